"""`row_stats`: two tensors row by row, in float64; every metric is a summary of these.

Invariant: sums are over pairs of which both are finite; what is not finite is counted, never added.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch

__all__ = ["RowStats", "as_rows", "row_stats", "take_rows"]

CHUNK = 1 << 21
"""Values that are converted to float64 at once: 16 MiB for each of a dozen temporaries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowStats:
    """Rows of `a` against those of `b`; everything is `[R]`."""

    squares_a: torch.Tensor
    squares_b: torch.Tensor
    squares_diff: torch.Tensor
    dots: torch.Tensor
    max_abs: torch.Tensor
    sum_abs: torch.Tensor
    max_rel: torch.Tensor
    """Of |a - b| / max(|a|, |b|), so at most 2."""
    nan_a: torch.Tensor
    nan_b: torch.Tensor
    inf_a: torch.Tensor
    inf_b: torch.Tensor
    nan_both: torch.Tensor
    """NaN at the same place."""
    num_broken: torch.Tensor
    """Pairs of which one is not finite and that are not equal, NaN on both sides aside."""
    is_different: torch.Tensor
    """Bool: any two values differ, as numbers; NaN differs from NaN."""

    @property
    def relative(self) -> torch.Tensor:
        """`[R]` ||a_t - b_t|| / max(||a_t||, root mean square over t of ||a_t||); infinite where it is undefined."""
        if not len(self.squares_a):
            return self.squares_a
        floor = self.squares_a.mean()
        share = (self.squares_diff / torch.maximum(self.squares_a, floor)).sqrt()
        share = torch.where(self.squares_diff == 0, 0.0, share)
        return torch.where(self.num_broken + self.nan_both > 0, torch.inf, share)


def as_rows(value: torch.Tensor) -> torch.Tensor:
    """`[R, ...]` as `[R, D]`."""
    return value.reshape(len(value), -1) if value.numel() else value.reshape(len(value), 0)


def take_rows(value: torch.Tensor, index_R: torch.Tensor) -> torch.Tensor:
    """Rows of a tensor; the tensor itself where these are all in order: one of logits may take half of the memory."""
    return value if torch.equal(index_R, torch.arange(len(value))) else value[index_R]


def row_stats(a: torch.Tensor, b: torch.Tensor) -> RowStats:
    """Of two tensors `[R, D]` of equal shape and any dtypes."""
    step = max(1, CHUNK // max(1, a.shape[1]))
    parts = [_chunk(a[start : start + step], b[start : start + step]) for start in range(0, max(1, len(a)), step)]
    names = [part.name for part in fields(RowStats)]
    columns: Iterator[torch.Tensor] = (torch.cat(column) for column in zip(*parts, strict=True))
    return RowStats(**dict(zip(names, columns, strict=True)))


def _chunk(raw_a: torch.Tensor, raw_b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """In the order of the fields of `RowStats`."""
    is_different = (raw_a != raw_b).any(1)
    a, b = raw_a.to(torch.float64), raw_b.to(torch.float64)
    nan_a, nan_b = a.isnan(), b.isnan()
    inf_a, inf_b = a.isinf(), b.isinf()
    nan_both = nan_a & nan_b
    is_finite = a.isfinite() & b.isfinite()
    num_broken = (~is_finite & ~nan_both & (a != b)).sum(1)
    a, b = torch.where(is_finite, a, 0.0), torch.where(is_finite, b, 0.0)
    diff = (a - b).abs()
    largest = torch.maximum(a.abs(), b.abs())
    relative = torch.where(largest > 0, diff / largest, 0.0)
    return (
        a.square().sum(1),
        b.square().sum(1),
        diff.square().sum(1),
        (a * b).sum(1),
        _row_max(diff),
        diff.sum(1),
        _row_max(relative),
        nan_a.sum(1),
        nan_b.sum(1),
        inf_a.sum(1),
        inf_b.sum(1),
        nan_both.sum(1),
        num_broken,
        is_different,
    )


def _row_max(value: torch.Tensor) -> torch.Tensor:
    return value.amax(1) if value.shape[1] else value.new_zeros(len(value))
