"""Deaths and silence, adapter by adapter: every call ends by its deadline, and its error says what it was about.

TransferQueue's own actors and Mooncake's own processes have their own files. Limits are three times the promise.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
import torch

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.factory import attach_data_plane
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.errors import DataPlaneClosed, DataPlaneError, DataPlaneTimeout, LeaseExpired, PayloadLost
from tests.helpers.data_plane_peers import Peer, ProcessPeer
from tests.helpers.data_planes import (
    LEASE_S,
    Plane,
    ids_column,
    keys_of,
    open_plane,
    rows_of,
    segments,
    wait_until,
)
from tests.helpers.store_kills import StoreKills, kill_store

pytestmark = pytest.mark.slow

SLACK = 10
SEEN_S = 2.0
"""A producer's death is seen within this time."""
DEADLINE_S = 2.0
FIELDS = ("input_ids", "sample_mask", "prev_logprobs")
KEYS = keys_of(2)
SMALL, LARGE = [3] * 8, [40_000] * 8
"""Tokens per row: Ray keeps small objects in their owner's memory, and large ones in its store."""
LOSES_ROWS = ("ray-producer", "transfer_queue-mooncake")
"""Adapters whose rows may live in the process that put them."""


def within(limit_s: float, call: Callable[[], object], kind: type[DataPlaneError]) -> str:
    """The text of the error that a call must raise in time, and of no other kind."""
    started = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    assert time.monotonic() - started < SLACK * limit_s
    assert type(caught.value) is kind
    return str(caught.value)


def check_text(text: str, partition: str, run_id: str) -> None:
    """Partition, a few keys and the count, fields, owner and age."""
    for part in (
        partition,
        "8 rows (u0_g0, u0_g1, u0_g2, u0_g3, u1_g0 and 3 more)",
        "fields input_ids",
        run_id,
        "age ",
    ):
        assert part in text, f"{part!r} is not in: {text}"


def read(client: DataPlaneClient, partition: str) -> list[list[object]]:
    return rows_of(client.kv_batch_get(KEYS, partition, ["input_ids"])["input_ids"])


def needs_another_process(plane: Plane) -> None:
    if plane.mode == "threads":
        pytest.skip("the other client lives in this process, which must not die")


# ---- a consumer


@pytest.mark.few_planes
def test_a_consumer_that_stands_still_loses_its_claim_and_its_late_write_is_refused(plane: Plane) -> None:
    needs_another_process(plane)
    partition = plane.partition(FIELDS, tasks=["prev_lp"])
    plane.owner.kv_batch_put(KEYS, partition, {"input_ids": ids_column(SMALL)})
    consumer = plane.guest()
    meta = consumer.get_meta(partition, "prev_lp", ["input_ids"], 8, consumer_id="slow")
    assert len(meta) == 8
    consumer.stop_answering()
    try:
        heir = plane.owner.get_meta(
            partition, "prev_lp", ["input_ids"], 8, consumer_id="heir", timeout_s=SLACK * LEASE_S + 5
        )
        assert heir.keys == meta.keys
    finally:
        consumer.go_on()
    late = {"prev_logprobs": torch.zeros(8, 3)}
    with pytest.raises(LeaseExpired, match="heir"):
        consumer.kv_batch_put(KEYS, partition, late)
    plane.owner.kv_batch_put(KEYS, partition, late)
    assert plane.owner.check_consumption_status(partition, ["prev_lp"])


# ---- the process that put the rows


