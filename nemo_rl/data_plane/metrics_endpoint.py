"""`MetricsEndpoint`: the data plane of a run in Prometheus' text format, over HTTP on 127.0.0.1.

Made by `factory` in the owner's process (`data_plane.observability.metrics_port`), closed with the owner. `METRICS` is
the one list of what is served; a scrape asks the ledger once and reads no rows. A ledger that does not answer is
`up 0`, never an error of the run.

`RunView`: a run's data plane at one moment, as its ledger's service tells it (`watch`).

Read by the metrics endpoint (`metrics_endpoint`) and by `nemo-rl data-plane top`. A view is plain records; it changes
nothing in the run.
"""

from __future__ import annotations

import logging
import socketserver
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any, Literal, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from nemo_rl.data_plane.client.operation_counts import OperationCount, Totals, sum_totals
from nemo_rl.data_plane.ledger.host import LedgerHost
from nemo_rl.errors import DataPlaneError, ResourceError

__all__ = [
    "METRICS",
    "PREFIX",
    "ClaimView",
    "ClientView",
    "MetricsEndpoint",
    "RunView",
    "check_metrics_port",
    "docs_table",
    "view_of",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientView:
    """One client of the run, on whatever node."""

    label: str
    """`place:process.id`, as events and errors name it."""
    stage: str
    """The stage of its last call that had one."""
    seen_s: float
    """Seconds since its last request."""
    calls: int
    """Requests that it has sent to the ledger."""
    is_closed: bool
    totals: Totals
    """Its calls since its start, by its own count: at most two seconds old; empty where it counts nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimView:
    """Rows that a consumer holds."""

    partition: str
    task: str
    client: str
    """Label of the client that claimed; another one may have been given the meta."""
    rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """Everything that is known of a run's data plane at one moment."""

    run_id: str
    at: float
    """Monotonic seconds of the ledger's process."""
    stats: Mapping[str, Any]
    """The reply to `stats`."""
    capacity_rows: int
    capacity_bytes: int | None
    reserved: Mapping[str, int]
    """Bytes reserved for puts under way, by partition."""
    tasks: Mapping[str, Mapping[str, Mapping[str, int]]]
    """Partition -> task -> pending, leased or done -> live rows."""
    claims: tuple[ClaimView, ...]
    operations: Mapping[str, tuple[int, float]]
    """Operation of the ledger -> its requests and the seconds that they took."""
    errors: Mapping[str, Mapping[str, int]]
    """Operation of the ledger -> kind of error -> requests that it ended."""
    puts_waiting: int
    """Puts that wait for capacity now."""
    clients: tuple[ClientView, ...]

    @property
    def calls(self) -> int:
        return sum(count for count, _ in self.operations.values())

    def rows_held(self) -> Counter[str]:
        held: Counter[str] = Counter()
        for claim in self.claims:
            held[claim.client] += claim.rows
        return held


def view_of(ledger: LedgerHost, *, timeout_s: float) -> RunView:
    reply: dict[str, Any] = ledger.call("watch", {}, timeout_s=timeout_s)
    inspected = reply["inspect"]
    return RunView(
        run_id=reply["run_id"],
        at=reply["now"],
        stats=reply["stats"],
        capacity_rows=inspected["capacity_rows"],
        capacity_bytes=inspected["capacity_bytes"],
        reserved=inspected["reserved"],
        tasks=inspected["tasks"],
        claims=tuple(
            ClaimView(partition=partition, task=task, client=consumer.rpartition("@")[2], rows=rows)
            for partition, task, consumer, rows in inspected["claims"]
        ),
        operations={op: (int(count), seconds) for op, (count, seconds) in reply["operations"].items()},
        errors=reply["errors"],
        puts_waiting=reply["puts_waiting"],
        clients=tuple(
            ClientView(
                label=label,
                stage=client["stage"],
                seen_s=client["seen_s"],
                calls=client["calls"],
                is_closed=client["is_closed"],
                totals=Totals() if client["totals"] is None else Totals.from_plain(client["totals"]),
            )
            for label, client in reply["clients"].items()
        ),
    )


PREFIX = "nemo_rl_data_plane_"
KEY = "data_plane.observability.metrics_port"
LOOPBACK = "127.0.0.1"
PATH = "/metrics"
TIMEOUT_S = 5.0
"""Limit of a scrape's question to the ledger, and of one read from the scraper's connection."""
HISTOGRAM_MS = tuple(float(2**power) for power in range(-2, 17))
"""Upper bounds of the buckets, from 0.25 ms to 65 s; the clients' own buckets divide at the powers of two."""

EVERYWHERE = ("run", "store")
"""Labels of every sample."""


@dataclass(frozen=True, slots=True)
class ServedMetric:
    """One metric of the endpoint."""

    kind: Literal["gauge", "counter", "histogram"]
    text: str
    labels: tuple[str, ...] = ()
    """Labels beside `EVERYWHERE`."""


def docs_table() -> str:
    lines = ["| metric | kind | labels | meaning |", "| --- | --- | --- | --- |"]
    for name, metric in METRICS.items():
        shown = f"{name}_total" if metric.kind == "counter" else name
        lines.append(f"| {shown} | {metric.kind} | {', '.join(metric.labels)} | {metric.text} |")
    return "\n".join(lines)


_CALL = ("client", "stage", "operation")
METRICS: Mapping[str, ServedMetric] = {
    "up": ServedMetric("gauge", "1 when the ledger has answered this scrape"),
    "live_rows": ServedMetric("gauge", "Live rows"),
    "peak_rows": ServedMetric("gauge", "Most live rows so far"),
    "capacity_rows": ServedMetric("gauge", "Limit of live rows"),
    "live_bytes": ServedMetric("gauge", "Bytes of live rows"),
    "peak_bytes": ServedMetric("gauge", "Most bytes of live rows so far"),
    "stored_bytes": ServedMetric("gauge", "Bytes of chunks, with rows that were cleared since"),
    "capacity_bytes": ServedMetric("gauge", "Limit of live bytes; absent without a limit"),
    "live_chunks": ServedMetric("gauge", "Chunks with a live row"),
    "peak_chunks": ServedMetric("gauge", "Most chunks so far"),
    "oldest_row_age_seconds": ServedMetric("gauge", "Age of the oldest live row; 0 without one"),
    "partition_rows": ServedMetric("gauge", "Live rows", ("partition",)),
    "partition_peak_rows": ServedMetric("gauge", "Most live rows so far", ("partition",)),
    "partition_bytes": ServedMetric("gauge", "Bytes of live rows", ("partition",)),
    "partition_peak_bytes": ServedMetric("gauge", "Most bytes of live rows so far", ("partition",)),
    "partition_reserved_bytes": ServedMetric("gauge", "Bytes reserved for puts under way", ("partition",)),
    "partition_oldest_row_age_seconds": ServedMetric("gauge", "Age of the oldest live row", ("partition",)),
    "field_bytes": ServedMetric("gauge", "Bytes of live rows", ("partition", "field")),
    "task_rows": ServedMetric("gauge", "Live rows: pending, leased or done", ("partition", "task", "state")),
    "task_claims": ServedMetric("gauge", "Claims that hold rows", ("partition", "task")),
    "puts_waiting": ServedMetric("gauge", "Puts that wait for capacity"),
    "blocked_put_seconds": ServedMetric("counter", "Seconds that puts have waited for capacity"),
    "ledger_requests": ServedMetric("counter", "Requests that the ledger has served", ("request",)),
    "ledger_seconds": ServedMetric("counter", "Seconds in which the ledger served them", ("request",)),
    "ledger_errors": ServedMetric("counter", "Requests that the ledger has refused", ("request", "kind")),
    "client_last_seen_seconds": ServedMetric("gauge", "Seconds since the last request of an open client", ("client",)),
    "client_rows_held": ServedMetric("gauge", "Rows under claims of an open client", ("client",)),
    "client_requests": ServedMetric("counter", "Requests to the ledger", ("client",)),
    "client_over_read_bytes": ServedMetric("counter", "Bytes read and not asked for", ("client",)),
    "client_calls": ServedMetric("counter", "Calls, also those that failed", _CALL),
    "client_call_seconds": ServedMetric("counter", "Seconds in these calls", _CALL),
    "client_bytes": ServedMetric("counter", "Columns put or fetched, without padding", _CALL),
    "client_meta_bytes": ServedMetric("counter", "Keys, lengths and tags of these calls", _CALL),
    "client_errors": ServedMetric("counter", "Calls that an error has ended", (*_CALL, "kind")),
    "moved_bytes": ServedMetric("counter", "Columns put and fetched, all clients together", ("field",)),
    "call_duration_seconds": ServedMetric("histogram", "Calls of all clients together", ("stage", "operation")),
}

_Sample: TypeAlias = tuple[str, tuple[str, ...], float]
"""Metric, the values of its own labels, value."""


class RunCollector(Collector):
    """Asks the ledger of a run at each scrape."""

    def __init__(self, *, run_id: str, store: str, ledger: LedgerHost) -> None:
        self._everywhere, self._ledger = [run_id, store], ledger

    def collect(self) -> Iterable[Metric]:
        try:
            view = view_of(self._ledger, timeout_s=TIMEOUT_S)
        except DataPlaneError as error:
            logger.debug("a scrape got no answer from the ledger: %s", error)
            view = None
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
            name: (GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily)(
                PREFIX + name, metric.text, labels=(*EVERYWHERE, *metric.labels)
            )
            for name, metric in METRICS.items()
            if metric.kind != "histogram"
        }
        for name, labels, value in [] if view is None else _samples(view):
            families[name].add_metric([*self._everywhere, *labels], value)
        families["up"].add_metric(self._everywhere, float(view is not None))
        yield from families.values()
        yield self._durations(view)

    def _durations(self, view: RunView | None) -> HistogramMetricFamily:
        name = "call_duration_seconds"
        labels = (*EVERYWHERE, *METRICS[name].labels)
        family = HistogramMetricFamily(PREFIX + name, METRICS[name].text, labels=labels)
        stages = {} if view is None else sum_totals(client.totals for client in view.clients).stages
        for stage, counts in stages.items():
            for operation, count in counts.items():
                family.add_metric([*self._everywhere, stage, operation], _buckets(count), sum_value=count.ms / 1e3)
        return family


