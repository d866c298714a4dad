"""Compares kept and replayed steps, stage by stage, and reports the findings for people and as JSON.

In the layout of the run every number must be the same to the last bit; in another layout or with the other worker
columns, routes and plans must be, and the others lie within bounds, which hold for float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from nemo_rl.algorithms.kept_steps.record import SnapshotOutcome, StepSnapshot
from nemo_rl.diagnostics.compare.comparison import RecordingComparison
from nemo_rl.diagnostics.step_replay.columns import SnapshotColumns
from nemo_rl.diagnostics.step_replay.rank import Logprobs, RankStep
from nemo_rl.diagnostics.step_replay.settings import ReplaySettings
from nemo_rl.diagnostics.step_replay.work import StepWork
from nemo_rl.diagnostics.verdict import Verdict
from nemo_rl.distributed.pack_plan import PackPlan
from nemo_rl.models.policy.interfaces import TOKEN_ADVANTAGES
from nemo_rl.models.policy.lm_policy import TrainSummary, summarize

__all__ = ["ReplayFinding", "ReplayReport", "StepFindings", "compare_step"]

LOSS_BOUND = 1e-6
"""Absolute, or relative to a loss above 1."""
NORM_BOUND = 1e-5
"""Relative."""
WEIGHTS_BOUND = 2e-5
"""Distance relative to the norm of all weights, by their projections."""
LOGPROBS_BOUND = 1e-4
"""Absolute, of one token."""
SHOWN = 4
"""Numbers of a stage that a line shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayFinding:
    """One stage of one step."""

    stage: str
    kept: str
    replayed: str
    agrees: bool | None
    """True where both agree; None where nothing was kept to compare with."""
    difference: str = ""


def compare_step(work: StepWork, ranks: Sequence[RankStep], settings: ReplaySettings) -> list[ReplayFinding]:
    """Return the stages of a step in their order, as far as it came."""
    if work.error is not None:
        return [_error(work.step, ranks[0])]
    findings = [] if work.is_subset else [*_columns(work), *_plans(work)]
    if not work.trained:
        return [
            *findings,
            ReplayFinding(stage="update", kept=_what_update(work.step), replayed="none", agrees=_no_update(work)),
        ]
    findings += _routes(ranks)
    findings += _logprobs("prev_logprobs", [rank.prev for rank in ranks], settings)
    findings += _logprobs("reference_logprobs", [rank.reference for rank in ranks], settings)
    error = ranks[0].error
    if error is not None:
        return [*findings, _error(work.step, ranks[0])]
    results = [rank.train for rank in ranks]
    assert all(result is not None for result in results), "a step that trains has a result on every rank"
    summary = summarize([result for result in results if result is not None], layout=settings.layout)
    if work.is_subset:
        return [*findings, _number("loss of these rows", None, summary.loss, exact=False, bound=0.0)]
    if work.step.error is not None:
        return [*findings, *_update(summary, work, None, settings), _error(work.step, ranks[0])]
    findings += _update(summary, work, work.step.outcome, settings)
    return [*findings, _weights(work.step.outcome, ranks[0], settings)]


def _columns(work: StepWork) -> list[ReplayFinding]:
    step, rows = work.step, work.step.rows
    assert rows is not None, "a step without rows has no work"
    columns = SnapshotColumns.read(work.folder, step)
    everywhere = list(range(len(rows.keys)))
    what = f"{len(rows.keys)} rows, {len(step.trained or ())} trained"
    problems = []
    if columns.rows("input_lengths", everywhere).tolist() != list(rows.lengths):
        problems.append("lengths")
    if tuple(work.trained) != (step.trained or ()) and (step.trained is not None or step.outcome is not None):
        problems.append("which rows are trained")
    replayed = f"{len(rows.keys)} rows, {len(work.trained)} trained"
    findings = [
        ReplayFinding(
            stage="columns", kept=what, replayed=replayed, agrees=not problems, difference=", ".join(problems)
        )
    ]
    if not work.trained:
        return findings
    of_rows = {"sample_mask": work.sample_mask}
    if work.token_advantages is None:
        of_rows = {"advantages": work.advantages, **of_rows}
    else:
        findings.append(_token_advantages(columns, work.token_advantages, work))
    for name, made in of_rows.items():
        is_kept = name in columns.update and columns.has(name, work.trained)
        kept = columns.rows(name, work.trained) if is_kept else None
        findings.append(_vector(name, kept, made))
    return findings