def test_the_death_of_a_process_gives_back_its_claims_and_keeps_or_tells_its_rows(plane: Plane) -> None:
    needs_another_process(plane)
    partition, victim = plane.partition(FIELDS, tasks=["train"]), plane.guest()
    plane.owner.kv_batch_put(KEYS, partition, {"input_ids": ids_column(SMALL)})
    assert len(victim.get_meta(partition, "train", ["input_ids"], 8, consumer_id="victim")) == 8
    own = {plane.partition(FIELDS): ids_column(lengths) for lengths in (SMALL, LARGE)}
    for name, column in own.items():
        victim.kv_batch_put(KEYS, name, {"input_ids": column})
    label, mixed = f":{victim.pid}.", plane.partition(FIELDS)
    plane.owner.kv_batch_put(KEYS[:4], mixed, {"input_ids": ids_column(LARGE[:4])})
    victim.kv_batch_put(KEYS[4:], mixed, {"input_ids": ids_column(LARGE[4:])})
    plane.kill_guest()
    if plane.name not in LOSES_ROWS:
        for name, column in own.items():
            assert read(plane.owner, name) == rows_of(column)
    elif plane.name == "ray-producer":
        for name, column in own.items():
            for client in (plane.owner, plane.peer):
                text = within(SEEN_S, _until_it_fails(read, client, name), PayloadLost)
                check_text(text, name, plane.owner.address.run_id)
                assert label in text, f"the producer {label} is not named: {text}"
            plane.peer.kv_batch_put(KEYS, name, {"input_ids": column})
            assert read(plane.owner, name) == rows_of(column), "the plane itself lives"
        text = within(SEEN_S, _until_it_fails(read, plane.owner, mixed), PayloadLost)
        gone = text.partition(" is gone")[0].rpartition("their owner ")[2]
        assert label in gone and "," not in gone, f"more than the producer that died is named: {text}"
    heir = plane.owner.get_meta(partition, "train", ["input_ids"], 8, consumer_id="heir", timeout_s=15)
    assert heir.keys == tuple(KEYS) and rows_of(plane.owner.get_data(heir)["input_ids"]) == rows_of(ids_column(SMALL))
    for name, column in own.items() if plane.name not in LOSES_ROWS else ():
        assert read(plane.owner, name) == rows_of(column), "rows went some time after their producer"


def _until_it_fails(call: Callable[..., object], *args: object) -> Callable[[], None]:
    """A kill takes a moment; until then calls succeed."""

    def repeat() -> None:
        while True:
            call(*args)

    return repeat


def test_a_producer_that_dies_while_a_reader_is_at_work_ends_the_read(cluster: None) -> None:
    with open_plane("ray-producer", mode="actors", timeout_s=60.0) as plane:
        partition, column, producer = plane.partition(FIELDS), ids_column(LARGE), plane.guest()
        producer.kv_batch_put(KEYS, partition, {"input_ids": column})
        expected, reads = column.values(), []

        def read_on() -> None:
            while True:
                rows = plane.owner.kv_batch_get(KEYS, partition, ["input_ids"])["input_ids"]
                assert torch.equal(rows.values(), expected), "bytes of a dying producer"
                reads.append(len(rows))

        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read_on)
            wait_until(lambda: len(reads) > 3)
            plane.kill_guest()
            text = within(SEEN_S, lambda: reading.result(timeout=30), PayloadLost)
        check_text(text, partition, plane.owner.address.run_id)


# ---- the ledger


@pytest.fixture
def shm_owner() -> Iterator[Peer]:
    """A child process that owns a run: its ledger's socket and its segments."""
    owner = ProcessPeer(DataPlaneConfig(impl="shm", timeout_s=DEADLINE_S))
    run_id = owner.address.run_id
    yield owner
    owner.kill()
    wait_until(lambda: not segments(run_id))


def test_a_ledger_process_that_stands_still_costs_a_call_its_deadline(shm_owner: Peer) -> None:
    client = attach_data_plane(shm_owner.address)
    client.register_partition("p1", FIELDS, 99, [])
    client.kv_batch_put(KEYS, "p1", {"input_ids": ids_column(SMALL)})
    shm_owner.stop_answering()
    try:
        text = within(DEADLINE_S, lambda: read(client, "p1"), DataPlaneTimeout)
        check_text(text, "p1", shm_owner_run(client))
        put = within(
            DEADLINE_S, lambda: client.kv_batch_put(KEYS, "p1", {"input_ids": ids_column(SMALL)}), DataPlaneTimeout
        )
        check_text(put, "p1", shm_owner_run(client))
        within(DEADLINE_S, lambda: client.kv_clear(None, "p1"), DataPlaneTimeout)
        within(DEADLINE_S, client.stats, DataPlaneTimeout)
    finally:
        shm_owner.go_on()
    # Whether the put and the clear arrived is not known to the caller; the plane itself goes on.
    client.kv_clear(None, "p1")
    client.kv_batch_put(KEYS, "p1", {"input_ids": ids_column(SMALL)})
    assert read(client, "p1") == rows_of(ids_column(SMALL))
    client.close()


