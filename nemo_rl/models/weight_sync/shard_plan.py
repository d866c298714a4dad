"""`ShardPlan`: the parts of each weight that every rank of a policy sends to every rank of the engines.

Computed once by the driver from the boxes that policy ranks hold and the boxes that engine ranks take. Invariant: each
engine rank gets every element that it takes once; where several policy ranks hold an element one of them sends it, and
all send about the same number of bytes. A round is as much as a buffer holds: no rank sends or receives more in it.

    policy rank 0 holds rows 0-3    engine rank 2 takes columns 0-1    0 -> 2: rows 0-3 of columns 0-1
    policy rank 1 holds rows 4-7    engine rank 3 takes columns 2-3    0 -> 3: rows 0-3 of columns 2-3, ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from nemo_rl.errors import WorkerError
from nemo_rl.models.hf.files import Box
from nemo_rl.models.weight_sync.buckets import WeightSlot

__all__ = ["Boxes", "ShardPart", "ShardPiece", "ShardPlan", "ShardSegment", "aligned", "plan_shards", "whole_boxes"]

Boxes = Sequence[Sequence[Box]]
"""Boxes of each weight, in the order of the slots."""
GRAINS = 64
"""Pieces that the share of a rank is cut into at least, where several ranks can send it."""
PARTS = 32
"""Pieces that a full buffer has at least: each is cast and hashed in memory of its own."""
MIN_GRAIN_BYTES = 256
ALIGNMENT = 8
"""Each segment of a buffer begins at a multiple: elements of any dtype can be read there."""


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPiece:
    """A part of a weight in a segment."""

    slot: int
    """Index of the weight."""
    box: Box
    offset: int
    """First byte in the segment, a multiple of the size of an element."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSegment:
    """What one rank sends in a round to each of some receivers, as one message."""

    sender: int
    receivers: tuple[int, ...]
    pieces: tuple[ShardPiece, ...]
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPart:
    """What one rank of the policy or of an engine has to do in a refit."""

    slots: tuple[WeightSlot, ...]
    rounds: tuple[tuple[ShardSegment, ...], ...]
    """Segments of each round in which this rank takes part, in the order of their senders."""

    @property
    def most_bytes(self) -> int:
        """Return the bytes of the largest round, with gaps between its segments: those of a buffer."""
        return max((sum(aligned(each.num_bytes) for each in segments) for segments in self.rounds), default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlan:
    """All segments of a refit; ranks are the numbers of the refit group, the policy's first."""

    slots: tuple[WeightSlot, ...]
    rounds: tuple[tuple[ShardSegment, ...], ...]
    sent: Mapping[int, int]
    """Policy rank -> bytes that it sends, to all receivers together."""
    received: Mapping[int, int]
    """Engine rank -> bytes that it receives."""

    def of(self, rank: int) -> ShardPart:
        own = [tuple(one for one in each if rank == one.sender or rank in one.receivers) for each in self.rounds]
        return ShardPart(slots=self.slots, rounds=tuple(segments for segments in own if segments))


def whole_boxes(slots: Sequence[WeightSlot]) -> Boxes:
    """Return the boxes of a rank that takes every weight whole."""
    return [(Box.whole(slot.shape),) if slot.num_bytes else () for slot in slots]


def plan_shards(
    slots: tuple[WeightSlot, ...], held: Sequence[Boxes], taken: Mapping[int, Boxes], *, bucket_bytes: int
) -> ShardPlan:
    """Return who sends what to whom.

    Args:
        held: boxes of each policy rank.
        taken: engine rank -> boxes that it takes.
        bucket_bytes: that a rank sends or receives in a round.

    Raises:
        WorkerError: boxes of a weight overlap, or leave a part out.
    """
    loads: Counter[int] = Counter(dict.fromkeys(range(len(held)), 0))
    share = sum(box.count * slot.element_bytes for boxes in taken.values() for slot, box in _all(slots, boxes))
    grain = max(MIN_GRAIN_BYTES, share // (GRAINS * len(held)))
    part = min(bucket_bytes, max(MIN_GRAIN_BYTES, bucket_bytes // PARTS))
    rounds = _Rounds(slots, bucket_bytes)
    received: Counter[int] = Counter(dict.fromkeys(taken, 0))
    for index, slot in enumerate(slots):
        holders = _by_box(slot, {rank: boxes[index] for rank, boxes in enumerate(held)}, "the policy's ranks hold")
        takers = _by_box(slot, {rank: boxes[index] for rank, boxes in taken.items()}, "ranks of the engines take")
        for wanted, receivers in takers.items():
            for own, senders in holders.items():
                meeting = wanted.meet(own)
                if meeting is None:
                    continue
                most = part if len(senders) == 1 else min(grain, part)
                for box in _cut(meeting, most=max(1, most // slot.element_bytes)):
                    sender = min(senders, key=lambda rank: (loads[rank], rank))
                    size = box.count * slot.element_bytes
                    loads[sender] += size * len(receivers)
                    received.update(dict.fromkeys(receivers, size))
                    rounds.add(index, box, sender, receivers)
    return ShardPlan(slots=slots, rounds=rounds.result(), sent=dict(loads), received=dict(received))


def _all(slots: Sequence[WeightSlot], boxes: Boxes) -> Iterator[tuple[WeightSlot, Box]]:
    return ((slot, box) for slot, own in zip(slots, boxes, strict=True) for box in own)


def _by_box(slot: WeightSlot, boxes: Mapping[int, Sequence[Box]], what: str) -> dict[Box, tuple[int, ...]]:
    """Return the boxes that make up a weight, and the ranks that have each.

    Raises:
        WorkerError: they overlap, or leave a part out.
    """
    found: dict[Box, list[int]] = {}
    for rank, own in boxes.items():
        for box in own:
            found.setdefault(box, []).append(rank)
    distinct, whole = sorted(found, key=lambda box: box.start), Box.whole(slot.shape)
    count = sum(box.count for box in distinct)
    overlaps = _overlap(distinct)
    if overlaps or count != whole.count:
        where = "overlapping parts" if overlaps else f"{count} of {whole.count} elements"
        raise WorkerError(f"{what} {where} of {slot.name}; set policy.generation.refit_transport=auto", stage="refit")
    return {box: tuple(sorted(found[box])) for box in distinct}


def _overlap(boxes: Sequence[Box]) -> bool:
    """Return whether two of the boxes meet, which are sorted by where they start."""
    near: list[Box] = []
    for box in boxes:
        near = [other for other in near if not box.start or other.start[0] + other.size[0] > box.start[0]]
        if any(box.meet(other) for other in near):
            return True
        near.append(box)
    return False


def _cut(box: Box, *, most: int) -> Iterator[Box]:
    """Yield parts of a box, of at most so many elements."""
    if box.count <= most:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.size) if size > 1)
    at_once = max(1, most // (box.count // box.size[dim]))
    for start in range(0, box.size[dim], at_once):
        yield from _cut(box.along(dim, start, min(at_once, box.size[dim] - start)), most=most)


@dataclass(slots=True)
class _Rounds:
    """Rounds that are being filled, weight by weight."""

    slots: tuple[WeightSlot, ...]
    bucket_bytes: int
    done: list[tuple[ShardSegment, ...]] = field(default_factory=list)
    open: dict[tuple[int, tuple[int, ...]], list[ShardPiece]] = field(default_factory=dict)
    sizes: Counter[tuple[int, tuple[int, ...]]] = field(default_factory=Counter)
    used: Counter[int] = field(default_factory=Counter)
    """Bytes of each rank in the round."""

    def add(self, slot: int, box: Box, sender: int, receivers: tuple[int, ...]) -> None:
        key, item = (sender, receivers), self.slots[slot].element_bytes
        size = box.count * item
        ranks = (sender, *receivers)
        if max(self.used[rank] for rank in ranks) + size + -self.sizes[key] % item > self.bucket_bytes:
            self._close()
        offset = self.sizes[key] + -self.sizes[key] % item
        self.open.setdefault(key, []).append(ShardPiece(slot=slot, box=box, offset=offset))
        self.used.update(dict.fromkeys(ranks, offset + size - self.sizes[key]))
        self.sizes[key] = offset + size

    def _close(self) -> None:
        segments = [
            ShardSegment(sender=key[0], receivers=key[1], pieces=tuple(pieces), num_bytes=self.sizes[key])
            for key, pieces in sorted(self.open.items())
        ]
        if segments:
            self.done.append(tuple(segments))
        self.open, self.sizes, self.used = {}, Counter(), Counter()

    def result(self) -> tuple[tuple[ShardSegment, ...], ...]:
        self._close()
        return tuple(self.done)