def _token_advantages(columns: SnapshotColumns, made_NT: torch.Tensor, work: StepWork) -> ReplayFinding:
    lengths = [columns.lengths[row] for row in work.trained]
    made = torch.cat([row_T[:length] for row_T, length in zip(made_NT, lengths, strict=True)])
    is_kept = columns.has(TOKEN_ADVANTAGES, work.trained)
    kept = columns.rows(TOKEN_ADVANTAGES, work.trained).values() if is_kept else None
    return _vector(TOKEN_ADVANTAGES, kept, made)


def _plans(work: StepWork) -> list[ReplayFinding]:
    findings = []
    for name, kept, made in (
        ("plan", work.step.plan, work.run_plan),
        ("logprob plan", work.step.logprob_plan, work.run_logprob_plan),
    ):
        if kept is None or made is None:
            continue
        findings.append(
            ReplayFinding(
                stage=name,
                kept=f"{_shape(kept.microbatches)}, {kept.digest[:12]}",
                replayed=f"{_shape(made.microbatches)}, {made.digest()[:12]}",
                agrees=kept.digest == made.digest(),
                difference="" if kept.digest == made.digest() else _first_difference(kept.microbatches, made),
            )
        )
    return findings


def _routes(ranks: Sequence[RankStep]) -> list[ReplayFinding]:
    """Compare routes of the log-probability pass; those of the rollout are columns, and given to the routers."""
    found = [rank.routes for rank in ranks if rank.routes is not None]
    if not found:
        return []
    count, different = sum(part.num_values for part in found), sum(part.num_different for part in found)
    text = f"{different} of {count}" if different else ""
    shown = f"{count} experts"
    return [ReplayFinding(stage="routes", kept=shown, replayed=shown, agrees=different == 0, difference=text)]


def _logprobs(stage: str, parts: Sequence[Logprobs | None], settings: ReplaySettings) -> list[ReplayFinding]:
    found = [part for part in parts if part is not None]
    if not found:
        return []
    count, different = sum(part.num_values for part in found), sum(part.num_different for part in found)
    if not all(part.has_kept for part in found):
        return [ReplayFinding(stage=stage, kept="not kept", replayed=f"{count} tokens", agrees=None)]
    worst = max(found, key=lambda part: part.largest)
    agrees = different == 0 if settings.is_exact else worst.largest <= LOGPROBS_BOUND
    difference = f"{different} of {count} tokens, at most {worst.largest:.2g} ({worst.key})" if different else ""
    return [
        ReplayFinding(
            stage=stage, kept=f"{count} tokens", replayed=f"{count} tokens", agrees=agrees, difference=difference
        )
    ]


def _update(
    summary: TrainSummary, work: StepWork, kept: SnapshotOutcome | None, settings: ReplaySettings
) -> list[ReplayFinding]:
    exact = settings.is_exact
    findings = [
        _number(
            "learning_rate", None if kept is None else kept.learning_rate, summary.learning_rate, exact=True, bound=0
        )
    ]
    losses = None if kept is None else _in_replay_order(kept.microbatch_losses, work)
    made = [loss for part in summary.microbatch_losses for loss in part]
    findings.append(_numbers("loss per microbatch", losses, made, exact=exact, bound=LOSS_BOUND))
    findings.append(
        _numbers("loss", None if kept is None else kept.losses, summary.losses, exact=exact, bound=LOSS_BOUND)
    )
    findings.append(
        _numbers(
            "grad_norm",
            None if kept is None else kept.grad_norms,
            summary.grad_norms,
            exact=exact,
            bound=NORM_BOUND,
            relative=True,
        )
    )
    return findings


