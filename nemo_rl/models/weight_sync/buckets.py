"""Weights cut into buckets of bounded size: both sides of a refit compute the same cuts from the same `RefitPlan`.

Used by the policy (`BucketFiller`) and the engines (`BucketSink`, `WeightJoiner`). Invariant: the pieces of all buckets
cover every byte of every weight once, in order, and no bucket is larger than the plan allows; a weight may span several
buckets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import Literal

import torch

from nemo_rl.errors import name_some
from nemo_rl.models.weight_sync.delta import HEADER_BYTES
from nemo_rl.utils.memory import available_bytes

__all__ = [
    "BucketFiller",
    "BucketPiece",
    "BucketSink",
    "DeltaRefit",
    "RefitPlan",
    "RefitSink",
    "WeightJoiner",
    "WeightSlot",
    "bucket_bytes",
    "flat_bytes",
    "free_bytes",
    "in_dtypes",
    "match_adapter",
    "match_slots",
    "most_bucket_bytes",
]

MIN_BUCKET_BYTES = 1 << 20
"""Smallest bucket: below this the calls cost more than the bytes, and a machine with less free memory is beyond
help."""
NUM_SLOTS = 2
"""Buckets in flight where both sides share memory: one is filled while engines read the other."""
MAX_BUCKET_BYTES, MAX_DEVICE_BUCKET_BYTES = 16 << 20, 1 << 30
"""A larger bucket is slower on a CPU, because its pages are touched for the first time, and adds to the peak memory of
a run. On a GPU each bucket is waited
for, and larger ones are waited for less often."""


@cache
def _item_bytes(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSlot:
    """Name, shape and dtype of a weight as it is sent."""

    name: str
    """Name in Hugging Face naming."""
    dtype: str
    """Dtype of the engine, such as `bfloat16`: the policy casts before it sends."""
    shape: tuple[int, ...]

    @property
    def element_bytes(self) -> int:
        return _item_bytes(self.dtype)

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.element_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketPiece:
    """Part of a weight in a bucket, in bytes."""

    slot: int
    """Index of the weight."""
    start: int
    """First byte in the weight."""
    size: int
    offset: int
    """First byte in the bucket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaRefit:
    """The versions of a refit that sends what has changed in the weights; see `delta_buckets`."""

    base: int
    """Version that both sides hold; -1: none, so that all weights are sent whole, and held from then on."""
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RefitPlan:
    """The weights of a refit, their order and the portions in which they are moved.

    Example:
        Weights of 6 and 3 bytes in buckets of 4: `[a 0-4], [a 4-6, b 0-2], [b 2-3]`.
    """

    slots: tuple[WeightSlot, ...]
    bucket_bytes: int
    """Bytes of weights in a bucket."""
    delta: DeltaRefit | None = None
    """Delta that is sent, or None where buckets hold the bytes of the weights as they are."""
    kind: Literal["weights", "adapter"] = "weights"
    """`adapter`: A and s B of low-rank adapters alone, which an engine receives beside those that are in use."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all weights."""
        return sum(slot.num_bytes for slot in self.slots)

    @property
    def buffer_bytes(self) -> int:
        """Return most that a bucket takes."""
        if self.delta is None:
            return self.bucket_bytes
        return self.bucket_bytes + HEADER_BYTES * max(map(len, self.buckets()), default=0)

    def buckets(self) -> Sequence[Sequence[BucketPiece]]:
        """Return the pieces of each bucket; a weight without elements has none."""
        return _cut(self.slots, self.bucket_bytes)


@lru_cache(maxsize=8)
def _cut(slots: tuple[WeightSlot, ...], bucket_bytes: int) -> Sequence[Sequence[BucketPiece]]:
    """Kept from one refit to the next: of the many small tensors of an adapter it takes as long as their copies."""
    buckets: list[list[BucketPiece]] = []
    room = 0
    for index, slot in enumerate(slots):
        start, num_bytes = 0, slot.num_bytes
        while start < num_bytes:
            if room == 0:
                buckets.append([])
                room = bucket_bytes
            size = min(room, num_bytes - start)
            buckets[-1].append(BucketPiece(slot=index, start=start, size=size, offset=bucket_bytes - room))
            start, room = start + size, room - size
    return buckets


