"""Bins when capacity is tight: still under the cap, or in fewer bins than the greedy algorithms need.

Called by `packing`. As in `packing_bins`, rows are numbers 0..n-1 and every function is deterministic.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from nemo_rl.distributed.packing_bins import Bins

__all__ = ["exact_bins", "repair", "tight_bins"]

EXACT_WORK = 200_000
"""Bins that the exact search looks at before it gives up, within 0.1 s; small inputs need far fewer."""
PAIR_WINDOW = 40
"""Tokens below a full bin that `tight_bins` searches for pairs."""
MOST_LOOKED_AT = 64
"""Rows of about the same size with which `repair` tries to exchange one."""


def repair(bins: Bins, sizes: Sequence[int], capacity: int, *, most_exchanges: int) -> bool:
    """Brings bins that are too full under the cap by exchanging rows of nearly the same size with bins that have room.

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
    """At most `count` bins with next to no room to spare; None when this way needs more.

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
        """The largest size of at most `room`; -1 when none is."""
        return (self.bits & ((2 << room) - 1)).bit_length() - 1

    def pair(self, room: int, least: int) -> tuple[int, int] | None:
        """Two sizes whose sum is the largest above `least` and at most `room`, and of these the most unequal two."""
        for total in range(room, least, -1):
            found = self.bits & (self._mirrored >> (self._capacity - total))
            if 2 * (larger := found.bit_length() - 1) == total and len(self._rows[larger]) < 2:
                continue
            if found:
                return larger, total - larger
        return None

    def take(self, size: int) -> int:
        """A row of this size, which is no longer left."""
        rows = self._rows[size]
        row = rows.pop()
        if not rows:
            self.bits ^= 1 << size
            self._mirrored ^= 1 << (self._capacity - size)
        return row


def exact_bins(order: Sequence[int], sizes: Sequence[int], count: int, capacity: int) -> Bins | None:
    """A packing into at most `count` bins by depth-first search; None when there is none, or none was found within
    `EXACT_WORK`.

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
    """One bin for each amount of room that holds `size`; the fullest comes last and is tried first."""
    by_room = {r: index for index, r in reversed(list(enumerate(room))) if r >= size}
    return [by_room[r] for r in sorted(by_room, reverse=True)]
