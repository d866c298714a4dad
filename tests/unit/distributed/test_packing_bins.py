"""The algorithms under the plans, against slow ones and numbers worked out by hand."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nemo_rl.distributed.packing_bins import (
    BIN_ALGORITHMS,
    best_fit_decreasing,
    bins_bound,
    exact_bins,
    longest_first,
    repair,
    spread,
    tight_bins,
)
from nemo_rl.distributed.packing_form import (
    deal_heaviest_to_lightest,
    deal_in_turn,
    karmarkar_karp,
    level_ranks,
    level_runs,
    runs_under_cap,
    split_to,
)

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=80)
CAP = 60


def by_size(bins: list[list[int]], sizes: list[int]) -> list[list[int]]:
    return [[sizes[row] for row in rows] for rows in bins]


def slow_fit(order: list[int], sizes: list[int], *, best: bool) -> list[list[int]]:
    """First or best fit by looking at every bin."""
    bins: list[list[int]] = []
    for row in order:
        room = [CAP - sum(sizes[i] for i in rows) for rows in bins]
        fitting = [index for index in range(len(bins)) if room[index] >= sizes[row]]
        if fitting:
            bins[min(fitting, key=lambda i: room[i]) if best else fitting[0]].append(row)
        else:
            bins.append([row])
    return bins


@given(sizes=SIZES)
def test_first_and_best_fit_are_what_their_names_say(sizes):
    order = longest_first(sizes)
    assert order == sorted(range(len(sizes)), key=lambda row: (-sizes[row], row))
    assert BIN_ALGORITHMS["first_fit_decreasing"](sizes, CAP) == slow_fit(order, sizes, best=False)
    ours, slow = best_fit_decreasing(order, sizes, CAP), slow_fit(order, sizes, best=True)
    assert sorted(map(sum, by_size(ours, sizes))) == sorted(map(sum, by_size(slow, sizes)))


def test_concatenation_closes_a_bin_for_good():
    assert BIN_ALGORITHMS["concatenative"]([30, 31, 29, 1], CAP) == [[0], [1, 2], [3]]


def test_shuffled_first_fit_is_the_same_every_time_and_not_in_order():
    sizes = list(range(1, 40))
    first = BIN_ALGORITHMS["first_fit_shuffle"](sizes, CAP)
    random.seed(5)
    assert first == BIN_ALGORITHMS["first_fit_shuffle"](sizes, CAP)
    assert first != BIN_ALGORITHMS["first_fit_decreasing"](sizes, CAP)


def test_modified_first_fit_gives_large_rows_the_partners_that_first_fit_takes_away():
    # Large above 30, medium above 20, small above 10: there with the medium row, back with two small ones each.
    sizes = [36, 34, 32, 24, 11, 13, 12, 15]
    bins = by_size(BIN_ALGORITHMS["modified_first_fit_decreasing"](sizes, CAP), sizes)
    assert bins == [[36, 24], [34, 12, 13], [32, 11, 15]]
    # Johnson and Garey's kind of instance: first fit decreasing joins small rows with medium ones.
    sizes = [31] * 6 + [17, 12] * 6 + [16, 15, 13, 15] * 2
    counts = {name: len(BIN_ALGORITHMS[name](sizes, CAP)) for name in BIN_ALGORITHMS}
    assert counts["modified_first_fit_decreasing"] <= counts["first_fit_decreasing"]


@pytest.mark.parametrize("name", BIN_ALGORITHMS)
@given(sizes=SIZES)
def test_bins_hold_each_row_once_under_the_cap_and_none_is_empty(name, sizes):
    bins = BIN_ALGORITHMS[name](sizes, CAP)
    assert sorted(row for rows in bins for row in rows) == list(range(len(sizes)))
    assert all(0 < sum(mine) <= CAP for mine in by_size(bins, sizes))


@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=12))
def test_the_bound_is_below_and_the_search_is_at_the_fewest_bins(sizes):
    order = longest_first(sizes)
    fewest = next(count for count in range(1, 13) if exact_bins(order, sizes, count, CAP) is not None)
    bins = exact_bins(order, sizes, fewest, CAP)
    assert sorted(row for rows in bins for row in rows) == list(range(len(sizes)))
    assert max(map(sum, by_size(bins, sizes))) <= CAP
    assert -(-sum(sizes) // CAP) <= bins_bound(sizes, CAP) <= fewest <= len(best_fit_decreasing(order, sizes, CAP))


def test_the_bound_knows_rows_that_share_no_bin():
    assert bins_bound([31] * 5, CAP) == 5, "tokens alone would fit in three bins"
    assert bins_bound([40, 40, 21, 21, 21], CAP) == 4, "no row of 21 fits besides one of 40"


def test_the_search_gives_up_instead_of_running_for_ever():
    rng = random.Random(1)
    sizes = [rng.randrange(1000, 3000) for _ in range(400)]
    assert exact_bins(longest_first(sizes), sizes, -(-sum(sizes) // 6000), 6000) is None


@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=80), count=st.integers(1, 80))
def test_tight_bins_are_right_or_none(sizes, count):
    bins = tight_bins(longest_first(sizes), sizes, count, CAP)
    if bins is None:
        assert count < len(sizes)
        return
    assert len(bins) <= count and max(map(sum, by_size(bins, sizes))) <= CAP
    assert sorted(row for rows in bins for row in rows) == list(range(len(sizes)))


def test_tight_bins_fill_what_greedy_bins_cannot():
    rng = random.Random(3)
    sizes = [min(8192, max(32, int(rng.lognormvariate(7.3, 0.8)))) for _ in range(512)]
    order = longest_first(sizes)
    greedy = len(best_fit_decreasing(order, sizes, 8192))
    assert greedy > (fewest := -(-sum(sizes) // 8192)), "this input is a tight one"
    assert len(tight_bins(order, sizes, fewest, 8192)) == fewest


def test_spreading_goes_to_the_lightest_bin_and_repair_brings_bins_under_the_cap():
    sizes = [40, 30, 25, 15, 10, 10]
    bins = spread(longest_first(sizes), sizes, 2)
    assert by_size(bins, sizes) == [[40, 15, 10], [30, 25, 10]]
    too_full = [[0, 1], [2, 3, 4, 5]]
    assert repair(too_full, sizes, 66, most_exchanges=10)
    assert by_size(too_full, sizes) == [[40, 25], [30, 15, 10, 10]]
    assert not repair([[0, 1], [2, 3, 4, 5]], sizes, 66, most_exchanges=0)
    assert not repair([[0, 1], [2, 3, 4, 5]], sizes, 64, most_exchanges=100), "130 tokens do not fit"


def test_differencing_is_karmarkars_and_karps():
    sets = karmarkar_karp([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in mine) for mine in sets) == [14, 16], "the published example"
    sets = karmarkar_karp([4.0, 5.0, 6.0, 7.0, 8.0, 9.0], 3)
    assert sorted(i for mine in sets for i in mine) == list(range(6))
    assert {sum([4, 5, 6, 7, 8, 9][i] for i in mine) for mine in sets} == {13}
    assert karmarkar_karp([3.0], 3) == [[0], [], []] and karmarkar_karp([2.0, 1.0], 1) == [[0, 1]]


def test_bins_are_dealt_in_turn_or_heaviest_to_lightest():
    bins = [[0], [1], [2], [3]]
    assert deal_in_turn(bins, 2) == [[[0], [2]], [[1], [3]]]
    assert deal_heaviest_to_lightest(bins, [9.0, 4.0, 5.0, 1.0], 2) == [[[0], [3]], [[2], [1]]]


def test_splitting_halves_the_heaviest_bin_first():
    bins = [[0], [1, 2], [3, 4, 5, 6]]
    split_to(bins, 4, [9, 1, 1, 1, 1, 1, 1])
    assert bins == [[0], [1, 2], [3, 5], [4, 6]]


@given(
    sizes=st.lists(st.integers(1, 30), min_size=12, max_size=60),
    num_ranks=st.integers(2, 4),
    per_rank=st.integers(1, 3),
)
# Two ranks end up as the busiest ones.
@example(sizes=[3, 22, 3, 18, 25, 1, 18, 18, 21, 23, 24, 19], num_ranks=4, per_rank=2)
def test_levelling_never_raises_the_busiest_rank_nor_breaks_the_cap(sizes, num_ranks, per_rank):
    costs = [n + n * n / 8 for n in sizes]
    bins = [list(range(place, len(sizes), num_ranks * per_rank)) for place in range(num_ranks * per_rank)]
    cap = max(sum(sizes[row] for row in rows) for rows in bins)
    ranks = deal_in_turn(bins, num_ranks)

    def busiest():
        return max(sum(costs[row] for rows in mine for row in rows) for mine in ranks)

    before, bound = busiest(), max(sum(costs) / num_ranks, *costs)
    level_ranks(ranks, costs, sizes, capacity=cap, bound=bound)
    assert bound * (1 - 1e-9) <= busiest() <= before
    assert sorted(row for mine in ranks for rows in mine for row in rows) == list(range(len(sizes)))
    assert all(rows and sum(sizes[row] for row in rows) <= cap for mine in ranks for rows in mine)
    assert [len(mine) for mine in ranks] == [per_rank] * num_ranks


def test_levelling_reaches_the_bound_where_rows_allow_it():
    costs = [float(cost) for cost in range(1, 41)]
    ranks = [[list(range(20))], [list(range(20, 40))]]
    level_ranks(ranks, costs, [1] * 40, capacity=100, bound=sum(costs) / 2)
    assert max(sum(costs[row] for row in mine[0]) for mine in ranks) <= 1.002 * sum(costs) / 2


def test_runs_of_like_length_are_level_in_cost():
    sizes = [10, 9, 8, 8, 2, 2, 2, 1]
    order = longest_first(sizes)
    assert by_size(runs_under_cap(order, sizes, 20), sizes) == [[10, 9], [8, 8], [2, 2, 2, 1]]
    level = level_runs(order, sizes, [float(n) for n in sizes], count=4, capacity=20)
    costs = [len(mine) * max(mine) for mine in by_size(level, sizes)]
    assert len(level) <= 4 and max(costs) <= 20 and [row for rows in level for row in rows] == order
    # Short rows are so cheap that cost alone would put all of them into one microbatch.
    sizes = [10, 10, *[1] * 30]
    level = level_runs(longest_first(sizes), sizes, [float(n * n) for n in sizes], count=4, capacity=20)
    assert [len(rows) for rows in level] == [1, 1, 20, 10]
