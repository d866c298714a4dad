"""What the raw engines do, pinned: an upgrade that changes one of these is noticed here.

`test_quirks` shows that our client does none of it. When a pin fails, read which guard in the adapter it names, decide
whether the guard can go, and write the new behaviour down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import ray
import torch
from ray import exceptions as ray_errors
from tensordict import NonTensorData, NonTensorStack, TensorDict

from nemo_rl.data_plane.adapters.mooncake_master import start_servers
from tests.helpers import mooncake
from tests.helpers.data_planes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.full]
needs_mooncake = pytest.mark.skipif(bool(mooncake.why_not()), reason=mooncake.why_not() or "Mooncake runs here")

HANG_S = 3.0
"""A call of 1 ms that takes this long never returns."""


class Engine:
    """A process with raw TransferQueue inside; it ends with its actor."""

    def __init__(self, backend: dict) -> None:
        import transfer_queue as tq
        from omegaconf import OmegaConf

        torch.set_num_threads(1)
        self.tq, self.conf = tq, OmegaConf.create({"controller": {"polling_mode": True}, "backend": backend})
        tq.init(self.conf)

    def run(self, function: Callable[[object], object]) -> object:
        return function(self.tq)

    def restart(self) -> None:
        self.tq.close()
        self.tq.init(self.conf)

    def close(self) -> None:
        self.tq.close()


class Guest:
    """A process that attaches to TransferQueue."""

    def list_rows(self) -> object:
        import transfer_queue as tq

        return tq.kv_list()

    def join_with(self, units: int) -> object:
        import transfer_queue as tq
        from omegaconf import OmegaConf

        simple = {"num_data_storage_units": units}
        tq.init(OmegaConf.create({"backend": {"storage_backend": "SimpleStorage", "SimpleStorage": simple}}))
        return tq.kv_list()


SIMPLE = {
    "storage_backend": "SimpleStorage",
    "SimpleStorage": {"num_data_storage_units": 1, "total_storage_size": None},
}
FAST = {
    "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT": "1",
    "TQ_SIMPLE_STORAGE_MAX_ATTEMPTS": "1",
    "TQ_LOGGING_LEVEL": "CRITICAL",
}


def start(backend: dict) -> object:
    return ray.remote(Engine).options(num_cpus=0, runtime_env={"env_vars": FAST}).remote(backend)


def end(engine: object) -> None:
    ray.get(engine.close.remote())
    ray.kill(engine)
    wait_until(lambda: not ray.util.list_named_actors(all_namespaces=True), timeout_s=30)


@pytest.fixture(scope="module")
def shared() -> Iterator[dict[str, object]]:
    """What the pins share: one engine, and one process that has attached to it."""
    actors: dict[str, object] = {}
    yield actors
    end_shared(actors)


def end_shared(actors: dict[str, object]) -> None:
    """A cluster has room for one TransferQueue."""
    if "guest" in actors:
        ray.kill(actors.pop("guest"))
    if "engine" in actors:
        end(actors.pop("engine"))


@pytest.fixture
def queue(cluster: None, shared: dict[str, object]) -> Callable[[Callable], object]:
    if "engine" not in shared:
        shared["engine"] = start(SIMPLE)
    return lambda function: ray.get(shared["engine"].run.remote(function), timeout=180)


@pytest.fixture
def guest(queue: Callable, shared: dict[str, object]) -> object:
    if "guest" not in shared:
        shared["guest"] = ray.remote(Guest).options(num_cpus=0).remote()
    return shared["guest"]


def put(tq: object, keys: list[str], partition: str, **columns: object) -> object:
    return tq.kv_batch_put(keys=keys, partition_id=partition, fields=TensorDict(columns, batch_size=[len(keys)]))


def get(tq: object, keys: list[str], partition: str, fields: list[str] | None = None) -> TensorDict:
    return tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=fields)


def test_transfer_queue_reads_are_short_without_an_error(queue: Callable) -> None:
    def quirk(tq: object) -> tuple:
        put(tq, ["a", "b"], "p", x=torch.arange(4).view(2, 2))
        put(tq, ["a"], "p", y=torch.ones(1, 2))
        missing = get(tq, ["a", "b"], "p", ["x", "y"])
        return (
            get(tq, ["a", "ghost", "b"], "p", ["x"]).batch_size[0],
            sorted(missing.keys()),
            get(tq, ["a"], "p", ["never"]).batch_size[0],
        )

    assert queue(quirk) == (2, ["x"], 0)


def test_transfer_queue_put_reports_success_though_the_controller_refused(queue: Callable) -> None:
    def quirk(tq: object) -> tuple:
        client = tq.get_client()
        meta = client.kv_retrieve_meta(keys=["a", "b"], partition_id="refused", create=True)
        client.clear_partition("refused")
        reply = client.put(TensorDict({"x": torch.ones(2, 2)}, batch_size=[2]), metadata=meta)
        return reply.is_ready, reply.size, tq.kv_list("refused")

    assert queue(quirk) == (True, 2, {})


def test_transfer_queue_takes_any_dtype_and_casts_mixed_reads(queue: Callable) -> None:
    def quirk(tq: object) -> tuple:
        put(tq, ["a"], "dtypes", x=torch.tensor([[2**40]]))
        put(tq, ["b"], "dtypes", x=torch.tensor([[1.5]]))
        rows = get(tq, ["a", "b"], "dtypes")["x"]
        return len({row.dtype for row in rows.unbind()}), torch.is_tensor(rows)

    assert queue(quirk) == (1, True)


def test_transfer_queue_applies_both_duplicates_and_then_raises(queue: Callable) -> None:
    def quirk(tq: object) -> tuple:
        try:
            put(tq, ["a", "a"], "twice", x=torch.tensor([[1], [2]]))
        except ValueError as error:
            raised = type(error).__name__
        return raised, [row.tolist() for row in get(tq, ["a"], "twice")["x"].unbind()]

    assert queue(quirk) == ("ValueError", [[2]])


def test_transfer_queue_changes_rows_of_one_shape_and_objects(queue: Callable) -> None:
    def quirk(tq: object) -> tuple:
        put(tq, ["a", "b"], "shapes", x=torch.ones(2, 3), o=NonTensorStack(NonTensorData((1, 2)), NonTensorData("t")))
        rows = get(tq, ["a", "b"], "shapes")
        return rows["x"].is_nested, list(rows["o"])

    assert queue(quirk) == (True, [[1, 2], "t"])


def test_transfer_queue_refuses_an_empty_batch(queue: Callable) -> None:
    def quirk(tq: object) -> str:
        try:
            put(tq, [], "none", x=torch.ones(0, 3))
        except ValueError as error:
            return str(error)
        return ""

    assert "empty list" in queue(quirk)


def test_transfer_queue_of_another_program_is_joined_without_a_word(queue: Callable, guest: object) -> None:
    queue(lambda tq: put(tq, ["secret"], "theirs", x=torch.ones(1, 2)) and None)
    assert "theirs" in ray.get(guest.join_with.remote(7), timeout=180)


def test_transfer_queue_clients_hang_after_the_owner_has_started_again(guest: object, shared: dict) -> None:
    ray.get(guest.list_rows.remote(), timeout=180)
    ray.get(shared["engine"].restart.remote(), timeout=240)
    with pytest.raises(ray_errors.GetTimeoutError):
        ray.get(guest.list_rows.remote(), timeout=HANG_S)
    ray.kill(shared.pop("guest"))


def test_transfer_queue_clear_hides_that_it_failed(queue: Callable, shared: dict) -> None:
    queue(lambda tq: put(tq, ["a"], "lost", x=torch.ones(1, 2)) and None)
    places = {a["name"]: a["namespace"] for a in ray.util.list_named_actors(all_namespaces=True)}
    ray.kill(ray.get_actor("TransferQueueStorageUnit#0", namespace=places["TransferQueueStorageUnit#0"]))
    assert queue(lambda tq: tq.kv_clear(keys=["a"], partition_id="lost")) is None
    end_shared(shared)


@needs_mooncake
def test_transfer_queue_over_mooncake_cannot_clear_the_keys_of_a_failed_put(cluster: None, shared: dict) -> None:
    end_shared(shared)
    servers = start_servers(mooncake.small_config().mooncake, has_holder=False)
    section = {
        "auto_init": False,
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": servers.address.master,
        "local_hostname": "127.0.0.1",
        "protocol": "tcp",
        "global_segment_size": 64 << 20,
        "local_buffer_size": 16 << 20,
    }
    try:
        engine = start({"storage_backend": "MooncakeStore", "MooncakeStore": section})

        def quirk(tq: object) -> tuple:
            outcomes = []
            for action in (
                lambda: put(tq, ["a"], "p", x=torch.empty(1, 0)),  # a value without bytes
                lambda: tq.kv_clear(keys=["a"], partition_id="p"),
            ):
                try:
                    action()
                except RuntimeError as error:
                    outcomes.append(str(error))
            put(tq, ["s"], "scalars", s=torch.ones(1))
            return outcomes, list(tq.kv_list("p")["p"]), get(tq, ["s"], "scalars")["s"].unbind()[0].shape

        outcomes, left, shape = ray.get(engine.run.remote(quirk), timeout=180)
        assert len(outcomes) == 2 and "field_names" in outcomes[1]
        assert left == ["a"] and shape == torch.Size([1]), "(N,) comes back as (N, 1)"
        end(engine)
    finally:
        servers.stop()


@needs_mooncake
def test_mooncake_answers_with_codes_and_keeps_the_first_value() -> None:
    from mooncake.store import MooncakeDistributedStore

    servers = start_servers(mooncake.small_config().mooncake, has_holder=False)
    store = MooncakeDistributedStore()
    try:
        arguments = ("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", servers.address.master)
        assert store.setup(*arguments) == 0
        assert store.put("k", b"first") == 0
        assert store.put("k", b"second") == 0 and store.get("k") == b"first", (
            "a put on an existing key is a silent no-op"
        )
        assert store.upsert("k", b"third!") == 0 and store.get("k") == b"third!"
        assert store.put("empty", b"") == -600, "a value without bytes is refused"
        assert store.get("ghost") == b"", "a missing value is an empty one"
        buffer = np.full(64, 7, dtype=np.uint8)
        store.register_buffer(buffer.ctypes.data, buffer.nbytes)
        assert store.get_into("k", buffer.ctypes.data, 64) == 6, "a larger buffer is filled in part"
        assert bytes(buffer[:6]) == b"third!" and (buffer[6:] == 7).all()
        assert store.get_into("k", buffer.ctypes.data, 3) == -600
        assert store.remove("k") == -706 and store.remove("k", force=True) == 0, "a key that was read has a lease"
        store.unregister_buffer(buffer.ctypes.data)
    finally:
        store.close()
        servers.stop()
