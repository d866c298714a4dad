"""Contract of every data plane: claims, leases, consumption, closing."""

from __future__ import annotations

import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nemo_rl.data_plane.column_io import write_columns
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from nemo_rl.errors import DataPlaneClosed, DataPlaneTimeout, LeaseExpired, SchemaMismatch, VersionMismatch
from tests.helpers.data_planes import LEASE_S, Plane, check_closed, ids_column, keys_of, open_plane, wait_until

pytestmark = pytest.mark.few_planes

FIELDS = ("input_ids", "sample_mask", "prev_logprobs")
TASKS = ("train", "prev_lp")


def put(plane: Plane, partition: str, keys: list[str]) -> None:
    tags = [{"group": key} for key in keys]
    columns = {"input_ids": ids_column([2] * len(keys)), "sample_mask": torch.ones(len(keys))}
    plane.owner.kv_batch_put(keys, partition, columns, tags)


def claim(
    client: DataPlaneClient,
    partition: str,
    count: int,
    *,
    task: str = "train",
    who: str = "c",
    fields: tuple = ("input_ids",),
    groups: tuple[str, ...] = (),
) -> KVBatchMeta:
    return client.get_meta(partition, task, fields, count, consumer_id=who, blocking=False, groups=groups)


def test_a_claim_carries_what_the_rows_are(plane: Plane) -> None:
    partition, keys = plane.partition(FIELDS, tasks=TASKS), keys_of(2)
    put(plane, partition, keys)
    meta = claim(plane.owner, partition, 3)
    assert meta.keys == tuple(keys[:3]) and meta.task_name == "train" and meta.fields == ("input_ids",)
    assert meta.sequence_lengths == (2, 2, 2) and dict(meta.versions) == {"tokens": 1}
    assert [row["group"] for row in meta.tags or ()] == keys[:3]
    assert len(plane.owner.get_data(meta)) == 3


def test_rows_are_claimed_once_per_task(plane: Plane) -> None:
    partition, keys = plane.partition(FIELDS, tasks=TASKS), keys_of(2)
    put(plane, partition, keys)
    assert claim(plane.owner, partition, 5).keys == tuple(keys[:5])
    assert claim(plane.owner, partition, 5).keys == tuple(keys[5:])
    assert claim(plane.owner, partition, 5).keys == ()
    assert claim(plane.owner, partition, 99, task="prev_lp").keys == tuple(keys)
    with pytest.raises(SchemaMismatch, match="unknown task 'other'"):
        claim(plane.owner, partition, 1, task="other")


def test_four_threads_share_all_rows_without_overlap(plane: Plane) -> None:
    partition, keys = plane.partition(FIELDS, tasks=TASKS), keys_of(50)
    put(plane, partition, keys)

    def consume(worker: int) -> list[str]:
        client, mine = plane.attach(), []
        while meta := claim(client, partition, 3, who=f"c{worker}"):
            mine += meta.keys
            client.release(meta)
        return mine

    with ThreadPoolExecutor(4) as pool:
        claimed = [key for part in pool.map(consume, range(4)) for key in part]
    assert sorted(claimed) == sorted(keys)
    assert plane.owner.check_consumption_status(partition, ["train"])
    assert not plane.owner.check_consumption_status(partition, ["train", "prev_lp"])


def test_groups_are_handed_out_whole(plane: Plane) -> None:
    partition = plane.partition(FIELDS, tasks=TASKS, grpo_group_size=4)
    keys = keys_of(3)
    put(plane, partition, keys[:6])
    assert claim(plane.owner, partition, 7).keys == tuple(keys[:4])
    assert claim(plane.owner, partition, 7).keys == ()
    put(plane, partition, keys[6:])
    assert claim(plane.owner, partition, 7).keys == tuple(keys[4:8])
    assert claim(plane.owner, partition, 99).keys == tuple(keys[8:])
    with pytest.raises(SchemaMismatch, match="at least one group"):
        claim(plane.owner, partition, 3)