def _samples(view: RunView) -> Iterator[_Sample]:
    for name in ("live_rows", "peak_rows", "live_bytes", "peak_bytes", "stored_bytes", "live_chunks", "peak_chunks"):
        yield name, (), view.stats[name]
    yield "oldest_row_age_seconds", (), view.stats["oldest_row_age_s"]
    yield "blocked_put_seconds", (), view.stats["blocked_put_s"]
    yield "capacity_rows", (), view.capacity_rows
    if view.capacity_bytes is not None:
        yield "capacity_bytes", (), view.capacity_bytes
    yield "puts_waiting", (), view.puts_waiting
    yield from _partition_samples(view)
    for request, (count, seconds) in view.operations.items():
        yield "ledger_requests", (request,), count
        yield "ledger_seconds", (request,), seconds
    for request, kinds in view.errors.items():
        yield from (("ledger_errors", (request, kind), count) for kind, count in kinds.items())
    yield from _client_samples(view)


def _partition_samples(view: RunView) -> Iterator[_Sample]:
    for name, partition in view.stats["partitions"].items():
        for what in ("rows", "peak_rows", "bytes", "peak_bytes"):
            yield f"partition_{what}", (name,), partition[what]
        yield "partition_oldest_row_age_seconds", (name,), partition["oldest_row_age_s"]
        yield from (("field_bytes", (name, field), size) for field, size in partition["fields"].items())
    for name, size in view.reserved.items():
        yield "partition_reserved_bytes", (name,), size
    for name, tasks in view.tasks.items():
        for task, states in tasks.items():
            yield from (("task_rows", (name, task, state), rows) for state, rows in states.items())
            claims = sum((claim.partition, claim.task) == (name, task) for claim in view.claims)
            yield "task_claims", (name, task), claims


