"""`MetricsDataPlaneClient`: counts what a client's calls cost and informs a callback, without changing what they do.

Every process wraps its own client; the driver sums the snapshots with `merge_snapshots`. Payload (columns) and meta
(keys, lengths and tags that cross with a call) are counted apart, so that the driver's share can be stated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

import msgpack
import torch

from nemo_rl.data_plane.address import DataPlaneAddress
from nemo_rl.data_plane.chunks.ragged import object_rows
from nemo_rl.data_plane.chunks.wire import packed_size
from nemo_rl.data_plane.client.event_callback import DataPlaneEvent, load_callback
from nemo_rl.data_plane.client.operation_counts import OperationCount, Totals, merge_snapshots
from nemo_rl.data_plane.client.stage_context import current_stage, working_for
from nemo_rl.data_plane.interfaces import Columns, DataPlaneClient, KVBatchMeta, Tags, TagValue
from nemo_rl.data_plane.schema import FieldSpec
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.errors import DataPlaneTimeout
from nemo_rl.jagged import values_of

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["DataPlaneEvent", "MetricsDataPlaneClient", "columns_bytes", "merge_snapshots", "meta_bytes"]

_T = TypeVar("_T")


@dataclass(slots=True)
class _Cost:
    """What one call is about and what it moved; filled by the call itself."""

    partition: str = ""
    rows: int = 0
    fields: tuple[str, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    """Payload bytes by field."""
    meta_bytes: int = 0


def columns_bytes(columns: Columns) -> int:
    """Bytes of the rows themselves: tensors without padding, objects as JSON-like values."""
    return sum(_column_sizes(columns).values())


def _column_sizes(columns: Columns) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name in map(str, columns.keys()):
        column = columns.get(name)
        if isinstance(column, torch.Tensor):
            sizes[name] = (values_of(column) if column.is_nested else column).nbytes
        else:
            sizes[name] = len(msgpack.packb(object_rows(column)))
    return sizes


def _dense_sizes(batch: BatchedDataDict, meta: KVBatchMeta, per_token: set[str]) -> dict[str, int]:
    """Bytes of dense columns, without the padding that no store has seen."""
    sizes = _column_sizes(batch.data)
    for name in per_token & sizes.keys() if meta.sequence_lengths else ():
        rows, width = batch.tensor(name).shape[:2]
        sizes[name] = sizes[name] // max(rows * width, 1) * sum(meta.sequence_lengths or ())
    return sizes


class MetricsDataPlaneClient(DataPlaneClient):
    """Counts calls, errors, milliseconds and bytes per operation and per stage. Thread-safe.

    Counts nothing where `data_plane.observability.enabled` is false.

    Example:
        >>> with client.stage("train"):                        # doctest: +SKIP
        ...     client.get_data(meta, ["input_ids"])
        >>> client.snapshot()["stages"]["train"]["get_data"]["count"]  # doctest: +SKIP
        1
    """

    def __init__(self, inner: DataPlaneClient) -> None:
        """Raises ConfigError when the callback of the config does not exist."""
        self._inner = inner
        settings = inner.address.config.observability
        self._is_counting = settings.enabled
        self._callback = load_callback(settings.callback)
        self._totals = Totals()
        self._over_read_before = 0
        self._lock = threading.Lock()

    @property
    def address(self) -> DataPlaneAddress:
        return self._inner.address

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Calls made inside, in this thread, are counted for stage `name`."""
        return working_for(name)

    def snapshot(self, *, reset: bool = False) -> dict[str, object]:
        """Totals since the start or the last reset.

        Returns:
            `operations`: name -> `OperationCount` as a dict; `stages`: stage ("" for calls outside any stage) -> the
            same per operation; `payload_bytes` and `meta_bytes` in all; `field_bytes`: field -> payload bytes;
            `over_read_bytes`.
        """
        with self._lock:
            totals, over_read = self._totals, self._inner.counters["over_read_bytes"]
            totals.over_read_bytes = over_read - self._over_read_before if self._is_counting else 0
            if reset:
                self._totals, self._over_read_before = Totals(), over_read
            return totals.snapshot()

    @property
    def counters(self) -> dict[str, int]:
        return self._inner.counters

    def register_partition(
        self,
        partition_id: str,
        fields: Sequence[str | FieldSpec],
        num_samples: int,
        consumer_tasks: Sequence[str],
        grpo_group_size: int | None = None,
    ) -> None:
        self._measure(
            "register_partition",
            lambda cost: self._inner.register_partition(
                partition_id, fields, num_samples, consumer_tasks, grpo_group_size
            ),
            _Cost(partition=partition_id),
        )

    def partition_fields(self, partition_id: str) -> tuple[FieldSpec, ...]:
        return self._inner.partition_fields(partition_id)

    def kv_batch_put(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: Columns,
        tags: Sequence[Tags] | None = None,
        *,
        claimed: KVBatchMeta | None = None,
    ) -> KVBatchMeta:
        def put(cost: _Cost) -> KVBatchMeta:
            meta = self._inner.kv_batch_put(keys, partition_id, fields, tags, claimed=claimed)
            _add_put(cost, meta, fields)
            return meta

        about = _Cost(partition=partition_id, rows=len(keys), fields=tuple(map(str, fields.keys())))
        return self._measure("kv_batch_put", put, about)

    def put_async(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: Columns,
        tags: Sequence[Tags] | None = None,
        *,
        claimed: KVBatchMeta | None = None,
    ) -> Future[KVBatchMeta]:
        """Counted when the put is done, for the stage that started it."""
        stage, started = current_stage.get(), time.perf_counter()
        future = self._inner.put_async(keys, partition_id, fields, tags, claimed=claimed)

        def count(done: Future[KVBatchMeta]) -> None:
            cost = _Cost(partition=partition_id, rows=len(keys), fields=tuple(map(str, fields.keys())))
            error = CancelledError() if done.cancelled() else done.exception()
            if error is None:
                _add_put(cost, done.result(), fields)
            self._add(stage, "put_async", started, cost, error)

        future.add_done_callback(count)
        return future

    def kv_batch_get(self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> TensorDict:
        def get(cost: _Cost) -> TensorDict:
            rows = self._inner.kv_batch_get(keys, partition_id, select_fields)
            cost.sizes, cost.meta_bytes = _column_sizes(rows), packed_size(keys)
            return rows

        about = _Cost(partition=partition_id, rows=len(keys), fields=tuple(select_fields))
        return self._measure("kv_batch_get", get, about)

    def get_data(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> TensorDict:
        def get(cost: _Cost) -> TensorDict:
            rows = self._inner.get_data(meta, select_fields)
            cost.sizes, cost.meta_bytes = _column_sizes(rows), packed_size(meta.keys)
            return rows

        names = meta.fields if select_fields is None else tuple(select_fields)
        return self._measure("get_data", get, _Cost(partition=meta.partition_id, rows=len(meta), fields=names))

    def get_padded(
        self,
        meta: KVBatchMeta,
        select_fields: Sequence[str],
        *,
        pad_values: Mapping[str, float],
        pad_to: int | None = None,
    ) -> BatchedDataDict:
        def get(cost: _Cost) -> BatchedDataDict:
            rows = self._inner.get_padded(meta, select_fields, pad_values=pad_values, pad_to=pad_to)
            per_token = {spec.name for spec in self.partition_fields(meta.partition_id) if spec.is_token_aligned}
            cost.sizes, cost.meta_bytes = _dense_sizes(rows, meta, per_token), packed_size(meta.keys)
            return rows

        about = _Cost(partition=meta.partition_id, rows=len(meta), fields=tuple(select_fields))
        return self._measure("get_data", get, about)

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
        def claim(cost: _Cost) -> KVBatchMeta:
            meta = self._inner.get_meta(
                partition_id,
                task_name,
                required_fields,
                batch_size,
                consumer_id=consumer_id,
                blocking=blocking,
                timeout_s=timeout_s,
            )
            cost.rows, cost.meta_bytes = len(meta), meta_bytes(meta)
            return meta

        about = _Cost(partition=partition_id, fields=tuple(required_fields))
        return self._measure("get_meta", claim, about)

    def release(self, meta: KVBatchMeta) -> None:
        def end(cost: _Cost) -> None:
            self._inner.release(meta)
            cost.meta_bytes = packed_size(meta.keys)

        self._measure("release", end, _Cost(partition=meta.partition_id, rows=len(meta)))

    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        return self._measure(
            "check_consumption_status",
            lambda cost: self._inner.check_consumption_status(partition_id, task_names),
            _Cost(partition=partition_id),
        )

    def kv_list(self, partition_id: str) -> dict[str, dict[str, TagValue]]:
        def list_rows(cost: _Cost) -> dict[str, dict[str, TagValue]]:
            rows = self._inner.kv_list(partition_id)
            cost.rows, cost.meta_bytes = len(rows), packed_size(list(rows), None, list(rows.values()))
            return rows

        return self._measure("kv_list", list_rows, _Cost(partition=partition_id))

    def kv_clear(self, keys: Sequence[str] | None, partition_id: str, *, reason: str = "") -> int:
        def clear(cost: _Cost) -> int:
            cost.rows = self._inner.kv_clear(keys, partition_id, reason=reason)
            cost.meta_bytes = packed_size(keys) if keys else 0
            return cost.rows

        return self._measure("kv_clear", clear, _Cost(partition=partition_id, rows=len(keys or ())))

    def drop_partition(self, partition_id: str, *, reason: str = "") -> int:
        def drop(cost: _Cost) -> int:
            cost.rows = self._inner.drop_partition(partition_id, reason=reason)
            return cost.rows

        return self._measure("drop_partition", drop, _Cost(partition=partition_id))

    def row_owners(self, partition_id: str) -> dict[str, str]:
        about = _Cost(partition=partition_id)
        return self._measure("row_owners", lambda cost: self._inner.row_owners(partition_id), about)

    def stats(self) -> dict[str, object]:
        return self._measure("stats", lambda cost: self._inner.stats(), _Cost())

    def close(self) -> None:
        self._measure("close", lambda cost: self._inner.close(), _Cost())

    def _measure(self, operation: str, action: Callable[[_Cost], _T], cost: _Cost) -> _T:
        started, stage = time.perf_counter(), current_stage.get()
        try:
            result = action(cost)
        except BaseException as error:
            self._add(stage, operation, started, cost, error)
            raise
        self._add(stage, operation, started, cost, None)
        return result

    def _add(self, stage: str, operation: str, started: float, cost: _Cost, error: BaseException | None) -> None:
        """Counts one call and informs the callback."""
        ms, num_bytes = (time.perf_counter() - started) * 1e3, sum(cost.sizes.values())
        if self._is_counting:
            counted = OperationCount.of_call(
                ms, has_failed=error is not None, payload_bytes=num_bytes, meta_bytes=cost.meta_bytes
            )
            with self._lock:
                self._totals.add(stage, operation, counted)
                self._totals.add_fields(cost.sizes)
        if self._callback is not None:
            status: Literal["ok", "error", "timeout"] = "ok" if error is None else "error"
            self._callback(
                DataPlaneEvent(
                    op=operation,
                    stage=stage,
                    partition=cost.partition,
                    rows=cost.rows,
                    fields=cost.fields,
                    bytes=num_bytes,
                    meta_bytes=cost.meta_bytes,
                    ms=ms,
                    status="timeout" if isinstance(error, DataPlaneTimeout) else status,
                )
            )


def _add_put(cost: _Cost, meta: KVBatchMeta, fields: Columns) -> None:
    cost.sizes, cost.meta_bytes = _column_sizes(fields), meta_bytes(meta)


def meta_bytes(meta: KVBatchMeta) -> int:
    """Bytes of keys, lengths and tags when the meta crosses a process border."""
    return packed_size(meta.keys, meta.sequence_lengths, meta.tags)
