"""The microbatches of one global batch, assigned to the ranks: packed rows by named algorithm, padded rows.

Called by `packing` with rows numbered 0..n-1 in an order the caller made stable. First bins of rows are formed, then
they are dealt to the ranks: the same number each, with costs as equal as possible. Invariant: `[rank][microbatch]` with
as many microbatches on every rank, a multiple of `multiple_of`, each under the cap and none empty; no row is lost.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl.distributed.packing_bins import (
    BIN_ALGORITHMS,
    Bins,
    best_fit_decreasing,
    bins_bound,
    exact_bins,
    longest_first,
    repair,
    spread,
    tight_bins,
)

__all__ = [
    "BatchRows",
    "TooFewRows",
    "bins_needed",
    "deal_heaviest_to_lightest",
    "deal_in_turn",
    "karmarkar_karp",
    "level_ranks",
    "level_runs",
    "pack_on_rank",
    "packed_ranks",
    "padded_ranks",
    "round_up",
    "runs_under_cap",
    "split_to",
]

EXACT_ROWS = 24
"""Up to so many rows the number of bins is the least there is, by exact search."""
EXCHANGES = 400
"""Most exchanges of `repair`, about 10 ms; past that the bins of best fit decreasing are balanced instead."""


class TooFewRows(ValueError):
    """A global batch has fewer rows than the microbatches that it needs."""


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows of one global batch."""

    sizes: Sequence[int]
    """Tokens of each row, padding to the multiple included, at least 1."""
    costs: Sequence[float]
    capacity: int


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def packed_ranks(rows: BatchRows, *, num_ranks: int, multiple_of: int, algorithm: str) -> list[Bins]:
    """Return rows laid end to end.

    Raises:
        TooFewRows: no packing under the cap has as few microbatches as there are rows.
    """
    _check_enough(len(rows.sizes), 1, num_ranks, multiple_of)
    if algorithm == "karmarkar_karp":
        ranks = _differencing_ranks(rows, num_ranks, multiple_of)
        if ranks is not None:
            return ranks
    elif algorithm != "balanced":
        bins = BIN_ALGORITHMS[algorithm](rows.sizes, rows.capacity)
        count = round_up(len(bins), num_ranks * multiple_of)
        if count > len(rows.sizes):
            bins = _fewest_bins(rows, num_ranks, multiple_of)
            count = round_up(len(bins), num_ranks * multiple_of)
        split_to(bins, count, rows.sizes)
        return deal_in_turn(bins, num_ranks)
    bins = _balanced_bins(rows, num_ranks, multiple_of)
    ranks = deal_heaviest_to_lightest(bins, _sums(bins, rows.costs), num_ranks)
    bound = max(sum(rows.costs) / num_ranks, *rows.costs)
    level_ranks(ranks, rows.costs, rows.sizes, capacity=rows.capacity, bound=bound)
    return [_most_expensive_first(mine, _sums(mine, rows.costs)) for mine in ranks]


def padded_ranks(rows: BatchRows, *, num_ranks: int, multiple_of: int) -> list[Bins]:
    """Return rows of similar length padded to the longest of their microbatch.

    Raises:
        TooFewRows: fewer rows than the fewest microbatches under the cap, rounded up to what the ranks divide.
    """
    order = longest_first(rows.sizes)
    fewest = runs_under_cap(order, rows.sizes, rows.capacity)
    count = round_up(len(fewest), num_ranks * multiple_of)
    _check_enough(len(rows.sizes), len(fewest), num_ranks, multiple_of)
    bins = level_runs(order, rows.sizes, rows.costs, count=count, capacity=rows.capacity)
    split_to(bins, count, rows.costs)
    ranks = deal_heaviest_to_lightest(bins, padded_costs(bins, rows.costs), num_ranks)
    return [_most_expensive_first(mine, padded_costs(mine, rows.costs)) for mine in ranks]


