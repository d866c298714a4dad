"""Laws of pack plans, for every algorithm and every way to form microbatches, and the optimum on tiny inputs."""

from __future__ import annotations

import inspect
import itertools
import random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.config.policy import PackingAlgorithm
from nemo_rl.distributed.packing import (
    PackPlan,
    TooFewRows,
    microbatches_needed,
    plan_fixed,
    plan_packs,
    plan_padded,
    replan_microbatches,
    replan_rows,
    round_up,
)

ALGORITHMS = get_args(PackingAlgorithm)
MODES = (*ALGORITHMS, "padded")
CAP = 128
LENGTHS = st.lists(st.integers(0, CAP), min_size=1, max_size=60)
LOG_NORMAL = [min(8192, max(32, int(rng.lognormvariate(7.3, 0.8)))) for rng in [random.Random(3)] for _ in range(512)]
LAYOUT = {
    "dp_world": st.integers(1, 5),
    "multiple_of": st.integers(1, 2),
    "pad_multiple": st.sampled_from([1, 8]),
    "microbatch_order": st.sampled_from(["packer", "largest_first"]),
}


def make_plan(mode: str, lengths: list[int], *, capacity: int = CAP, **keys: object) -> PackPlan:
    if mode == "padded":
        return plan_padded(lengths, capacity=capacity, **keys)
    return plan_packs(lengths, capacity=capacity, algorithm=mode, **keys)


def tokens_of(rows: tuple[int, ...], sizes: list[int], mode: str) -> int:
    return len(rows) * max(sizes[i] for i in rows) if mode == "padded" else sum(sizes[i] for i in rows)


def check_laws(plan: PackPlan, lengths: list[int], mode: str, *, capacity: int, layout: dict) -> None:
    sizes = [round_up(max(n, 1), layout["pad_multiple"]) for n in lengths]
    assert plan.num_ranks == layout["dp_world"] and plan.packed is (mode != "padded")
    rows = [row for rank in range(plan.num_ranks) for row in plan.rows_of_rank(rank)]
    assert sorted(rows) == list(range(len(lengths))), "each row exactly once"
    tokens = [[tokens_of(mine, sizes, mode) for mine in rank] for rank in plan.microbatches]
    assert max(map(max, tokens)) <= capacity, "the cap is hard"
    assert {len(rank) for rank in plan.microbatches} == {sum(plan.steps)}, "as many microbatches on every rank"
    assert all(count % layout["multiple_of"] == 0 for count in plan.steps)
    assert plan.pad_to == max(sizes)
    if layout["microbatch_order"] == "largest_first":
        starts = list(itertools.accumulate(plan.steps, initial=0))
        for mine in tokens:
            for start, stop in itertools.pairwise(starts):
                assert mine[start:stop] == sorted(mine[start:stop], reverse=True)


def check_load(plan: PackPlan, lengths: list[int], mode: str, *, layout: dict) -> None:
    """For one step and the default cost: what the plan says about itself, computed once more."""
    sizes = [round_up(max(n, 1), layout["pad_multiple"]) for n in lengths]

    def cost(rows):
        longest = max(sizes[i] for i in rows)
        of = [longest] * len(rows) if mode == "padded" else [sizes[i] for i in rows]
        return sum(24576.0 * s + s * s for s in of)

    load, ranks = plan.load, [sum(map(cost, rank)) for rank in plan.microbatches]
    row_costs = [24576.0 * s + s * s for s in sizes]
    assert load.rank_costs == pytest.approx(ranks) and load.busiest == pytest.approx(max(ranks))
    meets = [max(cost(rank[i]) for rank in plan.microbatches) for i in range(plan.steps[0])]
    assert load.synchronised == pytest.approx(sum(meets))
    assert load.cost_bound == pytest.approx(max(sum(row_costs) / plan.num_ranks, *row_costs))
    assert load.cost_bound <= load.busiest * (1 + 1e-9) and load.busiest <= load.synchronised * (1 + 1e-9)
    assert load.num_bins == sum(map(len, plan.microbatches)) >= load.bins_bound
    assert load.num_tokens == sum(lengths)
    assert load.computed_tokens == sum(tokens_of(rows, sizes, mode) for rank in plan.microbatches for rows in rank)


@pytest.mark.parametrize("mode", MODES)
@given(lengths=LENGTHS, cap=st.integers(CAP, 400), layout=st.fixed_dictionaries(LAYOUT))
def test_every_plan_keeps_the_laws_or_says_how_many_rows_are_missing(mode, lengths, cap, layout):
    try:
        plan = make_plan(mode, lengths, capacity=cap, **layout)
    except TooFewRows as error:
        needed = {k: layout[k] for k in ("dp_world", "multiple_of", "pad_multiple")}
        count = microbatches_needed(lengths, capacity=cap, packed=mode != "padded", **needed)
        assert len(lengths) < count and f"{count - len(lengths)} too few" in str(error)
        return
    check_laws(plan, lengths, mode, capacity=cap, layout=layout)
    check_load(plan, lengths, mode, layout=layout)


