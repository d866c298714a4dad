"""Contract of every data plane between two clients: of one process, of two processes, of driver and Ray actor.

`plane.peer` is the other client; what one puts the other reads, what one claims the other does not get, and an error is
the same on both sides, word for word.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from nemo_rl.data_plane.column_io import kv_first_write, read_columns, write_columns
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from nemo_rl.data_plane.metrics_endpoint import RunView, view_of
from nemo_rl.data_plane.schema import DP_TRAIN_FIELDS, extra_field
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.errors import (
    DataPlaneClosed,
    FieldNotProduced,
    KeysNotFound,
    LeaseExpired,
    NemoRLError,
    PartitionNotFound,
    SchemaMismatch,
    VersionMismatch,
)
from tests.helpers.data_planes import LEASE_S, Plane, ids_column, keys_of, rows_of, wait_until

FIELDS = ("input_ids", "sample_mask", "prev_logprobs")
TASKS = ("train", "prev_lp")
NOTE = extra_field("note", is_object=True)


def claim(client: DataPlaneClient, partition: str, count: int, *, task: str = "train") -> KVBatchMeta:
    return client.get_meta(partition, task, ("input_ids",), count, consumer_id="c", blocking=False)


def first_write(client: DataPlaneClient, partition: str, keys: list[str]) -> KVBatchMeta:
    """Rows of 0, 1, 2, ... tokens, padded to 9."""
    batch = BatchedDataDict(
        input_ids=torch.arange(len(keys) * 9, dtype=torch.int32).reshape(-1, 9),
        input_lengths=torch.arange(len(keys), dtype=torch.int32),
        sample_mask=torch.ones(len(keys)),
    )
    return kv_first_write(client, batch, keys, partition_id=partition, tags=[{"k": key} for key in keys])


def double(client: DataPlaneClient, meta: KVBatchMeta) -> KVBatchMeta:
    """A stage: reads, computes, writes back."""
    batch = read_columns(client, meta, ["input_ids"], pad_values={"input_ids": 0})
    return write_columns(client, meta, {"prev_logprobs": batch.tensor("input_ids").float() * 2})


def consume(client: DataPlaneClient, partition: str) -> list[str]:
    claimed: list[str] = []
    while meta := claim(client, partition, 3):
        claimed += meta.keys
        client.release(meta)
    return claimed


def test_rows_go_both_ways(plane: Plane) -> None:
    partition, keys = plane.partition([*FIELDS, NOTE]), keys_of(10)
    sides = [(plane.owner, plane.peer, keys[:20]), (plane.peer, plane.owner, keys[20:])]
    for writer, reader, own in sides:
        column = ids_column([i % 4 for i in range(20)], start=100)
        notes = [{"key": key, "n": [i, None]} for i, key in enumerate(own)]
        meta = writer.kv_batch_put(own, partition, {"input_ids": column, "note": notes}, [{"k": key} for key in own])
        assert meta.keys == tuple(own) and meta.sequence_lengths == tuple(i % 4 for i in range(20))
        rows = reader.get_data(meta.subset([19, 0, 7]))
        expected = rows_of(column)
        assert rows_of(rows["input_ids"]) == [expected[19], expected[0], expected[7]]
        assert rows.get("note").tolist() == [notes[19], notes[0], notes[7]]
    assert plane.owner.kv_list(partition) == plane.peer.kv_list(partition) == {key: {"k": key} for key in keys}
    both = [
        rows_of(c.kv_batch_get(keys[::-1], partition, ["input_ids"])["input_ids"]) for c in (plane.owner, plane.peer)
    ]
    assert both[0] == both[1] and len(both[0]) == 40


def test_stages_of_two_processes_hand_columns_on(plane: Plane) -> None:
    partition, keys = plane.partition(DP_TRAIN_FIELDS, tasks=["train"]), keys_of(2)
    written = plane.peer.work(first_write, partition, keys)
    assert written.tags == tuple({"k": key} for key in keys)
    shards = [written.subset([0, 2, 4, 6]), written.subset([7, 5, 3, 1])]
    metas = [plane.peer.work(double, shards[0]), double(plane.owner, shards[1])]
    for meta, shard in zip(metas, shards, strict=True):
        assert meta.keys == shard.keys and meta.versions["prev_logprobs"] == 1
    batch = read_columns(plane.owner, written, ["input_ids", "prev_logprobs"], pad_values={"input_ids": -1}, pad_to=9)
    for row in range(8):
        ids = batch.tensor("input_ids")[row]
        assert ids.tolist() == [*range(row * 9, row * 9 + row), *[-1] * (9 - row)]
        assert batch.tensor("prev_logprobs")[row, :row].tolist() == [2.0 * i for i in ids[:row]]


def test_a_rewrite_there_is_seen_here_and_old_metas_fail_on_both_sides(plane: Plane) -> None:
    partition, keys = plane.partition(FIELDS), keys_of(1)
    old = plane.owner.kv_batch_put(keys, partition, {"sample_mask": torch.ones(4)})
    new = plane.peer.kv_batch_put(keys[1:3], partition, {"sample_mask": torch.zeros(2)})
    for client in (plane.owner, plane.peer):
        assert client.kv_batch_get(keys, partition, ["sample_mask"])["sample_mask"].tolist() == [1, 0, 0, 1]
        assert client.get_data(new)["sample_mask"].tolist() == [0, 0]
        with pytest.raises(VersionMismatch, match="'sample_mask' was rewritten"):
            client.get_data(old)


@pytest.mark.few_planes
def test_two_clients_share_all_rows_without_overlap(plane: Plane) -> None:
    partition, keys = plane.partition(FIELDS, tasks=TASKS), keys_of(25)
    plane.owner.kv_batch_put(keys, partition, {"input_ids": ids_column([1] * 100)})
    with ThreadPoolExecutor(2) as pool:
        parts = [pool.submit(plane.peer.work, consume, partition), pool.submit(consume, plane.owner, partition)]
        claimed = [key for part in parts for key in part.result(timeout=180)]
    assert sorted(claimed) == sorted(keys)
    assert plane.peer.check_consumption_status(partition, ["train"])
    assert not plane.owner.check_consumption_status(partition, TASKS)


@pytest.mark.few_planes
def test_a_claim_there_is_not_handed_out_here_and_ends_there(plane: Plane) -> None:
    partition, keys = plane.partition(FIELDS, tasks=TASKS), keys_of(1)
    plane.owner.kv_batch_put(keys, partition, {"input_ids": ids_column([2] * 4)})
    theirs = claim(plane.peer, partition, 3, task="prev_lp")
    assert theirs.keys == tuple(keys[:3])
    ours = claim(plane.owner, partition, 9, task="prev_lp")
    assert ours.keys == (keys[3],)
    with pytest.raises(LeaseExpired, match="not claimed by anybody"):
        plane.peer.release(KVBatchMeta(partition_id=partition, keys=(keys[0],), task_name="train"))
    time.sleep(1.5 * LEASE_S)  # the peer's heartbeat keeps its claim
    assert claim(plane.owner, partition, 9, task="prev_lp").keys == ()
    plane.peer.kv_batch_put(theirs.keys, partition, {"prev_logprobs": torch.zeros(3, 2)})
    plane.owner.release(ours)
    assert plane.owner.check_consumption_status(partition, ["prev_lp"])


@pytest.mark.few_planes
def test_the_ledger_knows_what_every_client_has_counted(plane: Plane) -> None:
    partition = plane.partition(FIELDS, tasks=TASKS)
    plane.peer.kv_batch_put(keys_of(2), partition, {"input_ids": ids_column([3] * 8)})
    meta = claim(plane.peer, partition, 5)
    putter = plane.owner.row_owners(partition)["u0_g0"]

    def seen() -> RunView:
        return view_of(plane.owner._link._host, timeout_s=20)

    def calls(operation: str) -> dict[str, int]:
        totals = {client.label: client.totals.operations for client in seen().clients}
        return {label: counts[operation].count for label, counts in totals.items() if operation in counts}

    wait_until(lambda: calls("kv_batch_put").get(putter, 0) >= 1 and calls("get_meta").get(putter, 0) >= 1)
    wait_until(lambda: calls("row_owners").get(plane.owner._link.label, 0) >= 1)
    assert seen().rows_held()[putter] == 5
    assert seen().tasks[partition]["train"] == {"pending": 3, "leased": 5, "done": 0}
    plane.peer.release(meta)
    assert seen().tasks[partition]["train"] == {"pending": 3, "leased": 0, "done": 5}


@pytest.mark.few_planes
def test_groups_are_whole_wherever_they_were_put(plane: Plane) -> None:
    partition = plane.partition(FIELDS, tasks=TASKS, grpo_group_size=4)
    keys = keys_of(2)
    plane.owner.kv_batch_put(keys[:6], partition, {"input_ids": ids_column([1] * 6)})
    assert claim(plane.peer, partition, 8).keys == tuple(keys[:4])
    assert claim(plane.peer, partition, 8).keys == ()
    plane.peer.kv_batch_put(keys[6:], partition, {"input_ids": ids_column([1] * 2)})
    assert claim(plane.owner, partition, 8).keys == tuple(keys[4:])


@pytest.mark.few_planes
def test_a_blocking_claim_here_wakes_when_the_peer_puts(plane: Plane) -> None:
    partition = plane.partition(FIELDS, tasks=TASKS)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(plane.owner.get_meta, partition, "train", ["input_ids"], 2, consumer_id="c", timeout_s=60)
        wait_until(waiting.running)
        plane.peer.kv_batch_put(keys_of(1), partition, {"input_ids": ids_column([1] * 4)})
        assert waiting.result(timeout=180).keys == ("u0_g0", "u0_g1")


def test_a_client_that_closes_leaves_the_service_running(plane: Plane) -> None:
    partition = plane.partition(FIELDS)
    plane.peer.kv_batch_put(["a"], partition, {"input_ids": ids_column([3])})
    plane.peer.close()
    plane.peer.close()
    with pytest.raises(DataPlaneClosed, match="closed"):
        plane.peer.kv_list(partition)
    assert rows_of(plane.owner.kv_batch_get(["a"], partition, ["input_ids"])["input_ids"]) == [[0, 1, 2]]
    plane.peer.reopen()
    assert rows_of(plane.peer.kv_batch_get(["a"], partition, ["input_ids"])["input_ids"]) == [[0, 1, 2]]
    plane.owner.kv_batch_put(["b"], partition, {"input_ids": ids_column([1])})
    assert list(plane.peer.kv_list(partition)) == ["a", "b"]
    plane.peer.kv_clear(None, partition)
    assert plane.owner.stats()["live_chunks"] == 0


REFUSALS: list[tuple[str, type[NemoRLError], Callable[[DataPlaneClient, str], object]]] = [
    ("rows that are not there", KeysNotFound, lambda c, p: c.kv_batch_get(["a", "zz"], p, ["sample_mask"])),
    ("a field that nobody wrote", FieldNotProduced, lambda c, p: c.kv_batch_get(["a"], p, ["input_ids"])),
    ("an undeclared field", SchemaMismatch, lambda c, p: c.kv_batch_get(["a"], p, ["advantages"])),
    ("no partition", PartitionNotFound, lambda c, p: c.kv_list(f"{p}-other")),
    ("duplicate keys", SchemaMismatch, lambda c, p: c.kv_batch_get(["a", "a"], p, ["sample_mask"])),
    ("another dtype", SchemaMismatch, lambda c, p: c.kv_batch_put(["a"], p, {"sample_mask": torch.ones(1).cfloat()})),
    ("fewer rows", SchemaMismatch, lambda c, p: c.kv_batch_put(["a", "b"], p, {"sample_mask": torch.ones(1)})),
    ("late results", KeysNotFound, lambda c, p: c.kv_batch_put(["zz"], p, {"prev_logprobs": torch.zeros(1, 2)})),
    ("an unknown task", SchemaMismatch, lambda c, p: c.get_meta(p, "x", ["sample_mask"], 1, consumer_id="c")),
    ("another declaration", SchemaMismatch, lambda c, p: c.register_partition(p, ["sample_mask"], 1, [])),
]


@pytest.mark.few_planes
@pytest.mark.parametrize(("what", "kind", "call"), REFUSALS, ids=[row[0] for row in REFUSALS])
def test_a_refusal_is_the_same_on_both_sides(
    plane: Plane, what: str, kind: type[NemoRLError], call: Callable[[DataPlaneClient, str], object]
) -> None:
    partition = plane.partition(FIELDS, tasks=TASKS)
    plane.owner.kv_batch_put(["a"], partition, {"sample_mask": torch.ones(1)})
    texts = []
    for client in (plane.owner, plane.peer):
        with pytest.raises(kind) as caught:
            call(client, partition)
        assert type(caught.value) is kind, "a subclass would be caught by other handlers"
        texts.append(str(caught.value))
    assert texts[0] == texts[1] and partition in texts[0]
    assert plane.owner.kv_list(partition) == {"a": {}}


def test_clears_of_one_side_meet_reads_of_the_other(plane: Plane) -> None:
    """A reader gets whole rows or a refusal, never bytes of other rows, though chunks are freed under its hands."""
    partition, keys = plane.partition(FIELDS), keys_of(2)
    stop = threading.Event()

    def churn() -> None:
        value = 0
        while not stop.is_set():
            value += 1
            plane.owner.kv_batch_put(keys, partition, {"input_ids": ids_column([50] * 8, start=1000 * value)})
            stop.wait(value % 3 * 0.02)  # some reads have the time to end, others meet a clear
            plane.owner.kv_clear(keys[:4], partition)
            plane.owner.kv_clear(keys[4:], partition)

    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        done = pool.submit(churn)
        stack.callback(stop.set)
        whole = refused = 0
        began = time.monotonic()
        # Some stores refuse seldom; a machine that does much else lets few reads end between two clears.
        while (whole < 5 and time.monotonic() < began + 60) or (refused < 1 and time.monotonic() < began + 5):
            try:
                rows = plane.peer.kv_batch_get(keys, partition, ["input_ids"])["input_ids"]
            except KeysNotFound:
                refused += 1
                continue
            first = int(rows.values()[0])
            assert first % 1000 == 0 and rows.values().tolist() == list(range(first, first + 400))
            whole += 1
    done.result(timeout=180)
    assert whole, "no read met live rows"
