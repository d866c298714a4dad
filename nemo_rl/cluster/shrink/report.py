"""`ShrinkReport`: what was changed, that every stage ran, and what the checks of a shrunk run found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.cluster.shrink.changes import Change
from nemo_rl.diagnostics.verdict import Verdict

__all__ = ["Check", "ShrinkReport"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One question about the run."""

    name: str
    holds: bool | None
    """None: there was nothing to look at."""
    text: str
    """What was found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShrinkReport:
    """Of one recipe."""

    recipe: Path
    out: Path
    model: str
    """The real one and the small one, for people."""
    layout: str
    reduced: tuple[str, ...]
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()
    stages: Mapping[str, float] | None = None
    """Seconds of each stage over all steps; None: it was not run."""
    steps: int = 0
    checks: tuple[Check, ...] = ()
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        return Verdict.MISMATCH if any(check.holds is False for check in self.checks) else Verdict.PASS

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"shrink of {self.recipe}: {self.layout}"
        yield f"  model: {self.model}"
        for text in self.reduced:
            yield f"  not kept: {text}"
        for text in self.notes:
            yield f"  note: {text}"
        yield f"changed ({len(self.changes)} keys)"
        for why in dict.fromkeys(change.why for change in self.changes):
            yield f"  {why}: {', '.join(change.text for change in self.changes if change.why == why)}"
        if self.stages is not None:
            yield f"stages ({self.steps} steps)"
            for name, seconds in self.stages.items():
                yield f"  {name:<22} ran    {seconds:.2f} s"
        if self.checks:
            yield "checks"
        for check in self.checks:
            word = "-" if check.holds is None else "ok" if check.holds else "FAILS"
            yield f"  {check.name:<22} {word:<6} {check.text}"
        again = f"python examples/run_grpo.py --config {self.out / 'shrunk.yaml'}"
        if self.stages is None:
            yield f"written, not run; to run it: {again}"
        else:
            yield f"{self.verdict.label} in {self.seconds:.0f} s; again: {again}"

    def as_record(self) -> dict[str, object]:
        """For JSON."""
        return {
            "recipe": str(self.recipe),
            "out": str(self.out),
            "model": self.model,
            "layout": self.layout,
            "not_kept": list(self.reduced),
            "notes": list(self.notes),
            "changes": [
                {"key": change.key, "was": change.was, "now": change.now, "why": change.why} for change in self.changes
            ],
            "stages": self.stages,
            "steps": self.steps,
            "checks": [{"name": check.name, "holds": check.holds, "text": check.text} for check in self.checks],
            "verdict": self.verdict.label,
            "seconds": self.seconds,
        }
