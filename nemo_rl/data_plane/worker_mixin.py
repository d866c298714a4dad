"""`TQWorkerMixin`: the data plane half of a policy worker: it fetches this rank's shard and writes results back.

Mixed into a policy worker in front of it. A pass of the worker is a method like this, which the driver calls with this
rank's meta:

    def get_logprobs_presharded(self, meta: KVBatchMeta) -> KVBatchMeta:
        with self.stage(WorkerPass.PREV_LOGPROBS):
            batch = self.fetch(meta, LP_SEED_FIELDS)
            return self.write_back(meta, {"prev_logprobs": self.get_logprobs(batch, plan=meta.pack)})

Invariant: inside a replica group one rank (the leader) reads the store, exactly one rank (the write-back leader) writes
each result, and an error of either reaches every rank of the group as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import get_args

import torch
import torch.distributed as dist

from nemo_rl.config.data_plane import FetchPolicy
from nemo_rl.data_plane.address import DataPlaneAddress
from nemo_rl.data_plane.batch_meta import KVBatchMeta, RowFunction, RowMapResult, Version
from nemo_rl.data_plane.chunks.ragged import materialize, object_rows
from nemo_rl.data_plane.client.operation_counts import Totals
from nemo_rl.data_plane.column_io import extra_names, is_listed, rows_as_list, write_columns
from nemo_rl.data_plane.factory import attach_data_plane
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.data_plane.schema import FieldSpec
from nemo_rl.distributed.abort import GuardedWorker, RootCause, StepWatch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.collectives import Fields, broadcast_from_leader, check_plans, replica_group_of
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.worker_pass import RowPass, WorkerPass
from nemo_rl.errors import ConfigError, DataPlaneClosed, SchemaMismatch
from nemo_rl.jagged import values_of

__all__ = ["Channel", "ReplicaMember", "ShardReads", "TQWorkerMixin"]

FIRST_STAGE_FIELDS = ("input_ids", "input_lengths")
"""Fields that the first stage of a pipeline reads; the last one reads everything, those between only lengths."""


@dataclass(frozen=True, slots=True)
class Channel:
    """Columns that the leader sends to some ranks of its replica group."""

    group: dist.ProcessGroup
    """The leader, and the ranks that need these columns."""
    names: tuple[str, ...] | None = None
    """Names of the columns; None means those that no other channel carries."""


@dataclass(frozen=True, slots=True)
class ReplicaMember:
    """This rank among those that share one data-parallel shard."""

    leader: int
    """Global rank that reads the store; this one where it is alone."""
    group: dist.ProcessGroup | None = None
    """The process group of the replica, or None where this rank is alone."""
    is_write_back_leader: bool = True
    """True where this rank writes the shard's results."""
    ranks: tuple[int, ...] = ()
    """Global ranks of the group; empty when this rank is alone."""
    needs: tuple[str, ...] | None = None
    """Columns that this rank's pipeline stage reads; None means all."""
    channels: tuple[Channel, ...] = ()
    """The channels of this rank, in the order in which they are used; empty when every rank needs every column."""

    @classmethod
    def build(cls, layout: ParallelLayout, *, rank: int) -> ReplicaMember:
        """(collective over the job) Build all replica groups of the layout and return this rank in its own."""
        at = layout.coordinates(rank)
        ranks = layout.replica(at.dp)
        group = replica_group_of(rank, layout.replicas())
        needs = None
        if at.pp < layout.pp - 1:
            needs = FIRST_STAGE_FIELDS if at.pp == 0 else ()
        return cls(
            group=group,
            leader=ranks[0],
            is_write_back_leader=layout.is_writer(rank),
            ranks=ranks if group is not None else (),
            needs=needs,
            channels=_channels(layout, rank=rank) if layout.pp > 1 else (),
        )