def free_bytes(device: torch.device) -> int:
    """Return memory that can still be allocated on the device, by any process."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()


def most_bucket_bytes(*, on_device: bool) -> int:
    """Return the most bytes of a bucket, however much memory is free."""
    return MAX_DEVICE_BUCKET_BYTES if on_device else MAX_BUCKET_BYTES


def bucket_bytes(slots: Iterable[WeightSlot], *, free: int, ratio: float, most: int = MAX_BUCKET_BYTES) -> int:
    """Return size of a bucket: at most `ratio` of the free memory, and not more than all weights together."""
    total = sum(slot.num_bytes for slot in slots)
    return max(1, min(total, most, max(MIN_BUCKET_BYTES, int(free * ratio))))


def match_slots(
    offered: Mapping[str, tuple[int, ...]], model: Mapping[str, torch.Tensor]
) -> tuple[tuple[WeightSlot, ...], list[torch.Tensor]]:
    """Return the policy's weights as slots in the engine's dtypes, and the engine's tensors they go to.

    Args:
        offered: name and shape of each weight of the policy, in the order in which they will come.
        model: the engine's `state_dict(keep_vars=True)`: a tied weight appears under each of its names.

    Raises:
        ValueError: a name is unknown or missing, or has another shape.
    """
    problems = _misfits(offered, model)
    covered = {id(model[name]) for name in offered if name in model}
    problems += [f"{name}: missing" for name, weight in model.items() if id(weight) not in covered]
    if problems:
        raise ValueError(f"the policy's weights do not fit this engine: {name_some(problems)}")
    targets = [model[name].detach() for name in offered]
    slots = tuple(
        WeightSlot(name=name, dtype=str(target.dtype).removeprefix("torch."), shape=tuple(target.shape))
        for name, target in zip(offered, targets, strict=True)
    )
    return slots, targets


def match_adapter(
    offered: Mapping[str, tuple[int, ...]], known: Mapping[str, torch.Tensor | WeightSlot]
) -> tuple[WeightSlot, ...]:
    """Return the tensors of an adapter as slots in the engine's dtypes.

    Args:
        offered: name and shape of each, in the order in which they will come.
        known: the engine's own, of the shapes and dtypes that it takes.

    Raises:
        ValueError: a name is unknown or missing, or has another shape.
    """
    problems = _misfits(offered, known) + [f"{name}: missing" for name in known if name not in offered]
    if problems:
        raise ValueError(f"the policy's adapter does not fit this engine: {name_some(problems)}")
    return tuple(
        WeightSlot(name=name, dtype=str(known[name].dtype).removeprefix("torch."), shape=tuple(shape))
        for name, shape in offered.items()
    )


def _misfits(offered: Mapping[str, tuple[int, ...]], known: Mapping[str, torch.Tensor | WeightSlot]) -> list[str]:
    """Return a line for each name that is unknown or has another shape."""
    return [f"{name}: unknown" for name in offered if name not in known] + [
        f"{name}: expected shape {tuple(known[name].shape)}, got {tuple(shape)}"
        for name, shape in offered.items()
        if name in known and tuple(known[name].shape) != tuple(shape)
    ]


def in_dtypes(plan: RefitPlan, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights in the dtypes of the plan; those that it does not name as they are."""
    dtypes = {slot.name: getattr(torch, slot.dtype) for slot in plan.slots}
    return ((name, weight.to(dtypes.get(name, weight.dtype))) for name, weight in weights)


