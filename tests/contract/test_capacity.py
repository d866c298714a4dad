"""Contract of every data plane: room, waiting for it, leases that are over, statistics, versions that never restart."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from nemo_rl.data_plane.factory import attach_data_plane, open_step
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.errors import CapacityExceeded, DataPlaneError, KeysNotFound, LeaseExpired, VersionMismatch
from tests.helpers.data_planes import LEASE_S, Plane, ids_column, keys_of, rows_of

pytestmark = pytest.mark.few_planes


def attach_with(plane: Plane, timeout_s: float) -> DataPlaneClient:
    """A client with its own deadline."""
    address = plane.owner.address
    config = address.config.model_copy(update={"timeout_s": timeout_s})
    plane.attached.append(attach_data_plane(replace(address, config=config)))
    return plane.attached[-1]


def put(client: DataPlaneClient, partition: str, *keys: str) -> None:
    client.kv_batch_put(keys, partition, {"input_ids": ids_column([5] * len(keys))})


def test_a_put_waits_until_rows_are_cleared(plane: Plane) -> None:
    partition, other = plane.partition(num_samples=4), plane.attach()
    put(plane.owner, partition, "a", "b", "c")
    blocked_before = plane.owner.stats()["blocked_put_s"]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(put, other, partition, "d", "e")
        time.sleep(0.3)
        assert not waiting.done() and list(plane.owner.kv_list(partition)) == ["a", "b", "c"]
        plane.owner.kv_clear(["b"], partition)
        waiting.result(timeout=60)
    assert list(plane.owner.kv_list(partition)) == ["a", "c", "d", "e"]
    rows = plane.owner.kv_batch_get(["a", "e"], partition, ["input_ids"])
    assert rows_of(rows["input_ids"]) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert 0.1 < plane.owner.stats()["blocked_put_s"] - blocked_before < 15


def test_a_put_without_room_ends_at_its_deadline_and_leaves_nothing(plane: Plane) -> None:
    partition, hasty = plane.partition(num_samples=3), attach_with(plane, 1.5)
    put(plane.owner, partition, "a", "b")
    chunks, started = plane.owner.stats()["live_chunks"], time.monotonic()
    with pytest.raises(CapacityExceeded, match="2 new rows with 2 live ones.*in partition.*waited 1") as caught:
        put(hasty, partition, "c", "d")
    assert 1.0 < time.monotonic() - started < 15
    assert partition in str(caught.value) and "2 rows (c, d)" in str(caught.value)
    assert list(plane.owner.kv_list(partition)) == ["a", "b"] and plane.owner.stats()["live_chunks"] == chunks
    with pytest.raises(KeysNotFound):
        hasty.kv_batch_get(["c"], partition, ["input_ids"])
    put(hasty, partition, "c")


def test_a_put_that_can_never_fit_is_refused_at_once(plane: Plane) -> None:
    partition, started = plane.partition(num_samples=2), time.monotonic()
    with pytest.raises(CapacityExceeded, match="can never fit: 3 rows in one put"):
        put(plane.owner, partition, "a", "b", "c")
    assert time.monotonic() - started < 30 and plane.owner.kv_list(partition) == {}


def test_rewriting_live_rows_of_a_full_partition_does_not_wait(plane: Plane) -> None:
    partition, hasty = plane.partition(num_samples=2), attach_with(plane, 3.0)
    put(plane.owner, partition, "a", "b")
    hasty.kv_batch_put(["a", "b"], partition, {"sample_mask": torch.ones(2)})
    hasty.kv_batch_put(["a", "b"], partition, {"sample_mask": torch.zeros(2)})
    assert hasty.kv_batch_get(["b"], partition, ["sample_mask"])["sample_mask"].tolist() == [0.0]


def test_writers_that_share_little_room_lose_and_double_no_row(plane: Plane) -> None:
    """Three writers of 8 puts, room for 5 rows, a reader that checks and clears what it finds."""
    partition = plane.partition(num_samples=5)
    writers, seen = [plane.attach() for _ in range(3)], []

    def write(number: int) -> None:
        for i in range(8):
            put(writers[number], partition, f"{number}-{i}a", f"{number}-{i}b")

    with ThreadPoolExecutor(3) as pool:
        done = [pool.submit(write, number) for number in range(3)]
        give_up = time.monotonic() + 60
        while not all(d.done() for d in done) or plane.owner.kv_list(partition):
            keys = list(plane.owner.kv_list(partition))
            if keys:
                rows = plane.owner.kv_batch_get(keys, partition, ["input_ids"])["input_ids"]
                assert {tuple(row) for row in rows_of(rows)} <= {(0, 1, 2, 3, 4), (5, 6, 7, 8, 9)}
                seen += keys
                plane.owner.kv_clear(keys, partition)
            assert time.monotonic() < give_up
        for d in done:
            d.result()
    assert sorted(seen) == sorted(f"{n}-{i}{x}" for n in range(3) for i in range(8) for x in "ab")
    assert plane.owner.stats()["partitions"][partition]["peak_rows"] <= 5


def test_a_write_and_a_release_under_an_expired_lease_are_refused(plane: Plane) -> None:
    """Also when nobody took the rows: the consumer stopped renewing, as a stopped process does."""
    partition = plane.partition(["input_ids", "prev_logprobs"], tasks=["prev_lp"])
    stopped = plane.attach()
    plane.owner.kv_batch_put(keys_of(1), partition, {"input_ids": ids_column([1] * 4)})
    stopped._leases._renew = lambda claims: []  # type: ignore[attr-defined]
    mine = stopped.get_meta(partition, "prev_lp", ["input_ids"], 4, consumer_id="stopped")
    time.sleep(1.5 * LEASE_S)
    chunks = plane.owner.stats()["live_chunks"]
    with pytest.raises(LeaseExpired, match="4 rows has ended; they went to nobody yet"):
        stopped.kv_batch_put(mine.keys, partition, {"prev_logprobs": torch.zeros(4, 1)})
    assert plane.owner.stats()["live_chunks"] == chunks
    with pytest.raises(LeaseExpired):
        stopped.release(mine)
    again = plane.owner.get_meta(partition, "prev_lp", ["input_ids"], 4, consumer_id="heir")
    assert again.keys == mine.keys
    plane.owner.release(again)


def test_stats_count_rows_and_bytes_by_partition_and_field(plane: Plane) -> None:
    fields = ["input_ids", "sample_mask", "generation_logprobs"]
    one, two, other = plane.partition(fields), plane.partition(fields), plane.attach()
    columns = {"input_ids": ids_column([10] * 4), "generation_logprobs": ids_column([10] * 4).to(torch.float32)}
    other.kv_batch_put(keys_of(1), one, columns)
    plane.owner.kv_batch_put(keys_of(1), two, {"sample_mask": torch.ones(4)})
    stats = plane.owner.stats()
    assert json.loads(json.dumps(stats)) == stats
    found = stats["partitions"][one]
    assert found["fields"] == {"input_ids": 160, "generation_logprobs": 160}
    assert found["rows"] == found["peak_rows"] == 4 and 320 < found["bytes"] == found["peak_bytes"]
    assert stats["partitions"][two]["fields"] == {"sample_mask": 16}
    assert (stats["live_rows"], stats["live_bytes"]) == (8, found["bytes"] + stats["partitions"][two]["bytes"])
    assert stats["peak_rows"] >= 8 and stats["reserved_bytes"] == 0
    other.kv_clear(["u0_g0"], one)
    left = plane.owner.stats()["partitions"][one]
    assert left["rows"] == 3 and left["peak_rows"] == 4
    other.kv_clear(None, one)
    left = plane.owner.stats()["partitions"][one]
    assert (left["rows"], left["bytes"], left["fields"], left["oldest_row_age_s"]) == (0, 0, {}, 0.0)
    assert left["peak_bytes"] == found["peak_bytes"]


def test_the_age_is_that_of_the_oldest_live_row(plane: Plane) -> None:
    partition = plane.partition()
    plane.owner.kv_batch_put(["a"], partition, {"sample_mask": torch.ones(1)})
    time.sleep(0.3)
    plane.owner.kv_batch_put(["a", "b"], partition, {"sample_mask": torch.ones(2)})
    stats = plane.owner.stats()
    assert 0.3 <= stats["partitions"][partition]["oldest_row_age_s"] == stats["oldest_row_age_s"] < 10
    plane.owner.kv_clear(["a"], partition)
    assert plane.owner.stats()["oldest_row_age_s"] < stats["oldest_row_age_s"] + 0.25


def test_rows_that_leak_from_a_step_are_named_with_their_owner(plane: Plane) -> None:
    partition, late = plane.partition(), plane.attach()
    clear = plane.owner.kv_clear

    def clear_too_early(keys: object, partition_id: str, *, reason: str) -> None:
        clear(keys, partition_id, reason=reason)
        late.kv_batch_put(["late"], partition, {"sample_mask": torch.ones(1)})

    plane.owner.kv_clear = clear_too_early  # type: ignore[method-assign]
    late_rows = pytest.raises(DataPlaneError, match=r"1 rows were not freed .* late \(put by (.*)\)")
    try:
        with late_rows as caught, open_step(plane.owner, partition, ["on time", "late"]):
            plane.owner.kv_batch_put(["on time"], partition, {"sample_mask": torch.ones(1)})
    finally:
        del plane.owner.kv_clear
    owners = plane.owner.row_owners(partition)
    assert list(owners) == ["late"] and owners["late"] in str(caught.value)
    plane.owner.kv_batch_put(["mine"], partition, {"sample_mask": torch.ones(1)})
    plane.owner.kv_batch_put(["late"], partition, {"sample_mask": torch.ones(1)})
    owners = plane.owner.row_owners(partition)
    assert owners["mine"] != owners["late"], "a row belongs to the client that created it"


def test_a_row_that_is_cleared_and_put_again_never_matches_an_old_meta(plane: Plane) -> None:
    partition, keys = plane.partition(), keys_of(1)
    columns = {"input_ids": ids_column([2] * 4)}
    old = plane.owner.kv_batch_put(keys, partition, columns)
    plane.owner.kv_clear(keys[:1], partition)
    mixed = plane.owner.kv_batch_put(keys[:1], partition, {"input_ids": ids_column([2])})
    with pytest.raises(VersionMismatch, match="u0_g0"):
        plane.owner.get_data(old)
    plane.owner.get_data(old.subset([1, 2, 3]))
    plane.owner.kv_clear(None, partition)
    fresh = plane.owner.kv_batch_put(keys, partition, columns)
    assert old.versions["tokens"] < mixed.versions["tokens"] < fresh.versions["tokens"]
    for stale in (old, mixed):
        with pytest.raises(VersionMismatch):
            plane.owner.get_data(stale)
    plane.owner.get_data(fresh)
