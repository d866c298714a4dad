"""`StepsFolder`: what a run has left of each step, and which kept steps fall out under the limit.

    RUN/steps/step_N/
      step.json                  plan, settings, outcome: everything but columns   (`StepSnapshot`)
      rollout.safetensors        columns of the rollout, all rows
      update.safetensors         columns of the update, the trained rows in its order
      conversations.jsonl        replies of environments and tools                 (`ConversationFile`)
      manifest.json              size and checksum of each file above; written last
      records/                   tensors of the policy workers                     (`nemo_rl.records`)
      records/generation/        tensors of the engines

`StepRecorder` writes the kept step, workers and engines write their records; every reader asks here where they are.
Records have a digest for each tensor, and may be removed. Invariant: a step with a manifest is whole; one without was
in flight when its run was killed, or still is.

`StepSnapshot`: what is known of a step besides its columns, as `step.json` holds it.

Written by `StepRecorder`, read by the replay. Invariant: nothing per token is in it, and reading it back gives the same
record: floats to the last bit, NaN included.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError

from nemo_rl.algorithms.run_folder import STEPS
from nemo_rl.data_plane.chunks.tags import TagValue
from nemo_rl.data_plane.column_io import read_column_file
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.distributed.batched_data_dict import Column
from nemo_rl.distributed.packing import DEFAULT_COST, PackPlan
from nemo_rl.errors import CheckpointError, SchemaMismatch, shorten
from nemo_rl.experience.payload import SampleStats
from nemo_rl.models.weight_sync.weights_digest import WeightsDigest
from nemo_rl.utils.checkpoint import MANIFEST_FILE, Manifest
from nemo_rl.utils.files import FileFormat, check_format, read_plain

__all__ = [
    "CONVERSATION_FILE",
    "RECORDS",
    "ROLLOUT_FILE",
    "STEP_FILE",
    "UPDATE_FILE",
    "RunFacts",
    "SnapshotFolder",
    "SnapshotOutcome",
    "SnapshotPlan",
    "SnapshotRows",
    "StepError",
    "StepSnapshot",
    "StepStatus",
    "StepsFolder",
    "read_record",
    "record_text",
]


SCALARS = ("rewards", "truncated", "response_lengths", "components", "conversations", "leaves_none")
"""Columns of rows that are those of `SampleStats.to_json`."""


class StepStatus(Enum):
    """The progress of a step."""

    PARTIAL = "partial"
    """It was in flight when the run was killed, or still is."""
    COMPLETE = "complete"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotPlan:
    """A pack plan without its costs."""

    microbatches: tuple[tuple[tuple[int, ...], ...], ...]
    steps: tuple[int, ...]
    pad_to: int
    packed: bool
    digest: str

    @classmethod
    def of(cls, plan: PackPlan) -> SnapshotPlan:
        return cls(
            microbatches=plan.microbatches,
            steps=plan.steps,
            pad_to=plan.pad_to,
            packed=plan.packed,
            digest=plan.digest(),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotRows:
    """The rows of a step, one entry each, in the order of the rollout's file."""

    keys: tuple[str, ...]
    lengths: tuple[int, ...]
    tags: Mapping[str, tuple[TagValue, ...]]
    versions: Mapping[str, int | tuple[int, ...]]
    """Family -> version in the ledger when the rows were kept."""
    rewards: tuple[float, ...]
    truncated: tuple[bool, ...]
    response_lengths: tuple[int, ...]
    components: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    conversations: Mapping[str, tuple[bool | int | str, ...]] | None = None
    """The columns of `ConversationStats`; None where every row is one response to one prompt."""
    leaves_none: bool = False
    """As in `SampleStats`."""

    @classmethod
    def of(cls, meta: KVBatchMeta, sample_stats: SampleStats) -> SnapshotRows:
        tags = meta.tags or ()
        record = {
            "keys": meta.keys,
            "lengths": meta.sequence_lengths or (),
            "tags": {name: tuple(row[name] for row in tags) for name in (tags[0] if tags else ())},
            "versions": dict(meta.versions),
            **sample_stats.to_json(),
        }
        return TypeAdapter(cls).validate_python(record)

    @property
    def scalars(self) -> SampleStats:
        return SampleStats.from_json({name: getattr(self, name) for name in SCALARS})


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotOutcome:
    """The result of the update; everything is empty for a step that trained no row."""

    losses: tuple[float, ...] = ()
    """Losses of each optimizer step, as are the norms."""
    grad_norms: tuple[float, ...] = ()
    microbatch_losses: tuple[tuple[float, ...], ...] = ()
    """Losses of each data-parallel shard."""
    learning_rate: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the loss, over all microbatches."""
    weights: WeightsDigest | None = None
    """After the step; None: as before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepError:
    """The error that ended a step."""

    kind: str
    """Name of the exception's class."""
    text: str
    stage: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Facts that are the same in every step of a process."""

    config: Mapping[str, object]
    """The resolved config, with folders in place of names on the hub."""
    world_size: int
    """Policy workers."""
    stages: tuple[str, ...]
    train_fields: tuple[str, ...]
    """Columns that training reads, routes apart."""
    cost: tuple[float, float] = DEFAULT_COST
    """(a, b) of the cost by which rows were shared among the ranks."""
    started_from: int | None = None
    """Step of the checkpoint that the process resumed from; None: the initial model."""
    with_optimizer: bool = True
    """True when it took the optimizer's state from there."""
    packages: Mapping[str, str] = field(default_factory=dict)
    identity: Mapping[str, str] = field(default_factory=dict)
    """Digests of data, model, tokenizer, chat template and reward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSnapshot:
    """One step.

    Example:
        >>> step = StepSnapshot(number=3, partition="train", prompts=(7,), uids=("a",), keys=("a_g0", "a_g1"),
        ...                 policy_version=2, run=RunFacts(config={}, world_size=1, stages=(), train_fields=()))
        >>> read_record(record_text(step)) == step, step.status
        (True, <StepStatus.PARTIAL: 'partial'>)
    """

    format: int = FileFormat.STEP.version
    number: int
    status: StepStatus = StepStatus.PARTIAL
    partition: str
    prompts: tuple[int, ...]
    ordinals: tuple[int, ...] = ()
    """Places of the prompts in the stream; with `seed` they decide the seeds of the rows. Empty in a record of a run
    whose seeds came from its steps."""
    uids: tuple[str, ...]
    keys: tuple[str, ...]
    """Keys of all rows that the step could put."""
    weight_version: int | None = None
    policy_version: int
    seed: int = 0
    """`grpo.seed`."""
    run: RunFacts
    rows: SnapshotRows | None = None
    """The rows, or None when the rollout was not done."""
    trained: tuple[int, ...] | None = None
    """Rows of the update, in its order: indices into the rows. None: not decided yet, or none has a gradient."""
    plan: SnapshotPlan | None = None
    """The plan of the update, in indices into `trained`."""
    logprob_plan: SnapshotPlan | None = None
    update_versions: Mapping[str, int | tuple[int, ...]] = field(default_factory=dict)
    """Family -> version of the columns of the trained rows, when they were kept."""
    outcome: SnapshotOutcome | None = None
    error: StepError | None = None

    def ended(self, *, outcome: SnapshotOutcome | None = None, error: StepError | None = None) -> StepSnapshot:
        status = StepStatus.COMPLETE if error is None else StepStatus.FAILED
        return replace(self, outcome=outcome, error=error, status=status)


_ADAPTER = TypeAdapter(StepSnapshot)


def record_text(step: StepSnapshot) -> str:
    """The content of `step.json`."""
    return json.dumps(_ADAPTER.dump_python(step, mode="json"), separators=(",", ":"))


def read_record(text: str, *, where: str = "step.json") -> StepSnapshot:
    """The inverse of `record_text`.

    Raises:
        SchemaMismatch: damaged. UnsupportedFormat: of another version.
    """
    try:
        found = json.loads(text)
        if isinstance(found, dict) and "format" in found:
            check_format(FileFormat.STEP, found["format"], where=where)
        return _ADAPTER.validate_python(found)
    except (ValidationError, ValueError, RecursionError) as error:
        raise SchemaMismatch(f"{where} is damaged: {shorten(str(error))}") from error


ROLLOUT_FILE, UPDATE_FILE, STEP_FILE = "rollout.safetensors", "update.safetensors", "step.json"
CONVERSATION_FILE = "conversations.jsonl"
"""File of a step with conversations whose replies are kept."""
KEPT = (MANIFEST_FILE, STEP_FILE, ROLLOUT_FILE, UPDATE_FILE, CONVERSATION_FILE)
"""Files of a kept step. The manifest is removed first: without it the step is not taken for a whole one."""
RECORDS = "records"
"""Folder of recorded tensors, in that of a step; earlier releases had a folder of each step in it."""
NAME = re.compile(r"step_([0-9]{1,18})(\.partial)?")
"""Earlier releases had another name for the step in flight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotFolder:
    """One kept step on disk."""

    number: int
    path: Path

    @property
    def is_partial(self) -> bool:
        """Return whether the step was in flight when its run was killed, or still is."""
        return not (self.path / MANIFEST_FILE).exists()

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for name in KEPT if (path := self.path / name).is_file())

    def read(self) -> StepSnapshot:
        """The record; of a whole step all files are compared with the manifest.

        Raises:
            CheckpointError: a file is missing or is not as it was written.
            SchemaMismatch: the record is damaged. UnsupportedFormat: it is of another version.
        """
        is_partial = self.is_partial
        try:
            problem = None if is_partial else Manifest.read(self.path).damage(self.path)
            text = read_plain(self.path / STEP_FILE).decode("utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"kept step {self.path} cannot be read: {error}") from error
        if problem is None:
            found = read_record(text, where=str(self.path / STEP_FILE))
            if not is_partial or found.status is StepStatus.PARTIAL:
                return found
            problem = f"{MANIFEST_FILE} is missing: its run was killed while it wrote it, or it was removed"
        raise CheckpointError(f"kept step {self.path}: {problem}")

    def columns(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the tensor columns of the rollout and of the update; empty where they were not written.

        Raises:
            CheckpointError: a file is torn.
        """
        try:
            rollout, update = (
                read_column_file(path) if (path := self.path / name).is_file() else {}
                for name in (ROLLOUT_FILE, UPDATE_FILE)
            )
        except (OSError, ValueError, RuntimeError, SchemaMismatch) as error:
            raise CheckpointError(f"kept step {self.path}: {error}") from error
        return _tensors(rollout), _tensors(update)


def _tensors(columns: Mapping[str, Column]) -> dict[str, torch.Tensor]:
    return {name: column for name, column in columns.items() if isinstance(column, torch.Tensor)}


class StepsFolder:
    """The steps of one run.

    Args:
        log_dir: `logger.log_dir` of the run.
    """

    def __init__(self, log_dir: Path) -> None:
        self.path = log_dir / STEPS
        self._old_records = log_dir / RECORDS

    def all(self) -> list[SnapshotFolder]:
        """Return the kept steps in order, the one in flight among them."""
        found = [SnapshotFolder(number=number, path=path) for number, path in _numbered(self.path).items()]
        # A run that is killed at once leaves an empty folder; one with records alone is no kept step.
        return [kept for kept in found if (kept.path / STEP_FILE).is_file()]

    def records(self) -> dict[int, Path]:
        """Return step -> folder of its records, in order of the steps; `records/step_N` of earlier releases
        is read, too."""
        found = {number: path / RECORDS for number, path in _numbered(self.path).items() if (path / RECORDS).is_dir()}
        return dict(sorted((_numbered(self._old_records) | found).items()))

    def begin(self, number: int) -> Path:
        """A folder for the step in flight, without what another run of it has kept."""
        path = self._step(number)
        _forget(path)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def end(self, number: int) -> SnapshotFolder:
        """The step in flight becomes a whole one; its files are all there."""
        path = self._step(number)
        Manifest.write(path, [name for name in KEPT if (path / name).is_file()])
        return SnapshotFolder(number=number, path=path)

    def drop(self, number: int) -> None:
        """Forgets the step in flight. Raises nothing."""
        with suppress(OSError):
            _forget(self._step(number))

    def cut(self, *, resume_step: int) -> None:
        """Removes the steps after the one that a run resumes from, with their records: it makes them again."""
        for number, path in (*_numbered(self.path).items(), *_numbered(self._old_records).items()):
            if number > resume_step:
                shutil.rmtree(path, ignore_errors=True)

    def prune(self, *, max_bytes: int, since: int) -> list[int]:
        """Removes the oldest kept steps until the others fit; those after step `since` only if they alone do not.

        Returns:
            Removed steps that came after `since`: without them nothing from that checkpoint on can be replayed.
        """
        sizes = {kept.number: (kept, kept.num_bytes) for kept in self.all()}
        total = sum(size for _, size in sizes.values())
        needed: list[int] = []
        for number, (kept, size) in sizes.items():
            # The newest one stays: a limit below a single step would otherwise keep none and say so every step.
            if total <= max_bytes or number == max(sizes):
                break
            _forget(kept.path)
            total -= size
            if number > since:
                needed.append(number)
        return needed

    def _step(self, number: int) -> Path:
        return self.path / f"step_{number}"


def _numbered(folder: Path) -> dict[int, Path]:
    """Return the folders of steps by their numbers, in order."""
    # In reverse order `step_7.partial` comes before `step_7`, which counts.
    paths = sorted((path for path in folder.glob("step_*") if path.is_dir()), reverse=True)
    found = {int(name[1]): path for path in paths if (name := NAME.fullmatch(path.name)) is not None}
    return dict(sorted(found.items()))


def _forget(path: Path) -> None:
    """Remove a kept step; what else its folder holds stays."""
    for name in KEPT:
        (path / name).unlink(missing_ok=True)
    with suppress(OSError):  # records are in it, or it never was
        path.rmdir()