class BucketFiller:
    """The sending side: fills one bucket after another from a stream of weights."""

    def __init__(self, plan: RefitPlan, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._plan, self._weights = plan, weights
        self._buckets = plan.buckets()
        self._num_filled = 0
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._next_slot = 0

    @property
    def num_missing(self) -> int:
        return len(self._buckets) - self._num_filled

    def fill(self, buffer: torch.Tensor | None) -> int:
        """Write the next bucket into `buffer` (uint8); return its size. Without a buffer weights only pass by.

        Raises:
            StopIteration: all buckets were filled. RuntimeError: the stream is not the one that was planned.
        """
        if not self.num_missing:
            raise StopIteration
        size = 0
        for piece in self._buckets[self._num_filled]:
            while self._next_slot <= piece.slot:
                self._take()
            source = self._bytes[piece.start : piece.start + piece.size]
            size += piece.size if buffer is None else self._write(piece, source, buffer[size:])
        self._num_filled += 1
        return size

    def _write(self, piece: BucketPiece, source: torch.Tensor, room: torch.Tensor) -> int:
        """Put the bytes of a piece at the head of `room`; return how many bytes it took."""
        room[: piece.size].copy_(source)
        return piece.size

    def _take(self) -> None:
        slot = self._plan.slots[self._next_slot]
        name, weight = next(self._weights, ("nothing", torch.empty(0)))
        if name != slot.name or tuple(weight.shape) != slot.shape:
            raise RuntimeError(f"refit: expected {slot.name} of shape {slot.shape}, got {name} {tuple(weight.shape)}")
        self._bytes = flat_bytes(weight.to(getattr(torch, slot.dtype)))
        self._next_slot += 1


class RefitSink(ABC):
    """The receiving side: takes one bucket after another."""

    def __init__(self, plan: RefitPlan) -> None:
        self._plan, self._buckets = plan, plan.buckets()
        self._num_loaded = 0

    @property
    def num_missing(self) -> int:
        """Return buckets that have not come yet."""
        return len(self._buckets) - self._num_loaded

    @abstractmethod
    def load(self, buffer: torch.Tensor) -> None:
        """Take the next bucket out of `buffer` (uint8, on any device).

        Raises:
            WorkerError: it holds something else.
        """


class BucketSink(RefitSink):
    """Copies buckets into the engine's tensors."""

    def __init__(self, plan: RefitPlan, targets: Sequence[torch.Tensor]) -> None:
        super().__init__(plan)
        self._targets = [flat_bytes(target) for target in targets]

    def load(self, buffer: torch.Tensor) -> None:
        for piece in self._buckets[self._num_loaded]:
            target = self._targets[piece.slot][piece.start : piece.start + piece.size]
            target.copy_(buffer[piece.offset : piece.offset + piece.size])
        self._num_loaded += 1


class WeightJoiner(RefitSink):
    """Buckets of an engine that takes full weights: each is handed over as soon as its last byte is there.

    Besides the bucket one weight is held; its receiver may keep it.
    """

    def __init__(
        self, plan: RefitPlan, take: Callable[[str, torch.Tensor], None], *, device: torch.device | str
    ) -> None:
        super().__init__(plan)
        self._take, self._device = take, device
        self._weight = torch.empty(0)
        for slot in plan.slots:
            if not slot.num_bytes:
                take(slot.name, torch.empty(slot.shape, dtype=getattr(torch, slot.dtype), device=device))

    def load(self, buffer: torch.Tensor) -> None:
        for piece in self._buckets[self._num_loaded]:
            slot = self._plan.slots[piece.slot]
            if piece.start == 0:
                self._weight = torch.empty(slot.shape, dtype=getattr(torch, slot.dtype), device=self._device)
            target = flat_bytes(self._weight)[piece.start : piece.start + piece.size]
            target.copy_(buffer[piece.offset : piece.offset + piece.size])
            if piece.start + piece.size == slot.num_bytes:
                whole, self._weight = self._weight, torch.empty(0)
                self._take(slot.name, whole)
        self._num_loaded += 1


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return `[num_bytes]` uint8; shares memory with a contiguous tensor."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
