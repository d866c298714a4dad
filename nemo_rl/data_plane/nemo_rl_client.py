"""`NemoRlClient`: the data plane interface of NVIDIA NeMo-RL's trainer, over any store of this library.

    client = NemoRlClient(build_data_plane_client(config, run_id="r"))          # in the driver
    client = NemoRlClient(attach_data_plane(address))                           # in a worker

NeMo-RL's columns have names only: their dtype and dims are those of the first put, and come back as they were put. A
row is handed to a task once and for good: there are neither leases nor versions. Errors are those that NeMo-RL's
trainer expects (`KeyError`, `ValueError`, `TimeoutError`); others are `DataPlaneError`s. Nothing of NeMo-RL is
imported. The one invariant: what is read has every row and every column that was asked for, or it is an error.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nemo_rl.data_plane.chunks.columns import dtype_name
from nemo_rl.data_plane.chunks.ragged import is_object_stack, is_object_value, object_rows
from nemo_rl.data_plane.client.link import FIRST_POLL_S, LONGEST_POLL_S
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.data_plane.schema import FieldSpec, extra_field
from nemo_rl.errors import (
    DataPlaneError,
    FieldNotProduced,
    KeysNotFound,
    PartitionNotFound,
    SchemaMismatch,
    name_some,
)
from nemo_rl.jagged import lengths_of, stack_or_nest, values_of

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["NemoRlClient", "SampleMeta"]

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class SampleMeta:
    """The rows of a batch by id, as NeMo-RL's `KVBatchMeta`. All operations but `stamp_tags` return a new one.

    Example:
        >>> meta = SampleMeta(partition_id="train", sample_ids=["a_g0", "a_g1"], sequence_lengths=[3, 5])
        >>> meta.subset([1]).sample_ids, meta.drop([0, 1])
        (['a_g1'], None)
    """

    partition_id: str
    task_name: str | None = None
    sample_ids: list[str] = field(default_factory=list)
    fields: list[str] | None = None
    """Columns of the put that made this meta."""
    sequence_lengths: list[int] | None = None
    """Tokens per row, aligned with `sample_ids`."""
    extra_info: dict[str, Any] = field(default_factory=dict)
    """Facts about the batch as a whole."""
    tags: list[dict[str, Any]] | None = None
    """Small primitives per row, aligned with `sample_ids`."""

    def __post_init__(self) -> None:
        if self.tags is not None and len(self.tags) != len(self.sample_ids):
            raise ValueError(f"tags: expected {len(self.sample_ids)} rows, one per sample id, got {len(self.tags)}")

    @property
    def size(self) -> int:
        return len(self.sample_ids)

    def stamp_tags(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Set tags in place, one value per row and name."""
        for name, values in columns.items():
            if len(values) != self.size:
                raise ValueError(f"tag {name!r}: expected {self.size} values, one per sample id, got {len(values)}")
        if self.tags is None:
            self.tags = [{} for _ in self.sample_ids]
        for name, values in columns.items():
            for row, value in zip(self.tags, values, strict=True):
                row[name] = value

    def subset(self, indices: Iterable[int]) -> SampleMeta:
        """Return the rows at `indices`, in that order."""
        picked = list(indices)
        return replace(
            self,
            sample_ids=[self.sample_ids[i] for i in picked],
            fields=None if self.fields is None else list(self.fields),
            sequence_lengths=None if self.sequence_lengths is None else [self.sequence_lengths[i] for i in picked],
            extra_info=dict(self.extra_info),
            tags=None if self.tags is None else [dict(self.tags[i]) for i in picked],
        )

    def slice(self, start: int, stop: int) -> SampleMeta:
        """Return rows `start` to `stop`, as a slice of a list."""
        return self.subset(range(self.size)[start:stop])

    def concat(self, *others: SampleMeta) -> SampleMeta:
        """Return these rows, then those of the others. Fields and extra info are this meta's; lengths and tags are
        None when one of them lacks them.

        Raises:
            ValueError: another partition.
        """
        parts = [self, *others]
        if foreign := sorted({part.partition_id for part in others} - {self.partition_id}):
            raise ValueError(f"concat: expected metas of partition {self.partition_id!r}, got {name_some(foreign)}")
        lengths = [part.sequence_lengths for part in parts]
        tags = [part.tags for part in parts]
        return replace(
            self.subset(range(self.size)),
            sample_ids=[sample for part in parts for sample in part.sample_ids],
            sequence_lengths=None if None in lengths else [n for part in lengths for n in part or ()],
            tags=None if None in tags else [dict(row) for part in tags for row in part or ()],
        )

    def drop(self, indices: Iterable[int]) -> SampleMeta | None:
        """Return all rows but those at `indices` (any order, repeats allowed); None when none is left."""
        gone = set(indices)
        kept = [i for i in range(self.size) if i not in gone]
        return self.subset(kept) if kept else None

    def with_fields(self, names: Iterable[str]) -> SampleMeta:
        """Add field names, each once, order kept."""
        return replace(
            self,
            sample_ids=list(self.sample_ids),
            fields=list(dict.fromkeys([*(self.fields or ()), *names])),
            extra_info=dict(self.extra_info),
            tags=copy.deepcopy(self.tags),
        )


