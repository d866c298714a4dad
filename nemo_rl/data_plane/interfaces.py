"""The data plane's contract: `KVBatchMeta`, the client, and the payload store under it.

A client is one ledger (the truth about rows) and one payload store (opaque bytes). Everybody programs against
`DataPlaneClient`; only `factory.build_data_plane_client` knows which store and which ledger host are used.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeAlias, TypeVar

import torch
from tensordict import TensorDict

from nemo_rl.data_plane.address import DataPlaneAddress, Handles
from nemo_rl.data_plane.ragged import materialize
from nemo_rl.data_plane.schema import FieldSpec
from nemo_rl.data_plane.wire import Packed, pack_rows, unpack_rows
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.errors import SchemaMismatch, name_some

__all__ = [
    "Columns",
    "DataPlaneClient",
    "Handles",
    "KVBatchMeta",
    "Parts",
    "PayloadStore",
    "StoreHealth",
    "TagValue",
    "Tags",
]

_T = TypeVar("_T")

TagValue: TypeAlias = str | int | float | bool | None
Tags: TypeAlias = Mapping[str, TagValue]
Columns: TypeAlias = Mapping[str, torch.Tensor | Sequence[object]] | TensorDict
"""Field name -> rows. A tensor `[N, ...]` (jagged nested for ragged rows) or a list of N JSON-like objects."""


Parts: TypeAlias = Sequence[memoryview]
"""Buffers whose concatenation is one chunk; a store that moves whole chunks gives one part back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KVBatchMeta:
    """Which rows: keys, lengths, tags and the pack plan; never tensors.

    Example:
        >>> meta = KVBatchMeta(partition_id="train", keys=("a_g0", "a_g1"), sequence_lengths=(3, 5))
        >>> meta.subset([1]).keys
        ('a_g1',)
    """

    partition_id: str
    keys: tuple[str, ...]
    task_name: str | None = None
    """The consumer that claimed these rows, or None."""
    fields: tuple[str, ...] = ()
    """Columns known to be written for every row."""
    sequence_lengths: tuple[int, ...] | None = None
    """Tokens per row, aligned with `keys`."""
    tags: tuple[Tags, ...] | None = None
    """Small primitives per row, aligned with `keys`."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """Family -> version the ledger gave it; a fetch that finds another one fails."""
    pack: PackPlan | None = None
    """Which rows form which microbatch on which rank, in indices into `keys`."""

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "keys", tuple(self.keys))
        set_(self, "fields", tuple(dict.fromkeys(self.fields)))
        set_(self, "versions", MappingProxyType(dict(self.versions)))
        if len(set(self.keys)) != len(self.keys):
            seen: set[str] = set()
            twice = [key for key in self.keys if key in seen or seen.add(key)]  # type: ignore[func-returns-value]
            raise SchemaMismatch(f"partition {self.partition_id!r}: duplicate keys: {name_some(twice)}")
        if self.sequence_lengths is not None:
            set_(self, "sequence_lengths", tuple(int(n) for n in self.sequence_lengths))
            self._check_aligned("sequence_lengths", len(self.sequence_lengths))
            if any(n < 0 for n in self.sequence_lengths):
                raise SchemaMismatch(f"partition {self.partition_id!r}: a sequence length is negative")
        if self.tags is not None:
            set_(self, "tags", tuple(MappingProxyType(dict(row)) for row in self.tags))
            self._check_aligned("tags", len(self.tags))

    def __reduce__(self) -> tuple[object, ...]:
        # Metas travel between the driver and every worker in each stage: keys, lengths and tags go in compact form.
        rows = pack_rows(self.keys, self.sequence_lengths, self.tags)
        return _rebuild_meta, (rows, self.partition_id, self.task_name, self.fields, dict(self.versions), self.pack)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.keys)

    def subset(self, indices: Iterable[int]) -> KVBatchMeta:
        """The rows at `indices`, in that order; the pack plan is cleared."""
        picked = [int(i) for i in indices]
        outside = [i for i in picked if not 0 <= i < len(self.keys)]
        if outside:
            raise SchemaMismatch(f"subset: rows {name_some(outside)} are outside 0..{len(self.keys) - 1}")
        return replace(
            self,
            keys=tuple(self.keys[i] for i in picked),
            sequence_lengths=_pick(self.sequence_lengths, picked),
            tags=_pick(self.tags, picked),
            pack=None,
        )

    def slice(self, start: int, stop: int) -> KVBatchMeta:
        """Rows `start` to `stop`, clamped to what exists; the pack plan is cleared."""
        size = len(self.keys)
        first = min(max(start, 0), size)
        return self.subset(range(first, min(max(stop, first), size)))

    def concat(self, *others: KVBatchMeta) -> KVBatchMeta:
        """Rows of this meta, then those of the others; the pack plan is cleared.

        Raises:
            SchemaMismatch: another partition, task, field set or family version; lengths or tags on one side only.
        """
        for other in others:
            self._check_joins(other)
        parts = (self, *others)
        lengths = None if self.sequence_lengths is None else tuple(n for p in parts for n in p.sequence_lengths or ())
        tags = None if self.tags is None else tuple(row for p in parts for row in p.tags or ())
        keys = tuple(key for p in parts for key in p.keys)
        return replace(self, keys=keys, sequence_lengths=lengths, tags=tags, pack=None)

    def drop(self, indices: Iterable[int]) -> KVBatchMeta:
        """All rows but those at `indices` (any order, repeats allowed); dropping all gives an empty meta."""
        gone = {int(i) for i in indices}
        outside = sorted(i for i in gone if not 0 <= i < len(self.keys))
        if outside:
            raise SchemaMismatch(f"drop: rows {name_some(outside)} are outside 0..{len(self.keys) - 1}")
        return self.subset(i for i in range(len(self.keys)) if i not in gone)

    def with_tags(self, columns: Mapping[str, Sequence[TagValue]]) -> KVBatchMeta:
        """Adds or replaces tags, one value per row and name."""
        for name, values in columns.items():
            self._check_aligned(f"tag {name!r}", len(values))
        old: Sequence[Tags] = self.tags if self.tags is not None else [{}] * len(self.keys)
        tags = tuple({**row, **{name: values[i] for name, values in columns.items()}} for i, row in enumerate(old))
        return replace(self, tags=tags)

    def with_fields(self, names: Iterable[str], *, versions: Mapping[str, int] | None = None) -> KVBatchMeta:
        """Adds field names (each once, order kept) and, if given, family versions."""
        return replace(self, fields=(*self.fields, *names), versions={**self.versions, **(versions or {})})

    def with_pack(self, pack: PackPlan | None) -> KVBatchMeta:
        """The same rows under another pack plan."""
        return replace(self, pack=pack)

    def _check_aligned(self, what: str, count: int) -> None:
        if count != len(self.keys):
            raise SchemaMismatch(
                f"partition {self.partition_id!r}: {what}: expected {len(self.keys)} values, one per key, got {count}"
            )

    def _check_joins(self, other: KVBatchMeta) -> None:
        for what, mine, theirs in (
            ("partition_id", self.partition_id, other.partition_id),
            ("task_name", self.task_name, other.task_name),
            ("fields", set(self.fields), set(other.fields)),
            ("versions", dict(self.versions), dict(other.versions)),
            ("sequence_lengths present", self.sequence_lengths is not None, other.sequence_lengths is not None),
            ("tags present", self.tags is not None, other.tags is not None),
        ):
            if mine != theirs:
                raise SchemaMismatch(f"concat: {what} differ: {mine!r} and {theirs!r}")


def _rebuild_meta(
    rows: Packed,
    partition_id: str,
    task_name: str | None,
    fields: tuple[str, ...],
    versions: Mapping[str, int],
    pack: PackPlan | None,
) -> KVBatchMeta:
    keys, sequence_lengths, tags = unpack_rows(rows)
    return KVBatchMeta(
        partition_id=partition_id,
        keys=keys,
        task_name=task_name,
        fields=fields,
        sequence_lengths=sequence_lengths,
        tags=tags,
        versions=versions,
        pack=pack,
    )


def _pick(values: tuple[_T, ...] | None, indices: Sequence[int]) -> tuple[_T, ...] | None:
    return None if values is None else tuple(values[i] for i in indices)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreHealth:
    """What a payload store says about itself."""

    is_alive: bool
    detail: str = ""


class PayloadStore(ABC):
    """Opaque payloads under ids that are used once. Every call is bounded by a deadline and thread-safe."""

    @property
    def chunk_bytes(self) -> int | None:
        """The chunk size that suits this store, in bytes; None takes `data_plane.chunk_bytes`."""
        return None

    @property
    def address(self) -> str:
        """What other processes need to join, beside the run id; empty when that is enough."""
        return ""

    @property
    def reuses_memory(self) -> bool:
        """The bytes of a dropped chunk may be overwritten while a `get` of it is under way.

        The client then asks the ledger after each get whether its chunks are still live: they are dropped there first.
        """
        return False

    @property
    def place(self) -> str:
        """Where this process is, for the names of its chunks."""
        return socket.gethostname()

    @abstractmethod
    def put(self, chunks: Mapping[str, Parts], *, timeout_s: float) -> Handles | None:
        """Stores a copy of every chunk, or raises and leaves none readable.

        Returns:
            What readers need to reach the chunks, for stores whose chunks are not found by their id alone.
        """

    @abstractmethod
    def get(self, chunk_ids: Sequence[str], *, timeout_s: float, handles: Handles) -> list[Parts]:
        """The payloads in the order of `chunk_ids`; never fewer. The buffers are read-only to the caller.

        Raises:
            KeysNotFound: a chunk was freed. PayloadLost: the process that held it is gone.
        """

    def abandoned(self, after_s: float) -> list[str]:
        """Chunks whose writer died at least `after_s` seconds before, for stores where such chunks would stay.

        The caller asks the ledger which of them were ever committed.
        """
        return []

    def confirm(self, chunk_ids: Sequence[str]) -> None:  # noqa: B027 - most stores never reuse memory
        """Called when the bytes of a `get` have been copied out.

        Raises:
            KeysNotFound: a chunk was freed while it was copied; the copy is worthless.
        """

    @abstractmethod
    def drop(self, chunk_ids: Sequence[str], *, timeout_s: float) -> None:
        """Frees chunks; unknown ids are ignored."""

    @abstractmethod
    def health(self) -> StoreHealth:
        """Whether the backend answers."""

    @abstractmethod
    def close(self) -> None:
        """Ends this client's part; the owner's close also ends the backend. Idempotent."""


class DataPlaneClient(ABC):
    """Rows and columns in flight. Synchronous, thread-safe, and every call ends by a deadline."""

    @property
    @abstractmethod
    def address(self) -> DataPlaneAddress:
        """What another process passes to `factory.attach_data_plane`; picklable."""

    @property
    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Bytes that this client moved: `put_bytes`, `get_bytes`; of the latter nobody asked for `over_read_bytes`."""

    @abstractmethod
    def partition_fields(self, partition_id: str) -> tuple[FieldSpec, ...]:
        """The declared columns of a partition."""

    @abstractmethod
    def register_partition(
        self,
        partition_id: str,
        fields: Sequence[str | FieldSpec],
        num_samples: int,
        consumer_tasks: Sequence[str],
        grpo_group_size: int | None = None,
    ) -> None:
        """Declares schema and cursors. Idempotent for the same declaration.

        Args:
            fields: names of the FieldSpec table, or `FieldSpec`s of family `extras`.
            num_samples: rows the partition may hold at one time.
            consumer_tasks: tasks that may claim rows with `get_meta`.
            grpo_group_size: claims hand out whole groups of this size; None hands out single rows.

        Raises:
            SchemaMismatch: declared before in another way, or an unknown field name.
        """

    @abstractmethod
    def kv_batch_put(
        self, keys: Sequence[str], partition_id: str, fields: Columns, tags: Sequence[Tags] | None = None
    ) -> KVBatchMeta:
        """Writes columns of the rows `keys`; all of them become readable at one moment, or none does.

        Raises:
            PartitionNotFound, SchemaMismatch, CapacityExceeded, LeaseExpired, DataPlaneTimeout, DataPlaneClosed.
        """

    @abstractmethod
    def put_async(
        self, keys: Sequence[str], partition_id: str, fields: Columns, tags: Sequence[Tags] | None = None
    ) -> Future[KVBatchMeta]:
        """As `kv_batch_put`, in the background; the columns must not be changed until the future is done."""

    @abstractmethod
    def kv_batch_get(self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> TensorDict:
        """The rows in the order of `keys`; never fewer rows, never fewer fields.

        Ragged columns come back as jagged nested tensors, object columns as `NonTensorStack`.

        Raises:
            KeysNotFound, FieldNotProduced, PartitionNotFound, SchemaMismatch, DataPlaneTimeout, DataPlaneClosed.
        """

    @abstractmethod
    def get_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        *,
        consumer_id: str,
        blocking: bool = True,
        timeout_s: float | None = None,
    ) -> KVBatchMeta:
        """Claims up to `batch_size` rows that have all `required_fields`, each once per task.

        Blocking waits until at least one claimable unit (row or group) is there and raises DataPlaneTimeout past
        `timeout_s`; non-blocking returns an empty meta. The claim is a lease renewed by this client's heartbeat; a
        consumer that dies gives its rows back when the lease ends.
        """

    @abstractmethod
    def release(self, meta: KVBatchMeta) -> None:
        """Ends a claim: the rows are done for `meta.task_name`."""

    @abstractmethod
    def get_data(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> TensorDict:
        """The columns of `meta` (its own fields when none are named); checks the family versions it carries.

        Raises:
            VersionMismatch: a family was rewritten since `meta` was made. And the errors of `kv_batch_get`.
        """

    def get_padded(
        self,
        meta: KVBatchMeta,
        select_fields: Sequence[str],
        *,
        pad_values: Mapping[str, float],
        pad_to: int | None = None,
    ) -> BatchedDataDict:
        """As `get_data`, as a dense batch: rows `[N, width, ...]` padded on the right, object columns as lists.

        Args:
            pad_values: field -> padding; 0 for others.
            pad_to: width of token-aligned columns; None takes the longest row. Other ragged columns take their own.
        """
        aligned = [spec.name for spec in self.partition_fields(meta.partition_id) if spec.is_token_aligned]
        rows = self.get_data(meta, select_fields)
        return materialize(rows, pad_values=pad_values, pad_to=pad_to, token_aligned=aligned)

    @abstractmethod
    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        """True when every live row has been claimed by every named task; an unknown task is an error."""

    @abstractmethod
    def kv_list(self, partition_id: str) -> dict[str, dict[str, TagValue]]:
        """Keys of the live rows with their tags, in order of their first put."""

    @abstractmethod
    def kv_clear(self, keys: Sequence[str] | None, partition_id: str, *, reason: str = "") -> None:
        """Frees rows (all when None). Idempotent; unknown keys are ignored, an unknown partition is an error.

        Args:
            reason: why, for the rows' history.
        """

    @abstractmethod
    def row_owners(self, partition_id: str) -> dict[str, str]:
        """Keys of the live rows with the label of the client that created each."""

    @abstractmethod
    def stats(self) -> dict[str, object]:
        """Cluster-wide numbers, JSON-like.

        Returns:
            `live_rows`, `live_bytes`, `live_chunks` and their `peak_` marks; `reserved_bytes` (room promised to puts
            under way), `blocked_put_s` (seconds that puts have waited for room), `oldest_row_age_s`; `partitions`:
            name -> `rows`, `bytes`, `peak_rows`, `peak_bytes`, `oldest_row_age_s`, `fields` (field -> bytes).
        """

    @abstractmethod
    def close(self) -> None:
        """Ends this client; only the owner's close ends the service. Idempotent."""
