"""`StepSnapshot`: what is known of a step besides its columns, as `step.json` holds it.

Written by `StepRecorder`, read by the replay. Invariant: nothing per token is in it, and reading it back gives the same
record: floats to the last bit, NaN included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from pydantic import TypeAdapter, ValidationError

from nemo_rl.data_plane.chunks.tags import TagValue
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.distributed.pack_plan import PackPlan
from nemo_rl.distributed.packing import DEFAULT_COST
from nemo_rl.errors import SchemaMismatch, shorten
from nemo_rl.experience.payload import SampleStats
from nemo_rl.models.weight_sync.weights_digest import WeightsDigest
from nemo_rl.utils.files import FileFormat, check_format

__all__ = [
    "RunFacts",
    "SnapshotOutcome",
    "SnapshotPlan",
    "SnapshotRows",
    "StepError",
    "StepSnapshot",
    "StepStatus",
    "read_record",
    "record_text",
]

SCALARS = ("rewards", "truncated", "response_lengths", "components", "conversations")
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
