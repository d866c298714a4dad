"""`measure`: how two tensors of one site differ, with the rows that differ most."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from nemo_rl.diagnostics.compare.row_stats import RowStats, as_rows, row_stats
from nemo_rl.diagnostics.compare.ulps import ulp_counts

__all__ = ["Measurement", "Metric", "WorstRow", "measure"]

WORST_SHOWN = 5


class Metric(StrEnum):
    """What a limit can be set for; 0 is equality, and infinity stands for a value that is not finite on one side."""

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
    """Of the matched rows."""
    token_rel: float
    max_abs: float
    element: int
    """In the row, flattened."""
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
    """Of two tensors `[R, ...]` of the same shape with at least one value."""
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
        is_bit_equal=a.dtype == b.dtype and _bits_equal(a, b),
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
    """Of the finite pairs; two zeros point the same way."""
    if squares_diff == 0:
        return 1.0
    return float(stats.dots.sum()) / math.sqrt(squares_a * squares_b) if squares_a and squares_b else 0.0


def _bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


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
