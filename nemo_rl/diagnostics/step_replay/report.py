"""`ReplayReport`: what a replay found, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from nemo_rl.diagnostics.step_replay.compare import Finding
from nemo_rl.diagnostics.verdict import Verdict

__all__ = ["ReplayReport", "StepFindings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFindings:
    """One step."""

    number: int
    findings: tuple[Finding, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayReport:
    """All steps from the start to the one that was asked for."""

    run: str
    step: int
    start: str
    how: str
    """Worker and layout."""
    differences: tuple[str, ...]
    """What keeps the numbers from being the same to the last bit."""
    what_if: tuple[str, ...]
    """What was set over the kept config: then differences are the answer, not a fault."""
    notes: tuple[str, ...]
    steps: tuple[StepFindings, ...]
    seconds: float

    @property
    def first_difference(self) -> tuple[int, str] | None:
        """Step and stage; None where all that was compared agrees."""
        for step in self.steps:
            for finding in step.findings:
                if finding.agrees is False:
                    return step.number, finding.stage
        return None

    @property
    def verdict(self) -> Verdict:
        """How the replay ended."""
        looked_at = [finding.agrees for step in self.steps for finding in step.findings]
        if all(agrees is None for agrees in looked_at):
            return Verdict.VACUOUS
        if self.what_if:
            return Verdict.PASS
        if self.first_difference is not None:
            return Verdict.MISMATCH
        return Verdict.INCOMPLETE if None in looked_at else Verdict.PASS

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"replay of step {self.step} of {self.run}: from {self.start}, {self.how}"
        for text in self.differences:
            yield f"  not to the last bit: {text}"
        for text in self.what_if:
            yield f"  what if: {text}"
        for text in self.notes:
            yield f"  note: {text}"
        for step in self.steps:
            yield f"step {step.number}"
            for finding in step.findings:
                yield f"  {finding.stage:<20} {self._word(finding):<10} {_both(finding)}"
        first = self.first_difference
        if first is not None:
            yield f"first stage that differs: {first[1]} of step {first[0]}"
        yield f"{self.verdict.label} in {self.seconds:.1f} s"

    def as_record(self) -> dict[str, object]:
        """For JSON."""
        return {
            **asdict(self),
            "verdict": self.verdict.label,
            "first_difference": None
            if self.first_difference is None
            else {"step": self.first_difference[0], "stage": self.first_difference[1]},
        }

    def _word(self, finding: Finding) -> str:
        if finding.agrees is None:
            return "not kept"
        if not finding.agrees:
            return "what if" if self.what_if else "DIFFERS"
        return "within" if finding.difference else "equal"


def _both(finding: Finding) -> str:
    shown = finding.kept if finding.kept == finding.replayed else f"{finding.kept} -> {finding.replayed}"
    return f"{shown}; {finding.difference}" if finding.difference else shown