@pytest.mark.parametrize("size", [4, None])
def test_groups_are_claimed_by_name_and_in_the_order_of_the_names(plane: Plane, size: int | None) -> None:
    partition, keys = plane.partition(FIELDS, tasks=TASKS, grpo_group_size=size), keys_of(4)
    put(plane, partition, keys)
    named = claim(plane.owner, partition, 8, groups=("u2", "nobody", "u0"))
    assert named.keys == (*keys[8:12], *keys[:4])
    assert claim(plane.owner, partition, 8, groups=("u2",)).keys == (), "its rows are claimed"
    assert claim(plane.owner, partition, 99).keys == (*keys[4:8], *keys[12:])


def test_a_group_with_cleared_rows_is_still_handed_out(plane: Plane) -> None:
    partition = plane.partition(FIELDS, tasks=TASKS, grpo_group_size=4)
    put(plane, partition, keys_of(1))
    plane.owner.kv_clear(["u0_g1"], partition)
    assert claim(plane.owner, partition, 4).keys == ("u0_g0", "u0_g2", "u0_g3")


def test_only_rows_with_every_required_field_are_claimed(plane: Plane) -> None:
    partition, keys = plane.partition(FIELDS, tasks=TASKS), keys_of(1)
    put(plane, partition, keys)
    fields = ("input_ids", "prev_logprobs")
    assert claim(plane.owner, partition, 9, fields=fields).keys == ()
    plane.owner.kv_batch_put(keys[1:3], partition, {"prev_logprobs": torch.zeros(2, 2)})
    assert claim(plane.owner, partition, 9, fields=fields).keys == tuple(keys[1:3])


def test_a_group_is_complete_by_its_keys_and_not_by_its_puts(plane: Plane) -> None:
    partition = plane.partition(FIELDS, tasks=TASKS, grpo_group_size=4)
    keys = keys_of(1)
    put(plane, partition, keys[:3])
    plane.owner.kv_clear(keys[:1], partition)
    put(plane, partition, keys[:1])
    assert claim(plane.owner, partition, 4).keys == (), "a row that came again is not the fourth one"
    with pytest.raises(DataPlaneTimeout, match=r"groups that wait: u0 \(3 of 4 rows were put\)"):
        plane.owner.get_meta(partition, "train", ["input_ids"], 4, consumer_id="c", timeout_s=0.1)
    put(plane, partition, keys[3:])
    assert set(claim(plane.owner, partition, 4).keys) == set(keys)


def test_rows_of_several_versions_are_claimed_together(plane: Plane) -> None:
    partition, keys = plane.partition(FIELDS, tasks=TASKS, grpo_group_size=4), keys_of(1)
    put(plane, partition, keys)
    plane.owner.kv_batch_put(keys[1:2], partition, {"sample_mask": torch.zeros(1)})
    meta = claim(plane.owner, partition, 4, fields=("sample_mask", "input_ids"))
    assert meta.keys == tuple(keys) and dict(meta.versions) == {"sample_mask": (1, 2, 1, 1), "tokens": 1}
    assert plane.owner.get_data(meta)["sample_mask"].tolist() == [1, 0, 1, 1]
    plane.owner.kv_batch_put(keys[2:3], partition, {"sample_mask": torch.zeros(1)})
    with pytest.raises(VersionMismatch, match="names version 1, the ledger holds 2 for u0_g2"):
        plane.owner.get_data(meta)
    rest = meta.subset([3, 1, 0])
    assert plane.owner.get_data(rest)["sample_mask"].tolist() == [1, 0, 1] and rest.versions["sample_mask"] == (1, 2, 1)
    assert plane.owner.get_data(rest.subset([0])).batch_size[0] == 1 and rest.subset([0]).versions["sample_mask"] == 1


def test_a_blocking_claim_waits_for_rows(plane: Plane) -> None:
    partition = plane.partition(FIELDS, tasks=TASKS)
    consumer = plane.attach()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(consumer.get_meta, partition, "train", ["input_ids"], 2, consumer_id="c", timeout_s=60)
        time.sleep(0.1)
        assert not waiting.done()
        put(plane, partition, keys_of(1))
        assert waiting.result(timeout=60).keys == ("u0_g0", "u0_g1")