def _client_samples(view: RunView) -> Iterator[_Sample]:
    held = view.rows_held()
    for client in view.clients:
        if not client.is_closed:
            yield "client_last_seen_seconds", (client.label,), client.seen_s
            yield "client_rows_held", (client.label,), held[client.label]
        yield "client_requests", (client.label,), client.calls
        yield "client_over_read_bytes", (client.label,), client.totals.over_read_bytes
        for stage, counts in client.totals.stages.items():
            for operation, count in counts.items():
                yield from _call_samples((client.label, stage, operation), count)
    moved = sum_totals(client.totals for client in view.clients).field_bytes
    yield from (("moved_bytes", (field,), size) for field, size in moved.items())


def _call_samples(call: tuple[str, str, str], count: OperationCount) -> Iterator[_Sample]:
    yield "client_calls", call, count.count
    yield "client_call_seconds", call, count.ms / 1e3
    yield "client_bytes", call, count.payload_bytes
    yield "client_meta_bytes", call, count.meta_bytes
    yield from (("client_errors", (*call, kind), number) for kind, number in count.error_kinds.items())


def _buckets(count: OperationCount) -> list[tuple[str, float]]:
    """Return upper bounds in seconds with the calls within them, the last one without a bound."""
    bounded: list[tuple[str, float]] = [(str(limit / 1e3), count.within_ms(limit)) for limit in HISTOGRAM_MS]
    return [*bounded, ("+Inf", count.count)]