@pytest.mark.parametrize("mode", MODES)
@given(lengths=LENGTHS, dp_world=st.integers(1, 3), size=st.integers(8, 20))
def test_each_global_batch_keeps_its_members(mode, lengths, dp_world, size):
    lengths = [1 + n // 8 for n in lengths]
    sizes = [min(size, len(lengths) - start) for start in range(0, len(lengths), size)]
    if sizes[-1] < 2 * dp_world:
        return
    plan = make_plan(mode, lengths, dp_world=dp_world, global_batch_size=sizes)
    start = 0
    for step, count in enumerate(sizes):
        members = [row for rank in range(dp_world) for rows in list(plan.iter_steps(rank))[step] for row in rows]
        assert sorted(members) == list(range(start, start + count))
        start += count
    assert make_plan(mode, lengths, dp_world=dp_world, global_batch_size=sizes) == plan, "the same input, the same plan"


@pytest.mark.parametrize("mode", MODES)
@given(lengths=st.lists(st.sampled_from([3, 5, 5, 9, 40]), min_size=8, max_size=24), shuffle=st.randoms())
def test_with_keys_the_order_of_rows_does_not_matter(mode, lengths, shuffle):
    keys = [f"k{i:02}" for i in range(len(lengths))]
    order = list(range(len(lengths)))
    shuffle.shuffle(order)

    def named(plan, names):
        return [[[names[row] for row in rows] for rows in rank] for rank in plan.microbatches]

    given_order = make_plan(mode, lengths, dp_world=2, keys=keys)
    shuffled_keys = [keys[i] for i in order]
    shuffled = make_plan(mode, [lengths[i] for i in order], dp_world=2, keys=shuffled_keys)
    assert named(given_order, keys) == named(shuffled, shuffled_keys)


@given(lengths=LENGTHS, dp_world=st.integers(1, 3))
def test_a_ranks_view_uses_local_indices_of_its_own_rows(lengths, dp_world):
    lengths = [*lengths, *[5] * 12]
    plan = plan_packs(lengths, capacity=400, dp_world=dp_world)
    assert plan.rank_plans() == [plan.for_rank(rank) for rank in range(dp_world)]
    for rank, view in enumerate(plan.rank_plans()):
        rows = plan.rows_of_rank(rank)
        back = [tuple(rows[i] for i in microbatch) for microbatch in view.microbatches[0]]
        assert back == list(plan.microbatches[rank])
        assert view.steps == plan.steps and view.pad_to == plan.pad_to
        assert view.load.rank_costs == (plan.load.rank_costs[rank],)
        assert view.digest() == view.sealed_digest and view.whole_digest == plan.digest()


@pytest.mark.parametrize("packed", [True, False])
@given(
    lengths=LENGTHS,
    dp_world=st.integers(1, 3),
    cap=st.integers(200, 500),
    multiple_of=st.integers(1, 3),
    order=st.sampled_from(["packer", "largest_first"]),
)
def test_a_replanned_stage_keeps_the_laws_over_the_same_assignment(packed, lengths, dp_world, cap, multiple_of, order):
    lengths = [*lengths, *[5] * 12]
    mode = "balanced" if packed else "padded"
    plan = make_plan(mode, lengths, capacity=200, dp_world=dp_world, multiple_of=multiple_of)
    keys = {"multiple_of": multiple_of, "microbatch_order": order}
    other = replan_microbatches(plan, lengths, capacity=cap, **keys)
    for rank in range(dp_world):
        assert set(other.rows_of_rank(rank)) == set(plan.rows_of_rank(rank))
    layout = {"dp_world": dp_world, "pad_multiple": 1, **keys}
    check_laws(other, lengths, mode, capacity=cap, layout=layout)
    check_load(other, lengths, mode, layout=layout)


@given(count=st.integers(1, 6), dp_world=st.integers(1, 3), rows=st.integers(1, 3), multiple_of=st.integers(1, 2))
def test_fixed_microbatches_keep_the_laws(count, dp_world, rows, multiple_of):
    size = dp_world * rows * multiple_of
    lengths = [1 + (7 * i) % 23 for i in range(count * size)]
    layout = {"dp_world": dp_world, "multiple_of": multiple_of, "pad_multiple": 4, "microbatch_order": "largest_first"}
    plan = plan_fixed(lengths, rows_per_microbatch=rows, global_batch_size=size, **layout)
    check_laws(plan, lengths, "padded", capacity=10**6, layout=layout)
    assert plan.steps == (multiple_of,) * count and all(len(m) == rows for rank in plan.microbatches for m in rank)


# ---- the optimum, by trying everything


def fewest_bins(sizes: tuple[int, ...], capacity: int) -> int:
    """By trying, for every row, every bin and a new one."""
    best = len(sizes)

    def place(at: int, bins: list[int]) -> None:
        nonlocal best
        if len(bins) >= best:
            return
        if at == len(sizes):
            best = len(bins)
            return
        for i, held in enumerate(bins):
            if held + sizes[at] <= capacity:
                bins[i] += sizes[at]
                place(at + 1, bins)
                bins[i] -= sizes[at]
        place(at + 1, [*bins, sizes[at]])

    place(0, [])
    return best


def least_busiest(sizes: list[int], costs: list[float], capacity: int, dp_world: int, per_rank: int) -> float:
    """Cost of the busiest rank in the best assignment that `per_rank` microbatches per rank can hold."""
    best = float("inf")
    for assignment in itertools.product(range(dp_world), repeat=len(sizes)):
        shards = [[i for i, rank in enumerate(assignment) if rank == mine] for mine in range(dp_world)]
        busiest = max(sum(costs[i] for i in shard) for shard in shards)
        if busiest >= best or min(map(len, shards)) < per_rank:
            continue
        if all(fewest_bins(tuple(sizes[i] for i in shard), capacity) <= per_rank for shard in shards):
            best = busiest
    return best


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=9), dp_world=st.integers(1, 4))
def test_bins_are_the_fewest_there_are_and_a_refusal_is_right(lengths, dp_world):
    count = round_up(fewest_bins(tuple(sorted(lengths, reverse=True)), 30), dp_world)
    for algorithm in ALGORITHMS:
        if count > len(lengths):
            with pytest.raises(TooFewRows, match=f"{count - len(lengths)} too few"):
                plan_packs(lengths, capacity=30, dp_world=dp_world, algorithm=algorithm)
            continue
        plan = plan_packs(lengths, capacity=30, dp_world=dp_world, algorithm=algorithm)
        assert plan.load.num_bins >= count and (algorithm != "balanced" or plan.load.num_bins == count)


