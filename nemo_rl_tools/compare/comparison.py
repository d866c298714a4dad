"""`RecordingComparison`: the verdict over two recordings, for people and for machines. Made by `compare_folders`.

It names where a difference starts: the first site that fails, the block that adds most, the first NaN or infinity.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from nemo_rl.records.sites import SiteKind
from nemo_rl_tools.compare.measurement import Metric
from nemo_rl_tools.compare.side import ComparedSite
from nemo_rl_tools.compare.site_result import COLUMNS, RowName, SiteResult, WorstToken
from nemo_rl_tools.verdict import Comparison

__all__ = ["RecordingComparison", "SideFacts"]

BLOCKS = ((SiteKind.LAYER_IN, SiteKind.LAYER_OUT), (SiteKind.MLP_IN, SiteKind.MLP_OUT))
"""Pairs of sites: the input and the output of a part of a layer."""
NO_SIZE = frozenset({SiteKind.LOSS, SiteKind.GRAD})
"""A loss may be zero, and gradients of parameters do not run into each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstDivergence:
    """The first site in the order of a step that fails."""

    result: SiteResult
    after: ComparedSite | None
    """The last site before it, which passes; None where it is the first that was compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contribution:
    """The part between two sites, and the growth of the relative difference in it.

    A difference that was only carried along adds nothing.
    """

    start: ComparedSite | None
    """The site before the part; None for all that ran before the first site of a pass."""
    end: ComparedSite
    rms_rel_in: float
    rms_rel_out: float

    @property
    def added(self) -> float:
        """Output difference less input difference."""
        return self.rms_rel_out - self.rms_rel_in

    @property
    def text(self) -> str:
        """The text shown in reports."""
        place = f"{'before' if self.start is None else f'{self.start.label} ->'} {self.end.label}"
        return f"{place}: rms_rel from {self.rms_rel_in:.3g} to {self.rms_rel_out:.3g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedNonFinite:
    """The first site of a side that is not all finite; what was recorded before it is."""

    side: str
    site: ComparedSite
    row: RowName
    num_nan: int
    num_inf: int

    @property
    def text(self) -> str:
        """The text shown in reports."""
        return f"{self.side}: {self.site.label}, {self.row.text} ({self.num_nan} NaN, {self.num_inf} infinite)"


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


PASSING_SHOWN = 5
FAILING_SHOWN = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class SideFacts:
    """The folder of a side and what its manifest says."""

    path: str
    manifest: Mapping[str, object]
    """Empty where it could not be read."""
    num_records: int = 0
    num_samples: int = 0

    def as_record(self) -> dict[str, object]:
        """Return JSON form, without the manifest."""
        return {"path": self.path, "num_records": self.num_records, "num_samples": self.num_samples}


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordingComparison(Comparison):
    """A comparison whose sites are tensors: it also says which part adds most, and which token differs most."""

    a: SideFacts
    b: SideFacts
    sites: Sequence[SiteResult] = ()
    texts: Mapping[int, str] = field(default_factory=dict)
    """Texts of the tokens that are named, where the tokenizer of a side could be loaded."""

    @property
    def agreement(self) -> str:
        return f" within their limits, {sum(result.is_bit_equal for result in self.sites)} of them bit by bit"

    @property
    def divergence(self) -> FirstDivergence | None:
        """The first site that fails, and the one before it."""
        for before, result in pairwise([None, *self.sites]):
            if result is not None and result.failures:
                return FirstDivergence(result=result, after=None if before is None else before.site)
        return None

    @property
    def contribution(self) -> Contribution | None:
        """The part that adds most, or None where no two sites of a pass can be compared, or nothing differs."""
        found = [
            Contribution(
                start=None if first is None else first.site,
                end=last.site,
                rms_rel_in=0.0 if first is None else _size(first),
                rms_rel_out=_size(last),
            )
            for first, last in _blocks(self.sites)
        ]
        # Of a block and its only differing part, which add the same, the part comes first.
        largest = max(found, key=lambda block: block.added, default=None)
        return largest if largest is not None and largest.added > 0 else None

    @property
    def non_finite(self) -> Sequence[ComparedNonFinite]:
        """The first NaN or infinity of each side, at most one of each."""
        found: dict[str, ComparedNonFinite] = {}
        for result in self.sites:
            told = result.measurement
            if told is None:
                continue
            for side, row, nan, inf in (
                ("A", result.bad_a, told.nan_a, told.inf_a),
                ("B", result.bad_b, told.nan_b, told.inf_b),
            ):
                if row is not None and side not in found:
                    found[side] = ComparedNonFinite(side=side, site=result.site, row=row, num_nan=nan, num_inf=inf)
        return [found[side] for side in sorted(found)]

    def more(self) -> Mapping[str, object]:
        first, most = self.divergence, self.contribution
        return {
            "a": self.a.as_record(),
            "b": self.b.as_record(),
            "first_divergence": None
            if first is None
            else {"site": first.result.label, "after": None if first.after is None else first.after.label},
            "contribution": None
            if most is None
            else {
                "start": None if most.start is None else most.start.label,
                "end": most.end.label,
                "rms_rel_in": most.rms_rel_in,
                "rms_rel_out": most.rms_rel_out,
            },
            "non_finite": [
                {
                    "side": found.side,
                    "site": found.site.label,
                    **found.row.as_record(),
                    "num_nan": found.num_nan,
                    "num_inf": found.num_inf,
                }
                for found in self.non_finite
            ],
            "texts": {str(token): text for token, text in self.texts.items()},
        }

    def details(self) -> list[str]:
        """Return the first divergence with its worst tokens, the largest contribution and the first NaN."""
        first, most, lines = self.divergence, self.contribution, list[str]()
        if first is not None:
            after = "nothing before it was compared" if first.after is None else f"{first.after.label} before it agrees"
            lines += [f"first divergence: {first.result.label}; {after}"]
            lines += [f"  {failure}" for failure in first.result.failures]
            lines += [f"  {self._worst_line(worst)}" for worst in first.result.worst]
        if most is not None:
            lines.append(f"largest contribution: {most.text}")
        return lines + [f"first values that are not finite, {found.text}" for found in self.non_finite]

    def token_text(self, token: int | None) -> str:
        """` 'text'`, or nothing."""
        text = None if token is None else self.texts.get(token)
        return "" if text is None else f" {text!r}"

    def _worst_line(self, worst: WorstToken) -> str:
        row = f"{worst.row.text}{self.token_text(worst.row.token)}"
        return f"{row}: {worst.a:.6g} against {worst.b:.6g} at {worst.element}, token_rel {worst.token_rel:.3g}"

    def head(self) -> Sequence[str]:
        return ["site", "rows", *(metric.value for metric in COLUMNS), "result"]

    def shown(self, *, is_all: bool) -> Sequence[SiteResult]:
        if is_all:
            return self.sites
        failing = [result for result in self.sites if result.failures][:FAILING_SHOWN]
        passing = [result for result in self.sites if not result.failures and result.severity > 0]
        passing = sorted(passing, key=lambda result: result.severity, reverse=True)[:PASSING_SHOWN]
        shown = {result.site for result in (*failing, *passing)}
        return [result for result in self.sites if result.site in shown]

    def count(self) -> str:
        failing = sum(bool(result.failures) for result in self.sites)
        equal = sum(result.is_bit_equal for result in self.sites)
        return f"{len(self.sites)} sites compared, {failing} fail, {equal} are equal bit by bit"
