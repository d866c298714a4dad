"""The data plane's contract: the client, and the payload store under it.

A client is one ledger (the truth about rows) and one payload store (opaque bytes). Everybody programs against
`DataPlaneClient`; only `factory.build_data_plane_client` knows which store and which ledger host are used.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from nemo_rl.data_plane.address import DataPlaneAddress, Handles
from nemo_rl.data_plane.batch_meta import KVBatchMeta
from nemo_rl.data_plane.chunks.columns import Columns, FlatColumn
from nemo_rl.data_plane.chunks.ragged import materialize
from nemo_rl.data_plane.chunks.tags import Tags, TagValue
from nemo_rl.data_plane.client.operation_counts import Totals
from nemo_rl.data_plane.schema import FieldSpec
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = [
    "ColumnStore",
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

Parts: TypeAlias = Sequence[memoryview]
"""Buffers whose concatenation is one chunk; a store that moves whole chunks gives one part back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreHealth:
    """The health of a payload store, in its own words."""

    is_alive: bool
    detail: str = ""


class PayloadStore(ABC):
    """Opaque payloads under ids that are used once. Every call is bounded by a deadline and thread-safe."""

    @property
    def chunk_bytes(self) -> int | None:
        """The chunk size that suits this store, in bytes; None takes `data_plane.chunk_bytes`."""
        return None

    @property
    def block_bytes(self) -> int | None:
        """Target size of what one read moves at least, for a store that moves whole payloads: chunks are cut into such
        blocks, each stored by itself. None stores whole chunks."""
        return None

    @property
    def address(self) -> str:
        """The address that other processes need to join, besides the run id; empty when the run id is enough."""
        return ""

    @property
    def reuses_memory(self) -> bool:
        """The bytes of a dropped chunk may be overwritten while a `get` of it is under way.

        The client then asks the ledger after each get whether its chunks are still live: they are dropped there first.
        """
        return False

    @property
    def is_mapped(self) -> bool:
        """True where `get` returns memory that this process shares with the writer: no byte moves before it is read."""
        return False

    @property
    def place(self) -> str:
        """The name of this process's place, for the names of its chunks."""
        return socket.gethostname()

    @property
    def rows(self) -> ColumnStore | None:
        """The columns that this store keeps under the rows' own keys, for other programs; None where it keeps chunks
        alone."""
        return None

    @abstractmethod
    def put(self, chunks: Mapping[str, Parts], *, timeout_s: float) -> Handles | None:
        """Store a copy of every chunk, or raise and leave none readable.

        Returns:
            What readers need to reach the chunks, for stores whose chunks are not found by their id alone.
        """

    @abstractmethod
    def get(self, chunk_ids: Sequence[str], *, timeout_s: float, handles: Handles) -> list[Parts]:
        """Return the payloads in the order of `chunk_ids`; never fewer. The buffers are read-only to the caller.

        Raises:
            KeysNotFound: a chunk was freed. PayloadLost: the process that held it is gone.
        """

    def abandoned(self, after_s: float) -> list[str]:
        """Return chunks whose writer died at least `after_s` seconds before, for stores where such chunks would stay.

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
        """Free chunks; unknown ids are ignored."""

    @abstractmethod
    def health(self) -> StoreHealth:
        """Return whether the backend answers, with details."""

    @abstractmethod
    def close(self) -> None:
        """End this client's part; the owner's close also ends the backend. Idempotent."""


class ColumnStore(ABC):
    """Columns under the rows' own keys, which other programs read and add to. Every call ends by a deadline.

    A column of a row is written here once; what rewrites it goes to a chunk first, because a value cannot be replaced
    at one moment. The ledger decides which of the two a put is, and where a column is read.
    """

    @property
    @abstractmethod
    def others(self) -> str:
        """Name a client of another program, for messages."""

    @abstractmethod
    def takes(self, column: FlatColumn) -> bool:
        """Return whether the store can keep such a column; one that it cannot keep goes to chunks alone."""

    @abstractmethod
    def put(
        self,
        partition_id: str,
        keys: Sequence[str],
        columns: Mapping[str, FlatColumn],
        tags: Sequence[Tags] | None,
        *,
        timeout_s: float,
    ) -> None:
        """Write columns and add tags, in one message for all of the rows; rows that do not exist are made."""

    @abstractmethod
    def get(
        self,
        partition_id: str,
        keys: Sequence[str],
        specs: Sequence[FieldSpec],
        *,
        sizes: Mapping[str, Sequence[int]] | None,
        timeout_s: float,
    ) -> dict[str, torch.Tensor | list[object]]:
        """Return the columns in the order of `keys`; never fewer rows, never fewer columns.

        Args:
            sizes: bytes of each row, for columns that this run has written; None for those of other programs.

        Raises:
            KeysNotFound: a row was cleared, or lacks a column. SchemaMismatch: a column has rows of several dtypes.
        """

    @abstractmethod
    def written(
        self, partition_id: str, lacking: Mapping[str, Collection[str]], *, timeout_s: float
    ) -> dict[str, list[str]]:
        """Return, of the rows that lack a field in the ledger (field -> keys), those that have it here."""

    @abstractmethod
    def keys(self, partition_id: str, *, timeout_s: float) -> list[str]:
        """Return the keys of all rows, those of other programs too."""

    @abstractmethod
    def drop(self, partition_id: str, keys: Sequence[str], *, timeout_s: float) -> None:
        """Free rows with all of their columns; unknown keys are ignored."""


class DataPlaneClient(ABC):
    """Rows and columns in flight. Synchronous, thread-safe, and every call ends by a deadline."""

    @property
    @abstractmethod
    def address(self) -> DataPlaneAddress:
        """The address that another process passes to `factory.attach_data_plane`; picklable."""

    @property
    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Bytes that this client moved: `put_bytes`, `get_bytes`; of the latter nobody asked for `over_read_bytes`."""

    @abstractmethod
    def stage(self, name: str) -> AbstractContextManager[None]:
        """Calls made inside, in this thread, are counted for stage `name`."""

    @abstractmethod
    def snapshot(self, *, reset: bool = False) -> Totals:
        """Return the cost of this client's calls since the start or the last reset; picklable.

        Nothing is counted where `data_plane.observability.enabled` is false.

        Example:
            >>> with client.stage("train"):                        # doctest: +SKIP
            ...     client.get_data(meta, ["input_ids"])
            >>> client.snapshot().stages["train"]["get_data"].count  # doctest: +SKIP
            1
        """

    @abstractmethod
    def partition_fields(self, partition_id: str) -> tuple[FieldSpec, ...]:
        """Return the declared columns of a partition."""

    @abstractmethod
    def register_partition(
        self,
        partition_id: str,
        fields: Sequence[str | FieldSpec],
        num_samples: int,
        consumer_tasks: Sequence[str],
        grpo_group_size: int | None = None,
    ) -> None:
        """Declare schema and cursors. Idempotent for the same declaration.

        Args:
            fields: names of the FieldSpec table, or `FieldSpec`s of family `extras`.
            num_samples: rows the partition may hold at one time.
            consumer_tasks: tasks that may claim rows with `get_meta`.
            grpo_group_size: claims hand out whole groups of this size; None hands out single rows.

        Raises:
            SchemaMismatch: declared before in another way, or an unknown field name.
        """

    @abstractmethod
    def add_fields(self, partition_id: str, fields: Sequence[FieldSpec]) -> None:
        """Declare further columns of a registered partition, for programs that learn of them as they come. Idempotent.

        Args:
            fields: specs of family `extras`; here such a column may have the name of one of the FieldSpec table.

        Raises:
            SchemaMismatch: declared before in another way. PartitionNotFound: never registered.
        """

    @abstractmethod
    def kv_batch_put(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: Columns,
        tags: Sequence[Tags] | None = None,
        *,
        claimed: KVBatchMeta | None = None,
    ) -> KVBatchMeta:
        """Write columns of the rows `keys`; all of them become readable at one moment, or none does.

        Args:
            claimed: the meta under whose claim they are written, also when another client claimed it: once that claim
                has ended the put is refused. Without it, the claims that this client holds itself count.

        Raises:
            PartitionNotFound, SchemaMismatch, CapacityExceeded, LeaseExpired, DataPlaneTimeout, DataPlaneClosed.
        """

    @abstractmethod
    def put_async(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: Columns,
        tags: Sequence[Tags] | None = None,
        *,
        claimed: KVBatchMeta | None = None,
    ) -> Future[KVBatchMeta]:
        """Put in the background like `kv_batch_put`; the columns must not be changed until the future is done."""

    @abstractmethod
    def kv_batch_get(self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> TensorDict:
        """Return the rows in the order of `keys`; never fewer rows, never fewer fields.

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
        groups: Sequence[str] = (),
    ) -> KVBatchMeta:
        """Claim up to `batch_size` rows that have all `required_fields`, each once per task.

        Blocking waits until at least one claimable unit (row or group) is there and raises DataPlaneTimeout past
        `timeout_s`; non-blocking returns an empty meta. The claim is a lease renewed by this client's heartbeat; a
        consumer that dies gives its rows back when the lease ends.

        Args:
            groups: uids of the only groups to claim rows of, in the order in which they are wanted; none: all groups,
                first come first served.
        """

    @abstractmethod
    def release(self, meta: KVBatchMeta) -> None:
        """End a claim: the rows are done for `meta.task_name`. Any client that has the meta may do it.

        Raises:
            LeaseExpired: the claim in `meta` has ended, whichever client has the rows now.
        """

    @abstractmethod
    def get_data(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> TensorDict:
        """Return the columns of `meta` (its own fields when none are named); checks the family versions it carries.

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
        jagged: Collection[str] = (),
    ) -> BatchedDataDict:
        """Read into a dense batch, as `get_data`: rows `[N, width, ...]` padded on the right, object columns as lists.

        Args:
            pad_values: field -> padding; 0 for others.
            pad_to: width of token-aligned columns; None takes the longest row. Other ragged columns take their own.
            jagged: columns of `select_fields` that stay without padding.
        """
        aligned = [spec.name for spec in self.partition_fields(meta.partition_id) if spec.is_token_aligned]
        rows = self.get_data(meta, select_fields)
        return materialize(rows, pad_values=pad_values, pad_to=pad_to, token_aligned=aligned, jagged=jagged)

    @abstractmethod
    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        """True when every live row has been claimed by every named task; an unknown task is an error."""

    @abstractmethod
    def kv_list(self, partition_id: str) -> dict[str, dict[str, TagValue]]:
        """Return keys of the live rows with their tags, in order of their first put."""

    @abstractmethod
    def kv_clear(self, keys: Sequence[str] | None, partition_id: str, *, reason: str = "") -> int:
        """Free rows (all when None). Idempotent; unknown keys are ignored, an unknown partition is an error.

        Args:
            reason: why, for the rows' history.

        Returns:
            How many rows were freed.
        """

    @abstractmethod
    def drop_partition(self, partition_id: str, *, reason: str = "") -> int:
        """Free the rows of a partition and forget its declaration, so that it can be registered in another way.

        Versions go on where they were: a meta from before never matches rows from after.

        Returns:
            How many rows were freed.
        """

    @abstractmethod
    def row_owners(self, partition_id: str) -> dict[str, str]:
        """Return keys of the live rows with the label of the client that created each."""

    @abstractmethod
    def stats(self) -> dict[str, object]:
        """Cluster-wide numbers, JSON-like.

        Returns:
            `live_rows`, `live_bytes`, `live_chunks` and their `peak_` marks; `stored_bytes` (with cleared rows whose
            chunk has live ones), `reserved_bytes` (capacity reserved for puts under way), `blocked_put_s` (seconds that
            puts have waited for capacity), `oldest_row_age_s`; `partitions`:
            name -> `rows`, `bytes`, `peak_rows`, `peak_bytes`, `oldest_row_age_s`, `fields` (field -> bytes).
        """

    @abstractmethod
    def close(self) -> None:
        """End this client; only the owner's close ends the service. Idempotent."""
