"""Dense batches to columns and back: what is cut, what is padded, what the metas know."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nemo_rl.data_plane.batch_meta import shard_meta_for_dp
from nemo_rl.data_plane.column_io import kv_first_write, read_columns, write_columns
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.data_plane.schema import DP_TRAIN_FIELDS, extra_field
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.errors import SchemaMismatch
from tests.helpers.data_planes import Plane, open_plane, rows_of

LENGTHS = (2, 4, 0, 3)
KEYS = ("a_g0", "a_g1", "b_g0", "b_g1")

TEXT = extra_field("prompt_text", is_object=True)


@pytest.fixture
def plane() -> Iterator[Plane]:
    with open_plane("noop") as plane:
        yield plane
        plane.settle()


def rollouts() -> BatchedDataDict:
    return BatchedDataDict(
        input_ids=torch.arange(24, dtype=torch.int32).reshape(4, 6),
        input_lengths=torch.tensor(LENGTHS, dtype=torch.int32),
        token_mask=torch.ones(4, 6, dtype=torch.bool),
        sample_mask=torch.ones(4),
        prompt_text=["p", "q", "r", "s"],
        routes=torch.arange(48, dtype=torch.uint8).reshape(4, 6, 2),
        image=torch.ones(4, 3, 5),
    )


def first_write(plane: Plane) -> KVBatchMeta:
    routes = extra_field("routes", dtypes=["uint8"], dims=("T", "K"), pad=255)
    image = extra_field("image", dtypes=["float32"], dims=(3, 5))
    partition = plane.partition([*DP_TRAIN_FIELDS, TEXT, routes, image])
    return kv_first_write(
        plane.owner, rollouts(), KEYS, partition_id=partition, tags=[{"i": i} for i in range(4)], task_name="train"
    )


def test_the_first_write_cuts_padding_and_records_lengths(plane: Plane) -> None:
    meta = first_write(plane)
    assert (
        meta.sequence_lengths == LENGTHS
        and meta.task_name == "train"
        and meta.tags == ({"i": 0}, {"i": 1}, {"i": 2}, {"i": 3})
    )
    rows = plane.owner.get_data(meta, ["input_ids", "routes", "image"])
    assert rows_of(rows["input_ids"]) == [[0, 1], [6, 7, 8, 9], [], [18, 19, 20]]
    assert [row.shape for row in rows["routes"].unbind()] == [(n, 2) for n in LENGTHS]
    assert rows["image"].shape == (4, 3, 5)


def test_reading_pads_to_the_plan_or_the_longest_row(plane: Plane) -> None:
    meta = first_write(plane)
    batch = read_columns(plane.owner, meta, ["input_ids", "routes", "prompt_text"], pad_values={"input_ids": -7})
    assert batch.tensor("input_ids").tolist()[:2] == [[0, 1, -7, -7], [6, 7, 8, 9]]
    assert batch.tensor("routes")[0, 2:].tolist() == [[255, 255], [255, 255]]
    assert batch["prompt_text"] == ["p", "q", "r", "s"]
    plan = PackPlan(microbatches=(((0, 1, 2, 3),),), steps=(1,), pad_to=8)
    assert read_columns(plane.owner, meta.with_pack(plan), ["token_mask"]).tensor("token_mask").shape == (4, 8)
    assert read_columns(plane.owner, meta, ["token_mask"], pad_to=5).tensor("token_mask").sum() == sum(LENGTHS)
    with pytest.raises(SchemaMismatch, match="tokenizer's pad id"):
        read_columns(plane.owner, meta, ["input_ids"])


def test_results_are_cut_by_the_lengths_of_the_meta(plane: Plane) -> None:
    meta = first_write(plane).subset([3, 1])
    written = write_columns(plane.owner, meta, {"prev_logprobs": torch.arange(16.0).reshape(2, 8)})
    assert written.keys == ("b_g1", "a_g1") and "prev_logprobs" in written.fields
    assert written.versions["prev_logprobs"] == 1 and written.tags == meta.tags
    assert rows_of(plane.owner.get_data(written, ["prev_logprobs"])["prev_logprobs"]) == [[0, 1, 2], [8, 9, 10, 11]]
    assert write_columns(plane.owner, meta, {}) is meta
    bare = KVBatchMeta(partition_id=meta.partition_id, keys=meta.keys)
    with pytest.raises(SchemaMismatch, match="no sequence lengths"):
        write_columns(plane.owner, bare, {"prev_logprobs": torch.zeros(2, 8)})
    assert write_columns(plane.owner, bare, {"advantages": torch.zeros(2)}).fields == ("advantages",)


def test_a_first_write_needs_lengths_and_mask(plane: Plane) -> None:
    partition = plane.partition(DP_TRAIN_FIELDS)
    for missing in ("input_lengths", "sample_mask"):
        batch = BatchedDataDict({name: column for name, column in rollouts().items() if name in DP_TRAIN_FIELDS})
        del batch[missing]
        with pytest.raises(SchemaMismatch, match=missing):
            kv_first_write(plane.owner, batch, KEYS, partition_id=partition)
    with pytest.raises(SchemaMismatch, match="one per key"):
        kv_first_write(plane.owner, rollouts().slice(0, 4), KEYS[:3], partition_id=first_write(plane).partition_id)


def test_each_rank_gets_its_rows_in_the_order_of_its_microbatches(plane: Plane) -> None:
    meta = first_write(plane)
    plan = PackPlan(microbatches=(((3,), (0,)), ((1,), ())), steps=(2,), pad_to=8)
    shards = shard_meta_for_dp(meta, plan)
    assert [shard.keys for shard in shards] == [("b_g1", "a_g0"), ("a_g1",)]
    for rank, shard in enumerate(shards):
        assert shard.pack == plan.for_rank(rank) and shard.versions == meta.versions
    assert shards[0].tags == ({"i": 3}, {"i": 0}) and shards[0].sequence_lengths == (3, 2)


@pytest.mark.parametrize("rows", [(((0,),), ((0,),)), (((4,),), ((1,),)), (((-1,),), ((1,),))])
def test_a_plan_that_does_not_fit_the_rows_is_refused(rows: tuple) -> None:
    meta = KVBatchMeta(partition_id="p", keys=KEYS, sequence_lengths=LENGTHS)
    with pytest.raises(SchemaMismatch, match="pack plan"):
        shard_meta_for_dp(meta, PackPlan(microbatches=rows, steps=(1,), pad_to=8))
