"""Assigns bins to ranks: the same number each, costs as equal as possible. Plain integers and floats.

Called by `packing`. Invariant: no function here puts a bin over its cap, empties one, or loses a row.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl.distributed.packing_bins import Bins

__all__ = ["deal_heaviest_to_lightest", "deal_in_turn", "karmarkar_karp", "level_ranks", "split_to"]

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
    """Halves the heaviest bin that still has two rows, until there are `count` bins; the rows must suffice."""
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
    """Bin i to rank i modulo the ranks."""
    return [bins[rank::num_ranks] for rank in range(num_ranks)]


def deal_heaviest_to_lightest(bins: Bins, bin_costs: Sequence[float], num_ranks: int) -> list[Bins]:
    """Each round hands the heaviest of as many bins as ranks to the lightest rank."""
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
class _Place:
    """A row, or no row, in a bin of a rank."""

    cost: float
    size: int
    row: int | None
    bin: int


def level_ranks(
    ranks: list[Bins], costs: Sequence[float], sizes: Sequence[int], *, capacity: int, bound: float
) -> None:
    """Exchanges rows, or whole bins, between the busiest rank and a light one while that lowers the busiest.

    Args:
        ranks: changed in place.
        costs: of each row.
        sizes: of each row in tokens.
        bound: cost that no plan's busiest rank is below; near it levelling stops.
    """
    totals = [sum(sum(map(costs.__getitem__, rows)) for rows in bins) for bins in ranks]
    for _ in range(EXCHANGES_PER_RANK * len(ranks)):
        busiest = max(range(len(ranks)), key=totals.__getitem__)
        if totals[busiest] <= LEVEL_ENOUGH * bound:
            return
        for partner in heapq.nsmallest(PARTNERS, range(len(ranks)), key=totals.__getitem__):
            gap = totals[busiest] - totals[partner]
            if gap <= 0:
                # As busy, or the busiest itself: whatever moves would raise one of them.
                continue
            moved = _exchange_bins(ranks[busiest], ranks[partner], costs, gap)
            if not moved:
                moved = _exchange_rows(ranks[busiest], ranks[partner], costs, sizes, capacity, gap)
            if moved:
                totals[busiest] -= moved
                totals[partner] += moved
                break
        else:
            return


def _exchange_bins(high: Bins, low: Bins, costs: Sequence[float], gap: float) -> float:
    """Swaps the two bins that move about half the gap; returns what moved, 0 if no two do."""
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
    """Swaps or moves the row that moves most nearly half the gap and fits; returns what moved, 0 if none does."""
    room = [capacity - sum(map(sizes.__getitem__, rows)) for rows in low]
    roomiest = max(range(len(low)), key=room.__getitem__)
    places = [_Place(0.0, 0, None, roomiest)]
    places += [_Place(costs[row], sizes[row], row, at) for at, rows in enumerate(low) for row in rows]
    places.sort(key=lambda place: (place.cost, -room[place.bin], place.bin))
    place_costs = [place.cost for place in places]
    best: tuple[float, int, int, _Place] | None = None
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
