"""Bins of whole rows under a hard cap: the algorithms that form microbatches, on plain integers.

Called by `packing_form`. Rows are numbers 0..n-1 whose order the caller made stable; every function is deterministic in
it and puts each row into one bin whose sizes add up to at most the capacity. `repair`, `tight_bins` and `exact_bins`
need fewer bins than the greedy algorithms where capacity is tight.
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
    "exact_bins",
    "longest_first",
    "repair",
    "spread",
    "tight_bins",
]

Bins = list[list[int]]
SHUFFLE_SEED = 0


def longest_first(sizes: Sequence[int]) -> list[int]:
    """Return rows by falling size, equal ones in their order."""
    return sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)


def bins_bound(sizes: Sequence[int], capacity: int) -> int:
    """Return how many bins no packing can do without (Martello and Toth's L2).

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
    """Pack rows in the given order; a bin is closed when the next row does not fit."""
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
    """Put each row into the first bin with room, found in a tree of the largest room below."""
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
    """Pack by first fit, longest row first."""
    return first_fit(longest_first(sizes), sizes, capacity)


def first_fit_shuffle(sizes: Sequence[int], capacity: int) -> Bins:
    """Pack by first fit in a random order that is the same every time."""
    order = list(range(len(sizes)))
    random.Random(SHUFFLE_SEED).shuffle(order)
    return first_fit(order, sizes, capacity)


def modified_first_fit_decreasing(sizes: Sequence[int], capacity: int) -> Bins:
    """Johnson and Garey (1985): rows above half their own bin get partners before first fit decreasing.

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
    """Put each row of `order` into the bin of least weight (Graham's LPT), without a cap; rows must be as many as
    bins.
    """
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
"""Algorithms that users name in `policy.sequence_packing.algorithm`, besides `balanced` and `karmarkar_karp`, which
also assign rows to ranks."""


EXACT_WORK = 200_000
"""Bins that the exact search looks at before it gives up, within 0.1 s; small inputs need far fewer."""
PAIR_WINDOW = 40
"""Tokens below a full bin that `tight_bins` searches for pairs."""
MOST_LOOKED_AT = 64
"""Rows of about the same size with which `repair` tries to exchange one."""


def repair(bins: Bins, sizes: Sequence[int], capacity: int, *, most_exchanges: int) -> bool:
    """Bring bins that are too full under the cap by exchanging rows of nearly the same size with bins that have room.

    Args:
        bins: changed in place.

    Returns:
        Whether every bin is under the cap now; False also when that would take more than `most_exchanges`.
    """
    ascending = sorted((row for rows in bins for row in rows), key=sizes.__getitem__)
    ascending_sizes = [sizes[row] for row in ascending]
    bin_of = [0] * len(sizes)
    for index, rows in enumerate(bins):
        for row in rows:
            bin_of[row] = index
    room = [capacity - sum(map(sizes.__getitem__, rows)) for rows in bins]
    most_room = max(room, default=0)
    for full in sorted((index for index in range(len(bins)) if room[index] < 0), key=room.__getitem__):
        while room[full] < 0:
            most_exchanges -= 1
            best, giver, taker = 0, -1, -1
            for row in bins[full]:
                size = sizes[row]
                last = bisect_left(ascending_sizes, size)
                first = bisect_left(ascending_sizes, size - most_room, 0, last)
                for other in ascending[first : min(last, first + MOST_LOOKED_AT)]:
                    gain = size - sizes[other]
                    if best < gain <= room[bin_of[other]]:
                        best, giver, taker = gain, row, other
                if best >= -room[full]:
                    break
            if giver < 0 or most_exchanges < 0:
                return False
            target = bin_of[taker]
            bins[full][bins[full].index(giver)] = taker
            bins[target][bins[target].index(taker)] = giver
            bin_of[giver], bin_of[taker] = target, full
            room[full] += best
            room[target] -= best
        most_room = max(most_room, room[full])
    return True


def tight_bins(order: Sequence[int], sizes: Sequence[int], count: int, capacity: int) -> Bins | None:
    """Pack into at most `count` bins with next to no room to spare; None when this way needs more.

    One bin after the other: the longest row that fits, again and again, and two rows instead where these leave less
    room. The sizes that are left are the bits of an integer, so that one shift and one `and` find every pair of a sum.
    """
    left = _Sizes(order, sizes, capacity)
    bins: Bins = []
    while left.bits:
        if len(bins) == count:
            return None
        mine: list[int] = []
        room = capacity
        while (single := left.longest(room)) >= 0:
            rest = room - single
            is_last = left.longest(rest) < 0
            # A pair in place of the last row, or one that fills the bin, but for so few tokens as are worth a look.
            least = max(single if is_last else room - 1, room - PAIR_WINDOW)
            pair = left.pair(room, least) if rest else None
            for size in pair or (single,):
                mine.append(left.take(size))
                room -= size
        bins.append(mine)
    return bins


class _Sizes:
    """Rows by size, with the set of sizes as bits of an integer."""

    def __init__(self, order: Sequence[int], sizes: Sequence[int], capacity: int) -> None:
        self._rows: dict[int, list[int]] = {}
        for row in reversed(order):
            self._rows.setdefault(sizes[row], []).append(row)
        self._capacity = capacity
        self.bits = sum(1 << size for size in self._rows)
        self._mirrored = sum(1 << (capacity - size) for size in self._rows)

    def longest(self, room: int) -> int:
        """Return the largest size of at most `room`; -1 when none is."""
        return (self.bits & ((2 << room) - 1)).bit_length() - 1

    def pair(self, room: int, least: int) -> tuple[int, int] | None:
        """Return the two sizes with the largest sum above `least` and at most `room`; of several, the most unequal."""
        for total in range(room, least, -1):
            found = self.bits & (self._mirrored >> (self._capacity - total))
            if 2 * (larger := found.bit_length() - 1) == total and len(self._rows[larger]) < 2:
                continue
            if found:
                return larger, total - larger
        return None

    def take(self, size: int) -> int:
        rows = self._rows[size]
        row = rows.pop()
        if not rows:
            self.bits ^= 1 << size
            self._mirrored ^= 1 << (self._capacity - size)
        return row


def exact_bins(order: Sequence[int], sizes: Sequence[int], count: int, capacity: int) -> Bins | None:
    """Return a packing into at most `count` bins by depth-first search; None when there is none, or none was found
    within `EXACT_WORK`.

    Longest row first; bins with the same room are tried once, and a branch ends when the rows left exceed the room.
    """
    bins: Bins = [[] for _ in range(count)]
    room = [capacity] * count
    total = [0] * (len(order) + 1)
    for depth in range(len(order) - 1, -1, -1):
        total[depth] = total[depth + 1] + sizes[order[depth]]
    # An own stack, for Python's would end at 1000 rows: per depth the bins left to try.
    choices: list[list[int]] = [[]]
    depth, placements_left = 0, EXACT_WORK // max(count, 1)
    if order and total[0] <= count * capacity:
        choices[0] = _choices(room, sizes[order[0]])
    while depth >= 0:
        if depth == len(order):
            return bins
        if not choices[depth]:
            choices.pop()
            depth -= 1
            if depth >= 0:
                index = choices[depth].pop()
                bins[index].pop()
                room[index] += sizes[order[depth]]
            continue
        placements_left -= 1
        if placements_left < 0:
            return None
        index = choices[depth][-1]
        bins[index].append(order[depth])
        room[index] -= sizes[order[depth]]
        depth += 1
        usable = sum(r for r in room if depth < len(order) and r >= sizes[order[-1]])
        choices.append(_choices(room, sizes[order[depth]]) if depth < len(order) and total[depth] <= usable else [])
    return None


def _choices(room: Sequence[int], size: int) -> list[int]:
    """Return one bin for each amount of room that holds `size`; the fullest comes last and is tried first."""
    by_room = {r: index for index, r in reversed(list(enumerate(room))) if r >= size}
    return [by_room[r] for r in sorted(by_room, reverse=True)]
