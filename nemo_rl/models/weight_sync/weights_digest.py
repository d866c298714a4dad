"""`WeightsDigest`: full weights as a few numbers, by which two sets of them are compared without either being there.

A worker makes it from its exported weights (`PolicyWorker.weights_digest`); kept steps hold it. The hash finds one bit
that differs. Projections bound how far apart weights are that went through another layout: with signs s_i of +-1,
pairwise independent, E[(s . d)^2] = |d|^2, so the mean of squares of differing projections estimates the squared
distance. Signs are products of a row's and a column's, so that they cost a small matrix and not one as large as the
weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import torch

__all__ = ["WeightsDigest", "digest_weights"]

NUM_PROJECTIONS = 4
BLOCK = 4096
"""Columns of the matrix that a tensor is folded into."""
ROWS_AT_ONCE = 1024
"""32 MiB of float64 at a time."""
SIGNS_SEED = 20_240_229
"""Seed of both sign tables: they must be the same whenever and wherever a digest is made."""
HASH_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDigest:
    """The digest of one weight."""

    shape: tuple[int, ...]
    dtype: str
    squares: float
    """Sum of squares, in float64."""
    projections: tuple[float, ...]
    """Sums with the signs of each projection, in float64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsDigest:
    """The digests of all weights, in export order."""

    bits: str
    """Hash of names, shapes, dtypes and bytes."""
    tensors: Mapping[str, TensorDigest]

    def distance(self, other: WeightsDigest) -> float:
        """Return about the distance relative to the norm of these weights; inf for other names or shapes, or for
        NaN."""
        shapes, others = ({name: t.shape for name, t in side.tensors.items()} for side in (self, other))
        # Workers export in orders of their own.
        if shapes != others:
            return math.inf
        squares = sum(tensor.squares for tensor in self.tensors.values())
        apart = sum(_squared_distance(tensor, other.tensors[name]) for name, tensor in self.tensors.items())
        if apart == 0.0:
            return 0.0
        found = math.sqrt(apart / squares) if squares else math.inf
        return math.inf if math.isnan(found) else found

    def furthest(self, other: WeightsDigest) -> str | None:
        """Return the weight that is furthest from the other's, relative to its own norm; None where names differ."""
        if self.tensors.keys() != other.tensors.keys():
            return None
        apart = {
            name: _squared_distance(tensor, other.tensors[name]) / (tensor.squares or 1.0)
            for name, tensor in self.tensors.items()
        }
        return max(apart, key=lambda name: apart[name], default=None)


def digest_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> WeightsDigest:
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    tensors: dict[str, TensorDigest] = {}
    for name, weight in weights:
        plain = weight.detach().cpu().contiguous()
        shape, dtype = tuple(plain.shape), str(plain.dtype).removeprefix("torch.")
        digest.update(f"{name} {dtype} {list(shape)}\n".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
        squares, projections = _project(plain.reshape(-1))
        tensors[name] = TensorDigest(shape=shape, dtype=dtype, squares=squares, projections=projections)
    return WeightsDigest(bits=digest.hexdigest(), tensors=tensors)


def _squared_distance(one: TensorDigest, other: TensorDigest) -> float:
    apart = [(a - b) ** 2 for a, b in zip(one.projections, other.projections, strict=True)]
    return sum(apart) / len(apart)


def _project(flat: torch.Tensor) -> tuple[float, tuple[float, ...]]:
    columns, rows = _signs()
    squares, sums = 0.0, torch.zeros(NUM_PROJECTIONS, dtype=torch.float64)
    for start in range(0, flat.numel(), BLOCK * ROWS_AT_ONCE):
        part = flat[start : start + BLOCK * ROWS_AT_ONCE].double()
        squares += float(part.dot(part))
        whole = part.numel() // BLOCK * BLOCK
        first = start // BLOCK
        if whole:
            table = part[:whole].view(-1, BLOCK)
            of_rows = rows[(first + torch.arange(len(table))) % len(rows)]
            sums += ((table @ columns) * of_rows).sum(0)
        if whole < part.numel():
            rest, row = part[whole:], (first + whole // BLOCK) % len(rows)
            sums += (rest @ columns[: len(rest)]) * rows[row]
    return squares, tuple(sums.tolist())


@cache
def _signs() -> tuple[torch.Tensor, torch.Tensor]:
    """Return `[BLOCK, projections]` and `[a prime, projections]` of +-1, apart from the process's random numbers."""
    generator = torch.Generator().manual_seed(SIGNS_SEED)
    columns, rows = (
        torch.randint(0, 2, (size, NUM_PROJECTIONS), generator=generator).double() * 2 - 1 for size in (BLOCK, 65_537)
    )
    return columns, rows
