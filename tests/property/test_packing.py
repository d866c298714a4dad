"""Pack plans: every row once, hard cap, equal microbatches, membership of global batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.distributed.packing import (
    PackPlan,
    plan_fixed,
    plan_packs,
    plan_padded,
    replan_microbatches,
    replan_rows,
    round_up,
)

LENGTHS = st.lists(st.integers(1, 64), min_size=8, max_size=120)


def loads(plan: PackPlan, lengths: list[int], *, packed: bool) -> list[int]:
    rows_of = [rows for rank in plan.microbatches for rows in rank]
    if packed:
        return [sum(lengths[i] for i in rows) for rows in rows_of]
    return [len(rows) * max(lengths[i] for i in rows) for rows in rows_of]


def rows_of_step(plan: PackPlan, step: int) -> list[int]:
    per_rank = [list(plan.iter_steps(rank))[step] for rank in range(plan.num_ranks)]
    return sorted(row for microbatches in per_rank for rows in microbatches for row in rows)


@pytest.mark.parametrize("packed", [True, False])
@given(lengths=LENGTHS, dp_world=st.integers(1, 4), cap=st.integers(64, 400), multiple=st.sampled_from([1, 4]))
def test_capped_plans_keep_every_row_once_under_the_cap_with_equal_counts(packed, lengths, dp_world, cap, multiple):
    planner = plan_packs if packed else plan_padded
    try:
        plan = planner(lengths, capacity=cap, dp_world=dp_world, pad_multiple=multiple)
    except ValueError as error:
        # The next multiple of the ranks may be more microbatches than there are rows, unless the ranks divide them.
        assert "too few" in str(error) and len(lengths) % dp_world
        return
    assert sorted(row for rank in range(dp_world) for row in plan.rows_of_rank(rank)) == list(range(len(lengths)))
    padded = [round_up(n, multiple) for n in lengths]
    assert max(loads(plan, padded, packed=packed)) <= cap
    assert {len(rank) for rank in plan.microbatches} == {sum(plan.steps)}
    assert all(rows for rank in plan.microbatches for rows in rank)
    assert plan.pad_to == max(padded) and plan.packed is packed


@given(lengths=LENGTHS, dp_world=st.integers(1, 3), size=st.integers(4, 20))
def test_each_global_batch_keeps_its_members(lengths, dp_world, size):
    sizes = [min(size, len(lengths) - start) for start in range(0, len(lengths), size)]
    if sizes[-1] < dp_world:
        return
    plan = plan_padded(lengths, capacity=128, dp_world=dp_world, global_batch_size=sizes)
    start = 0
    for step, count in enumerate(sizes):
        assert rows_of_step(plan, step) == list(range(start, start + count))
        start += count


@given(lengths=LENGTHS, dp_world=st.integers(1, 3))
def test_a_ranks_view_uses_local_indices_of_its_own_rows(lengths, dp_world):
    plan = plan_packs(lengths, capacity=200, dp_world=dp_world)
    for rank in range(dp_world):
        view, rows = plan.for_rank(rank), plan.rows_of_rank(rank)
        back = [tuple(rows[i] for i in microbatch) for microbatch in view.microbatches[0]]
        assert back == list(plan.microbatches[rank])
        assert view.steps == plan.steps and view.pad_to == plan.pad_to


@given(lengths=LENGTHS, dp_world=st.integers(1, 3), cap=st.integers(100, 300))
def test_a_replanned_stage_keeps_the_assignment_of_rows_to_ranks(lengths, dp_world, cap):
    plan = plan_packs(lengths, capacity=100, dp_world=dp_world)
    other = replan_microbatches(plan, lengths, capacity=cap)
    for rank in range(dp_world):
        assert set(other.rows_of_rank(rank)) == set(plan.rows_of_rank(rank))
    assert max(loads(other, lengths, packed=True)) <= cap
    assert {len(rank) for rank in other.microbatches} == {other.steps[0]}


def test_plans_do_not_depend_on_anything_but_their_input():
    lengths = [5, 9, 9, 3, 30, 12, 5, 5]
    assert plan_packs(lengths, capacity=40, dp_world=2) == plan_packs(list(lengths), capacity=40, dp_world=2)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("num_rows", "dp_world", "cap"), [(512, 4, 2048), (356, 2, 8192), (700, 2, 8192)])
def test_load_is_balanced_over_ranks(packed, num_rows, dp_world, cap):
    lengths = [20 + (i * 37) % 9 for i in range(num_rows)]
    planner = plan_packs if packed else plan_padded
    plan = planner(lengths, capacity=cap, dp_world=dp_world)
    tokens = [sum(lengths[i] for i in plan.rows_of_rank(rank)) for rank in range(dp_world)]
    assert max(tokens) <= 1.05 * sum(tokens) / dp_world
    biggest, total = max(loads(plan, lengths, packed=packed)), sum(loads(plan, lengths, packed=packed))
    assert biggest <= 1.1 * total / (dp_world * plan.steps[0]), "no microbatch is much larger than the others"


def test_fixed_microbatches_divide_or_say_which_keys_to_change():
    plan = plan_fixed([3] * 8, rows_per_microbatch=2, dp_world=2, global_batch_size=4)
    assert plan.steps == (1, 1) and plan.microbatches[1] == ((2, 3), (6, 7))
    assert replan_rows(plan, [3] * 8, rows_per_microbatch=3).microbatches[0] == ((0, 1, 4), (5,))
    with pytest.raises(ValueError, match=r"6 rows does not divide by 2 ranks x 2 rows.*train_micro_batch_size"):
        plan_fixed([3] * 6, rows_per_microbatch=2, dp_world=2)


def test_too_few_rows_and_too_long_rows_name_the_shortfall():
    with pytest.raises(ValueError, match=r"3 rows for 4 ranks, 1 too few"):
        plan_packs([5, 5, 5], capacity=100, dp_world=4)
    with pytest.raises(ValueError, match=r"row 1 has 101 tokens, the cap of a microbatch is 100 \(1 too many\)"):
        plan_packs([5, 101], capacity=100, dp_world=1)
    with pytest.raises(ValueError, match="hold 5 rows, got 4"):
        plan_packs([5] * 4, capacity=100, dp_world=1, global_batch_size=[2, 3])