def _in_replay_order(kept: Sequence[Sequence[float]], work: StepWork) -> list[float]:
    """Return losses of microbatches of all shards, in the order in which the replay meets them."""
    plan = work.step.plan
    assert plan is not None and work.plan is not None, "there are rows"
    if work.plan.num_ranks == len(kept):
        return [loss for part in kept for loss in part]
    starts = [sum(plan.steps[:number]) for number in range(len(plan.steps))]
    return [
        loss
        for start, count in zip(starts, plan.steps, strict=True)
        for part in kept
        for loss in part[start : start + count]
    ]


def _weights(outcome: SnapshotOutcome | None, rank: RankStep, settings: ReplaySettings) -> ReplayFinding:
    made, kept = rank.weights, None if outcome is None else outcome.weights
    assert made is not None, "rank 0 makes the digest"
    if kept is None:
        return ReplayFinding(stage="weights", kept="not kept", replayed=made.bits[:12], agrees=None)
    is_same, apart = kept.bits == made.bits, kept.distance(made)
    agrees = is_same if settings.is_exact else apart <= WEIGHTS_BOUND
    furthest = kept.furthest(made)
    difference = "" if is_same else f"{apart:.2g} of their norm apart" + (f", most in {furthest}" if furthest else "")
    return ReplayFinding(
        stage="weights", kept=kept.bits[:12], replayed=made.bits[:12], agrees=agrees, difference=difference
    )


def _error(step: StepSnapshot, rank: RankStep) -> ReplayFinding:
    kept, made = step.error, rank.error
    shown = "none" if kept is None else f"{kept.kind} in {kept.stage}"
    replayed = "none" if made is None else f"{made.kind} in {made.stage}: {made.text}"
    if made is None and kept is not None and kept.kind != "NonFiniteError":
        # An interrupt or a worker that died is not in the numbers.
        return ReplayFinding(stage="error", kept=f"{shown}: {kept.text}", replayed=replayed, agrees=None)
    agrees = kept is not None and made is not None and (kept.kind, kept.stage) == (made.kind, made.stage)
    return ReplayFinding(
        stage="error", kept=shown, replayed=replayed, agrees=agrees, difference="" if agrees else "another"
    )


def _no_update(work: StepWork) -> bool | None:
    outcome = work.step.outcome
    return None if outcome is None else not outcome.losses


def _what_update(step: StepSnapshot) -> str:
    if step.outcome is None:
        return "not kept"
    return f"{len(step.outcome.losses)} optimizer steps" if step.outcome.losses else "none"


def _vector(stage: str, kept: torch.Tensor | None, made: torch.Tensor) -> ReplayFinding:
    shown = f"{len(made)} numbers"
    if kept is None or kept.shape != made.shape:
        is_none = kept is None
        return ReplayFinding(
            stage=stage,
            kept="not kept" if kept is None else f"{len(kept)} numbers",
            replayed=shown,
            agrees=None if is_none else False,
            difference="" if is_none else "another number of rows",
        )
    different = int((kept != made).sum())
    text = f"{different} of {len(made)}, at most {float((kept - made).abs().max()):.2g}" if different else ""
    return ReplayFinding(stage=stage, kept=shown, replayed=shown, agrees=different == 0, difference=text)


def _number(stage: str, kept: float | None, made: float, *, exact: bool, bound: float) -> ReplayFinding:
    return _numbers(stage, None if kept is None else [kept], [made], exact=exact, bound=bound)


