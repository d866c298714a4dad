"""`compare_step`: the stages of a kept step against those of its replay, as sites of a `Comparison`.

In the layout of the run every number must be the same to the last bit; in another layout or with the other worker
columns, routes and plans must be, and the others lie within the limits of `ToleranceRules.of_stage`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from nemo_rl.algorithms.kept_steps.record import SnapshotOutcome, StepSnapshot
from nemo_rl.diagnostics.step_replay.chain import SnapshotColumns
from nemo_rl.diagnostics.step_replay.rank import RankStep, ReplayedValues
from nemo_rl.diagnostics.step_replay.settings import ReplaySettings
from nemo_rl.diagnostics.step_replay.work import StepWork
from nemo_rl.diagnostics.verdict import SiteCheck
from nemo_rl.distributed.pack_plan import PackPlan
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.models.policy.interfaces import TOKEN_ADVANTAGES
from nemo_rl.models.policy.lm_policy import TrainSummary, summarize
from nemo_rl.records.sites import SiteKind

__all__ = ["compare_step"]

SHOWN = 4
"""Numbers of a stage that a line shows."""


def compare_step(work: StepWork, ranks: Sequence[RankStep], settings: ReplaySettings) -> list[SiteCheck]:
    """Return the stages of a step in their order, as far as it came."""
    return [replace(check, step=work.step.number) for check in _stages(work, ranks, settings)]


def _stages(work: StepWork, ranks: Sequence[RankStep], settings: ReplaySettings) -> list[SiteCheck]:
    if work.error is not None:
        return [_error(work.step, ranks[0])]
    findings = [] if work.is_subset else [*_columns(work), *_plans(work)]
    if not work.trained:
        return [*findings, _no_update(work.step)]
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
        return [*findings, _not_kept("loss of these rows", _listed([summary.loss]))]
    if work.step.error is not None:
        return [*findings, *_update(summary, work, None, settings), _error(work.step, ranks[0])]
    findings += _update(summary, work, work.step.outcome, settings)
    return [*findings, _weights(work.step.outcome, ranks[0], settings)]


def _columns(work: StepWork) -> list[SiteCheck]:
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
    findings = [SiteCheck(name="columns", a=what, b=replayed, agrees=not problems, difference=", ".join(problems))]
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


def _token_advantages(columns: SnapshotColumns, made_NT: torch.Tensor, work: StepWork) -> SiteCheck:
    lengths = [columns.lengths[row] for row in work.trained]
    made = torch.cat([row_T[:length] for row_T, length in zip(made_NT, lengths, strict=True)])
    is_kept = columns.has(TOKEN_ADVANTAGES, work.trained)
    kept = columns.rows(TOKEN_ADVANTAGES, work.trained).values() if is_kept else None
    return _vector(TOKEN_ADVANTAGES, kept, made)


def _plans(work: StepWork) -> list[SiteCheck]:
    findings = []
    for name, kept, made in (
        ("plan", work.step.plan, work.run_plan),
        ("logprob plan", work.step.logprob_plan, work.run_logprob_plan),
    ):
        if kept is None or made is None:
            continue
        difference = "" if kept.digest == made.digest() else _first_difference(kept.microbatches, made)
        a, b = (
            f"{_shape(plan)}, {digest[:12]}"
            for plan, digest in ((kept.microbatches, kept.digest), (made.microbatches, made.digest()))
        )
        findings.append(SiteCheck(name=name, a=a, b=b, agrees=not difference, difference=difference))
    return findings


def _routes(ranks: Sequence[RankStep]) -> list[SiteCheck]:
    """Compare routes of the log-probability pass; those of the rollout are columns, and given to the routers."""
    found = [rank.routes for rank in ranks if rank.routes is not None]
    count, different = sum(part.num_values for part in found), sum(part.num_different for part in found)
    text = f"{different} of {count}" if different else ""
    return [_same("routes", f"{count} experts", text)] if found else []


def _logprobs(name: str, parts: Sequence[ReplayedValues | None], settings: ReplaySettings) -> list[SiteCheck]:
    found = [part for part in parts if part is not None]
    if not found:
        return []
    count, different = sum(part.num_values for part in found), sum(part.num_different for part in found)
    if not all(part.has_kept for part in found):
        return [_not_kept(name, f"{count} tokens")]
    worst = max(found, key=lambda part: part.largest)
    difference = f"{different} of {count} tokens, at most {worst.largest:.2g} ({worst.key})" if different else ""
    limit = settings.limits.of_stage(SiteKind.LOGPROB, phase=name)
    agrees = different == 0 if settings.is_exact else worst.largest <= limit
    return [replace(_same(name, f"{count} tokens", difference), agrees=agrees)]


def _update(
    summary: TrainSummary, work: StepWork, kept: SnapshotOutcome | None, settings: ReplaySettings
) -> list[SiteCheck]:
    exact, losses = settings.is_exact, [loss for part in summary.microbatch_losses for loss in part]
    of_loss, of_norm = (
        settings.limits.of_stage(kind, phase=WorkerPass.TRAIN) for kind in (SiteKind.LOSS, SiteKind.GRAD)
    )
    # A step without outcome has nothing to compare with.
    rate = None if kept is None or kept.learning_rate is None else [kept.learning_rate]
    order = None if kept is None else _in_replay_order(kept.microbatch_losses, work)
    loss, norms = (None, None) if kept is None else (kept.losses, kept.grad_norms)
    return [
        _numbers("learning_rate", rate, [summary.learning_rate], exact=True, bound=0),
        _numbers("loss per microbatch", order, losses, exact=exact, bound=of_loss),
        _numbers("loss", loss, summary.losses, exact=exact, bound=of_loss),
        _numbers("grad_norm", norms, summary.grad_norms, exact=exact, bound=of_norm, relative=True),
    ]


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


def _weights(outcome: SnapshotOutcome | None, rank: RankStep, settings: ReplaySettings) -> SiteCheck:
    made, kept = rank.weights, None if outcome is None else outcome.weights
    assert made is not None, "rank 0 makes the digest"
    if kept is None:
        return _not_kept("weights", made.bits[:12])
    is_same, apart = kept.bits == made.bits, kept.distance(made)
    limit = settings.limits.of_stage(SiteKind.PARAM, phase=WorkerPass.TRAIN)
    agrees = is_same if settings.is_exact else apart <= limit
    furthest = kept.furthest(made)
    difference = "" if is_same else f"{apart:.2g} of their norm apart" + (f", most in {furthest}" if furthest else "")
    return SiteCheck(name="weights", a=kept.bits[:12], b=made.bits[:12], agrees=agrees, difference=difference)


def _error(step: StepSnapshot, rank: RankStep) -> SiteCheck:
    kept, made = step.error, rank.error
    shown = "none" if kept is None else f"{kept.kind} in {kept.stage}"
    replayed = "none" if made is None else f"{made.kind} in {made.stage}: {made.text}"
    if made is None and kept is not None and kept.kind != "NonFiniteError":
        # An interrupt or a worker that died is not in the numbers.
        return SiteCheck(name="error", a=f"{shown}: {kept.text}", b=replayed, agrees=None)
    agrees = kept is not None and made is not None and (kept.kind, kept.stage) == (made.kind, made.stage)
    return SiteCheck(name="error", a=shown, b=replayed, agrees=agrees, difference="" if agrees else "another")


def _no_update(step: StepSnapshot) -> SiteCheck:
    """Compare a step in which the replay has nothing to train."""
    if step.outcome is None:
        return _not_kept("update", "none")
    num = len(step.outcome.losses)
    return SiteCheck(
        name="update",
        a=f"{num} optimizer steps" if num else "none",
        b="none",
        agrees=not num,
        difference="one of them has none" if num else "",
    )


def _not_kept(name: str, made: str) -> SiteCheck:
    return SiteCheck(name=name, a="not kept", b=made, agrees=None)


def _same(name: str, shown: str, difference: str) -> SiteCheck:
    return SiteCheck(name=name, a=shown, b=shown, agrees=not difference, difference=difference)


def _vector(name: str, kept: torch.Tensor | None, made: torch.Tensor) -> SiteCheck:
    shown = f"{len(made)} numbers"
    if kept is None:
        return _not_kept(name, shown)
    if kept.shape != made.shape:
        return replace(_same(name, shown, "another number of rows"), a=f"{len(kept)} numbers")
    different = int((kept != made).sum())
    text = f"{different} of {len(made)}, at most {float((kept - made).abs().max()):.2g}" if different else ""
    return _same(name, shown, text)


def _numbers(
    name: str,
    kept: Sequence[float] | None,
    made: Sequence[float],
    *,
    exact: bool,
    bound: float,
    relative: bool = False,
) -> SiteCheck:
    if kept is None:
        return _not_kept(name, _listed(made))
    check = SiteCheck(name=name, a=_listed(kept), b=_listed(made), agrees=True)
    if len(kept) != len(made):
        return replace(check, agrees=False, difference="another number of them")
    if all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(kept, made, strict=True)):
        return check
    worst = max(_apart(a, b, relative=relative) for a, b in zip(kept, made, strict=True))
    text = f"at most {worst:.2g}{' relative' if relative else ''}"
    return replace(check, agrees=not exact and worst <= bound, difference=text)


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