def padded_costs(bins: Bins, costs: Sequence[float]) -> list[float]:
    """Return cost of microbatches in which every row costs as much as the most expensive."""
    return [len(mine) * max((costs[row] for row in mine), default=0.0) for mine in bins]


def bins_needed(rows: BatchRows, *, num_ranks: int, multiple_of: int, packed: bool) -> int:
    """Microbatches, and so rows, with which a plan can surely be made; a plan may need a round fewer."""
    order = longest_first(rows.sizes)
    fill = best_fit_decreasing if packed else runs_under_cap
    return round_up(len(fill(order, rows.sizes, rows.capacity)), num_ranks * multiple_of)


def pack_on_rank(rows: BatchRows, count: int | None, *, packed: bool) -> Bins:
    """Return microbatches of one rank's rows: as few as can be quickly found, or `count` of about the same cost."""
    order = longest_first(rows.sizes)
    bins = (best_fit_decreasing if packed else runs_under_cap)(order, rows.sizes, rows.capacity)
    if count is None:
        return bins
    if packed:
        even = _even_bins(rows, order, count)
        if even is None:
            split_to(bins, count, rows.costs)
        bins = even or bins
        return _most_expensive_first(bins, _sums(bins, rows.costs))
    bins = level_runs(order, rows.sizes, rows.costs, count=count, capacity=rows.capacity)
    split_to(bins, count, rows.costs)
    return _most_expensive_first(bins, padded_costs(bins, rows.costs))


