"""`MismatchReport`: the parts of a step's KL, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from nemo_rl.diagnostics.mismatch.evidence import Evidence, FarToken
from nemo_rl.diagnostics.mismatch.measure import Divergence
from nemo_rl.diagnostics.mismatch.parts import Part, named_first
from nemo_rl.diagnostics.mismatch.setting import CAUSES, Cause
from nemo_rl.diagnostics.verdict import Verdict

__all__ = ["MismatchReport"]

HINTS: Mapping[Cause, str] = {
    "weights": "compare the tags of the rows with what the engines hold: is a refit late, or lost on one replica?",
    "temperature": "give trainer and engine the same policy.generation.temperature; look for an engine's own default",
    "top_k": "give trainer and engine the same policy.generation.top_k; look for an engine's own default "
    "(generation_config.json)",
    "top_p": "give trainer and engine the same policy.generation.top_p; look for an engine's own default "
    "(generation_config.json), and whether its log-probabilities are those of the cut distribution",
    "sets": "set policy.generation.record_support=true, so that the trainer scores under the embedded engine's sets, "
    "or leave the filter out: policy.generation.top_p=1 and top_k=null",
    "routes": "set policy.router_replay.enabled=true and see `nemo-rl trace verify` for where routes are lost",
    "precision": "compare policy.precision with policy.generation.precision and with what the engine really "
    "computes in; raise the lower one, or correct for it with importance weights",
    "batching": "compare the trainer's pass with rows alone: `nemo-rl probe`, the layout of the run against one rank",
    "shift": "the engine's log-probabilities belong to the neighbouring token: look at how its output is aligned",
    "rope": "compare rope_theta and rope_scaling of the engine's model with config.json; are positions right after the "
    "prompt?",
    "engine": "compare the engine's weights with the trainer's after a refit, name by name, then its layers: `nemo-rl "
    "probe` records both sides at every site",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchReport:
    """One step."""

    run: str
    step: int
    num_rows: int
    total: Divergence
    floor: float
    """Nats per token, below which a KL is noise."""
    trainer: str
    """How the trainer has scored, by its own numbers."""
    parts: tuple[Part, ...]
    evidence: Evidence
    """Of the rest."""
    far: tuple[FarToken, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def first(self) -> Part | None:
        """The cause that is named first; None for a total within noise."""
        return None if self.total.kl <= self.floor else named_first(self.parts)

    @property
    def verdict(self) -> Verdict:
        """How it ended."""
        if not self.total.num_tokens:
            return Verdict.VACUOUS
        return Verdict.PASS if self.first is None else Verdict.MISMATCH

    def lines(self) -> Iterator[str]:
        """For people."""
        total = self.total
        yield f"mismatch of step {self.step} of {self.run}: {self.num_rows} rows, {total.num_tokens} sampled tokens"
        yield f"  trainer: {self.trainer}"
        for note in self.notes:
            yield f"  note: {note}"
        yield (
            f"KL(rollout || trainer) {total.kl:.4g} +- {total.std_error:.2g} nats per token (k3); |d| mean "
            f"{total.mean_abs:.3g}, largest {total.largest:.3g}; noise up to {self.floor:.2g}"
        )
        first = self.first
        if first is not None:
            yield from self._causes(first)
        yield f"{self.verdict.label} in {self.seconds:.1f} s"

    def as_record(self) -> dict[str, object]:
        """For JSON."""
        first = self.first
        return {
            **asdict(self),
            "first": None if first is None else first.cause,
            "hint": None if first is None else HINTS[first.cause],
            "verdict": self.verdict.label,
        }

    def _causes(self, first: Part) -> Iterator[str]:
        yield f"  {'cause':<42} {'part':>11} {'share':>7}  changed"
        for part in [*sorted(self.parts[:-1], key=lambda part: -part.kl), self.parts[-1]]:
            yield f"  {CAUSES[part.cause]:<42} {part.kl:>11.4g} {part.share:>7.1%}  {part.what}"
        added = sum(part.kl for part in self.parts)
        yield f"  {'sum':<42} {added:>11.4g} {sum(part.share for part in self.parts):>7.1%}"
        if any(part.kl < 0 for part in self.parts):
            yield "  a negative part: the change made the two sides differ more, other causes have hidden it"
        if self.parts[-1].kl > self.floor:
            yield f"  of the rest: {self.evidence.text}"
        yield f"first cause: {CAUSES[first.cause]} ({first.share:.0%}): {first.what}"
        yield "tokens furthest apart (log-probability of rollout -> trainer):"
        for token in self.far:
            yield (
                f"  {token.key}[{token.position}] {token.rollout:9.4f} -> {token.trainer:9.4f}  "
                f"{token.before!r} then {token.text!r}"
            )
        yield f"hint: {HINTS[first.cause]}"