def _channels(layout: ParallelLayout, *, rank: int) -> tuple[Channel, ...]:
    """(collective over the job) Tokens go to both ends of the pipeline, what only the loss needs to its last stage."""
    ends = [[*layout.stage(dp, 0), *layout.stage(dp, layout.pp - 1)] for dp in range(layout.dp)]
    leader_and_last = [[layout.replica(dp)[0], *layout.stage(dp, layout.pp - 1)] for dp in range(layout.dp)]
    groups = ((FIRST_STAGE_FIELDS, replica_group_of(rank, ends)), (None, replica_group_of(rank, leader_and_last)))
    return tuple(Channel(group, names) for names, group in groups if group is not None)


Column = torch.Tensor | list[object]
Key = tuple[str, tuple[str, ...], Version, int | None]
"""Name, rows, family version and width (None: ragged) of a column."""


class ShardReads:
    """Reads of one rank in this step, so that bulk crosses the wire once.

    A rank that reads for itself gets dense columns straight from the chunks; a leader gets ragged ones, which it sends
    on without their padding.

    Args:
        client: of this process.
        cache_bytes: most bytes of columns that are kept until `clear`; 0 keeps nothing.
    """

    def __init__(self, client: DataPlaneClient, *, cache_bytes: int) -> None:
        self.client, self._cache_bytes = client, cache_bytes
        self._cached: dict[Key, Column] = {}
        self._num_bytes = 0

    def ragged(self, meta: KVBatchMeta, names: Sequence[str]) -> Fields:
        """Return the columns as they are stored: per-token ones jagged, objects as lists."""
        keys = self._keys(meta, names, width=None)
        columns = self._kept(keys)
        if missing := [name for name in names if name not in columns]:
            found = self.client.get_data(meta, missing)
            for name in missing:
                column = found.get(name)
                columns[name] = column if isinstance(column, torch.Tensor) else object_rows(column)
                self._keep(keys, name, columns[name])
        return {name: columns[name] for name in names}

    def padded(
        self,
        meta: KVBatchMeta,
        names: Sequence[str],
        *,
        pad_values: Mapping[str, float],
        width: int,
        jagged: Sequence[str] = (),
    ) -> Fields:
        """Return the columns dense, per-token ones `[N, width, ...]`, but for those in `jagged`, which stay as they are
        stored; do not change them in place: they are kept."""
        dense = [name for name in names if name not in jagged]
        keys = self._keys(meta, dense, width=width) | self._keys(meta, jagged, width=None)
        columns = self._kept(keys)
        if missing := [name for name in names if name not in columns]:
            found = self.client.get_padded(meta, missing, pad_values=pad_values, pad_to=width, jagged=jagged)
            for name, column in found.items():
                columns[name] = column
                self._keep(keys, name, column)
        return {name: columns[name] for name in names}

    def clear(self) -> None:
        self._cached.clear()
        self._num_bytes = 0

    def _keys(self, meta: KVBatchMeta, names: Sequence[str], *, width: int | None) -> dict[str, Key]:
        """Return the keys of columns with a version; without one nobody would notice that a column was rewritten."""
        families = {spec.name: spec.family for spec in self.client.partition_fields(meta.partition_id)}
        return {
            name: (name, meta.keys, meta.versions[families[name]], width)
            for name in names
            if families.get(name) in meta.versions
        }

    def _kept(self, keys: Mapping[str, Key]) -> Fields:
        return {name: self._cached[key] for name, key in keys.items() if key in self._cached}

    def _keep(self, keys: Mapping[str, Key], name: str, column: Column) -> None:
        size = _num_bytes(column)
        if name in keys and self._num_bytes + size <= self._cache_bytes:
            self._cached[keys[name]] = column
            self._num_bytes += size


