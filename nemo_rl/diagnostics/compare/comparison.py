"""`Comparison`: the verdict over two recordings, for people and for machines. Made by `compare_folders`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nemo_rl.diagnostics.compare.divergence import Contribution, Divergence, NonFinite
from nemo_rl.diagnostics.compare.findings import Finding
from nemo_rl.diagnostics.compare.measurement import Metric
from nemo_rl.diagnostics.compare.site_result import SiteResult, WorstToken
from nemo_rl.diagnostics.verdict import Verdict

__all__ = ["Comparison", "SideFacts"]

FINDINGS_SHOWN = 12
PASSING_SHOWN = 5
FAILING_SHOWN = 20
_COLUMNS = (Metric.TOKEN_REL, Metric.MAX_ABS, Metric.RMS_REL, Metric.COSINE_DISTANCE, Metric.DIFFERING_FRACTION)


@dataclass(frozen=True, kw_only=True, slots=True)
class SideFacts:
    """Which folder a side is."""

    path: str
    manifest: Mapping[str, object]
    """Empty where it could not be read."""
    num_records: int = 0
    num_samples: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All that is known about two recordings."""

    verdict: Verdict
    reason: str
    """One sentence."""
    a: SideFacts
    b: SideFacts
    sites: Sequence[SiteResult] = ()
    """Of both sides, in the order in which a step meets them."""
    first: Divergence | None = None
    contribution: Contribution | None = None
    non_finite: Sequence[NonFinite] = ()
    findings: Sequence[Finding] = ()
    """What is wrong, except for sites that fail."""
    notes: Sequence[str] = ()
    """What does not change the verdict."""
    texts: Mapping[int, str] = field(default_factory=dict)
    """Of the tokens that are named, where the tokenizer of a side could be loaded."""

    @property
    def num_failing(self) -> int:
        """Sites that fail."""
        return sum(bool(result.failures) for result in self.sites)

    def as_record(self) -> dict[str, object]:
        """For machines."""
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
        """For people; `is_all` names every site, rather than those that fail and the worst of the others."""
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

    def _first_lines(self, first: Divergence) -> list[str]:
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
    """What a recording says is shown to a terminal, which must not obey it."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)


def _severity(result: SiteResult) -> float:
    """How near a site is to its limits; 1 is at the limit."""
    if result.measurement is None:
        return 0.0
    metrics = result.measurement.metrics
    return max((metrics[metric] / limit for metric, limit in result.limits.items() if limit), default=0.0)
