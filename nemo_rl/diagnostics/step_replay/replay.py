"""`replay_step`: the kept steps of a run, from the last checkpoint on, once more through the optimizer.

replay_step
  |- read_link, find_chain     which steps, from where (chain)
  |- replay_settings           config, worker, layout (settings)
  |- make_work                 advantages and plans, as the driver made them (work)
  |- replay_rank               every rank: worker, passes, updates (rank)
  `- compare_step              kept against replayed (compare)
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nemo_rl.algorithms.kept_steps.folder import RECORDS, StepsFolder
from nemo_rl.algorithms.kept_steps.record import StepSnapshot, StepStatus
from nemo_rl.algorithms.losses.policy_loss import build_loss
from nemo_rl.diagnostics.compare.folders import compare_folders
from nemo_rl.diagnostics.compare.side import ComparedSite
from nemo_rl.diagnostics.step_replay.chain import (
    ReplayChain,
    ReplayProblem,
    ReplayRequest,
    checkpoints_of,
    damage_named,
    find_chain,
    read_link,
)
from nemo_rl.diagnostics.step_replay.compare import compare_step
from nemo_rl.diagnostics.step_replay.rank import RankJob
from nemo_rl.diagnostics.step_replay.settings import ReplaySettings, replay_settings
from nemo_rl.diagnostics.step_replay.work import StepWork, make_work
from nemo_rl.diagnostics.verdict import Comparison, Verdict
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.errors import NonFiniteError, UnsupportedFormat
from nemo_rl.models.policy.recording import RecordSpec, recorded_model
from nemo_rl.records.reader import CorruptRecord, TensorRecord, read_folder
from nemo_rl.records.selector import Selector

__all__ = ["first_non_finite", "replay_step"]


def first_non_finite(folder: Path) -> str | None:
    """Return the first NaN or infinity in words; None where all is finite. What ended early is read as far as it goes.

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
            where = f"microbatch {record.place.microbatch}, rank {record.rank}{sample}"
            return f"{site.label}, {where} ({int(is_bad.sum())} values that are not finite)"
    return None


def _order(site: ComparedSite, record: TensorRecord) -> tuple[object, ...]:
    """Sort records as the passes of a step make them."""
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
        if is_nan:
            report = replace(report, notes=(*report.notes, *_first_nan(ours)))
        if theirs is None or not ours.is_dir():
            return report
        return replace(report, recorded=compare_folders(theirs, ours, limits=request.limits))


def _selector(recorded: Path) -> str:
    """Return the sites that a run has recorded; all where its manifest is damaged, which the comparison says."""
    try:
        return read_folder(recorded).manifest.selector
    except (CorruptRecord, UnsupportedFormat):
        return EVERYTHING


def _first_nan(folder: Path) -> tuple[str, ...]:
    """Return the remark on the first NaN; empty where no pass was run."""
    if not folder.is_dir():
        return ()
    found = first_non_finite(folder)
    return ("every recorded site is finite",) if found is None else (f"first NaN or infinity: {found}",)


def _replay(request: ReplayRequest, target: StepSnapshot) -> Comparison:
    started = time.perf_counter()
    settings = replay_settings(request, target)
    checkpoints = checkpoints_of(settings.config, request.run)
    chain = find_chain(request.run, request.step, checkpoints, reads_optimizer=not settings.is_other_worker)
    works = [make_work(link, settings, only=request.rows if link is chain.links[-1] else ()) for link in chain.links]
    job = RankJob(
        settings=settings,
        chain=chain,
        steps=tuple(works),
        loss_fn=build_loss(settings.config),
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
        notes=(*_notes(request, chain, settings), *_unmeasured(works)),
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
    sizes = {"dp": layout.dp, "cp": layout.cp, "tp": layout.tp, "pp": layout.pp}
    axes = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    ranks = "1 rank" if layout.world_size == 1 else f"{layout.world_size} ranks ({axes})"
    return f"{settings.worker} worker, {ranks}"


def _unmeasured(works: Sequence[StepWork]) -> list[str]:
    return [
        f"step {work.step.number} ended before its log-probabilities were kept: advantages and weights are those of "
        "its rewards alone"
        for work in works
        if work.lacks_tokens
    ]


def _notes(request: ReplayRequest, chain: ReplayChain, settings: ReplaySettings) -> tuple[str, ...]:
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
    return tuple(notes)