def _balanced_bins(rows: BatchRows, num_ranks: int, multiple_of: int) -> Bins:
    """Return as few bins as we can find, of about the same cost where the cap leaves a choice."""
    unit, num_rows = num_ranks * multiple_of, len(rows.sizes)
    order = longest_first(rows.sizes)
    least = round_up(-(-sum(rows.sizes) // rows.capacity), unit)
    even = _even_bins(rows, order, least) if least <= num_rows else None
    if even is not None:
        return even
    bins = _fewest_bins(rows, num_ranks, multiple_of)
    count = round_up(len(bins), unit)
    even = _even_bins(rows, order, count) if count > least else None
    if even is None:
        split_to(bins, count, rows.costs)
    return even or bins


def _fewest_bins(rows: BatchRows, num_ranks: int, multiple_of: int) -> Bins:
    """Return bins under the cap that, rounded up to a multiple of the ranks, are as few as we can find."""
    unit, num_rows = num_ranks * multiple_of, len(rows.sizes)
    order = longest_first(rows.sizes)
    greedy = best_fit_decreasing(order, rows.sizes, rows.capacity)
    enough = round_up(len(greedy), unit)
    least = round_up(-(-sum(rows.sizes) // rows.capacity), unit)
    if least < enough:
        least = round_up(bins_bound(rows.sizes, rows.capacity), unit)
    for count in range(least, enough, unit):
        found = tight_bins(order, rows.sizes, count, rows.capacity)
        # Where one round more is more than there are rows, searching is better than giving up.
        if found is None and (num_rows <= EXACT_ROWS or count <= num_rows < count + unit):
            found = exact_bins(order, rows.sizes, count, rows.capacity)
        if found is not None:
            return [mine for mine in found if mine]
    _check_enough(num_rows, len(greedy), num_ranks, multiple_of)
    return greedy


def _check_enough(num_rows: int, num_bins: int, num_ranks: int, multiple_of: int) -> None:
    needed = round_up(max(num_bins, 1), num_ranks * multiple_of)
    if num_rows >= needed:
        return
    each = f"{needed // num_ranks} per rank" if needed > num_ranks else "one per rank"
    raise TooFewRows(
        f"packing: {num_rows} rows for {num_ranks} ranks, {needed - num_rows} too few: an optimizer step needs "
        f"{needed} microbatches of at least one row, {each} ({num_bins} under the token cap, rounded up to a multiple "
        f"of {num_ranks * multiple_of}); raise *_mb_tokens or policy.train_global_batch_size, or use fewer ranks"
    )


def _even_bins(rows: BatchRows, order: Sequence[int], count: int) -> Bins | None:
    """`count` bins of about the same cost; None where the cap does not let it."""
    bins = spread(order, rows.costs, count)
    return bins if repair(bins, rows.sizes, rows.capacity, most_exchanges=EXCHANGES) else None


def _differencing_ranks(rows: BatchRows, num_ranks: int, multiple_of: int) -> list[Bins] | None:
    """Karmarkar and Karp's sets of equal cost, one per rank, each packed on its own; None when a rank has fewer rows
    than microbatches."""
    sets = karmarkar_karp(rows.costs, num_ranks)
    ranks = []
    for mine in sets:
        sizes = [rows.sizes[row] for row in mine]
        bins = best_fit_decreasing(longest_first(sizes), sizes, rows.capacity)
        ranks.append([[mine[place] for place in places] for places in bins])
    count = round_up(max(1, *map(len, ranks)), multiple_of)
    if min(map(len, sets)) < count:
        return None
    for bins in ranks:
        split_to(bins, count, rows.costs)
    return ranks


def _sums(bins: Bins, costs: Sequence[float]) -> list[float]:
    return [sum(map(costs.__getitem__, mine)) for mine in bins]


def _most_expensive_first(bins: Bins, bin_costs: Sequence[float]) -> Bins:
    """Sort the bins by falling cost, so that microbatches that meet on all ranks cost about the same."""
    return [bins[place] for place in sorted(range(len(bins)), key=lambda place: -bin_costs[place])]


LEVEL_ENOUGH = 1.002
"""Busiest rank over lower bound at which levelling stops."""
EXCHANGES_PER_RANK = 6
PARTNERS = 4
"""Ranks, lightest first, with which the busiest one tries to exchange."""
NEIGHBOURS = 4
"""Rows of about the wanted cost that are tried on either side, for the first may not fit under the cap."""
CLOSE_ENOUGH = 0.1
"""An exchange is taken at once when it moves half the gap, give or take this part of it."""


def split_to(bins: Bins, count: int, weights: Sequence[float]) -> None:
    """Halve the heaviest bin that still has two rows, until there are `count` bins; the rows must suffice."""
    heap = [(-sum(weights[row] for row in rows), index) for index, rows in enumerate(bins) if len(rows) > 1]
    heapq.heapify(heap)
    while len(bins) < count:
        assert heap, f"{len(bins)} single rows cannot form {count} bins"
        _, index = heapq.heappop(heap)
        rows = bins[index]
        # Alternate rows, so that both halves have about the same length profile.
        bins[index] = rows[0::2]
        bins.append(rows[1::2])
        for at in (index, len(bins) - 1):
            if len(bins[at]) > 1:
                heapq.heappush(heap, (-sum(weights[row] for row in bins[at]), at))


def deal_in_turn(bins: Bins, num_ranks: int) -> list[Bins]:
    return [bins[rank::num_ranks] for rank in range(num_ranks)]


def deal_heaviest_to_lightest(bins: Bins, bin_costs: Sequence[float], num_ranks: int) -> list[Bins]:
    """Hand the heaviest of as many bins as ranks to the lightest rank, round by round."""
    order = sorted(range(len(bins)), key=lambda index: -bin_costs[index])
    ranks: list[Bins] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for start in range(0, len(order), num_ranks):
        lightest_first = sorted(range(num_ranks), key=totals.__getitem__)
        for rank, index in zip(lightest_first, order[start : start + num_ranks], strict=True):
            ranks[rank].append(bins[index])
            totals[rank] += bin_costs[index]
    return ranks


def karmarkar_karp(weights: Sequence[float], num_sets: int) -> list[list[int]]:
    """Items to sets of about the same weight by largest differencing; a set may stay empty, items keep no cap.

    Every item starts as a partition of its own; the two partitions that are furthest from level are joined, the
    heaviest set of one with the lightest of the other, until one is left.
    """
    # A partition: sets by falling weight, less the lightest; empty ones of weight 0 at the end are left out.
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for item, weight in enumerate(weights):
        heap.append((-weight if num_sets > 1 else 0.0, item, [(weight, [item])]))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        joined = first + [(0.0, []) for _ in range(num_sets - len(first))]
        for at, (weight, items) in enumerate(second):
            mine, held = joined[num_sets - 1 - at]
            joined[num_sets - 1 - at] = (mine + weight, held + items)
        joined.sort(key=lambda part: -part[0])
        lightest = joined[-1][0]
        while joined and not joined[-1][1]:
            joined.pop()
        heapq.heappush(heap, (lightest - joined[0][0], number, [(w - lightest, items) for w, items in joined]))
        number += 1
    sets = [sorted(items) for _, items in heap[0][2]] if heap else []
    return sets + [[] for _ in range(num_sets - len(sets))]


@dataclass(frozen=True, slots=True)
class _BinPlace:
    """A row, or no row, in a bin of a rank."""

    cost: float
    size: int
    row: int | None
    bin: int


def level_ranks(
    ranks: list[Bins], costs: Sequence[float], sizes: Sequence[int], *, capacity: int, bound: float
) -> None:
    """Exchange rows, or whole bins, between the busiest rank and a light one while that lowers the busiest.

    Args:
        ranks: changed in place.
        costs: of each row.
        sizes: of each row in tokens.
        bound: cost that no plan's busiest rank is below; near it levelling stops.
    """
    totals = [sum(sum(map(costs.__getitem__, rows)) for rows in bins) for bins in ranks]
    # Sorted all the time: to look at every rank for every exchange would be quadratic.
    lightest = sorted((total, rank) for rank, total in enumerate(totals))
    for _ in range(EXCHANGES_PER_RANK * len(ranks)):
        most, busiest = lightest[bisect_left(lightest, (lightest[-1][0],))]
        if most <= LEVEL_ENOUGH * bound:
            return
        for least, partner in lightest[:PARTNERS]:
            gap = most - least
            if gap <= 0:
                # As busy, or the busiest itself: whatever moves would raise one of them.
                continue
            moved = _exchange_bins(ranks[busiest], ranks[partner], costs, gap)
            if not moved:
                moved = _exchange_rows(ranks[busiest], ranks[partner], costs, sizes, capacity, gap)
            if moved:
                for rank, more in ((busiest, -moved), (partner, moved)):
                    del lightest[bisect_left(lightest, (totals[rank], rank))]
                    totals[rank] += more
                    insort(lightest, (totals[rank], rank))
                break
        else:
            return


def _exchange_bins(high: Bins, low: Bins, costs: Sequence[float], gap: float) -> float:
    """Swap the two bins that move about half the gap; return what moved, 0 if no two do."""
    if len(high) == 1:
        return 0.0
    mine = [sum(map(costs.__getitem__, rows)) for rows in high]
    theirs = [sum(map(costs.__getitem__, rows)) for rows in low]
    ascending = sorted(range(len(low)), key=theirs.__getitem__)
    ascending_costs = [theirs[j] for j in ascending]
    missed, i, j = gap, 0, 0
    for at, cost in enumerate(mine):
        middle = bisect_left(ascending_costs, cost - gap / 2)
        for other in ascending[max(0, middle - 1) : middle + 1]:
            if abs(cost - theirs[other] - gap / 2) < missed:
                missed, i, j = abs(cost - theirs[other] - gap / 2), at, other
    if missed > CLOSE_ENOUGH * gap:
        return 0.0
    high[i], low[j] = low[j], high[i]
    return mine[i] - theirs[j]


def _exchange_rows(
    high: Bins, low: Bins, costs: Sequence[float], sizes: Sequence[int], capacity: int, gap: float
) -> float:
    """Swap or move the row that moves most nearly half the gap and fits; return what moved, 0 if none does."""
    room = [capacity - sum(map(sizes.__getitem__, rows)) for rows in low]
    roomiest = max(range(len(low)), key=room.__getitem__)
    places = [_BinPlace(0.0, 0, None, roomiest)]
    places += [_BinPlace(costs[row], sizes[row], row, at) for at, rows in enumerate(low) for row in rows]
    places.sort(key=lambda place: (place.cost, -room[place.bin], place.bin))
    place_costs = [place.cost for place in places]
    best: tuple[float, int, int, _BinPlace] | None = None
    for at, rows in enumerate(high):
        for row in rows:
            middle = bisect_left(place_costs, costs[row] - gap / 2)
            for place in places[max(0, middle - NEIGHBOURS) : middle + NEIGHBOURS]:
                moved = costs[row] - place.cost
                missed = abs(moved - gap / 2)
                if not 0 < moved < gap or room[place.bin] + place.size < sizes[row]:
                    continue
                if place.row is None and len(rows) == 1:
                    continue
                if best is None or missed < best[0]:
                    best = (missed, at, row, place)
        if best is not None and best[0] <= CLOSE_ENOUGH * gap:
            break
    if best is None:
        return 0.0
    _, at, row, place = best
    high[at].remove(row)
    low[place.bin].append(row)
    if place.row is not None:
        low[place.bin].remove(place.row)
        high[at].append(place.row)
    return costs[row] - place.cost


HALVINGS = 14
"""Steps of the search for the least cost, which is then exact to 1 in 2^14."""


def runs_under_cap(order: Sequence[int], sizes: Sequence[int], capacity: int) -> Bins:
    """Cut into the fewest microbatches there are: each takes as many of the next rows as the cap allows."""
    most_rows = [capacity // sizes[row] for row in order]
    return _cut_at(order, _starts(most_rows, [sizes[row] for row in order], float(capacity)))


def level_runs(
    order: Sequence[int], sizes: Sequence[int], costs: Sequence[float], *, count: int, capacity: int
) -> Bins:
    """Cut the rows into at most `count` microbatches under the cap, the most expensive as cheap as can be.

    Args:
        order: rows by falling size.
        costs: of each row, falling as the sizes do; a row of a microbatch costs what its longest row costs.
        count: at least the microbatches of `runs_under_cap`.
    """
    most_rows, row_costs = [capacity // sizes[row] for row in order], [costs[row] for row in order]
    best = _starts(most_rows, [sizes[row] for row in order], float(capacity))
    ends = [*best[1:], len(order)]
    low = row_costs[0]
    high = max((end - start) * row_costs[start] for start, end in zip(best, ends, strict=True))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        found = _starts(most_rows, row_costs, middle, most=count)
        if len(found) <= count:
            best, high = found, middle
        else:
            low = middle
    return _cut_at(order, best)


def _starts(
    most_rows: Sequence[int], row_costs: Sequence[float], most_cost: float, *, most: int | None = None
) -> list[int]:
    """Return the first rows of microbatches of consecutive rows, as many as stay under both limits; at least one.

    Args:
        most_rows: that a microbatch may have which begins with this row.
        row_costs: of each row.
        most: number of microbatches behind which nobody is interested in the rest.
    """
    starts: list[int] = []
    at, end = 0, len(most_rows)
    while at < end:
        starts.append(at)
        if most is not None and len(starts) > most:
            break
        take, by_cost = most_rows[at], int(most_cost / row_costs[at])
        if by_cost < take:
            take = by_cost
        at += take if take > 1 else 1
    return starts


def _cut_at(order: Sequence[int], starts: Sequence[int]) -> Bins:
    return [list(order[start:end]) for start, end in zip(starts, [*starts[1:], len(order)], strict=True)]
