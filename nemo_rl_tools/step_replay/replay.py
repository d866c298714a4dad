"""`replay_step`: the kept steps of a run, from the last checkpoint on, once more through the optimizer.

replay_step
  |- read_link, find_chain     which steps, from where (chain)
  |- replay_settings           config, worker, layout (settings)
  |- make_work                 advantages and plans, as the driver made them (work)
  |- replay_rank               every rank: worker, passes, updates (rank)
  `- compare_step              kept against replayed

`compare_step` gives the stages of a step as sites of a `Comparison`. In the layout of the run every number must be the
same to the last bit; in another layout or with the other worker columns, routes and plans must be, and the others lie
within the limits of `ToleranceRules.of_stage`.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from nemo_rl.algorithms.kept_steps.folder import RECORDS, SnapshotOutcome, StepsFolder, StepSnapshot, StepStatus
from nemo_rl.algorithms.losses.policy_loss import build_loss
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.errors import NonFiniteError, UnsupportedFormat
from nemo_rl.models.policy.interfaces import TOKEN_ADVANTAGES
from nemo_rl.models.policy.recording import RecordSpec, recorded_model
from nemo_rl.models.policy.tq_policy import TrainSummary, summarize
from nemo_rl.records.reader import CorruptRecord, TensorRecord, read_folder
from nemo_rl.records.sites import Selector, SiteKind
from nemo_rl_tools.compare.folders import compare_folders
from nemo_rl_tools.compare.side import ComparedSite
from nemo_rl_tools.step_replay.chain import (
    ReplayChain,
    ReplayProblem,
    ReplayRequest,
    SnapshotColumns,
    checkpoints_of,
    damage_named,
    find_chain,
    read_link,
)
from nemo_rl_tools.step_replay.rank import RankJob, RankStep, ReplayedValues
from nemo_rl_tools.step_replay.settings import ReplaySettings, replay_settings
from nemo_rl_tools.step_replay.work import StepWork, make_work
from nemo_rl_tools.verdict import Comparison, SiteCheck, Verdict

__all__ = ["first_non_finite", "replay_step"]


def first_non_finite(folder: Path) -> str:
    """Return the first NaN or infinity in words, or that all is finite. What ended early is read as far as it goes.

    Raises:
        UserError: no folder of records.
        CorruptRecord: a record is not what was written.
    """
    sites = [(ComparedSite.of_place(record.place), record) for record in read_folder(folder).records]
    for site, record in sorted(sites, key=lambda pair: _order(*pair)):
        value = record.load()
        if value.is_floating_point() and not bool(value.isfinite().all()):
            is_bad, tokens, sample = ~value.isfinite(), record.tokens(), ""
            if tokens is not None and len(tokens):
                row = int(is_bad.reshape(len(is_bad), -1).any(1).nonzero()[0])
                key, position = tokens.keys[int(tokens.row_R[row])], int(tokens.position_R[row])
                sample = f", sample {key!r}, position {position}"
            where = f"{site.label}, microbatch {record.place.microbatch}, rank {record.rank}{sample}"
            return f"first NaN or infinity: {where} ({int(is_bad.sum())} values that are not finite)"
    return "every recorded site is finite"


def _order(site: ComparedSite, record: TensorRecord) -> tuple[object, ...]:
    phase, *_, place, _ = site.order
    return phase, site.update, record.place.microbatch, place, record.rank, record.seq


EVERYTHING = "*"


def replay_step(request: ReplayRequest) -> Comparison:
    """Replay a step and compare it, site by site where the run has recorded it too.

    Of a step that failed with a NaN, name the site where it came from.

    Raises:
        ReplayProblem: it cannot be replayed; says why. ConfigError: an override is wrong.
        ChildFailed: a rank ended with something that is no error of a step.
    """
    target = read_link(request.run, request.step).step
    is_nan = target.error is not None and target.error.kind == NonFiniteError.__name__
    # Tensors of all rows say nothing of some of them, and those of the run nothing of another config.
    is_same = not request.rows and not request.overrides
    theirs = StepsFolder(request.run).records().get(request.step) if is_same else None
    if request.dump is not None or not (is_nan or theirs):
        return _replay(request, target)
    with tempfile.TemporaryDirectory(prefix="nemo_rl_replay_") as folder:
        ours = Path(folder) / RECORDS
        sites = EVERYTHING if is_nan or theirs is None else _selector(theirs)
        report = _replay(replace(request, dump=sites, out=ours), target)
        if not ours.is_dir():
            # No pass was run.
            return report
        if is_nan:
            report = replace(report, notes=(*report.notes, first_non_finite(ours)))
        if theirs is None:
            return report
        return replace(report, recorded=compare_folders(theirs, ours, limits=request.limits))


def _selector(recorded: Path) -> str:
    """Return the sites that a run has recorded; all where its manifest is damaged, which the comparison says."""
    try:
        return read_folder(recorded).manifest.selector
    except (CorruptRecord, UnsupportedFormat):
        return EVERYTHING


def _replay(request: ReplayRequest, target: StepSnapshot) -> Comparison:
    started = time.perf_counter()
    settings = replay_settings(request, target)
    checkpoints = checkpoints_of(settings.config.checkpointing, request.run)
    chain = find_chain(request.run, request.step, checkpoints, reads_optimizer=not settings.is_other_worker)
    works = [make_work(link, settings, only=request.rows if link is chain.links[-1] else ()) for link in chain.links]
    job = RankJob(
        settings=settings,
        chain=chain,
        steps=tuple(works),
        loss_fn=build_loss(settings.config.loss_fn, settings.config.grpo),
        stages=target.run.stages,
        train_fields=target.run.train_fields,
        record=_record_spec(request, settings, target),
    )
    with damage_named():
        ranks = job.run()
        sites = [
            check
            for place, work in enumerate(works[: len(ranks[0])])
            for check in compare_step(work, [steps[place] for steps in ranks], settings)
        ]
    return Comparison(
        title=f"replay of step {request.step} of {request.run}: from {chain.start}, {_how(settings)}",
        inexact=settings.differences,
        what_if=request.overrides,
        notes=_notes(request, chain, settings, works),
        sites=sites,
        seconds=time.perf_counter() - started,
    )


def _record_spec(request: ReplayRequest, settings: ReplaySettings, target: StepSnapshot) -> RecordSpec | None:
    if request.dump is None:
        return None
    if request.out is None:
        raise ReplayProblem("--dump: the records need a folder: give --out DIR", verdict=Verdict.USAGE)
    Selector.parse(request.dump)
    return RecordSpec(
        folder=request.out,
        sites=request.dump,
        phases=tuple(phase for phase in WorkerPass if phase in target.run.stages),
        model=recorded_model(settings.policy),
        weights=f"run {request.run}, step {request.step}",
        has_backward=not request.rows,
    )


def _how(settings: ReplaySettings) -> str:
    layout = settings.layout
    axes = ", ".join(f"{name} {size}" for name, size in layout.sizes.items() if size > 1)
    ranks = "1 rank" if layout.world_size == 1 else f"{layout.world_size} ranks ({axes})"
    return f"{settings.worker} worker, {ranks}"


def _notes(
    request: ReplayRequest, chain: ReplayChain, settings: ReplaySettings, works: Sequence[StepWork]
) -> list[str]:
    notes = list(settings.notes)
    status = chain.target.status
    if status is StepStatus.PARTIAL:
        notes.append(f"step {request.step} was in flight when the run ended: it has no outcome to compare with")
    if status is StepStatus.FAILED and chain.target.error is not None:
        notes.append(f"step {request.step} failed in {chain.target.error.stage}: {chain.target.error.text}")
    if request.rows:
        notes.append(f"{len(request.rows)} rows of step {request.step} alone: no update, and no loss to compare with")
    if settings.config.policy.precision != "float32" and not settings.is_exact and not settings.limits.rules:
        notes.append(f"the limits are those of float32, this run computes in {settings.config.policy.precision}")
    return notes + [
        f"step {work.step.number} ended before its log-probabilities were kept: advantages and weights are those of "
        "its rewards alone"
        for work in works
        if work.lacks_tokens
    ]


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
    for stage in (WorkerPass.PREV_LOGPROBS.value, WorkerPass.REFERENCE_LOGPROBS.value):
        found = [rank.logprobs[stage] for rank in ranks if stage in rank.logprobs]
        findings += [_logprobs(stage, found, settings)] if found else []
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


def _plans(work: StepWork) -> Iterator[SiteCheck]:
    for name, kept, made in (
        ("plan", work.step.plan, work.run_plan),
        ("logprob plan", work.step.logprob_plan, work.run_logprob_plan),
    ):
        if kept is None or made is None:
            continue
        difference = "" if kept.digest == made.digest() else _first_difference(kept.microbatches, made)
        a, b = (
            f"{len(plan)} x {len(plan[0]) if plan else 0} microbatches, {digest[:12]}"
            for plan, digest in ((kept.microbatches, kept.digest), (made.microbatches, made.digest()))
        )
        yield SiteCheck(name=name, a=a, b=b, agrees=not difference, difference=difference)


def _routes(ranks: Sequence[RankStep]) -> list[SiteCheck]:
    """Compare routes of the log-probability pass; those of the rollout are columns, and given to the routers."""
    found = [rank.routes for rank in ranks if rank.routes is not None]
    count, different = sum(part.num_values for part in found), sum(part.num_different for part in found)
    text = f"{different} of {count}" if different else ""
    return [_same("routes", f"{count} experts", text)] if found else []


def _logprobs(name: str, found: Sequence[ReplayedValues], settings: ReplaySettings) -> SiteCheck:
    count, different = sum(part.num_values for part in found), sum(part.num_different for part in found)
    if not all(part.has_kept for part in found):
        return _not_kept(name, f"{count} tokens")
    worst = max(found, key=lambda part: part.largest)
    difference = f"{different} of {count} tokens, at most {worst.largest:.2g} ({worst.key})" if different else ""
    limit = settings.limits.of_stage(SiteKind.LOGPROB, phase=name)
    agrees = different == 0 if settings.is_exact else worst.largest <= limit
    return replace(_same(name, f"{count} tokens", difference), agrees=agrees)


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


def _first_difference(kept: Sequence[Sequence[Sequence[int]]], made: PackPlan) -> str:
    for rank, (one, other) in enumerate(zip(kept, made.microbatches, strict=False)):
        for number, (rows, others) in enumerate(zip(one, other, strict=False)):
            if tuple(rows) != tuple(others):
                return f"shard {rank}, microbatch {number}: rows {list(rows)[:SHOWN]}, got {list(others)[:SHOWN]}"
    return "shards, steps or width"
