"""Shards of weights: `Box`, a part of a tensor, and `local_shard`, what this rank holds of a weight.

Used for what each rank holds of a weight and for what of it lies where in a file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

__all__ = ["Box", "chunk_of", "local_shard"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A part of a tensor, given by a start and a size along every dim.

    Example:
        >>> rows = Box(start=(2, 0), size=(4, 8))
        >>> rows.meet(Box(start=(4, 0), size=(4, 8)))
        Box(start=(4, 0), size=(2, 8))
    """

    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        return cls(start=(0,) * len(shape), size=shape)

    @property
    def count(self) -> int:
        """Return the number of elements."""
        return math.prod(self.size)

    def along(self, dim: int, start: int, size: int) -> Box:
        """Return a part of it along one dim.

        Args:
            start: within the box.
        """
        starts, sizes = list(self.start), list(self.size)
        starts[dim] += start
        sizes[dim] = size
        return Box(start=tuple(starts), size=tuple(sizes))

    def meet(self, other: Box) -> Box | None:
        """Return the part that both have, or None where they do not meet."""
        starts = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        ends = (min(a + b, c + d) for a, b, c, d in zip(self.start, self.size, other.start, other.size, strict=True))
        sizes = tuple(max(0, end - start) for start, end in zip(starts, ends, strict=True))
        return Box(start=starts, size=sizes) if all(sizes) else None

    def of(self, tensor: torch.Tensor, *, held: Box) -> torch.Tensor:
        """Return this box of a tensor that is the box `held`; shares its memory."""
        for dim, (start, size) in enumerate(zip(self.start, self.size, strict=True)):
            tensor = tensor.narrow(dim, start - held.start[dim], size)
        return tensor


def chunk_of(length: int, *, place: int, count: int) -> tuple[int, int]:
    """Start and size of one of `count` parts, as `torch.chunk` cuts; the last ones may be empty.

    Example:
        >>> [chunk_of(5, place=place, count=4) for place in range(4)]
        [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    size = -(-length // count)
    start = min(place * size, length)
    return start, min(size, length - start)


def local_shard(weight: torch.Tensor) -> torch.Tensor:
    """Return this rank's part, sharing memory."""
    return weight.to_local() if isinstance(weight, DTensor) else weight
