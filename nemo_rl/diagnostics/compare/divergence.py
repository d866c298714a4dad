"""Where a difference starts: the first site that fails, the block that adds most, the first NaN or infinity."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nemo_rl.diagnostics.compare.measurement import Metric
from nemo_rl.diagnostics.compare.site import Site
from nemo_rl.diagnostics.compare.site_result import RowName, SiteResult
from nemo_rl.records.sites import SiteKind

__all__ = ["Contribution", "Divergence", "NonFinite", "first_divergence", "first_non_finite", "largest_contribution"]

BLOCKS = ((SiteKind.LAYER_IN, SiteKind.LAYER_OUT), (SiteKind.MLP_IN, SiteKind.MLP_OUT))
"""What goes in and what comes out of a part of a layer."""
NO_SIZE = frozenset({SiteKind.LOSS, SiteKind.GRAD})
"""A loss may be zero, and gradients of parameters do not run into each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """The first site in the order of a step that fails."""

    result: SiteResult
    after: Site | None
    """The last site before it, which passes; None where it is the first that was compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contribution:
    """What lies between two sites, and by how much the relative difference grows in it. A difference that was only
    carried along adds nothing."""

    start: Site | None
    """None for all that ran before the first site of a pass."""
    end: Site
    rms_rel_in: float
    rms_rel_out: float

    @property
    def added(self) -> float:
        """Output difference less input difference."""
        return self.rms_rel_out - self.rms_rel_in

    @property
    def text(self) -> str:
        """For people."""
        place = f"{'before' if self.start is None else f'{self.start.label} ->'} {self.end.label}"
        return f"{place}: rms_rel from {self.rms_rel_in:.3g} to {self.rms_rel_out:.3g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class NonFinite:
    """The first site of a side that is not all finite; what was recorded before it is."""

    side: str
    site: Site
    row: RowName
    num_nan: int
    num_inf: int

    @property
    def text(self) -> str:
        """For people."""
        return f"{self.side}: {self.site.label}, {self.row.text} ({self.num_nan} NaN, {self.num_inf} infinite)"


def first_divergence(results: Sequence[SiteResult]) -> Divergence | None:
    """Of results in the order of a step."""
    before = None
    for result in results:
        if result.failures:
            return Divergence(result=result, after=before)
        before = result.site
    return None


def largest_contribution(results: Sequence[SiteResult]) -> Contribution | None:
    """None where no two sites of a pass can be compared, or nothing differs."""
    found = [
        Contribution(
            start=None if first is None else first.site,
            end=last.site,
            rms_rel_in=0.0 if first is None else _size(first),
            rms_rel_out=_size(last),
        )
        for first, last in _blocks(results)
    ]
    # Of a block and its only differing part, which add the same, the part comes first.
    largest = max(found, key=lambda block: block.added, default=None)
    return largest if largest is not None and largest.added > 0 else None


def first_non_finite(results: Sequence[SiteResult]) -> list[NonFinite]:
    """At most one of each side."""
    found: dict[str, NonFinite] = {}
    for result in results:
        told = result.measurement
        if told is None:
            continue
        for side, row, nan, inf in (
            ("A", result.bad_a, told.nan_a, told.inf_a),
            ("B", result.bad_b, told.nan_b, told.inf_b),
        ):
            if row is not None and side not in found:
                found[side] = NonFinite(side=side, site=result.site, row=row, num_nan=nan, num_inf=inf)
    return [found[side] for side in sorted(found)]


def _blocks(results: Sequence[SiteResult]) -> Iterator[tuple[SiteResult | None, SiteResult]]:
    """Neighbours of a pass, the first of which has None before it, then the blocks of `BLOCKS`."""
    usable = [result for result in results if result.site.kind not in NO_SIZE and math.isfinite(_size(result))]
    for before, result in pairwise([None, *usable]):
        if result is not None:
            is_same_pass = before is not None and before.site.in_pass == result.site.in_pass
            yield before if is_same_pass else None, result
    place = {(result.site.in_pass, result.site.layer, result.site.kind): at for at, result in enumerate(usable)}
    for (in_pass, layer, kind), at in place.items():
        for first, last in BLOCKS:
            other = place.get((in_pass, layer, last))
            if kind is first and other is not None:
                yield usable[min(at, other)], usable[max(at, other)]


def _size(result: SiteResult) -> float:
    """Infinite where there is none."""
    if result.measurement is None or result.measurement.is_integer:
        return math.inf
    return result.measurement.metrics[Metric.RMS_REL]