class NemoRlClient:
    """NeMo-RL's `DataPlaneClient`, by the names and meanings of its interface."""

    def __init__(self, client: DataPlaneClient) -> None:
        self._client = client
        self._is_closed = False

    @property
    def client(self) -> DataPlaneClient:
        """The client of this library underneath; its `address` is what a worker attaches with."""
        return self._client

    def register_partition(
        self,
        partition_id: str,
        fields: Sequence[str],
        num_samples: int,
        consumer_tasks: Sequence[str],
        grpo_group_size: int | None = None,
        enums: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Declare a partition and its consumer tasks. Repeating it changes nothing; another declaration replaces the
        partition with its rows and cursors.

        Args:
            fields: not needed, columns are declared by their first put; likewise `num_samples`, rows are limited by
                `data_plane.storage_capacity` alone, and `enums`.
            grpo_group_size: claims hand out whole groups of this size; None hands out single rows.
        """
        rows = self._client.address.config.storage_capacity.rows
        declaration = (partition_id, (), max(rows, num_samples), tuple(consumer_tasks), grpo_group_size)
        try:
            self._client.register_partition(*declaration)
        except SchemaMismatch:
            self._client.drop_partition(partition_id, reason="registered anew")
            self._client.register_partition(*declaration)

    def claim_meta(  # noqa: PLR0917 - a published interface
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = 60.0,
    ) -> SampleMeta:
        """Claim up to `batch_size` rows that have all required fields; no row is given to a task twice.

        Blocking waits for the first of them; non-blocking returns an empty meta.

        Raises:
            TimeoutError: there was none for `timeout_s`. KeyError: an unknown partition or task.
        """
        give_up, poll_s = time.monotonic() + timeout_s, FIRST_POLL_S
        consumer = "nemo-rl" if dp_rank is None else f"nemo-rl rank {dp_rank}"
        while True:
            meta = self._claim(partition_id, task_name, list(required_fields), batch_size, consumer)
            if meta.sample_ids or not blocking:
                return meta
            if time.monotonic() + poll_s > give_up:
                raise TimeoutError(
                    f"claim_meta of partition {partition_id!r}, task {task_name!r}: no row with fields "
                    f"{', '.join(required_fields)} for {timeout_s:.1f} s"
                )
            time.sleep(poll_s)
            poll_s = min(poll_s * 2, LONGEST_POLL_S)

    def _claim(
        self, partition_id: str, task_name: str, fields: list[str], batch_size: int, consumer: str
    ) -> SampleMeta:
        empty = SampleMeta(partition_id=partition_id, task_name=task_name, fields=fields)
        with _as_key_errors():
            try:
                meta = self._client.get_meta(
                    partition_id, task_name, fields, batch_size, consumer_id=consumer, blocking=False
                )
            except SchemaMismatch as error:
                known = {spec.name for spec in self._client.partition_fields(partition_id)}
                if known.issuperset(fields):
                    raise KeyError(str(error)) from error  # the task
                return empty  # no stage has written the field yet
            if not meta.keys:
                return empty
            self._client.release(meta)
        lengths = meta.sequence_lengths
        return SampleMeta(
            partition_id=partition_id,
            task_name=task_name,
            sample_ids=list(meta.keys),
            fields=fields,
            sequence_lengths=None if lengths is None else list(lengths),
            tags=[dict(row) for row in meta.tags or ()] if meta.tags is not None else [{} for _ in meta.keys],
        )

    def get_data(self, meta: SampleMeta, select_fields: Sequence[str] | None = None) -> TensorDict:
        """Return the rows of a meta, the named columns or else its own.

        Raises:
            ValueError: neither names columns. And the errors of `get_samples`.
        """
        names = meta.fields if select_fields is None else select_fields
        if not names:
            raise ValueError(f"get_data of partition {meta.partition_id!r}: the meta names no fields; pass them")
        return self.get_samples(meta.sample_ids, meta.partition_id, names)

    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        """True when every row was claimed by every task; false for an unknown task or partition."""
        try:
            return self._client.check_consumption_status(partition_id, task_names)
        except (PartitionNotFound, SchemaMismatch):
            return False

    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: Mapping[str, Any] | TensorDict | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> SampleMeta:
        """Write columns of rows; a written field is the only sign that a stage is done with it.

        Columns are tensors `[N, ...]`, jagged nested tensors, or JSON-like objects (a list, an object array, a
        `NonTensorStack`).

        Raises:
            KeyError: an unknown partition. SchemaMismatch: a column of another dtype or other dims than before.
        """
        ids, rows = list(sample_ids), dict(_items(fields))
        tag_rows = [{} for _ in ids] if tags is None else [{k: _plain(v) for k, v in row.items()} for row in tags]
        if ids:
            columns = {name: _for_put(column) for name, column in rows.items()}
            with _as_key_errors():
                self._declare(partition_id, columns)
                self._client.kv_batch_put(ids, partition_id, columns, None if tags is None else tag_rows)
        return SampleMeta(partition_id=partition_id, sample_ids=ids, fields=list(rows), tags=tag_rows)

    def _declare(self, partition_id: str, columns: Mapping[str, Any]) -> None:
        known = {spec.name for spec in self._client.partition_fields(partition_id)}
        fresh = [_spec_of(name, column) for name, column in columns.items() if name not in known]
        for some in [fresh, *([spec] for spec in fresh)] if fresh else ():
            try:
                self._client.add_fields(partition_id, some)
            except SchemaMismatch as error:
                # Another process was first; its first put says what the column is, and ours is checked against it.
                logger.debug("a column is declared already: %s", error)
            else:
                if some is fresh:
                    return

    def get_samples(self, sample_ids: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> TensorDict:
        """Return rows in the order of the ids, which may repeat; rows of one shape are dense, others nested.

        Raises:
            KeyError: an unknown id, or a field that is not written for every row.
        """
        from tensordict import TensorDict  # noqa: PLC0415 - only readers need it

        if not sample_ids:
            return TensorDict({}, batch_size=[0])
        names, distinct = list(dict.fromkeys(select_fields)), list(dict.fromkeys(sample_ids))
        with _as_key_errors():
            try:
                rows = self._client.kv_batch_get(distinct, partition_id, names)
            except SchemaMismatch as error:
                known = {spec.name for spec in self._client.partition_fields(partition_id)}
                if known.issuperset(names):
                    raise
                raise KeyError(f"no row has fields {name_some(set(names) - known)}: {error}") from error
        places = {sample: i for i, sample in enumerate(distinct)}
        order = None if len(distinct) == len(sample_ids) else [places[sample] for sample in sample_ids]
        columns = {name: _as_read(rows.get(name), order) for name in names}
        return TensorDict(columns, batch_size=[len(sample_ids)])

    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        """Free rows, all of them when None; unknown ones and unknown partitions are ignored."""
        try:
            self._client.kv_clear(None if sample_ids is None else list(sample_ids), partition_id)
        except PartitionNotFound:
            logger.debug("clear_samples: partition %r is not registered", partition_id)

    def close(self) -> None:
        """End this client; the owner's close ends the service. Idempotent, and raises no data plane error."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._client.close()
        except DataPlaneError as error:
            logger.warning("the data plane did not close cleanly: %s", error)


@contextmanager
def _as_key_errors() -> Iterator[None]:
    """Raise what NeMo-RL's trainer expects for what is not there."""
    try:
        yield
    except (KeysNotFound, FieldNotProduced, PartitionNotFound) as error:
        raise KeyError(str(error)) from error


def _items(fields: Mapping[str, Any] | TensorDict | None) -> Iterator[tuple[str, Any]]:
    """Yield the columns as they were given: indexing a TensorDict would unwrap its objects."""
    if fields is None:
        return
    for name in fields.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        yield str(name), fields.get(str(name))


def _for_put(column: Any) -> Any:
    """Return a column as `kv_batch_put` takes it: detached tensors, objects as a list."""
    if isinstance(column, torch.Tensor):
        return column.detach()
    if isinstance(column, np.ndarray) and column.dtype != object:
        return torch.from_numpy(column)
    if is_object_value(column) or is_object_stack(column):
        return object_rows(column)
    return list(column)


def _spec_of(name: str, column: Any) -> FieldSpec:
    """Declare a column by its first put. Each has a family of its own, so that a read moves no other."""
    if not isinstance(column, torch.Tensor):
        return extra_field(name, is_object=True, read_by=(name,))
    if column.dim() == 1:
        return extra_field(name, dtypes=(dtype_name(column.dtype),), read_by=(name,))
    entry = values_of(column).shape[1:] if column.is_nested else column.shape[2:]
    # Rows of later puts may have another length, as of another prompt.
    dims = (f"{name} entries", *entry)
    return extra_field(name, dtypes=(dtype_name(column.dtype),), dims=dims, read_by=(name,))


def _as_read(column: Any, order: Sequence[int] | None) -> Any:
    """Return a column in the order asked for (None: as it is), dense where all rows have one shape."""
    if not isinstance(column, torch.Tensor):
        from tensordict import NonTensorData, NonTensorStack  # noqa: PLC0415 - only readers need it

        rows = object_rows(column)
        return NonTensorStack(*[NonTensorData(rows[i]) for i in (range(len(rows)) if order is None else order)])
    if not column.is_nested:
        return column if order is None else column[torch.tensor(order)]
    lengths = lengths_of(column)
    if order is not None:
        each = column.unbind()
        return stack_or_nest([each[i] for i in order])
    if bool((lengths != lengths[0]).any()):
        return column
    values = values_of(column)
    return values.reshape(len(lengths), int(lengths[0]), *values.shape[1:])


def _plain(value: Any) -> Any:
    """Return a number of torch or numpy as Python's."""
    return value.tolist() if isinstance(value, np.generic | torch.Tensor) else value