def test_a_claim_that_waits_in_vain_says_why(plane: Plane) -> None:
    partition = plane.partition(FIELDS, tasks=TASKS)
    put(plane, partition, keys_of(1))
    claim(plane.owner, partition, 1, who="holder")
    started = time.monotonic()
    with pytest.raises(DataPlaneTimeout) as caught:
        plane.owner.get_meta(partition, "train", ["prev_logprobs"], 1, consumer_id="late", timeout_s=0.3)
    assert 0.2 < time.monotonic() - started < 15
    for part in (partition, "'train'", "prev_logprobs (3 rows)", "holder", "holds 1 rows", "'late'"):
        assert part in str(caught.value)


def test_writing_the_fields_of_a_task_ends_its_claim(plane: Plane) -> None:
    partition, keys = plane.partition(FIELDS, tasks=TASKS), keys_of(1)
    put(plane, partition, keys)
    meta = claim(plane.owner, partition, 3, task="prev_lp")
    assert not plane.owner.check_consumption_status(partition, ["prev_lp"])
    plane.owner.kv_batch_put(meta.keys, partition, {"prev_logprobs": torch.zeros(3, 2)})
    # The fourth row was written without a claim: its stage is done as well.
    plane.owner.kv_batch_put(keys[3:], partition, {"prev_logprobs": torch.zeros(1, 2)})
    assert plane.owner.check_consumption_status(partition, ["prev_lp"])
    assert claim(plane.owner, partition, 9, task="prev_lp").keys == ()


def test_rows_of_a_dead_consumer_are_handed_out_again(plane: Plane) -> None:
    partition, keys = plane.partition(FIELDS, tasks=TASKS), keys_of(1)
    put(plane, partition, keys)
    dead = plane.attach()
    assert claim(dead, partition, 2, who="dead").keys == tuple(keys[:2])
    assert claim(plane.owner, partition, 9, who="heir").keys == tuple(keys[2:])
    dead.close()
    heir = plane.owner.get_meta(partition, "train", ["input_ids"], 9, consumer_id="heir", timeout_s=10 * LEASE_S)
    assert heir.keys == tuple(keys[:2])


def test_the_claim_travels_with_its_meta(plane: Plane) -> None:
    """Whoever has the meta may write and release under its claim, as long as it holds."""
    partition = plane.partition(FIELDS, tasks=TASKS)
    put(plane, partition, keys_of(1))
    claimer, other = plane.attach(), plane.attach()
    first = pickle.loads(pickle.dumps(claim(claimer, partition, 2, task="prev_lp")))
    write_columns(other, first, {"prev_logprobs": torch.zeros(2, 2)})
    other.release(pickle.loads(pickle.dumps(claim(claimer, partition, 2, task="train"))))
    assert claim(plane.owner, partition, 9).keys == ("u0_g2", "u0_g3")
    assert claim(plane.owner, partition, 9, task="prev_lp").keys == ("u0_g2", "u0_g3")
    bare = KVBatchMeta(partition_id=partition, keys=("u0_g2",), task_name="train")
    with pytest.raises(LeaseExpired, match="not claimed by the caller"):
        other.release(bare)


def test_a_release_needs_a_claim(plane: Plane) -> None:
    partition = plane.partition(FIELDS, tasks=TASKS)
    put(plane, partition, keys_of(1))
    meta = claim(plane.owner, partition, 2)
    with pytest.raises(LeaseExpired, match="not claimed"):
        plane.owner.release(KVBatchMeta(partition_id=partition, keys=("u0_g3",), task_name="train"))
    with pytest.raises(SchemaMismatch, match="names no task"):
        plane.owner.release(KVBatchMeta(partition_id=partition, keys=("u0_g0",)))
    plane.owner.release(meta)
    plane.owner.release(meta)
    plane.owner.kv_clear(None, partition)
    plane.owner.release(meta)


@pytest.mark.parametrize("name", ["noop", "noop-socket"])
def test_after_the_owner_has_closed_every_call_fails_at_once(name: str) -> None:
    with open_plane(name) as plane:
        check_closed(plane)


def test_a_call_under_way_when_the_client_closes_ends(plane: Plane) -> None:
    partition = plane.partition(FIELDS, tasks=TASKS)
    consumer = plane.attach()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(consumer.get_meta, partition, "train", ["input_ids"], 1, consumer_id="c", timeout_s=30)
        wait_until(waiting.running)
        consumer.close()
        with pytest.raises(DataPlaneClosed):
            waiting.result(timeout=60)
