"""`ShardSender` and `ShardReceiver`: a rank of a policy and one of an engine walk the rounds of a `ShardPart`.

Both have two buffers: a round is packed, or taken, while the other one is on its way. Before what a rank sends to
another one in a round goes a word that says whether it can. Invariant: a receiver that is gone is waited for no longer,
and the others get everything; a receiver takes nothing of a round that it has not got whole from all of its senders.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from nemo_rl.errors import CollectiveTimeout, WorkerError
from nemo_rl.models.hf.files import Box
from nemo_rl.models.weight_sync.buckets import WeightSlot, flat_bytes
from nemo_rl.models.weight_sync.receipt.fingerprint import PartFingerprints
from nemo_rl.models.weight_sync.shard_plan import ShardPart, ShardPiece, ShardSegment, aligned
from nemo_rl.models.weight_sync.transport import RefitGroup

__all__ = ["HeldShards", "ShardReceiver", "ShardSender"]

logger = logging.getLogger(__name__)

HeldShards = Mapping[str, Sequence[tuple[Box, torch.Tensor]]]
"""Name of a weight -> the boxes of it that a rank holds."""
NUM_BUFFERS = 2
SENDS, FAILS = 0, 1


@dataclass(slots=True)
class _Round:
    """A round that is on its way."""

    works: list[tuple[int, dist.Work]] = field(default_factory=list)
    """Member, and what was begun with it."""
    words: dict[int, torch.Tensor] = field(default_factory=dict)
    """Sender -> the word that comes before its segments."""
    segments: list[tuple[ShardSegment, torch.Tensor]] = field(default_factory=list)


class _Walk:
    def __init__(self, part: ShardPart, group: RefitGroup) -> None:
        self._part, self._group = part, group
        count = min(NUM_BUFFERS, len(part.rounds))
        self._buffers = torch.empty(count, part.most_bytes, dtype=torch.uint8, device=group.device)

    def _rooms(self, number: int) -> Iterator[tuple[ShardSegment, torch.Tensor]]:
        """Yield the segments of a round, and the place of each in the buffer."""
        start, buffer = 0, self._buffers[number % NUM_BUFFERS]
        for segment in self._part.rounds[number]:
            yield segment, buffer[start : start + segment.num_bytes]
            start += aligned(segment.num_bytes)


class ShardSender(_Walk):
    """The side of a rank of the policy.

    Args:
        prints: given what is sent, where refits are proved.
    """

    def __init__(self, part: ShardPart, group: RefitGroup, *, prints: PartFingerprints | None) -> None:
        super().__init__(part, group)
        self._prints = prints
        self._lost: set[int] = set()
        self._num_begun = 0
        self._rounds = [_Round() for _ in range(NUM_BUFFERS)]

    def send(self, held: HeldShards) -> int:
        """(while every receiver receives) Send all rounds; return the bytes that were packed.

        Raises:
            CollectiveTimeout: all receivers are gone or late. WorkerError: the rank does not hold what it is to send.
        """
        packed = 0
        for number, segments in enumerate(self._part.rounds):
            self._finish(number % NUM_BUFFERS)
            for segment, room in self._rooms(number):
                self._pack(segment, room, held)
            if self._group.device.type == "cuda":
                torch.cuda.synchronize(self._group.device)
            self._begin(number)
            self._num_begun = number + 1
            packed += sum(segment.num_bytes for segment in segments)
        for place in range(NUM_BUFFERS):
            self._finish((len(self._part.rounds) + place) % NUM_BUFFERS)
        return packed

    def send_error(self, text: str) -> None:
        """Let receivers that are still to get something hear why they do not."""
        left = self._receivers(self._num_begun) - self._lost
        word, told = torch.tensor([FAILS], device=self._group.device), _Round()
        # The store is that of rank 0, which may be gone.
        with suppress(RuntimeError):
            self._group.leave_error(text)
            for to in sorted(left):
                with suppress(CollectiveTimeout):
                    told.works.append((to, self._group.start_send(word, to=to)))
        for to, work in told.works:
            with suppress(CollectiveTimeout):
                self._group.finish(work, peer=to)

    def _pack(self, segment: ShardSegment, room: torch.Tensor, held: HeldShards) -> None:
        for piece in segment.pieces:
            slot = self._part.slots[piece.slot]
            found = next((own for own in held.get(slot.name, ()) if own[0].meet(piece.box) == piece.box), None)
            if found is None:
                raise WorkerError(f"rank {self._group.rank} does not hold {piece.box} of {slot.name}", stage="refit")
            values = piece.box.of(found[1], held=found[0]).to(getattr(torch, slot.dtype))
            if self._prints is not None:
                self._prints.add(slot.name, piece.box, values, shape=slot.shape)
            room[piece.offset : piece.offset + values.nbytes].copy_(flat_bytes(values))

    def _begin(self, number: int) -> None:
        begun = self._rounds[number % NUM_BUFFERS] = _Round(segments=list(self._rooms(number)))
        word = torch.tensor([SENDS], device=self._group.device)
        for segment, room in begun.segments:
            for to in segment.receivers:
                if to not in begun.words:
                    begun.words[to] = word
                    self._send(begun, word, to)
                self._send(begun, room, to)

    def _send(self, begun: _Round, tensor: torch.Tensor, to: int) -> None:
        if to not in self._lost:
            try:
                begun.works.append((to, self._group.start_send(tensor, to=to)))
            except CollectiveTimeout as error:
                self._lose(to, error)

    def _finish(self, place: int) -> None:
        begun, self._rounds[place] = self._rounds[place], _Round()
        for to, work in begun.works:
            if to not in self._lost:
                try:
                    self._group.finish(work, peer=to)
                except CollectiveTimeout as error:
                    self._lose(to, error)

    def _lose(self, to: int, error: CollectiveTimeout) -> None:
        self._lost.add(to)
        logger.warning("refit: rank %d of the refit group no longer receives its weights: %s", to, error)
        if self._lost >= self._receivers():
            raise error

    def _receivers(self, first: int = 0) -> set[int]:
        """Return the members that get something in a round, or in a later one."""
        return {to for segments in self._part.rounds[first:] for each in segments for to in each.receivers}


class ShardReceiver(_Walk):
    """The side of a rank of an engine."""

    def receive(self, take: Callable[[WeightSlot, Box, torch.Tensor], None]) -> int:
        """(while every sender sends) Receive all rounds; return the bytes that came.

        Args:
            take: is given each piece, which is gone when it returns.

        Raises:
            WorkerError: a sender failed, with its text. CollectiveTimeout: one is gone or late.
        """
        received, count = 0, len(self._part.rounds)
        begun = self._begin(0) if count else None
        for number in range(count):
            current, begun = begun, None
            assert current is not None, "each round was begun in the one before"
            self._finish(current)
            if number + 1 < count:
                begun = self._begin(number + 1)
            for segment, room in current.segments:
                for piece, slot, values in self._pieces(segment, room):
                    take(slot, piece.box, values)
                received += segment.num_bytes
        return received

    def _pieces(
        self, segment: ShardSegment, room: torch.Tensor
    ) -> Iterator[tuple[ShardPiece, WeightSlot, torch.Tensor]]:
        for piece in segment.pieces:
            slot = self._part.slots[piece.slot]
            raw = room[piece.offset : piece.offset + piece.box.count * slot.element_bytes]
            yield piece, slot, raw.view(getattr(torch, slot.dtype)).view(piece.box.size)

    def _begin(self, number: int) -> _Round:
        begun = _Round(segments=list(self._rooms(number)))
        for segment, room in begun.segments:
            source = segment.sender
            if source not in begun.words:
                begun.words[source] = torch.zeros(1, dtype=torch.int64, device=self._group.device)
                begun.works.append((source, self._group.start_receive(begun.words[source], source=source)))
            begun.works.append((source, self._group.start_receive(room, source=source)))
        return begun

    def _finish(self, begun: _Round) -> None:
        heard: set[int] = set()
        for source, work in begun.works:
            self._group.finish(work, peer=source)
            if source not in heard and int(begun.words[source]) == FAILS:
                raise WorkerError(f"the policy could not send weights: {self._group.read_error(source)}", stage="refit")
            heard.add(source)
