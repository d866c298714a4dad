"""`ReplayRequest` and `ReplayChain`: what is to be replayed, the kept steps that lead to it, and their start.

Invariant: the steps of a chain are those that the run did between its start and the target, all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nemo_rl.algorithms.kept_steps.folder import STEP_FILE, SnapshotFolder, StepsFolder
from nemo_rl.algorithms.kept_steps.record import StepSnapshot, StepStatus
from nemo_rl.config.schema import MasterConfig
from nemo_rl.diagnostics.verdict import Verdict
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.errors import CheckpointError, SchemaMismatch, UserError, name_some, shorten
from nemo_rl.utils.checkpoint import Checkpoint, CheckpointManager

__all__ = [
    "ChainLink",
    "ReplayChain",
    "ReplayProblem",
    "ReplayRequest",
    "Worker",
    "checkpoints_of",
    "find_chain",
    "read_link",
    "read_target",
]

MOST_RANKS = 1 << 16
Worker = Literal["dtensor", "megatron"]


class ReplayProblem(UserError):
    """A step cannot be replayed; `verdict` says for which kind of reason."""

    def __init__(self, text: str, *, verdict: Verdict) -> None:
        super().__init__(text)
        self.verdict = verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRequest:
    """The step of a run to replay, and the options of the replay."""

    run: Path
    """`logger.log_dir` of the run."""
    step: int
    in_one_process: bool = False
    """False: as many ranks as the run had, in its layout."""
    worker: Worker | None = None
    """The worker, or None for that of the run."""
    overrides: tuple[str, ...] = ()
    """`KEY=VALUE` of the config: what would have been."""
    rows: tuple[str, ...] = ()
    """Keys of rows of the step: only these, without an update of theirs."""
    dump: str | None = None
    """Sites to record in the passes of `step`."""
    allows_code: bool = False
    """True where modules outside the library that the kept config names may be imported."""
    out: Path | None = None
    """Folder of these records; they need one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainLink:
    """One kept step."""

    folder: SnapshotFolder
    step: StepSnapshot


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayChain:
    """The kept steps from a start to the target."""

    links: tuple[ChainLink, ...]
    checkpoint: Checkpoint | None
    """The checkpoint of the start, or None for the initial model."""
    with_optimizer: bool = True

    @property
    def target(self) -> StepSnapshot:
        return self.links[-1].step

    @property
    def start(self) -> str:
        """The name of the start, shown in reports."""
        return "the initial model" if self.checkpoint is None else f"checkpoint {self.checkpoint.path}"


def read_target(run: Path, number: int) -> StepSnapshot:
    """Return the record of the step that is asked for; raises as `read_link`."""
    return read_link(run, number).step


def read_link(run: Path, number: int) -> ChainLink:
    """Find the step that is asked for.

    Raises:
        ReplayProblem: it is not there, or damaged.
    """
    kept = {folder.number: folder for folder in StepsFolder(run).all()}
    if number not in kept:
        there = name_some(kept) if kept else "none; set diagnostics.keep_steps.enabled=true in the run"
        raise ReplayProblem(
            f"step {number} was not kept in {StepsFolder(run).path}; kept steps: {there}",
            verdict=Verdict.INCOMPLETE if kept else Verdict.USAGE,
        )
    return _read(kept[number])


def checkpoints_of(config: MasterConfig, run: Path) -> list[Checkpoint]:
    """Complete checkpoints of the run, in order of their steps."""
    # A log folder may have been moved with its checkpoints.
    folder = config.checkpointing.checkpoint_dir or run / "checkpoints"
    manager = CheckpointManager(folder, keep_top_k=None, metric_name="")
    return [found for found in manager.all() if found.manifest.missing(found.path) is None]


