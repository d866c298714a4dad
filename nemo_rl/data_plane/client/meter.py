"""`Meter`: counts what the calls of one client cost, per operation and stage, and informs a callback.
`CountReporter` sends the counts to the ledger, so that the whole run can be watched in one place.

Made by every `LedgerClient`; the driver adds up the `Totals` of all processes. Payload (columns) and meta (keys,
lengths and tags that cross with a call) are counted apart, so that the driver's share can be stated. The user's
function (`data_plane.observability.callback`) gets a `DataPlaneEvent` after each call; one that raises is reported
once, and the data plane's calls go on.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgpack
import torch

from nemo_rl.config.data_plane import ObservabilityConfig
from nemo_rl.data_plane.chunks.ragged import object_rows
from nemo_rl.data_plane.chunks.tags import Tags, TagTable
from nemo_rl.data_plane.chunks.wire import message_bytes
from nemo_rl.data_plane.client.link import current_stage
from nemo_rl.data_plane.client.operation_counts import OperationCount, Totals, sum_totals
from nemo_rl.errors import ConfigError, DataPlaneClosed, DataPlaneError, DataPlaneTimeout
from nemo_rl.jagged import values_of

if TYPE_CHECKING:
    from nemo_rl.data_plane.interfaces import Columns
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

__all__ = ["REPORT_TIMEOUT_S", "Cost", "CountReporter", "DataPlaneEvent", "Meter", "columns_bytes", "print_event"]

logger = logging.getLogger(__name__)

KEY = "data_plane.observability.callback"
PRINT = "print_event"
"""Value of the key that stands for the function of this name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPlaneEvent:
    """One call of a data plane client, after it has ended."""

    op: str
    """Name of the method, for example `kv_batch_put`."""
    stage: str
    """Stage that the call worked for; "" outside every stage."""
    partition: str
    rows: int
    fields: tuple[str, ...]
    bytes: int
    """Columns put or fetched, padding excluded."""
    meta_bytes: int
    """Keys, lengths and tags, as plain values."""
    ms: float
    status: Literal["ok", "error", "timeout"]


EventCallback: TypeAlias = Callable[[DataPlaneEvent], object]


def print_event(event: DataPlaneEvent) -> None:
    """Log one line per call: on the console of the driver, in the log file of a worker.

    Example:
        `data plane: kv_batch_put ok in 0.4 ms, stage rollout, partition train: 4 rows, 64 bytes of input_ids`
    """
    fields = f" of {', '.join(event.fields)}" if event.fields else ""
    logger.info(
        "data plane: %s %s in %.1f ms, stage %s, partition %s: %d rows, %d bytes%s",
        event.op,
        event.status,
        event.ms,
        event.stage or "none",
        event.partition or "none",
        event.rows,
        event.bytes,
        fields,
    )


def load_callback(name: str | None) -> EventCallback | None:
    """Return the function that `package.module:function` or `print_event` names, made safe to call; None for None.

    Raises:
        ConfigError: there is no such function.
    """
    if name is None:
        return None
    if name == PRINT:
        return print_event
    module_name, mark, function_name = name.partition(":")
    try:
        function = vars(importlib.import_module(module_name))[function_name]
    except (ImportError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{KEY}: expected an importable `package.module:function`, got {name!r}: {error!r}"
        ) from error
    if not mark or not callable(function):
        raise ConfigError(f"{KEY}: expected a function, got {name!r}")
    return _Guarded(name, function)


class _Guarded:
    """Calls the user's function; the first error is logged, none is raised."""

    def __init__(self, name: str, function: EventCallback) -> None:
        self._name, self._function = name, function
        self._has_failed = False

    def __call__(self, event: DataPlaneEvent) -> None:
        try:
            self._function(event)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            if not self._has_failed:
                logger.warning("%s: %s raised %r; further errors are not reported", KEY, self._name, error)
            self._has_failed = True


class Cost:
    """The partition, rows and fields of one call and the bytes that it moved; filled by the call itself."""

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

    def __init__(self, settings: ObservabilityConfig, *, on_count: Callable[[], None] = lambda: None) -> None:
        """Args:
        on_count: called after each call that was counted.
        """
        self._is_counting, self._on_count = settings.enabled, on_count
        self._callback = load_callback(settings.callback)
        self._totals, self._before_reset = Totals(), Totals()
        self._over_read_before = 0
        self._lock = threading.Lock()

    @contextmanager
    def measure(
        self, operation: str, partition: str = "", *, rows: int = 0, fields: Iterable[str] = ()
    ) -> Iterator[Cost]:
        """Count what happens inside as one call, for the stage of this thread; also when it raises."""
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
        """Return totals since the start or the last reset.

        Args:
            over_read_bytes: of the client since its start.
        """
        with self._lock:
            totals = self._totals.copy()
            totals.over_read_bytes = over_read_bytes - self._over_read_before if self._is_counting else 0
            if reset:
                self._before_reset.merge(self._totals)
                self._totals, self._over_read_before = Totals(), over_read_bytes
            return totals

    def lifetime_totals(self, *, over_read_bytes: int) -> Totals:
        """Return totals since the start, whatever was reset.

        Args:
            over_read_bytes: of the client since its start.
        """
        with self._lock:
            totals = sum_totals([self._before_reset, self._totals])
        totals.over_read_bytes = over_read_bytes
        return totals

    def _add(self, stage: str, operation: str, started: float, cost: Cost, error: BaseException | None) -> None:
        ms, num_bytes = (time.perf_counter() - started) * 1e3, sum(cost.sizes.values())
        if self._is_counting:
            counted = OperationCount.of_call(ms, error=error, payload_bytes=num_bytes, meta_bytes=cost.meta_bytes)
            with self._lock:
                self._totals.add(stage, operation, counted)
                self._totals.add_fields(cost.sizes)
            self._on_count()
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


REPORT_PERIOD_S = 1.0
"""A client that works reports so often: one small request to the ledger."""
REPORT_TIMEOUT_S = 2.0
"""Limit of one report; a closing client waits for the last one."""


class CountReporter:
    """Reports a client's counts in the background. Its thread lives only while there is something new to report.

    Args:
        report: sends what the client has counted so far; is told whether it is the last time.
    """

    def __init__(self, report: Callable[[bool], None], *, period_s: float = REPORT_PERIOD_S) -> None:
        self._report, self._period_s = report, period_s
        self._has_news = False
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def note(self) -> None:
        """Mark that there is something new, which is reported within the period."""
        if self._has_news:  # its report has not begun, and will have this as well
            return
        with self._lock:
            self._has_news = True
            if self._thread is None and not self._end.is_set():
                self._thread = threading.Thread(target=self._run, name="data-plane-counts", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread and report a last time. Call once."""
        with self._lock:
            self._end.set()
            thread = self._thread
        if thread is not None:
            thread.join()
        self._try_to_report(is_last=True)

    def _run(self) -> None:
        while not self._end.wait(self._period_s):
            with self._lock:
                if not self._has_news:
                    self._thread = None
                    return
                self._has_news = False
            self._try_to_report(is_last=False)

    def _try_to_report(self, *, is_last: bool) -> None:
        """Counts are sums since the start, so the next report makes up for one that is lost."""
        try:
            self._report(is_last)
        except DataPlaneClosed as error:
            logger.debug("the counts of a client reached no ledger: %s", error)
        except DataPlaneError as error:
            logger.warning("the counts of a client could not be reported: %s", error)


def columns_bytes(columns: Columns) -> int:
    """Return bytes of the rows themselves: tensors without padding, objects as JSON-like values."""
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
