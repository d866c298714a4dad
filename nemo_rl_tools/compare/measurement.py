"""`measure`: how two tensors of one site differ, with the rows that differ most.

`row_stats` compares row by row, in float64; every metric is a summary of these. Differences are also counted in units
in the last place: how many values that a dtype can hold lie between two. Invariant: sums are over pairs of which both
are finite; what is not finite is counted, never added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum

import torch

__all__ = ["ULP_BUCKETS", "Measurement", "Metric", "as_rows", "measure", "row_stats", "take_rows", "ulp_counts"]

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
    """Maximum of |a - b| / max(|a|, |b|), so at most 2."""
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
    """Return `[R, ...]` as `[R, D]`."""
    return value.reshape(len(value), -1) if value.numel() else value.reshape(len(value), 0)


def take_rows(value: torch.Tensor, index_R: torch.Tensor) -> torch.Tensor:
    """Return rows of a tensor; the tensor itself where these are all in order: one of logits may take half of the
    memory.
    """
    return value if torch.equal(index_R, torch.arange(len(value))) else value[index_R]


def row_stats(a: torch.Tensor, b: torch.Tensor) -> RowStats:
    """Compare two tensors `[R, D]` of equal shape and any dtypes row by row."""
    step = max(1, CHUNK // max(1, a.shape[1]))
    parts = [_chunk(a[start : start + step], b[start : start + step]) for start in range(0, max(1, len(a)), step)]
    names = [part.name for part in fields(RowStats)]
    columns: Iterator[torch.Tensor] = (torch.cat(column) for column in zip(*parts, strict=True))
    return RowStats(**dict(zip(names, columns, strict=True)))


def _chunk(raw_a: torch.Tensor, raw_b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the statistics of some rows, in the order of the fields of `RowStats`."""
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


ULP_BUCKETS = ("0", "1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", ">64")
_UPPER = (0, 1, 2, 4, 8, 16, 32, 64)
_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
ULP_CHUNK = 1 << 22
"""Values at once: 32 MiB for each temporary."""


def ulp_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype | None:
    """Return the narrower one, in which both are counted; None where there is no such thing."""
    if a == b or a.itemsize != b.itemsize:
        narrower = a if a.itemsize <= b.itemsize else b
        return narrower if narrower in _INTEGERS and a.is_floating_point and b.is_floating_point else None
    return None


def ulp_counts(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...] | None:
    """Pairs of finite values in each of `ULP_BUCKETS`; None where dtypes have no common units.

    Example:
        >>> one = torch.ones(2, dtype=torch.bfloat16)
        >>> ulp_counts(one, one + torch.tensor([0.0, 2**-7]))[:3]
        (1, 1, 0)
    """
    dtype = ulp_dtype(a.dtype, b.dtype)
    if dtype is None:
        return None
    total = torch.zeros(len(ULP_BUCKETS), dtype=torch.int64)
    upper = torch.tensor(_UPPER)
    for part_a, part_b in zip(a.reshape(-1).split(ULP_CHUNK), b.reshape(-1).split(ULP_CHUNK), strict=True):
        narrow_a, narrow_b = part_a.to(dtype), part_b.to(dtype)
        is_finite = narrow_a.isfinite() & narrow_b.isfinite()
        distance = (_ordinal(narrow_a[is_finite]) - _ordinal(narrow_b[is_finite])).abs()
        total += torch.bucketize(distance, upper).bincount(minlength=len(ULP_BUCKETS))
    return tuple(total.tolist())


def _ordinal(value: torch.Tensor) -> torch.Tensor:
    """Neighbouring values of the dtype have neighbouring numbers; both zeros have 0."""
    bits = value.view(_INTEGERS[value.dtype]).to(torch.int64)
    magnitude = bits & ((1 << (8 * value.dtype.itemsize - 1)) - 1)
    return torch.where(bits < 0, -magnitude, magnitude)


WORST_SHOWN = 5


