"""A plan's digest: the same wherever the plan is the same, another one as soon as an integer changes."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from nemo_rl.data_plane.batch_meta import shard_meta_for_dp
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.distributed.packing import PackPlan, plan_packs, replan_microbatches

LENGTHS = [9, 3, 7, 7, 2, 8, 5, 5]
PLAN = plan_packs(LENGTHS, capacity=16, dp_world=2)


@pytest.mark.parametrize(
    "changed",
    [
        replace(PLAN, pad_to=PLAN.pad_to + 1),
        replace(PLAN, packed=False),
        replace(PLAN, steps=(*PLAN.steps, 0)),
        replace(PLAN, microbatches=PLAN.microbatches[::-1]),
        replace(PLAN, microbatches=tuple(rank[::-1] for rank in PLAN.microbatches)),
        replace(PLAN, microbatches=tuple(tuple(rows[::-1] for rows in rank) for rank in PLAN.microbatches)),
    ],
)
def test_every_integer_of_a_plan_counts(changed):
    assert changed != PLAN and changed.digest() != PLAN.digest()


def test_bounds_of_microbatches_count_not_only_the_rows():
    plans = [PackPlan(microbatches=(rows,), steps=(2,), pad_to=8) for rows in (((0,), (1, 2)), ((0, 1), (2,)))]
    assert plans[0].rows_of_rank(0) == plans[1].rows_of_rank(0) and plans[0].digest() != plans[1].digest()


def test_costs_do_not_count():
    assert replace(PLAN, load=None).digest() == PLAN.digest()


def test_views_keep_their_seals_on_the_way_to_the_workers():
    keys = [f"{'0' * 12}_g{i}" for i in range(8)]
    meta = KVBatchMeta(partition_id="train", keys=tuple(keys), sequence_lengths=tuple(LENGTHS))
    shards = [pickle.loads(pickle.dumps(shard, protocol=5)) for shard in shard_meta_for_dp(meta, PLAN)]
    for rank, shard in enumerate(shards):
        view = shard.pack
        assert view == PLAN.for_rank(rank) and view.digest() == view.sealed_digest
        assert view.whole_digest == PLAN.digest()
        assert shard.keys == tuple(keys[row] for row in PLAN.rows_of_rank(rank))
        assert replace(view, pad_to=view.pad_to + 8).digest() != view.sealed_digest
    other = replan_microbatches(PLAN, LENGTHS, capacity=100)
    assert {view.whole_digest for view in other.rank_plans()} == {other.digest()} != {PLAN.digest()}


def test_a_view_is_small():
    lengths = [100 + (i * 37) % 900 for i in range(1024)]
    view = plan_packs(lengths, capacity=8192, dp_world=8).for_rank(0)
    rows = len(view.rows_of_rank(0))
    assert len(pickle.dumps(view, protocol=5)) < 600 + 4 * rows, "it travels with every stage"