class TQWorkerMixin(GuardedWorker):
    """Data plane half of a policy worker. Its methods that are not of one rank are collective over the replica group.

    Args:
        replica: this rank as a member of its replica group, whose process groups exist.
        watch: ends a step on all ranks when it fails on one.
        pad_values: field -> pad value of the worker's tokenizer.
    """

    def __init__(self, *, rank: int, replica: ReplicaMember, watch: StepWatch, pad_values: Mapping[str, float]) -> None:
        self.rank = rank
        self._replica, self._watch, self._pad_values = replica, watch, pad_values
        self._reads: ShardReads | None = None
        """Columns that this rank has read in this step; None on a rank without a client."""
        self._extras: tuple[FieldSpec, ...] = ()
        self.fetch_group: dist.ProcessGroup | None = None
        """Over which the leader broadcasts; None when this rank reads for itself."""

    def setup_data_plane(
        self,
        address: DataPlaneAddress | None,
        *,
        fetch_policy: FetchPolicy = "auto",
        cache_bytes: int = 0,
        extras: tuple[FieldSpec, ...] = (),
    ) -> None:
        """Attach this process's client, unless this rank neither reads nor writes.

        Args:
            address: of the owner's client; None for a rank that gets its columns from its leader.
            fetch_policy: `auto` lets the leader read and broadcast where there is a replica group, `independent` lets
                every rank read for itself, `leader_broadcast` insists on a group.
            cache_bytes: most bytes of fetched columns that are kept within a step; 0 keeps none.
            extras: columns of the rows besides the table of fields; a pass fetches those that name it.

        Raises:
            ConfigError: an unknown fetch policy, or `leader_broadcast` without a replica group.
        """
        self._extras = extras
        self.fetch_group = _fetch_group(fetch_policy, self._replica)
        is_reader = self.fetch_group is None or self.rank == self._replica.leader
        self._reads = None
        if address is not None and (is_reader or self._replica.is_write_back_leader):
            self._reads = ShardReads(attach_data_plane(address), cache_bytes=cache_bytes)

    def close_data_plane(self) -> None:
        """End this process's client. Idempotent."""
        reads, self._reads = self._reads, None
        if reads is not None:
            reads.client.close()

    def end_step(self) -> None:
        """Forget fetched columns; called when the rows of the step are cleared."""
        if self._reads is not None:
            self._reads.clear()

    def data_plane_snapshot(self) -> Totals | None:
        """Return counters of this process's client since the last call; None for a rank without one."""
        return None if self._reads is None else self._reads.client.snapshot(reset=True)

    def guarded(self, stage: str) -> AbstractContextManager[None]:
        return self._watch.stage(stage)

    @property
    def root_cause(self) -> RootCause | None:
        return self._watch.cause

    @property
    def client(self) -> DataPlaneClient:
        """Raises DataPlaneClosed on a rank without one."""
        return self.reads.client

    @property
    def reads(self) -> ShardReads:
        """Raises DataPlaneClosed on a rank without a client."""
        if self._reads is None:
            raise DataPlaneClosed(f"rank {self.rank}: no data plane client; call setup_data_plane first")
        return self._reads

    def map_rows(self, meta: KVBatchMeta, work: RowFunction, *, stage: RowPass) -> RowMapResult:
        """(on every rank) Do the work on the rank that writes the shard's results; the others wait for nothing."""
        with self.stage(stage):
            if not self._replica.is_write_back_leader or not meta.keys:
                return RowMapResult(meta=meta)
            output = work(self._read_alone(meta, work.input_fields))
            return RowMapResult(meta=self.write_back(meta, output.columns), numbers=output.numbers)

    def _read_alone(self, meta: KVBatchMeta, fields: Sequence[str]) -> dict[str, torch.Tensor]:
        """Read dense columns without telling the other ranks, in the form in which this rank keeps its reads."""
        width = meta.pack.pad_to if meta.pack is not None else max(meta.sequence_lengths or (0,))
        if self.fetch_group is None:
            batch = BatchedDataDict(self.reads.padded(meta, fields, pad_values=self._pad_values, width=width))
        else:
            batch = materialize(self.reads.ragged(meta, fields), pad_values=self._pad_values, pad_to=width)
        return {name: batch.tensor(name) for name in fields}

    @contextmanager
    def stage(self, stage: WorkerPass | RowPass) -> Iterator[None]:
        """(collective over the job) Attribute data plane calls to a stage; when it fails, end it on all ranks and drop
        cached columns."""
        try:
            with (
                self.guarded(stage.value),
                nullcontext() if self._reads is None else self._reads.client.stage(stage.value),
            ):
                yield
        except BaseException:
            self.end_step()
            raise

    def fetch(self, meta: KVBatchMeta, fields: Sequence[str]) -> BatchedDataDict:
        """Check the plan, and return the columns that this rank's pipeline stage reads, dense, padded to
        the plan's width, plus `keys`; extra columns without a token axis are lists of tensors."""
        check_plans(meta.pack, rank=self.rank, replica=self._replica.ranks)
        width = meta.pack.pad_to if meta.pack is not None else max(meta.sequence_lengths or (0,))
        if self.fetch_group is None:
            names = [name for name in fields if self._replica.needs is None or name in self._replica.needs]
            lists = [spec.name for spec in self._extras if is_listed(spec) and spec.name in names]
            batch = BatchedDataDict(
                self.reads.padded(meta, names, pad_values=self._pad_values, width=width, jagged=lists)
            )
        else:
            columns = self._broadcast(meta, fields, self.fetch_group)
            lists = [spec.name for spec in self._extras if is_listed(spec) and spec.name in columns]
            batch = materialize(columns, pad_values=self._pad_values, pad_to=width, jagged=lists)
        batch.update({name: rows_as_list(batch[name]) for name in lists})
        if "input_ids" in fields and "input_ids" not in batch:
            # A stage in the middle of a pipeline sees shapes only.
            batch["input_ids"] = torch.zeros(len(meta.keys), width, dtype=torch.int32)
            batch["input_lengths"] = torch.tensor(meta.sequence_lengths, dtype=torch.int32)
        batch["keys"] = list(meta.keys)
        return batch

    def extra_names(self, stage: WorkerPass) -> tuple[str, ...]:
        return extra_names(self._extras, stage.value)

    def _broadcast(self, meta: KVBatchMeta, fields: Sequence[str], group: dist.ProcessGroup) -> Fields:
        """Columns that the leader reads and this rank needs, without padding."""
        replica = self._replica
        # The leader reads everything at once, in the first channel, so that its error reaches both ends.
        read = cache(lambda: self.reads.ragged(meta, fields))
        if not replica.channels and replica.needs is None:
            return broadcast_from_leader(read, group=group, leader=replica.leader)
        columns: Fields = {}
        for channel in replica.channels:
            carried = channel.names or [name for name in fields if name not in FIRST_STAGE_FIELDS]
            pick = partial(_pick, read, [name for name in fields if name in carried])
            columns |= broadcast_from_leader(pick, group=channel.group, leader=replica.leader)
        return columns

    def write_back(self, meta: KVBatchMeta, columns: Mapping[str, torch.Tensor]) -> KVBatchMeta:
        """Write result columns, dense `[N, T]` or jagged; only the write-back leader sends them."""
        for name, values in columns.items():
            if values.dim() < 2 or values.shape[0] != len(meta.keys):
                raise SchemaMismatch(
                    f"write-back of {name!r}, rank {self.rank}: expected [{len(meta.keys)}, T], got "
                    f"[{', '.join(str(size) for size in values.shape)}]"
                )
        if not self._replica.is_write_back_leader:
            return meta
        return write_columns(self.client, meta, {name: values.detach().to("cpu") for name, values in columns.items()})


def _fetch_group(policy: FetchPolicy, replica: ReplicaMember) -> dist.ProcessGroup | None:
    """Return the group over which the leader broadcasts; None when this rank reads for itself."""
    if policy not in get_args(FetchPolicy):
        raise ConfigError(
            f"data_plane.fetch_policy: expected one of {', '.join(get_args(FetchPolicy))}, got {policy!r}"
        )
    if policy == "leader_broadcast" and replica.group is None:
        raise ConfigError(
            "data_plane.fetch_policy: 'leader_broadcast' needs a replica group, and every rank has its shard for "
            "itself; set auto, or a tensor, context or pipeline parallel size of the policy above 1"
        )
    return None if policy == "independent" else replica.group


def _pick(read: Callable[[], Fields], names: Sequence[str]) -> Fields:
    columns = read()
    return {name: columns[name] for name in names}


def _num_bytes(column: Column) -> int:
    if not isinstance(column, torch.Tensor):
        return sum(len(str(row)) for row in column)
    values = values_of(column) if column.is_nested else column
    return values.numel() * values.element_size()