class Metric(StrEnum):
    """A number that a limit can be set for; 0 is equality, infinity a value that is not finite on one side."""

    TOKEN_REL = "token_rel"
    """Largest over rows t of ||a_t - b_t|| / max(||a_t||, root mean square of ||a_t||): one bad token in a thousand
    counts as much as if it were alone, and a row that is nearly zero does not count more than others."""
    MAX_ABS = "max_abs"
    MEAN_ABS = "mean_abs"
    MAX_REL = "max_rel"
    """Largest |a - b| / max(|a|, |b|)."""
    RMS_REL = "rms_rel"
    """Root mean square of a - b over that of a."""
    COSINE_DISTANCE = "cosine_distance"
    """1 - cosine of the whole tensors."""
    DIFFERING_FRACTION = "differing_fraction"
    """Share of the rows in which any value differs; the only one for integers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorstRow:
    """A row that differs, and its element that differs most."""

    row: int
    """Index among the matched rows."""
    token_rel: float
    max_abs: float
    element: int
    """Index in the row, flattened."""
    a: float
    b: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """`a` against `b`."""

    num_rows: int
    num_values: int
    dtype_a: str
    dtype_b: str
    is_bit_equal: bool
    is_integer: bool
    metrics: Mapping[Metric, float]
    cosine: float
    nan_a: int
    nan_b: int
    inf_a: int
    inf_b: int
    num_nan_both: int
    """Pairs that are NaN on both sides."""
    num_broken: int
    """Pairs of which one is not finite and the other is not the same."""
    max_abs_row: int
    """Row of the largest difference."""
    first_bad_a: int | None
    """First row of `a` that is not all finite."""
    first_bad_b: int | None
    worst: tuple[WorstRow, ...]
    """Rows that differ, the worst first."""
    ulps: tuple[int, ...] | None
    """Values in each of `ULP_BUCKETS`."""


def measure(a: torch.Tensor, b: torch.Tensor) -> Measurement:
    """Measure two tensors `[R, ...]` of the same shape with at least one value."""
    a, b = as_rows(a), as_rows(b)
    stats = row_stats(a, b)
    relative = stats.relative
    squares_a, squares_b = float(stats.squares_a.sum()), float(stats.squares_b.sum())
    squares_diff, is_broken = float(stats.squares_diff.sum()), bool((stats.num_broken + stats.nan_both).any())
    cosine = _cosine(stats, squares_a, squares_b, squares_diff)
    finite = {
        Metric.TOKEN_REL: float(relative.max()),
        Metric.MAX_ABS: float(stats.max_abs.max()),
        Metric.MEAN_ABS: float(stats.sum_abs.sum()) / a.numel(),
        Metric.MAX_REL: float(stats.max_rel.max()),
        Metric.RMS_REL: math.sqrt(squares_diff / squares_a) if squares_a else math.inf if squares_diff else 0.0,
        Metric.COSINE_DISTANCE: max(0.0, 1 - cosine),
    }
    metrics = {metric: math.inf if is_broken else value for metric, value in finite.items()}
    metrics[Metric.DIFFERING_FRACTION] = float(stats.is_different.double().mean())
    return Measurement(
        num_rows=len(a),
        num_values=a.numel(),
        dtype_a=str(a.dtype).removeprefix("torch."),
        dtype_b=str(b.dtype).removeprefix("torch."),
        is_bit_equal=a.dtype == b.dtype and torch.equal(*(value.contiguous().view(torch.uint8) for value in (a, b))),
        is_integer=not (a.dtype.is_floating_point or b.dtype.is_floating_point),
        metrics=metrics,
        cosine=cosine,
        nan_a=int(stats.nan_a.sum()),
        nan_b=int(stats.nan_b.sum()),
        inf_a=int(stats.inf_a.sum()),
        inf_b=int(stats.inf_b.sum()),
        num_nan_both=int(stats.nan_both.sum()),
        num_broken=int(stats.num_broken.sum()),
        max_abs_row=int(torch.where(stats.num_broken > 0, torch.inf, stats.max_abs).argmax()),
        first_bad_a=_first(stats.nan_a + stats.inf_a),
        first_bad_b=_first(stats.nan_b + stats.inf_b),
        worst=_worst(a, b, stats, relative),
        ulps=ulp_counts(a, b),
    )


def _cosine(stats: RowStats, squares_a: float, squares_b: float, squares_diff: float) -> float:
    """Return the cosine over the finite pairs; two zeros point the same way."""
    if squares_diff == 0:
        return 1.0
    return float(stats.dots.sum()) / math.sqrt(squares_a * squares_b) if squares_a and squares_b else 0.0


def _first(count_R: torch.Tensor) -> int | None:
    found = count_R.nonzero()
    return int(found[0]) if len(found) else None


def _worst(a: torch.Tensor, b: torch.Tensor, stats: RowStats, relative_R: torch.Tensor) -> tuple[WorstRow, ...]:
    # Of rows that are equally far off, as where both are infinite, the first come first.
    order = relative_R.sort(descending=True, stable=True).indices[:WORST_SHOWN]
    worst = []
    for row in order.tolist():
        if not stats.is_different[row]:
            continue
        diff = (a[row].double() - b[row].double()).abs()
        element = int(torch.where(a[row] == b[row], 0.0, diff.nan_to_num(torch.inf, torch.inf)).argmax())
        worst.append(
            WorstRow(
                row=row,
                token_rel=float(relative_R[row]),
                max_abs=math.inf if stats.num_broken[row] + stats.nan_both[row] else float(stats.max_abs[row]),
                element=element,
                a=float(a[row, element]),
                b=float(b[row, element]),
            )
        )
    return tuple(worst)