@given(lengths=st.lists(st.integers(1, 30), min_size=4, max_size=7))
def test_the_busiest_rank_is_near_the_optimum_of_tiny_inputs(lengths):
    costs = [n + n * n / 16 for n in lengths]
    try:
        plan = plan_packs(lengths, capacity=40, dp_world=2, cost=(1.0, 1 / 16))
    except TooFewRows:
        return
    best = least_busiest(lengths, costs, 40, 2, plan.steps[0])
    assert best <= plan.load.busiest * (1 + 1e-9) <= 4 / 3 * best * (1 + 2e-9)


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=7), cap=st.integers(30, 90))
def test_padded_microbatches_are_the_fewest_there_are(lengths, cap):
    def parts(rows):
        if not rows:
            yield []
            return
        first, rest = rows[0], rows[1:]
        for size in range(len(rest) + 1):
            for others in itertools.combinations(rest, size):
                if (size + 1) * max(lengths[i] for i in (first, *others)) <= cap:
                    left = [i for i in rest if i not in others]
                    yield from ([(first, *others), *more] for more in parts(left))

    fewest = min(map(len, parts(list(range(len(lengths))))))
    assert plan_padded(lengths, capacity=cap, dp_world=1).load.num_bins == fewest


# ---- examples


@pytest.mark.parametrize("mode", ["balanced", "padded"])
@pytest.mark.parametrize(("num_rows", "dp_world", "cap"), [(512, 4, 2048), (356, 2, 8192), (700, 2, 8192)])
def test_load_is_balanced_over_ranks(mode, num_rows, dp_world, cap):
    lengths = [20 + (i * 37) % 9 for i in range(num_rows)]
    plan = make_plan(mode, lengths, capacity=cap, dp_world=dp_world)
    mean = sum(plan.load.rank_costs) / dp_world
    assert plan.load.busiest <= 1.05 * mean and plan.load.synchronised <= 1.1 * mean


def test_rows_that_no_bins_can_hold_are_refused_with_the_shortfall():
    # Seven bins at least: six of one long row each, and one for the row of 28.
    with pytest.raises(TooFewRows, match=r"8 rows for 3 ranks, 1 too few: .* 9 microb.* \(7 under the token cap"):
        plan_packs([1, 28, *[37] * 6], capacity=64, dp_world=3)
    assert plan_packs([1, 1, 28, *[37] * 6], capacity=64, dp_world=3).steps == (3,)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_plan_is_found_where_greedy_bins_are_one_round_too_many(algorithm):
    # First and best fit decreasing need six bins, so ten on five ranks, for nine rows that five bins hold.
    lengths = [4, 4, 3, 3, 3, 3, 10, 10, 10]
    assert plan_packs(lengths, capacity=10, dp_world=5, algorithm=algorithm).steps == (1,)


