"""`TQWorkerMixin`: a policy worker that takes its shard from the data plane and writes its results back.

Mixed into a policy worker in front of it. The driver calls the `*_presharded` methods with this rank's meta. Invariant:
inside a replica group one rank (the leader) reads the store, exactly one rank (the write-back leader) writes each
result, and an error of either reaches every rank of the group as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from nemo_rl.data_plane.address import DataPlaneAddress
from nemo_rl.data_plane.column_io import write_columns
from nemo_rl.data_plane.factory import attach_data_plane
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.data_plane.observability import MetricsDataPlaneClient
from nemo_rl.data_plane.ragged import materialize, object_rows
from nemo_rl.data_plane.schema import DP_TRAIN_FIELDS, LP_SEED_FIELDS, family_of
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.collectives import Fields, broadcast_from_leader
from nemo_rl.errors import DataPlaneClosed, SchemaMismatch

__all__ = ["ReplicaView", "ShardCache", "TQWorkerMixin"]

CACHE_BYTES = 1 << 30
"""Most bytes of fetched columns a worker keeps within a step."""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """This rank's place among the ranks that share one data-parallel shard."""

    group: dist.ProcessGroup | None = None
    """None: this rank is alone."""
    leader: int = 0
    """Global rank that reads the store."""
    is_write_back_leader: bool = True
    """Whether this rank writes the shard's results."""


@dataclass(slots=True)
class ShardCache:
    """Columns already fetched in this step, so that bulk crosses the wire once. Keyed by rows and family version."""

    max_bytes: int = CACHE_BYTES
    _columns: dict[tuple[str, tuple[str, ...], int], torch.Tensor | list[object]] = field(default_factory=dict)
    _bytes: int = 0

    def get(self, meta: KVBatchMeta, name: str) -> torch.Tensor | list[object] | None:
        return self._columns.get(self._key(meta, name))

    def put(self, meta: KVBatchMeta, name: str, column: torch.Tensor | list[object]) -> None:
        size = _num_bytes(column)
        if family_of(name) in meta.versions and self._bytes + size <= self.max_bytes:
            self._columns[self._key(meta, name)] = column
            self._bytes += size

    def clear(self) -> None:
        self._columns.clear()
        self._bytes = 0

    @staticmethod
    def _key(meta: KVBatchMeta, name: str) -> tuple[str, tuple[str, ...], int]:
        return name, meta.keys, meta.versions.get(family_of(name), -1)


class TQWorkerMixin:
    """Data plane half of a policy worker.

    The worker class behind it provides `train`, `get_logprobs`, `get_reference_policy_logprobs`, `rank` and
    `pad_values` (field -> pad value of its tokenizer).
    """

    rank: int
    pad_values: Mapping[str, float]
    _client: MetricsDataPlaneClient | None = None
    _replica: ReplicaView = ReplicaView()
    _cache: ShardCache

    def setup_data_plane(self, address: DataPlaneAddress | None, *, replica: ReplicaView | None = None) -> None:
        """Attaches this process's client.

        Args:
            address: of the owner's client; None for a rank that neither reads nor writes, which gets its columns from
                its leader.
            replica: place in the replica group; None for a rank that has its shard for itself.
        """
        self._client = None if address is None else MetricsDataPlaneClient(attach_data_plane(address))
        self._replica = replica or ReplicaView(leader=self.rank)
        self._cache = ShardCache()

    def close_data_plane(self) -> None:
        """Ends this process's client. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def end_step(self) -> None:
        """Forgets fetched columns; called when the rows of the step are cleared."""
        self._cache.clear()

    def data_plane_snapshot(self) -> dict[str, object]:
        """Counters of this process's client since the last call."""
        return self.client.snapshot(reset=True)

    @property
    def client(self) -> MetricsDataPlaneClient:
        if self._client is None:
            raise DataPlaneClosed(f"rank {self.rank}: no data plane client; call setup_data_plane first")
        return self._client

    def train_presharded(
        self, meta: KVBatchMeta, loss_fn: object, *, fields: Sequence[str] = DP_TRAIN_FIELDS, eval_mode: bool = False
    ) -> object:
        """(collective) Fetches this rank's shard, trains on it by the plan in `meta.pack`, returns a `TrainResult`."""
        with self._stage("train"):
            batch = self._fetch(meta, fields)
            return self.train(batch, loss_fn, eval_mode=eval_mode, plan=meta.pack)  # type: ignore[attr-defined]

    def get_logprobs_presharded(self, meta: KVBatchMeta) -> KVBatchMeta:
        """(collective) Writes `prev_logprobs` of this rank's shard and returns the meta that knows them."""
        with self._stage("prev_logprobs"):
            batch = self._fetch(meta, LP_SEED_FIELDS)
            result = self.get_logprobs(batch, plan=meta.pack)  # type: ignore[attr-defined]
            return self._write_back(meta, "prev_logprobs", result)

    def get_reference_policy_logprobs_presharded(self, meta: KVBatchMeta) -> KVBatchMeta:
        """(collective) Writes `reference_policy_logprobs` of this rank's shard."""
        with self._stage("reference_logprobs"):
            batch = self._fetch(meta, LP_SEED_FIELDS)
            result = self.get_reference_policy_logprobs(batch, plan=meta.pack)  # type: ignore[attr-defined]
            return self._write_back(meta, "reference_policy_logprobs", result)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Attributes data plane calls to a stage, and drops cached columns when the stage fails."""
        try:
            with self.client.stage(name) if self._client is not None else nullcontext():
                yield
        except BaseException:
            self.end_step()
            raise

    def _fetch(self, meta: KVBatchMeta, fields: Sequence[str]) -> BatchedDataDict:
        """(collective over the replica group) The columns, dense and padded to the plan's width, plus `keys`."""
        columns = broadcast_from_leader(
            lambda: self._read(meta, fields), group=self._replica.group, leader=self._replica.leader
        )
        width = meta.pack.pad_to if meta.pack is not None else max(meta.sequence_lengths or (0,))
        batch = BatchedDataDict(materialize(columns, pad_values=self.pad_values, pad_to=width))
        batch["keys"] = list(meta.keys)
        return batch

    def _read(self, meta: KVBatchMeta, fields: Sequence[str]) -> Fields:
        """Columns from this step's cache, the rest from the store."""
        columns = {name: cached for name in fields if (cached := self._cache.get(meta, name)) is not None}
        missing = [name for name in fields if name not in columns]
        if missing:
            fetched = self.client.get_data(meta, missing)
            for name in missing:
                column = fetched.get(name)
                columns[name] = column if isinstance(column, torch.Tensor) else object_rows(column)
                self._cache.put(meta, name, columns[name])
        return {name: columns[name] for name in fields}

    def _write_back(self, meta: KVBatchMeta, name: str, values: torch.Tensor) -> KVBatchMeta:
        """Writes one result column `[N, T]`; only the write-back leader sends it."""
        if values.dim() < 2 or values.shape[0] != len(meta.keys):
            raise SchemaMismatch(
                f"write-back of {name!r}, rank {self.rank}: expected [{len(meta.keys)}, T], got {list(values.shape)}"
            )
        if not self._replica.is_write_back_leader:
            return meta
        return write_columns(self.client, meta, {name: values.detach().to("cpu")})


def _num_bytes(column: torch.Tensor | list[object]) -> int:
    if not isinstance(column, torch.Tensor):
        return sum(len(str(row)) for row in column)
    values = column.values() if column.is_nested else column
    return values.numel() * values.element_size()
