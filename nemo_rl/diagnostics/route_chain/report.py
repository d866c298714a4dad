"""The verdict over a trace, for people and for machines. Made by `chain`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from nemo_rl.diagnostics.route_chain.coverage import Gap
from nemo_rl.diagnostics.verdict import Verdict
from nemo_rl.errors import name_some

__all__ = ["Mismatch", "Report"]

GAPS_SHOWN = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """The first difference of a trace in causal order."""

    hop: str
    key: str
    stage: str
    step: int
    microbatch: int | None
    rank: int | None
    coords: Mapping[str, int]
    process: str
    layer: int | None
    """None where the token itself differs."""
    position: int
    """Of the token in its sample."""
    expected: list[int] | str
    """Ids as the rollout has them; their digest where a record holds no ids."""
    got: list[int] | str
    guess: str
    where: str
    """File and line."""

    def lines(self) -> list[str]:
        """For people."""
        at = "".join(f" {axis}={place}" for axis, place in self.coords.items())
        batch = "" if self.microbatch is None else f", microbatch {self.microbatch}"
        what = "token" if self.layer is None else f"layer {self.layer}"
        return [
            f"first bad hop: {self.hop}, stage {self.stage}, step {self.step}{batch}",
            f"  sample {self.key}, position {self.position}, {what}",
            f"  rank {'unknown' if self.rank is None else self.rank}{at}, process {self.process}, {self.where}",
            f"  expected {self.expected}",
            f"  got      {self.got}",
            f"  guess: {self.guess}",
        ]


@dataclass(kw_only=True, slots=True)
class Report:
    """All that is known about a trace."""

    verdict: Verdict
    reason: str
    mismatch: Mismatch | None = None
    bad_records: dict[str, int] = field(default_factory=dict)
    """Hop -> records that differ from the rollout."""
    gaps: list[Gap] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What does not change the verdict, such as torn lines and retired samples."""
    num_files: int = 0
    num_processes: int = 0
    num_samples: int = 0
    """That the rollout recorded."""
    events: dict[str, int] = field(default_factory=dict)
    """Event -> records."""
    compared: dict[str, int] = field(default_factory=dict)
    """`<hop>/<stage>` -> routes of one token and layer that were compared."""

    def as_record(self) -> dict[str, object]:
        """For machines."""
        return {**asdict(self), "verdict": self.verdict.label, "exit_code": self.verdict.value}

    def lines(self) -> list[str]:
        """For people."""
        lines = [f"{self.verdict.name}: {self.reason}"]
        lines += [] if self.mismatch is None else self.mismatch.lines()
        lines += [f"  {count} bad records at hop {hop}" for hop, count in self.bad_records.items()]
        lines += [f"missing: {gap.text}" for gap in self.gaps[:GAPS_SHOWN]]
        if len(self.gaps) > GAPS_SHOWN:
            lines.append(f"missing: {len(self.gaps) - GAPS_SHOWN} things more")
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"compared {count:>10,} routes at {place}" for place, count in self.compared.items()]
        read = f"read {self.num_files} files of {self.num_processes} processes, {self.num_samples} samples; records:"
        return [*lines, f"{read} {name_some([f'{count} {event}' for event, count in self.events.items()], limit=20)}"]