def shm_owner_run(client: DataPlaneClient) -> str:
    return client.address.run_id


def test_a_ledger_process_that_is_killed_ends_calls_at_once(shm_owner: Peer) -> None:
    client = attach_data_plane(shm_owner.address)
    client.register_partition("p1", FIELDS, 99, ["train"])
    client.kv_batch_put(KEYS, "p1", {"input_ids": ids_column(SMALL)})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.get_meta, "p1", "train", ["prev_logprobs"], 1, consumer_id="c", timeout_s=60)
        time.sleep(0.3)
        shm_owner.kill()
        within(DEADLINE_S, lambda: waiting.result(timeout=30), DataPlaneClosed)
    text = within(DEADLINE_S, lambda: read(client, "p1"), DataPlaneClosed)
    check_text(text, "p1", client.address.run_id)
    within(DEADLINE_S, client.stats, DataPlaneClosed)
    with pytest.raises(DataPlaneClosed):
        attach_data_plane(client.address).stats()
    client.close()
    client.close()


@pytest.mark.parametrize("name", ["ray-producer", "ray-holder", "ray-node"])
def test_a_ledger_actor_that_is_killed_ends_calls_at_once(cluster: None, name: str) -> None:
    with open_plane(name, mode="actors") as plane:
        partition, other = plane.partition(FIELDS, tasks=["train"]), plane.attach()
        plane.owner.kv_batch_put(KEYS, partition, {"input_ids": ids_column(SMALL)})
        ray.kill(ray.get_actor(plane.owner.address.ledger.actor_name, namespace="nemo_rl"))
        for client in (plane.owner, other):
            text = within(DEADLINE_S, _until_it_fails(read, client, partition), DataPlaneClosed)
            check_text(text, partition, plane.owner.address.run_id)
            within(DEADLINE_S, _until_it_fails(client.kv_clear, None, partition), DataPlaneClosed)
        with pytest.raises(DataPlaneClosed):
            plane.attach()
        other.close()
    wait_until(lambda: not ray.util.list_named_actors(all_namespaces=True))


def test_the_holder_actor_is_the_owner_of_all_rows(cluster: None) -> None:
    with open_plane("ray-holder", mode="actors") as plane:
        partition = plane.partition(FIELDS)
        plane.owner.kv_batch_put(KEYS, partition, {"input_ids": ids_column(SMALL)})
        holder = f"holder-{plane.owner.address.run_id}"
        ray.kill(ray.get_actor(holder, namespace="nemo_rl"))
        text = within(SEEN_S, _until_it_fails(read, plane.owner, partition), PayloadLost)
        check_text(text, partition, plane.owner.address.run_id)
        text = within(
            SEEN_S,
            lambda: plane.owner.kv_batch_put(KEYS, partition, {"input_ids": ids_column(SMALL)}),
            DataPlaneClosed,
        )
        check_text(text, partition, plane.owner.address.run_id)
        plane.owner.kv_clear(None, partition)
        assert plane.owner.stats()["live_rows"] == 0
    wait_until(lambda: not ray.util.list_named_actors(all_namespaces=True))


@pytest.mark.parametrize("name", ["ray-holder", pytest.param("transfer_queue-native", marks=pytest.mark.full)])
def test_a_storage_process_that_is_killed_under_work_gives_no_wrong_row_and_leaves_nothing(
    cluster: None, name: str
) -> None:
    result = StoreKills()
    kill_store(name, result, random.Random(0))
    assert result.problems == [] and sum(result.kills.values()) == 1 and result.reads and result.errors, result
