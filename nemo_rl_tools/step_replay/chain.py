"""`ReplayRequest` and `ReplayChain`: what is to be replayed, the kept steps that lead to it, and their start.

`SnapshotColumns` are the columns of one of these steps, as dense batches of the rows that a rank works on.

Invariant: the steps of a chain are those that the run did between its start and the target, all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from nemo_rl.algorithms.kept_steps.folder import (
    ROLLOUT_FILE,
    STEP_FILE,
    UPDATE_FILE,
    SnapshotFolder,
    StepsFolder,
    StepSnapshot,
    StepStatus,
)
from nemo_rl.config.run import CheckpointingConfig
from nemo_rl.data_plane.chunks.ragged import materialize
from nemo_rl.data_plane.column_io import is_listed, rows_as_list
from nemo_rl.data_plane.schema import ROUTE_FIELDS, FieldSpec
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.errors import CheckpointError, SchemaMismatch, UnsupportedFormat, UserError, name_some, shorten
from nemo_rl.jagged import nest, offsets_of
from nemo_rl.models.policy.routes.worker_replay import ROUTES
from nemo_rl.routes.columns import decode_routes
from nemo_rl.routes.shape import MISSING, RouteShape
from nemo_rl.utils.checkpoint import Checkpoint
from nemo_rl.utils.remote_checkpoints import fetched, open_checkpoints
from nemo_rl_tools.compare.limits import DEFAULT, ToleranceRules
from nemo_rl_tools.verdict import Verdict

__all__ = [
    "ChainLink",
    "ReplayChain",
    "ReplayProblem",
    "ReplayRequest",
    "SnapshotColumns",
    "Worker",
    "checkpoints_of",
    "damage_named",
    "find_chain",
    "read_link",
    "rows_named",
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
    limits: ToleranceRules = DEFAULT


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
        return "the initial model" if self.checkpoint is None else f"checkpoint {self.checkpoint.place}"


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


def rows_named(step: StepSnapshot, keys: Sequence[str]) -> list[int]:
    """Return the rows of these keys, counted in the order of the rollout.

    Raises:
        ReplayProblem: the step has no such row.
    """
    assert step.rows is not None, "a step without rows has no keys"
    places = {key: row for row, key in enumerate(step.rows.keys)}
    unknown = [key for key in keys if key not in places]
    if unknown:
        raise ReplayProblem(
            f"step {step.number} has no row {name_some(unknown)}; rows: {name_some(step.rows.keys)}",
            verdict=Verdict.USAGE,
        )
    return [places[key] for key in keys]


@contextmanager
def damage_named() -> Iterator[None]:
    """Within it, a damaged or foreign file is the problem of the replay."""
    try:
        yield
    except UnsupportedFormat as error:
        raise ReplayProblem(str(error), verdict=Verdict.UNSUPPORTED) from error
    except (CheckpointError, SchemaMismatch) as error:
        raise ReplayProblem(str(error), verdict=Verdict.CORRUPT) from error


def checkpoints_of(config: CheckpointingConfig, run: Path) -> list[Checkpoint]:
    """Complete checkpoints of the run, in order of their steps."""
    # A log folder may have been moved with its checkpoints.
    manager = open_checkpoints(config, run)
    return [found for found in manager.all() if manager.problem(found, found.manifest, reads_files=False) is None]


def find_chain(run: Path, number: int, checkpoints: list[Checkpoint], *, reads_optimizer: bool) -> ReplayChain:
    """Return the shortest way to the target.

    Args:
        reads_optimizer: False for a worker that cannot read the optimizer's state of the run's checkpoints: then the
            chain starts at the initial model.

    Raises:
        ReplayProblem: it or steps in between were not kept, did not end, or are damaged.
    """
    kept = {folder.number: folder for folder in StepsFolder(run).all()}
    target = read_link(run, number)
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
            with damage_named():
                found = None if checkpoint is None else fetched(checkpoint)
            problem = None if found is None else found.manifest.damage(found.path)
            if found is not None and problem is not None:
                raise ReplayProblem(f"checkpoint {found.place}: {problem}", verdict=Verdict.CORRUPT)
            return ReplayChain(links=tuple(links), checkpoint=found, with_optimizer=with_optimizer)
        missing = unfinished
    why = "" if reads_optimizer else " (this worker cannot read the optimizer's state of the run's checkpoints)"
    there = name_some(found.step for found in checkpoints) or "none"
    raise ReplayProblem(
        f"step {number} cannot be reached: step {name_some(missing)} before it was not kept whole{why}; checkpoints of "
        f"steps: {there}. Raise diagnostics.keep_steps.max_bytes, or save more often and with the optimizer",
        verdict=Verdict.INCOMPLETE,
    )


def _read(folder: SnapshotFolder) -> ChainLink:
    with damage_named():
        step = folder.read()
        problem = _contradiction(step, folder.number)
        if problem is not None:
            raise CheckpointError(f"{folder.path / STEP_FILE}: {problem}")
    return ChainLink(folder=folder, step=step)


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


INPUT_IDS = "input_ids"


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotColumns:
    """The columns of one step; rows are counted in the order of the rollout."""

    keys: tuple[str, ...]
    lengths: tuple[int, ...]
    path: Path
    """Folder of the step."""
    rollout: dict[str, torch.Tensor]
    update: dict[str, torch.Tensor]
    places: dict[int, int]
    """Row -> its place in the columns of the update."""
    lists: tuple[str, ...] = ()
    """Columns of which a batch holds one tensor per row."""

    @classmethod
    def read(cls, folder: SnapshotFolder, step: StepSnapshot, *, extras: Sequence[FieldSpec] = ()) -> SnapshotColumns:
        """
        Raises:
            CheckpointError: a file is torn, or holds columns of other rows than the step's.
        """
        assert step.rows is not None, "a step without rows has no columns"
        rollout, update = folder.columns()
        for name, columns, count in (
            (ROLLOUT_FILE, rollout, len(step.rows.keys)),
            (UPDATE_FILE, update, len(step.trained or ())),
        ):
            for column, values in columns.items():
                found = values.size(0) if values.dim() else 0
                if found != count:
                    raise CheckpointError(
                        f"{folder.path / name}: column {column!r}: expected {count} rows as in {STEP_FILE}, got {found}"
                    )
        if rollout and INPUT_IDS not in rollout:
            raise CheckpointError(
                f"{folder.path / ROLLOUT_FILE}: expected the columns of a rollout with {INPUT_IDS!r}, got "
                f"{', '.join(sorted(rollout))}"
            )
        return cls(
            keys=step.rows.keys,
            lengths=step.rows.lengths,
            path=folder.path,
            rollout=rollout,
            update=update,
            places={row: place for place, row in enumerate(step.trained or ())},
            lists=tuple(spec.name for spec in extras if is_listed(spec)),
        )

    def has(self, name: str, rows: Sequence[int]) -> bool:
        """Return whether the column was kept of all these rows."""
        if name in self.update:
            return all(row in self.places for row in rows)
        return name in self.rollout

    def rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        """Return the column of these rows, jagged where it is kept so; of the update where it is there."""
        in_update = name in self.update
        if not in_update and name not in self.rollout:
            raise CheckpointError(f"{self.path}: neither {ROLLOUT_FILE} nor {UPDATE_FILE} has the column {name!r}")
        column = self.update[name] if in_update else self.rollout[name]
        index = [self.places[row] for row in rows] if in_update else list(rows)
        if not column.is_nested:
            return column[torch.tensor(index, dtype=torch.int64)]
        offsets, values = offsets_of(column).tolist(), column.values()
        parts = [values[offsets[at] : offsets[at + 1]] for at in index]
        return nest(torch.cat(parts), torch.tensor([len(part) for part in parts], dtype=torch.int64))

    def batch(self, fields: Sequence[str], rows: Sequence[int], *, width: int, pad_token_id: int) -> BatchedDataDict:
        columns = {name: self.rows(name, rows) for name in fields}
        listed = {name: rows_as_list(columns.pop(name)) for name in self.lists if name in columns}
        batch = materialize(columns, pad_values={"input_ids": float(pad_token_id)}, pad_to=width)
        batch.update(listed)
        batch["keys"] = [self.keys[row] for row in rows]
        return batch

    def routes(self, rows: Sequence[int], shape: RouteShape, *, width: int | None = None) -> torch.Tensor | None:
        """Return the kept routes, decoded `[N, T, L, K]` int16, -1 where one is missing; None where none were kept."""
        names = [name for name in ROUTE_FIELDS if self.has(name, rows)]
        if not names:
            return None
        routes = decode_routes({name: self.rows(name, rows) for name in names}, shape)
        return materialize({ROUTES: routes}, pad_values={ROUTES: float(MISSING)}, pad_to=width).tensor(ROUTES)