class MetricsEndpoint:
    """An HTTP server on loopback: its port is taken when it is made, and it answers from `serve` until `close`."""

    def __init__(self, port: int) -> None:
        """Args:
        port: 0 takes a free one.

        Raises:
            ResourceError: the port is taken.
        """
        try:
            self._server = _MetricsServer((LOOPBACK, port), _ScrapeHandler)
        except OSError as error:
            raise ResourceError(_taken(port, error)) from error
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        port: int = self._server.server_address[1]
        return port

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}{PATH}"

    def serve(self, *, run_id: str, store: str, ledger: LedgerHost) -> None:
        self._server.collector = RunCollector(run_id=run_id, store=store, ledger=ledger)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="data-plane-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop answering and free the port. Idempotent."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._thread = None
        self._server.server_close()


def check_metrics_port(port: int | None) -> list[str]:
    """Return a line when the port of the config is taken on this machine."""
    if not port:
        return []
    try:
        _MetricsServer((LOOPBACK, port), _ScrapeHandler).server_close()
    except OSError as error:
        return [_taken(port, error)]
    return []


def _taken(port: int, error: OSError) -> str:
    return f"{KEY}: port {port} of {LOOPBACK} cannot be used ({error.strerror}); set another one, or 0 for a free one"


class _MetricsServer(socketserver.ThreadingTCPServer):
    """Serves each scrape in its own thread."""

    allow_reuse_address = True
    daemon_threads = True

    collector: RunCollector

    def handle_error(self, request: object, client_address: object) -> None:
        logger.debug("a scrape was not served", exc_info=True)


class _ScrapeHandler(BaseHTTPRequestHandler):
    timeout = TIMEOUT_S
    server: _MetricsServer

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self.send_error(404, f"expected {PATH}")
            return
        body = generate_latest(self.server.collector)
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug("metrics: %s", format % args)
