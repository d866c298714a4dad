"""`Meter`: counts what the calls of one client cost, per operation and stage, and informs a callback.

Made by every `LedgerClient`; the driver adds up the `Totals` of all processes. Payload (columns) and meta (keys,
lengths and tags that cross with a call) are counted apart, so that the driver's share can be stated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import msgpack
import torch

from nemo_rl.config.data_plane import ObservabilityConfig
from nemo_rl.data_plane.chunks.ragged import object_rows
from nemo_rl.data_plane.chunks.tags import Tags, TagTable
from nemo_rl.data_plane.chunks.wire import message_bytes
from nemo_rl.data_plane.client.event_callback import DataPlaneEvent, load_callback
from nemo_rl.data_plane.client.operation_counts import OperationCount, Totals
from nemo_rl.data_plane.client.stage_context import current_stage
from nemo_rl.errors import DataPlaneTimeout
from nemo_rl.jagged import values_of

if TYPE_CHECKING:
    from nemo_rl.data_plane.interfaces import Columns
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

__all__ = ["Cost", "Meter", "columns_bytes"]


class Cost:
    """What one call is about and what it moved; filled by the call itself."""

    __slots__ = ("_is_wanted", "fields", "meta_bytes", "partition", "rows", "sizes")

    def __init__(self, *, is_wanted: bool, partition: str, rows: int, fields: Iterable[str]) -> None:
        self._is_wanted = is_wanted
        self.partition, self.rows, self.fields = partition, rows, tuple(map(str, fields))
        self.sizes: dict[str, int] = {}
        """Payload bytes by field."""
        self.meta_bytes = 0

    def add_rows(
        self, keys: Sequence[str] | None, lengths: Sequence[int] | None = None, tags: Sequence[Tags] | None = None
    ) -> None:
        """Keys, lengths and tags that crossed with the call, as plain values."""
        if self._is_wanted:
            columns = () if tags is None else [values for _, _, values in TagTable.of(tags, where="tags").columns()]
            self.meta_bytes = message_bytes((keys, lengths, columns))

    def add_columns(self, columns: Columns) -> None:
        """Columns that were put or fetched."""
        if self._is_wanted:
            self.sizes = _column_sizes(columns)

    def add_padded(self, batch: BatchedDataDict, lengths: Sequence[int] | None, per_token: set[str]) -> None:
        """Dense columns that were fetched; the padding, which no store has seen, is left out."""
        if not self._is_wanted:
            return
        self.sizes = _column_sizes(batch.data)
        for name in per_token & self.sizes.keys() if lengths else ():
            rows, width = batch.tensor(name).shape[:2]
            self.sizes[name] = self.sizes[name] // max(rows * width, 1) * sum(lengths or ())


class Meter:
    """Calls, errors, milliseconds and bytes per operation and per stage. Thread-safe.

    Counts nothing where `data_plane.observability.enabled` is false.

    Raises:
        ConfigError: the callback of the config does not exist.
    """

    def __init__(self, settings: ObservabilityConfig) -> None:
        self._is_counting = settings.enabled
        self._callback = load_callback(settings.callback)
        self._totals = Totals()
        self._over_read_before = 0
        self._lock = threading.Lock()

    @contextmanager
    def measure(
        self, operation: str, partition: str = "", *, rows: int = 0, fields: Iterable[str] = ()
    ) -> Iterator[Cost]:
        """Counts what happens inside as one call, for the stage of this thread; also when it raises."""
        is_wanted = self._is_counting or self._callback is not None
        cost = Cost(is_wanted=is_wanted, partition=partition, rows=rows, fields=fields)
        started, stage = time.perf_counter(), current_stage.get()
        try:
            yield cost
        except BaseException as error:
            self._add(stage, operation, started, cost, error)
            raise
        self._add(stage, operation, started, cost, None)

    def totals(self, *, over_read_bytes: int, reset: bool) -> Totals:
        """Totals since the start or the last reset.

        Args:
            over_read_bytes: of the client since its start.
        """
        with self._lock:
            totals = self._totals.copy()
            totals.over_read_bytes = over_read_bytes - self._over_read_before if self._is_counting else 0
            if reset:
                self._totals, self._over_read_before = Totals(), over_read_bytes
            return totals

    def _add(self, stage: str, operation: str, started: float, cost: Cost, error: BaseException | None) -> None:
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