def find_chain(run: Path, number: int, checkpoints: list[Checkpoint], *, reads_optimizer: bool) -> ReplayChain:
    """Return the shortest way to the target.

    Args:
        reads_optimizer: False for a worker that cannot read the optimizer's state of the run's checkpoints: then the
            chain starts at the initial model.

    Raises:
        ReplayProblem: steps in between were not kept, did not end, or are damaged.
    """
    kept = {folder.number: folder for folder in StepsFolder(run).all()}
    target = _read(kept[number])
    usable = [found for found in checkpoints if found.step < number and reads_optimizer]
    resumed = target.step.run.started_from
    starts: list[Checkpoint | None] = [None, *usable]
    missing: list[int] = []
    for checkpoint in reversed(starts):
        first = 1 if checkpoint is None else checkpoint.step + 1
        missing = [step for step in range(first, number) if step not in kept]
        if missing:
            continue
        is_resume = checkpoint is not None and checkpoint.step == resumed
        with_optimizer = target.step.run.with_optimizer if is_resume else True
        if checkpoint is not None and with_optimizer and not checkpoint.has_optimizer:
            continue
        links = [*(_read(kept[step]) for step in range(first, number)), target]
        unfinished = [link.step.number for link in links[:-1] if link.step.status is not StepStatus.COMPLETE]
        if not unfinished:
            problem = None if checkpoint is None else checkpoint.manifest.damage(checkpoint.path)
            if checkpoint is not None and problem is not None:
                raise ReplayProblem(f"checkpoint {checkpoint.path}: {problem}", verdict=Verdict.CORRUPT)
            return ReplayChain(links=tuple(links), checkpoint=checkpoint, with_optimizer=with_optimizer)
        missing = unfinished
    why = "" if reads_optimizer else " (this worker cannot read the optimizer's state of the run's checkpoints)"
    there = name_some(found.step for found in checkpoints) or "none"
    raise ReplayProblem(
        f"step {number} cannot be reached: step {name_some(missing)} before it was not kept whole{why}; checkpoints of "
        f"steps: {there}. Raise diagnostics.keep_steps.max_bytes, or save more often and with the optimizer",
        verdict=Verdict.INCOMPLETE,
    )


def _read(folder: SnapshotFolder) -> ChainLink:
    try:
        step = folder.read()
        problem = _contradiction(step, folder.number)
        if problem is not None:
            raise CheckpointError(f"{folder.path / STEP_FILE}: {problem}")
        return ChainLink(folder=folder, step=step)
    except SchemaMismatch as error:
        is_other = "of another version" in str(error)
        raise ReplayProblem(str(error), verdict=Verdict.UNSUPPORTED if is_other else Verdict.CORRUPT) from error
    except CheckpointError as error:
        raise ReplayProblem(str(error), verdict=Verdict.CORRUPT) from error


def _contradiction(step: StepSnapshot, number: int) -> str | None:
    """Return how a record contradicts itself or its folder's name, in words; a checksum finds no edit."""
    if step.number != number:
        return f"number: expected {number} as its folder is named, got {step.number}"
    run = step.run
    section = run.config.get("grpo")
    seed = section.get("seed") if isinstance(section, Mapping) else None
    if isinstance(seed, int) and seed != step.seed:
        return f"seed: expected grpo.seed={seed} of its config, got {step.seed}"
    if not 1 <= run.world_size <= MOST_RANKS:
        return f"run.world_size: expected 1 to {MOST_RANKS} workers, got {run.world_size}"
    if WorkerPass.TRAIN not in run.stages or len(set(run.stages)) != len(run.stages):
        return f"run.stages: expected different stages with {WorkerPass.TRAIN.value!r}, got {list(run.stages)}"
    rows = step.rows
    if rows is None:
        return None if step.trained is None else "trained: there are no rows"
    columns = {"lengths": rows.lengths, "rewards": rows.rewards, "truncated": rows.truncated, **rows.tags}
    columns |= {"response_lengths": rows.response_lengths, **rows.components, **(rows.conversations or {})}
    for name, values in columns.items():
        if len(values) != len(rows.keys):
            return f"rows.{name}: expected {len(rows.keys)} values, one for each key, got {len(values)}"
    trained = step.trained or ()
    if len(set(trained)) != len(trained) or not all(0 <= row < len(rows.keys) for row in trained):
        return f"trained: expected different rows below {len(rows.keys)}, got {shorten(str(trained))}"
    for name, plan in (("plan", step.plan), ("logprob_plan", step.logprob_plan)):
        if plan is None:
            continue
        planned = [row for shard in plan.microbatches for rows_of in shard for row in rows_of]
        if not set(planned) <= set(range(len(trained))) or len(set(planned)) != len(planned):
            return f"{name}: expected different rows below {len(trained)}, got {shorten(str(planned))}"
    return None
