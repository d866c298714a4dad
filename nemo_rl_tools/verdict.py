"""`Comparison`: two sides, site by site, with one rule for the verdict and one report in text and JSON.

    compare/              sites of two recordings, measured within limits         SiteResult
    step_replay/          stages of kept steps against the replay                 SiteCheck
    run_replay            numbers and weights of an asynchronous run              SiteCheck
    conversation_replay   turns that are sampled again                            SiteCheck
    route_chain/          hops of the routes against the rollout                  SiteCheck

They give sites in the order in which a run meets them, and findings that no site has. Invariant: it passes only if
something was compared, everything that should have been was, and nothing differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Protocol

from nemo_rl.utils.console import printable
from nemo_rl.utils.exits import CHILD_FAILED

__all__ = ["Comparison", "Finding", "Site", "SiteCheck", "Verdict", "gravest", "table_lines"]

FINDINGS_SHOWN = 12
SITES_SHOWN = 60
"""Sites of a report; of more, those that differ are shown."""


class Verdict(Enum):
    """The outcome of a check. Exit code 1 is left to failures that nobody foresaw."""

    PASS = 0
    USAGE = 2
    """The command itself was wrong: an unknown site, a folder that is none."""
    MISMATCH = 3
    INCOMPLETE = 4
    """Something that should have been compared is not there."""
    VACUOUS = 5
    """The check compared nothing."""
    CORRUPT = 6
    """Bytes are not those that were written."""
    UNSUPPORTED = 7
    """The input is of another model, format or version."""
    CHILD_FAILED = CHILD_FAILED
    """A process that was started for this ended with an error."""

    @property
    def label(self) -> str:
        """The name shown to people and in JSON."""
        return self.name.lower()


_GRAVITY = (Verdict.CORRUPT, Verdict.UNSUPPORTED, Verdict.VACUOUS, Verdict.MISMATCH, Verdict.INCOMPLETE)
"""Verdicts, gravest first. Damaged bytes prove nothing; a difference beyond its limit is one, whatever else is
missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A reason for which two sides cannot be said to agree."""

    verdict: Verdict
    text: str


def gravest(findings: Sequence[Finding]) -> Finding | None:
    """Return the first of those of the gravest kind; None where nothing is wrong."""
    return min(findings, key=lambda finding: _GRAVITY.index(finding.verdict), default=None)


class Site(Protocol):
    """One thing of both sides."""

    @property
    def label(self) -> str:
        """The name in reports."""

    @property
    def agrees(self) -> bool | None:
        """True where both sides agree; None where one has nothing to compare with."""

    @property
    def difference(self) -> str:
        """The difference in words, within the limits or not; empty where there is none."""

    @property
    def cells(self) -> Sequence[str]:
        """A row of the table: the name, numbers, the result."""

    def as_record(self) -> Mapping[str, object]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteCheck:
    """A site whose values are shown as texts: a stage of a step, a number, a turn, a hop."""

    name: str
    step: int | None = None
    a: str
    """Side A, which is relied on: what was kept."""
    b: str
    """Side B: what was made again."""
    agrees: bool | None
    difference: str = ""

    @property
    def label(self) -> str:
        return self.name if self.step is None else f"{self.name} of step {self.step}"

    @property
    def cells(self) -> Sequence[str]:
        words = {None: "not kept", False: "DIFFERS", True: "within" if self.difference else "equal"}
        shown = self.a if self.a == self.b else f"{self.a} -> {self.b}"
        return self.label, words[self.agrees], f"{shown}; {self.difference}" if self.difference else shown

    def as_record(self) -> Mapping[str, object]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All that is known about two sides."""

    title: str
    sites: Sequence[Site] = ()
    """Sites in the order in which a run meets them."""
    findings: Sequence[Finding] = ()
    """Problems, except for sites that differ."""
    inexact: Sequence[str] = ()
    """Reasons for which the numbers need not be the same to the last bit."""
    what_if: Sequence[str] = ()
    """Settings of side B alone: with them differences are the answer, not a fault."""
    notes: Sequence[str] = ()
    """Remarks that do not change the verdict."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """More for JSON."""
    recorded: Comparison | None = None
    """The recordings of both sides; None where one has none."""
    seconds: float | None = None

    @property
    def outcome(self) -> Finding:
        """The verdict and its reason, by the rule of the module."""
        looked_at = [site.agrees for site in self.sites]
        found = list(self.findings)
        if not found and all(agrees is None for agrees in looked_at):
            return Finding(verdict=Verdict.VACUOUS, text="nothing was compared")
        if self.what_if:
            return Finding(verdict=Verdict.PASS, text="differences are the answer to what was asked")
        first = self.first
        if first is not None:
            text = f"{looked_at.count(False)} of {len(looked_at)} sites differ, first {first.label}: {first.difference}"
            found.insert(0, Finding(verdict=Verdict.MISMATCH, text=text))
        if None in looked_at:
            text = f"{looked_at.count(None)} of {len(looked_at)} sites have nothing to be compared with"
            found.append(Finding(verdict=Verdict.INCOMPLETE, text=text))
        if self.recorded is not None and self.recorded.verdict is not Verdict.PASS:
            theirs = self.recorded.verdict
            is_proof = theirs in (Verdict.MISMATCH, Verdict.CORRUPT)
            text = f"records: {self.recorded.outcome.text}"
            found.append(Finding(verdict=theirs if is_proof else Verdict.INCOMPLETE, text=text))
        passes = Finding(verdict=Verdict.PASS, text=f"all {len(looked_at)} sites agree{self.agreement}")
        return gravest(found) or passes

    @property
    def verdict(self) -> Verdict:
        return self.outcome.verdict

    @property
    def agreement(self) -> str:
        """The way in which sites agree, for the reason of a pass."""
        within = sum(bool(site.difference) for site in self.sites)
        return f", {within} of them within their limits" if within else ""

    @property
    def first(self) -> Site | None:
        """The first site that differs; None where all that was compared agrees."""
        return next((site for site in self.sites if site.agrees is False), None)

    def lines(self, *, is_all: bool = False) -> list[str]:
        """Return the lines of the report; `is_all` names every site."""
        outcome = self.outcome
        lines = [f"{outcome.verdict.name}: {outcome.text}", self.title]
        lines += [f"not to the last bit: {text}" for text in self.inexact]
        lines += [f"what if: {text}" for text in self.what_if]
        lines += self.details()
        lines += [f"{finding.verdict.label}: {finding.text}" for finding in self.findings[:FINDINGS_SHOWN]]
        if len(self.findings) > FINDINGS_SHOWN:
            lines.append(f"{len(self.findings) - FINDINGS_SHOWN} findings more")
        lines += [f"note: {note}" for note in self.notes]
        lines += table_lines([self.head(), *(site.cells for site in self.shown(is_all=is_all))])
        lines.append(self.count())
        if self.recorded is not None:
            lines += [f"records: {line}" if not at else f"  {line}" for at, line in enumerate(self.recorded.lines())]
        lines += [] if self.seconds is None else [f"{outcome.verdict.label} in {self.seconds:.1f} s"]
        # A recording is shown to a terminal, which must not obey it.
        return [printable(line, limit=len(line)) for line in lines]

    def as_record(self) -> dict[str, object]:
        outcome, first = self.outcome, self.first
        return {
            "verdict": outcome.verdict.label,
            "exit_code": outcome.verdict.value,
            "reason": outcome.text,
            "title": self.title,
            "first": None if first is None else first.label,
            "inexact": list(self.inexact),
            "what_if": list(self.what_if),
            "findings": [{"verdict": finding.verdict.label, "text": finding.text} for finding in self.findings],
            "notes": list(self.notes),
            "seconds": self.seconds,
            "sites": [site.as_record() for site in self.sites],
            "recorded": None if self.recorded is None else self.recorded.as_record(),
            **self.more(),
        }

    def details(self) -> list[str]:
        """Return the lines that say more of the first difference."""
        return []

    def more(self) -> Mapping[str, object]:
        """Return what JSON has besides."""
        return self.facts

    def head(self) -> Sequence[str]:
        return "site", "result", "A -> B"

    def shown(self, *, is_all: bool) -> Sequence[Site]:
        if is_all or len(self.sites) <= SITES_SHOWN:
            return self.sites
        return [site for site in self.sites if site.agrees is False][:SITES_SHOWN]

    def count(self) -> str:
        """Return the last line on the sites."""
        looked_at = [site.agrees for site in self.sites]
        return f"{len(looked_at) - looked_at.count(None)} sites compared, {looked_at.count(False)} differ"


def table_lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the rows with aligned columns; nothing where there is but the head."""
    if len(rows) < 2:
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for name, *cells, result in rows:
        parts = [name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))]
        yield "  ".join([*parts, result])