def _numbers(
    stage: str,
    kept: Sequence[float] | None,
    made: Sequence[float],
    *,
    exact: bool,
    bound: float,
    relative: bool = False,
) -> ReplayFinding:
    shown = _listed(made)
    if kept is None:
        return ReplayFinding(stage=stage, kept="not kept", replayed=shown, agrees=None)
    if len(kept) != len(made):
        return ReplayFinding(
            stage=stage, kept=_listed(kept), replayed=shown, agrees=False, difference="another number of them"
        )
    apart = [_apart(a, b, relative=relative) for a, b in zip(kept, made, strict=True)]
    worst = max(apart, default=0.0)
    is_same = all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(kept, made, strict=True))
    agrees = is_same if exact else worst <= bound
    difference = "" if is_same else f"at most {worst:.2g}" + (" relative" if relative else "")
    return ReplayFinding(stage=stage, kept=_listed(kept), replayed=shown, agrees=agrees, difference=difference)


def _apart(kept: float, made: float, *, relative: bool) -> float:
    if kept == made:
        return 0.0
    scale = abs(kept) if relative else max(1.0, abs(kept))
    found = abs(kept - made) / scale if scale else math.inf
    return math.inf if math.isnan(found) else found


def _listed(numbers: Sequence[float]) -> str:
    shown = ", ".join(f"{number:.9g}" for number in numbers[:SHOWN])
    return shown if len(numbers) <= SHOWN else f"{shown}, ... ({len(numbers)})"


def _shape(microbatches: Sequence[Sequence[Sequence[int]]]) -> str:
    return f"{len(microbatches)} x {len(microbatches[0]) if microbatches else 0} microbatches"


def _first_difference(kept: Sequence[Sequence[Sequence[int]]], made: PackPlan) -> str:
    for rank, (one, other) in enumerate(zip(kept, made.microbatches, strict=False)):
        for number, (rows, others) in enumerate(zip(one, other, strict=False)):
            if tuple(rows) != tuple(others):
                return f"shard {rank}, microbatch {number}: rows {list(rows)[:SHOWN]}, got {list(others)[:SHOWN]}"
    return "shards, steps or width"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFindings:
    """One step."""

    number: int
    findings: tuple[ReplayFinding, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayReport:
    """All steps from the start to the one that was asked for."""

    run: str
    step: int
    start: str
    how: str
    """Worker and layout."""
    differences: tuple[str, ...]
    """Reasons for which the numbers need not be the same to the last bit."""
    what_if: tuple[str, ...]
    """Settings over the kept config: with them differences are the answer, not a fault."""
    notes: tuple[str, ...]
    steps: tuple[StepFindings, ...]
    seconds: float
    sites: RecordingComparison | None = None
    """The records of the last step against those of its replay; None where the run has none."""

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
        """The verdict of the replay."""
        looked_at = [finding.agrees for step in self.steps for finding in step.findings]
        if all(agrees is None for agrees in looked_at):
            return Verdict.VACUOUS
        if self.what_if:
            return Verdict.PASS
        of_sites = Verdict.PASS if self.sites is None else self.sites.verdict
        if self.first_difference is not None or of_sites is Verdict.MISMATCH:
            return Verdict.MISMATCH
        return Verdict.INCOMPLETE if None in looked_at and of_sites is Verdict.PASS else of_sites

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report."""
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
        if self.sites is not None:
            yield f"recorded sites of step {self.step}, A as the run recorded them, B replayed"
            yield from (f"  {line}" for line in self.sites.lines())
        yield f"{self.verdict.label} in {self.seconds:.1f} s"

    def as_record(self) -> dict[str, object]:
        """Return the report as JSON-like values."""
        return {
            **asdict(replace(self, sites=None)),
            "verdict": self.verdict.label,
            "sites": None if self.sites is None else self.sites.as_record(),
            "first_difference": None
            if self.first_difference is None
            else {"step": self.first_difference[0], "stage": self.first_difference[1]},
        }

    def _word(self, finding: ReplayFinding) -> str:
        if finding.agrees is None:
            return "not kept"
        if not finding.agrees:
            return "what if" if self.what_if else "DIFFERS"
        return "within" if finding.difference else "equal"


def _both(finding: ReplayFinding) -> str:
    shown = finding.kept if finding.kept == finding.replayed else f"{finding.kept} -> {finding.replayed}"
    return f"{shown}; {finding.difference}" if finding.difference else shown
