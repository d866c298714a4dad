"""What TransferQueue would do silently, or for ever: the adapter turns each into an error in bounded time."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import ray
import torch
import transfer_queue as tq
from transfer_queue.controller import TransferQueueController

from nemo_rl.data_plane.adapters import transfer_queue as adapter
from nemo_rl.data_plane.adapters.transfer_queue import CONTROLLER, CONTROLLER_NAMESPACE, TransferQueueStore
from nemo_rl.data_plane.codec import join
from nemo_rl.errors import DataPlaneClosed, DataPlaneError, DataPlaneTimeout, KeysNotFound, ResourceError
from nemo_rl.utils.deadlines import StartUp
from tests.helpers.data_planes import CONFIGS, check_closed, ids_column, keys_of, open_plane, rows_of, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]

CONFIG = CONFIGS["transfer_queue"]
WIDE = CONFIG.model_copy(update={"simple": CONFIG.simple.model_copy(update={"num_storage_units": 9})})


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    wait_until(lambda: not ray.util.list_named_actors(all_namespaces=True))


class Stranger:
    """Another program on the same cluster."""

    def start(self) -> str:
        with pytest.raises(ResourceError) as caught:
            TransferQueueStore.start(CONFIG, run_id="stranger")
        return str(caught.value)

    def join(self, run_id: str) -> str:
        with pytest.raises(DataPlaneClosed) as caught:
            TransferQueueStore.join(run_id=run_id, timeout_s=5)
        return str(caught.value)


class Hog:
    """Holds CPUs."""

    def ping(self) -> None:
        return None


def test_reads_are_never_short_and_a_put_is_checked() -> None:
    with open_plane("transfer_queue") as plane:
        store = TransferQueueStore.join(run_id=plane.owner.address.run_id, timeout_s=5)
        store.put({"x": [memoryview(b"ab"), memoryview(b"c")], "y": [memoryview(b"d")]}, timeout_s=10)
        assert [bytes(join(chunk)) for chunk in store.get(["y", "x"], timeout_s=10, handles={})] == [b"d", b"abc"]
        for ids in (["x", "gone"], ["gone"]):
            with pytest.raises(KeysNotFound, match=f"not all of {len(ids)} chunks.*TQKeyNotFound"):
                store.get(ids, timeout_s=10, handles={})
        with pytest.raises(DataPlaneError, match="did not accept"):
            store._check_accepted(["x", "gone"], time.monotonic() + 10)
        store.drop(["x", "gone"], timeout_s=10)
        with pytest.raises(KeysNotFound):
            store.get(["x"], timeout_s=10, handles={})
        assert [bytes(join(chunk)) for chunk in store.get(["y"], timeout_s=10, handles={})] == [b"d"]
        store.close()
        with pytest.raises(DataPlaneClosed):
            store.get(["y"], timeout_s=10, handles={})
        assert plane.owner.stats()["live_rows"] == 0


@pytest.mark.full
def test_an_unsatisfied_fetch_blocks_nobody_and_other_runs_are_refused() -> None:
    with open_plane("transfer_queue") as plane:
        seconds = []
        for _ in range(3):
            started = time.monotonic()
            found = tq.get_client().get_meta(
                data_fields=["never"], batch_size=1, partition_id="nowhere", task_name="t", mode="fetch"
            )
            assert found.size == 0
            seconds.append(time.monotonic() - started)
        # Without polling mode the controller sleeps for 5 s each time, and all of its clients with it.
        assert min(seconds) < 4
        stranger = ray.remote(Stranger).options(num_cpus=0).remote()
        assert f"of run '{plane.owner.address.run_id}'" in ray.get(stranger.start.remote())
        assert "not 'stranger'" in ray.get(stranger.join.remote("stranger"))
        with pytest.raises(ResourceError, match="already"):
            TransferQueueStore.start(CONFIG, run_id="second")
        with pytest.raises(DataPlaneClosed, match="not to 'second'"):
            TransferQueueStore.join(run_id="second", timeout_s=1)
        ray.kill(stranger)


@pytest.mark.full
def test_too_few_cpus_are_an_error_and_not_a_hang() -> None:
    hog = ray.remote(Hog).options(num_cpus=7).remote()
    ray.get(hog.ping.remote())
    wait_until(lambda: ray.available_resources().get("CPU", 0) <= 1)
    started = time.monotonic()
    with pytest.raises(ResourceError, match="needs 2 free CPUs in Ray .* there are 1"):
        TransferQueueStore.start(CONFIG, run_id="starved", start=StartUp(timeout_s=1.0))
    with pytest.raises(ResourceError, match="needs 10 free CPUs"):  # it would wait for ever: the cluster has 8
        TransferQueueStore.start(WIDE, run_id="starved")
    assert time.monotonic() - started < 60
    ray.kill(hog)
    wait_until(lambda: ray.available_resources().get("CPU", 0) >= 8)


@pytest.mark.full
def test_a_start_that_fails_leaves_no_half_made_controller_and_says_which_key_to_raise() -> None:
    told: list[str] = []
    start = StartUp(timeout_s=1.0, report=told.append, every_s=0.2)
    with pytest.raises(DataPlaneTimeout, match="TransferQueue did not start within 1 s; raise cluster.worker_start"):
        TransferQueueStore.start(CONFIG, run_id="half", start=start)
    assert "waiting for TransferQueue, 0 s" in told
    wait_until(lambda: not ray.util.list_named_actors(all_namespaces=True))
    with open_plane("transfer_queue") as plane:
        assert plane.owner.stats()["live_rows"] == 0


@pytest.mark.full
def test_a_controller_that_was_never_finished_is_refused() -> None:
    half = TransferQueueController.options(name=adapter.CONTROLLER, namespace=adapter.CONTROLLER_NAMESPACE).remote()
    ray.get(half.get_config.remote())
    with pytest.raises(ResourceError, match="half made"):
        TransferQueueStore.start(CONFIG, run_id="r")
    started = time.monotonic()
    with pytest.raises(DataPlaneTimeout, match="not finished after 1.0 s"):
        TransferQueueStore.join(run_id="r", timeout_s=1.0)
    assert time.monotonic() - started < 30
    ray.kill(half)
    wait_until(lambda: not ray.util.list_named_actors(all_namespaces=True))
    with pytest.raises(DataPlaneTimeout, match="no controller"):
        TransferQueueStore.join(run_id="r", timeout_s=0.5)


def test_chunks_stay_readable_when_the_controller_dies() -> None:
    with open_plane("transfer_queue") as plane:
        partition, columns = plane.partition(), {"input_ids": ids_column([2] * 4)}
        plane.owner.kv_batch_put(keys_of(1), partition, columns)
        ray.kill(ray.get_actor(CONTROLLER, namespace=CONTROLLER_NAMESPACE))
        wait_until(lambda: not plane.owner._link.store.health().is_alive)
        plane.owner.kv_batch_put(keys_of(1, prefix="v"), partition, columns)
        for prefix in ("u", "v"):
            rows = plane.owner.kv_batch_get(keys_of(1, prefix=prefix), partition, ["input_ids"])
            assert rows_of(rows["input_ids"]) == rows_of(columns["input_ids"])


def test_the_death_of_a_storage_unit_ends_calls_soon() -> None:
    victim = "TransferQueueStorageUnit#0"
    with open_plane("transfer_queue") as plane:
        partition = plane.partition()
        columns = {"input_ids": ids_column([2] * 4)}
        plane.owner.kv_batch_put(keys_of(1), partition, columns)
        namespace = {a["name"]: a["namespace"] for a in ray.util.list_named_actors(all_namespaces=True)}[victim]
        ray.kill(ray.get_actor(victim, namespace=namespace))
        # Killing is not instantaneous: calls may succeed for a moment, and then fail as they must.
        started = time.monotonic()
        with pytest.raises(DataPlaneClosed, match=rf"has lost {victim} \(process \d+\)"):
            while time.monotonic() - started < 60:
                plane.owner.kv_batch_get(keys_of(1), partition, ["input_ids"])
        assert time.monotonic() - started < 60
        with pytest.raises(DataPlaneClosed, match="has lost"):
            plane.owner.kv_batch_put(keys_of(1), partition, columns)
        started = time.monotonic()
        plane.owner.close()
        assert time.monotonic() - started < 120


@pytest.mark.full
def test_the_death_of_the_ledger_ends_calls_at_once() -> None:
    with open_plane("transfer_queue") as plane:
        partition = plane.partition()
        ray.kill(ray.get_actor(plane.owner.address.ledger.actor_name, namespace="nemo_rl"))
        # Killing is not instantaneous: calls may succeed for a moment.
        with pytest.raises(DataPlaneClosed, match=r"ledger.* is gone \(process \d+\)"):
            wait_until(lambda: not plane.owner.kv_batch_put(["a"], partition, {"sample_mask": torch.ones(1)}))
        with pytest.raises(DataPlaneClosed, match="no ledger actor"):
            plane.attach()


@pytest.mark.full
def test_past_a_deadline_the_connection_is_broken_for_good() -> None:
    with open_plane("transfer_queue") as plane:
        store = TransferQueueStore.join(run_id=plane.owner.address.run_id, timeout_s=5)
        with pytest.raises(DataPlaneTimeout, match="did not finish a put"):
            store.put({"x": [memoryview(b"abc")]}, timeout_s=0.0)
        with pytest.raises(DataPlaneClosed, match="earlier put did not end in time"):
            store.get(["x"], timeout_s=10, handles={})
        assert not store.health().is_alive
        store.close()


def test_after_the_owner_has_closed_every_call_fails_at_once() -> None:
    with open_plane("transfer_queue") as plane:
        check_closed(plane)
