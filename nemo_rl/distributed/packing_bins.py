"""Bins of whole rows under a hard cap: the algorithms that form microbatches, on plain integers.

Called by `packing`. Rows are numbers 0..n-1 whose order the caller made stable; every function is deterministic in it
and puts each row into one bin whose sizes add up to at most the capacity.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "BIN_ALGORITHMS",
    "Bins",
    "best_fit_decreasing",
    "bins_bound",
    "longest_first",
    "spread",
]

Bins = list[list[int]]
SHUFFLE_SEED = 0


def longest_first(sizes: Sequence[int]) -> list[int]:
    """Rows by falling size, equal ones in their order."""
    return sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)


def bins_bound(sizes: Sequence[int], capacity: int) -> int:
    """Bins that no packing can do without (Martello and Toth's L2).

    For a threshold t: rows above capacity - t stand alone, rows above capacity / 2 share no bin with one another, and
    what rows of at least t do not fit with the latter needs bins of its own.
    """
    ordered = sorted(sizes, reverse=True)
    best = -(-sum(ordered) // capacity)
    prefix = [0]
    for size in ordered:
        prefix.append(prefix[-1] + size)
    negated = [-size for size in ordered]
    half = bisect_left(negated, -(capacity // 2))  # rows with size > capacity // 2
    for threshold in {size for size in ordered if 2 * size <= capacity}:
        alone = bisect_left(negated, -(capacity - threshold))  # rows with size > capacity - threshold
        at_least = bisect_left(negated, -threshold + 1)  # rows with size >= threshold
        room = (half - alone) * capacity - (prefix[half] - prefix[alone])
        rest = prefix[at_least] - prefix[half] - room
        best = max(best, half + max(0, -(-rest // capacity)))
    return max(best, half)


def next_fit(sizes: Sequence[int], capacity: int) -> Bins:
    """Rows in the given order; a bin is closed when the next row does not fit."""
    bins: Bins = []
    room = -1
    for row, size in enumerate(sizes):
        if size > room:
            bins.append([])
            room = capacity
        bins[-1].append(row)
        room -= size
    return bins


def first_fit(order: Sequence[int], sizes: Sequence[int], capacity: int) -> Bins:
    """Each row to the first bin with room, found in a tree of the largest room below."""
    leaves = 1
    while leaves < len(order):
        leaves *= 2
    room = [capacity] * (2 * leaves)
    bins: Bins = []
    for row in order:
        size, node = sizes[row], 1
        while node < leaves:
            node *= 2
            if room[node] < size:
                node += 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(row)
        room[node] -= size
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> Bins:
    """First fit, longest row first."""
    return first_fit(longest_first(sizes), sizes, capacity)


def first_fit_shuffle(sizes: Sequence[int], capacity: int) -> Bins:
    """First fit in a random order that is the same every time."""
    order = list(range(len(sizes)))
    random.Random(SHUFFLE_SEED).shuffle(order)
    return first_fit(order, sizes, capacity)


def modified_first_fit_decreasing(sizes: Sequence[int], capacity: int) -> Bins:
    """Johnson and Garey (1985): rows above half a bin get partners of their own before first fit decreasing.

    Classes by size: large above C/2, medium above C/3, small above C/6, the rest tiny. Bins of large rows stand in
    falling size of that row. The way there gives each the largest medium row that fits, while the smallest one does;
    the way back gives bins without one the smallest small row and the largest other that fits with it; the way
    there again takes the largest row that fits, whatever its class.
    """
    ascending = [(sizes[row], -row) for row in range(len(sizes))]
    ascending.sort()
    large = [item for item in ascending if 2 * item[0] > capacity]
    medium = [item for item in ascending if 2 * item[0] <= capacity < 3 * item[0]]
    small = [item for item in ascending if 3 * item[0] <= capacity < 6 * item[0]]
    tiny = [item for item in ascending if 6 * item[0] <= capacity]
    bins = [[-row] for _, row in reversed(large)]
    room = [capacity - size for size, _ in reversed(large)]
    is_alone = [True] * len(bins)

    def take(pool: list[tuple[int, int]], at: int, place: int) -> None:
        size, row = pool.pop(place)
        bins[at].append(-row)
        room[at] -= size
        is_alone[at] = False

    for at in range(len(bins)):
        if medium and medium[0][0] <= room[at]:
            take(medium, at, _last_that_fits(medium, room[at]))
    for at in reversed(range(len(bins))):
        if not is_alone[at]:
            continue
        if len(small) < 2 or small[0][0] + small[1][0] > room[at]:
            break
        take(small, at, 0)
        take(small, at, _last_that_fits(small, room[at]))
    rest = sorted(medium + small + tiny)
    for at in range(len(bins)):
        while (place := _last_that_fits(rest, room[at])) >= 0:
            take(rest, at, place)
    return bins + first_fit([-row for _, row in reversed(rest)], sizes, capacity)


def best_fit_decreasing(order: Sequence[int], sizes: Sequence[int], capacity: int) -> Bins:
    """Longest row first, each to the fullest bin it fits."""
    bins: Bins = []
    open_bins: list[tuple[int, int]] = []
    smallest = sizes[order[-1]] if order else 0
    for row in order:
        size = sizes[row]
        place = bisect_left(open_bins, (size, -1))
        if place == len(open_bins):
            bins.append([row])
            room, index = capacity - size, len(bins) - 1
        else:
            room, index = open_bins.pop(place)
            bins[index].append(row)
            room -= size
        if room >= smallest:
            insort(open_bins, (room, index))
    return bins


def spread(order: Sequence[int], weights: Sequence[float], count: int) -> Bins:
    """Each row of `order` to the bin of least weight (Graham's LPT), without a cap; rows must be as many as bins."""
    bins: Bins = [[] for _ in range(count)]
    heap: list[tuple[float, int]] = [(0.0, index) for index in range(count)]
    for row in order:
        weight, index = heap[0]
        bins[index].append(row)
        heapq.heapreplace(heap, (weight + weights[row], index))
    return bins


def _last_that_fits(ascending: Sequence[tuple[int, int]], room: int) -> int:
    """Place of the largest size of at most `room`; -1 when none is."""
    return bisect_left(ascending, (room + 1,)) - 1


BIN_ALGORITHMS: Mapping[str, Callable[[Sequence[int], int], Bins]] = {
    "first_fit_decreasing": first_fit_decreasing,
    "modified_first_fit_decreasing": modified_first_fit_decreasing,
    "first_fit_shuffle": first_fit_shuffle,
    "concatenative": next_fit,
}
"""What users name in `policy.sequence_packing.algorithm`, besides `balanced` and `karmarkar_karp`, which also assign
rows to ranks."""
