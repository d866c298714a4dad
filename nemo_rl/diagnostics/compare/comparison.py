"""`RecordingComparison`: the verdict over two recordings, for people and for machines. Made by `compare_folders`.

It names where a difference starts: the first site that fails, the block that adds most, the first NaN or infinity.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from nemo_rl.diagnostics.compare.measurement import Metric
from nemo_rl.diagnostics.compare.side import ComparedSite, SideFinding
from nemo_rl.diagnostics.compare.site_result import RowName, SiteResult, WorstToken
from nemo_rl.diagnostics.verdict import Verdict
from nemo_rl.records.sites import SiteKind

__all__ = [
    "ComparedNonFinite",
    "Contribution",
    "FirstDivergence",
    "RecordingComparison",
    "SideFacts",
    "first_divergence",
    "first_non_finite",
    "largest_contribution",
]

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


def first_divergence(results: Sequence[SiteResult]) -> FirstDivergence | None:
    """Return the first site that fails; the results are in the order of a step."""
    before = None
    for result in results:
        if result.failures:
            return FirstDivergence(result=result, after=before)
        before = result.site
    return None


def largest_contribution(results: Sequence[SiteResult]) -> Contribution | None:
    """Return the part that adds most, or None where no two sites of a pass can be compared, or nothing differs."""
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


def first_non_finite(results: Sequence[SiteResult]) -> list[ComparedNonFinite]:
    """Return the first NaN or infinity of each side, at most one of each."""
    found: dict[str, ComparedNonFinite] = {}
    for result in results:
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


FINDINGS_SHOWN = 12
PASSING_SHOWN = 5
FAILING_SHOWN = 20
_COLUMNS = (Metric.TOKEN_REL, Metric.MAX_ABS, Metric.RMS_REL, Metric.COSINE_DISTANCE, Metric.DIFFERING_FRACTION)


@dataclass(frozen=True, kw_only=True, slots=True)
class SideFacts:
    """The folder of a side and what its manifest says."""

    path: str
    manifest: Mapping[str, object]
    """Empty where it could not be read."""
    num_records: int = 0
    num_samples: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordingComparison:
    """All that is known about two recordings."""

    verdict: Verdict
    reason: str
    """One sentence."""
    a: SideFacts
    b: SideFacts
    sites: Sequence[SiteResult] = ()
    """Results of the sites of both sides, in the order in which a step meets them."""
    first: FirstDivergence | None = None
    contribution: Contribution | None = None
    non_finite: Sequence[ComparedNonFinite] = ()
    findings: Sequence[SideFinding] = ()
    """Problems of the comparison, except for sites that fail."""
    notes: Sequence[str] = ()
    """Remarks that do not change the verdict."""
    texts: Mapping[int, str] = field(default_factory=dict)
    """Texts of the tokens that are named, where the tokenizer of a side could be loaded."""

    @property
    def num_failing(self) -> int:
        """Sites that fail."""
        return sum(bool(result.failures) for result in self.sites)

    def as_record(self) -> dict[str, object]:
        """Return the comparison as JSON-like values."""
        first, most = self.first, self.contribution
        return {
            "verdict": self.verdict.label,
            "exit_code": self.verdict.value,
            "reason": self.reason,
            "a": {"path": self.a.path, "num_records": self.a.num_records, "num_samples": self.a.num_samples},
            "b": {"path": self.b.path, "num_records": self.b.num_records, "num_samples": self.b.num_samples},
            "first_divergence": None
            if first is None
            else {"site": first.result.site.label, "after": None if first.after is None else first.after.label},
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
            "findings": [{"verdict": finding.verdict.label, "text": finding.text} for finding in self.findings],
            "notes": list(self.notes),
            "texts": {str(token): text for token, text in self.texts.items()},
            "sites": [result.as_record() for result in self.sites],
        }

    def lines(self, *, is_all: bool = False) -> list[str]:
        """Return the lines of the report; `is_all` names every site, else the worst and those that fail."""
        lines = [f"{self.verdict.name}: {self.reason}"]
        lines += [] if self.first is None else self._first_lines(self.first)
        if self.contribution is not None:
            lines.append(f"largest contribution: {self.contribution.text}")
        lines += [f"first values that are not finite, {found.text}" for found in self.non_finite]
        lines += [f"{finding.verdict.label}: {finding.text}" for finding in self.findings[:FINDINGS_SHOWN]]
        if len(self.findings) > FINDINGS_SHOWN:
            lines.append(f"{len(self.findings) - FINDINGS_SHOWN} findings more")
        lines += [f"note: {note}" for note in self.notes]
        lines += self._table(self.sites if is_all else self._shown())
        counts = f"{len(self.sites)} sites compared, {self.num_failing} fail"
        equal = sum(result.measurement is not None and result.measurement.is_bit_equal for result in self.sites)
        return [_printable(line) for line in (*lines, f"{counts}, {equal} are equal bit by bit")]

    def token_text(self, token: int | None) -> str:
        """` 'text'`, or nothing."""
        text = None if token is None else self.texts.get(token)
        return "" if text is None else f" {text!r}"

    def _first_lines(self, first: FirstDivergence) -> list[str]:
        after = "nothing before it was compared" if first.after is None else f"{first.after.label} before it agrees"
        lines = [f"first divergence: {first.result.site.label}; {after}"]
        lines += [f"  {failure}" for failure in first.result.failures]
        return lines + [f"  {self._worst_line(worst)}" for worst in first.result.worst]

    def _worst_line(self, worst: WorstToken) -> str:
        row = f"{worst.row.text}{self.token_text(worst.row.token)}"
        return f"{row}: {worst.a:.6g} against {worst.b:.6g} at {worst.element}, token_rel {worst.token_rel:.3g}"

    def _shown(self) -> list[SiteResult]:
        """Failing sites and the worst of the others, in their order."""
        failing = [result for result in self.sites if result.failures][:FAILING_SHOWN]
        passing = [result for result in self.sites if not result.failures and _severity(result) > 0]
        passing = sorted(passing, key=_severity, reverse=True)[:PASSING_SHOWN]
        shown = {result.site for result in (*failing, *passing)}
        return [result for result in self.sites if result.site in shown]

    def _table(self, results: Sequence[SiteResult]) -> list[str]:
        if not results:
            return []
        rows = [["site", "rows", *(metric.value for metric in _COLUMNS), "result"]]
        for result in results:
            metrics = {} if result.measurement is None else result.measurement.metrics
            cells = [f"{metrics[metric]:.2e}" if metric in metrics else "-" for metric in _COLUMNS]
            rows.append([result.site.label, str(result.num_rows), *cells, "; ".join(result.failures) or "ok"])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
        return [
            "  ".join(
                [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:-1], widths[1:], strict=True)), row[-1]]
            )
            for row in rows
        ]


def _printable(line: str) -> str:
    """Escape control characters: a recording is shown to a terminal, which must not obey it."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)


def _severity(result: SiteResult) -> float:
    """Return how near a site is to its limits; 1 is at the limit."""
    if result.measurement is None:
        return 0.0
    metrics = result.measurement.metrics
    return max((metrics[metric] / limit for metric, limit in result.limits.items() if limit), default=0.0)