@pytest.mark.parametrize(
    ("lengths", "capacity"),
    [
        ([28, 21, 9, 6, 5, 5, 4, 2], 40),
        (LOG_NORMAL, 8192),
    ],
)
def test_bins_are_filled_to_the_last_token_when_the_next_round_would_begin(lengths, capacity):
    assert plan_packs(lengths, capacity=capacity, dp_world=1).load.num_bins == -(-sum(lengths) // capacity)


def test_a_stage_keeps_the_plans_microbatches_where_a_rank_has_too_few_rows_for_more():
    # Rank 1 fits into two microbatches of 10, but quick bins need three, and rank 0 has two rows.
    plan = PackPlan(microbatches=(((0,), (1,)), ((2, 4, 5), (3, 6, 7))), steps=(1, 1), pad_to=10, packed=True)
    lengths = [10, 10, 4, 4, 3, 3, 3, 3]
    kept = replan_microbatches(plan, lengths, capacity=10)
    assert kept.microbatches == plan.microbatches and kept.steps == (2,) and kept.load.num_bins == 4
    with pytest.raises(TooFewRows, match="a rank has 2 rows, 1 too few: another rank needs 3 .* the plan has 2"):
        replan_microbatches(plan, lengths, capacity=10, multiple_of=3)
    longer = replan_microbatches(plan, lengths, capacity=20)
    assert longer.steps == (1,)


def test_fixed_microbatches_divide_or_say_which_keys_to_change():
    plan = plan_fixed([3] * 8, rows_per_microbatch=2, dp_world=2, global_batch_size=4)
    assert plan.steps == (1, 1) and plan.microbatches[1] == ((2, 3), (6, 7))
    assert replan_rows(plan, [3] * 8, rows_per_microbatch=3).microbatches[0] == ((0, 1, 4), (5,))
    with pytest.raises(ValueError, match=r"6 rows does not divide by 2 ranks x 2 rows.*train_micro_batch_size"):
        plan_fixed([3] * 6, rows_per_microbatch=2, dp_world=2)
    with pytest.raises(ValueError, match=r"ranks have \[1, 2\] rows"):
        replan_rows(PackPlan(microbatches=(((0,),), ((1, 2),)), steps=(1,), pad_to=4), [3] * 3, rows_per_microbatch=1)


def test_too_few_rows_and_too_long_rows_name_the_shortfall():
    with pytest.raises(ValueError, match=r"3 rows for 4 ranks, 1 too few"):
        plan_packs([5, 5, 5], capacity=100, dp_world=4)
    with pytest.raises(ValueError, match=r"3 rows for 1 ranks, 1 too few.*4 per rank"):
        plan_padded([5, 5, 5], capacity=100, dp_world=1, multiple_of=4)
    with pytest.raises(ValueError, match=r"row 1 has 101 tokens, the cap of a microbatch is 100 \(1 too many\)"):
        plan_packs([5, 101], capacity=100, dp_world=1)
    with pytest.raises(ValueError, match="hold 5 rows, got 4"):
        plan_packs([5] * 4, capacity=100, dp_world=1, global_batch_size=[2, 3])
    with pytest.raises(ValueError, match="2 different keys, got 1 among 2"):
        plan_packs([5] * 2, capacity=100, dp_world=1, keys=["a", "a"])
    with pytest.raises(ValueError, match="expected an algorithm of .*'balanced'.*got 'best'"):
        plan_packs([5] * 2, capacity=100, dp_world=1, algorithm="best")


@pytest.mark.parametrize("wrong", [0, -1])
@pytest.mark.parametrize(
    ("plan", "names"),
    [
        (plan_packs, ("capacity", "dp_world", "multiple_of", "pad_multiple", "global_batch_size")),
        (plan_padded, ("capacity", "dp_world", "multiple_of", "pad_multiple", "global_batch_size")),
        (plan_fixed, ("rows_per_microbatch", "dp_world", "multiple_of", "pad_multiple", "global_batch_size")),
        (replan_microbatches, ("capacity", "multiple_of", "pad_multiple")),
        (replan_rows, ("rows_per_microbatch", "pad_multiple")),
        (microbatches_needed, ("capacity", "dp_world", "multiple_of", "pad_multiple")),
    ],
)
def test_numbers_below_one_are_refused_by_name(plan, names, wrong):
    fine = {"capacity": 20, "rows_per_microbatch": 1, "dp_world": 1, "packed": True}
    takes = inspect.signature(plan).parameters
    keys = {name: value for name, value in fine.items() if name in takes}
    first = [plan_packs([3, 4], capacity=20, dp_world=1)] if "plan" in takes else []
    for name in names:
        with pytest.raises(ValueError, match=f"^packing: {name}: expected at least 1, got {wrong}$"):
            plan(*first, [3, 4], **{**keys, name: wrong})
