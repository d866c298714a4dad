"""`MetricsDataPlaneClient`: counts what a client's calls cost, without changing what they do.

Every process wraps its own client; the driver sums the snapshots with `merge_snapshots`. Payload (columns) and meta
(keys, lengths and tags that cross with a call) are counted apart, so that the driver's share can be stated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import TypeVar, cast

import msgpack
import torch
from tensordict import TensorDict

from nemo_rl.data_plane.address import DataPlaneAddress
from nemo_rl.data_plane.interfaces import Columns, DataPlaneClient, KVBatchMeta, Tags, TagValue
from nemo_rl.data_plane.ragged import object_rows, values_of
from nemo_rl.data_plane.schema import FieldSpec
from nemo_rl.data_plane.wire import packed_size

__all__ = ["MetricsDataPlaneClient", "OperationCount", "columns_bytes", "merge_snapshots", "meta_bytes"]

_T = TypeVar("_T")

NO_STAGE = ""


@dataclass(slots=True)
class OperationCount:
    """Totals of one operation."""

    count: int = 0
    errors: int = 0
    ms: float = 0.0
    payload_bytes: int = 0
    """Columns put or fetched, padding excluded."""
    meta_bytes: int = 0
    """Keys, lengths and tags, in their compact form."""

    def add(self, other: OperationCount) -> None:
        self.count += other.count
        self.errors += other.errors
        self.ms += other.ms
        self.payload_bytes += other.payload_bytes
        self.meta_bytes += other.meta_bytes


@dataclass(slots=True)
class _Cost:
    """What one call moved; filled by the call itself."""

    payload_bytes: int = 0
    meta_bytes: int = 0


@dataclass(slots=True)
class _Totals:
    stages: dict[str, dict[str, OperationCount]] = field(default_factory=dict)

    def add(self, stage: str, operation: str, cost: OperationCount) -> None:
        self.stages.setdefault(stage, {}).setdefault(operation, OperationCount()).add(cost)

    def snapshot(self) -> dict[str, object]:
        operations: dict[str, OperationCount] = {}
        total = OperationCount()
        for counts in self.stages.values():
            for operation, count in counts.items():
                operations.setdefault(operation, OperationCount()).add(count)
                total.add(count)
        return {
            "operations": {name: asdict(count) for name, count in operations.items()},
            "stages": {s: {name: asdict(c) for name, c in counts.items()} for s, counts in self.stages.items()},
            "payload_bytes": total.payload_bytes,
            "meta_bytes": total.meta_bytes,
        }


def columns_bytes(columns: Columns) -> int:
    """Bytes of the rows themselves: tensors without padding, objects as JSON-like values."""
    total = 0
    for name in columns.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        column = columns.get(str(name))
        if isinstance(column, torch.Tensor):
            total += (values_of(column) if column.is_nested else column).nbytes
        else:
            total += len(msgpack.packb(object_rows(column)))
    return total


def merge_snapshots(snapshots: Iterable[Mapping[str, object]]) -> dict[str, object]:
    """The sum of the snapshots of several processes, in the same form."""
    merged = _Totals()
    for snapshot in snapshots:
        stages = cast("Mapping[str, Mapping[str, Mapping[str, float]]]", snapshot["stages"])
        for stage, counts in stages.items():
            for operation, count in counts.items():
                merged.add(stage, operation, OperationCount(**count))  # type: ignore[arg-type]
    return merged.snapshot()


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
        self._inner = inner
        self._is_counting = inner.address.config.observability.enabled
        self._totals = _Totals()
        self._lock = threading.Lock()
        self._stage: ContextVar[str] = ContextVar("data_plane_stage", default=NO_STAGE)

    @property
    def address(self) -> DataPlaneAddress:
        return self._inner.address

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Calls made inside, in this thread, are counted for stage `name`."""
        token = self._stage.set(name)
        try:
            yield
        finally:
            self._stage.reset(token)

    def snapshot(self, *, reset: bool = False) -> dict[str, object]:
        """Totals since the start or the last reset.

        Returns:
            `operations`: name -> `OperationCount` as a dict; `stages`: stage ("" for calls outside any stage) -> the
            same per operation; `payload_bytes` and `meta_bytes` in all.
        """
        with self._lock:
            totals = self._totals
            if reset:
                self._totals = _Totals()
            return totals.snapshot()

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
        )

    def partition_fields(self, partition_id: str) -> tuple[FieldSpec, ...]:
        return self._inner.partition_fields(partition_id)

    def kv_batch_put(
        self, keys: Sequence[str], partition_id: str, fields: Columns, tags: Sequence[Tags] | None = None
    ) -> KVBatchMeta:
        def put(cost: _Cost) -> KVBatchMeta:
            meta = self._inner.kv_batch_put(keys, partition_id, fields, tags)
            _add_put(cost, meta, fields)
            return meta

        return self._measure("kv_batch_put", put)

    def put_async(
        self, keys: Sequence[str], partition_id: str, fields: Columns, tags: Sequence[Tags] | None = None
    ) -> Future[KVBatchMeta]:
        """Counted when the put is done, for the stage that started it."""
        stage, started = self._stage.get(), time.perf_counter()
        future = self._inner.put_async(keys, partition_id, fields, tags)

        def count(done: Future[KVBatchMeta]) -> None:
            cost = _Cost()
            has_failed = done.cancelled() or done.exception() is not None
            if not has_failed:
                _add_put(cost, done.result(), fields)
            self._add(stage, "put_async", started, cost, has_failed=has_failed)

        future.add_done_callback(count)
        return future

    def kv_batch_get(self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> TensorDict:
        def get(cost: _Cost) -> TensorDict:
            rows = self._inner.kv_batch_get(keys, partition_id, select_fields)
            cost.payload_bytes, cost.meta_bytes = columns_bytes(rows), packed_size(keys)
            return rows

        return self._measure("kv_batch_get", get)

    def get_data(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> TensorDict:
        def get(cost: _Cost) -> TensorDict:
            rows = self._inner.get_data(meta, select_fields)
            cost.payload_bytes, cost.meta_bytes = columns_bytes(rows), packed_size(meta.keys)
            return rows

        return self._measure("get_data", get)

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
            cost.meta_bytes = meta_bytes(meta)
            return meta

        return self._measure("get_meta", claim)

    def release(self, meta: KVBatchMeta) -> None:
        def end(cost: _Cost) -> None:
            self._inner.release(meta)
            cost.meta_bytes = packed_size(meta.keys)

        self._measure("release", end)

    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        return self._measure(
            "check_consumption_status", lambda cost: self._inner.check_consumption_status(partition_id, task_names)
        )

    def kv_list(self, partition_id: str) -> dict[str, dict[str, TagValue]]:
        def list_rows(cost: _Cost) -> dict[str, dict[str, TagValue]]:
            rows = self._inner.kv_list(partition_id)
            cost.meta_bytes = packed_size(list(rows), None, list(rows.values()))
            return rows

        return self._measure("kv_list", list_rows)

    def kv_clear(self, keys: Sequence[str] | None, partition_id: str) -> None:
        def clear(cost: _Cost) -> None:
            self._inner.kv_clear(keys, partition_id)
            cost.meta_bytes = packed_size(keys) if keys else 0

        self._measure("kv_clear", clear)

    def stats(self) -> dict[str, int | float]:
        return self._measure("stats", lambda cost: self._inner.stats())

    def close(self) -> None:
        self._measure("close", lambda cost: self._inner.close())

    def _measure(self, operation: str, action: Callable[[_Cost], _T]) -> _T:
        cost, started, stage = _Cost(), time.perf_counter(), self._stage.get()
        has_failed = True
        try:
            result = action(cost)
            has_failed = False
            return result
        finally:
            self._add(stage, operation, started, cost, has_failed=has_failed)

    def _add(self, stage: str, operation: str, started: float, cost: _Cost, *, has_failed: bool) -> None:
        if not self._is_counting:
            return
        counted = OperationCount(
            count=1,
            errors=int(has_failed),
            ms=(time.perf_counter() - started) * 1e3,
            payload_bytes=cost.payload_bytes,
            meta_bytes=cost.meta_bytes,
        )
        with self._lock:
            self._totals.add(stage, operation, counted)


def _add_put(cost: _Cost, meta: KVBatchMeta, fields: Columns) -> None:
    cost.payload_bytes, cost.meta_bytes = columns_bytes(fields), meta_bytes(meta)


def meta_bytes(meta: KVBatchMeta) -> int:
    """Bytes of keys, lengths and tags when the meta crosses a process border."""
    return packed_size(meta.keys, meta.sequence_lengths, meta.tags)
