"""The hosts of a ledger: their protocol, what is counted of requests, and the host inside this process.

`LedgerClient` talks to a `LedgerHost`. Every call ends by its deadline, and a host raises only errors of the
data plane: what the ledger refused, `DataPlaneTimeout` when it is slow, `DataPlaneClosed` when it is gone.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.address import Handles, LedgerAddress
from nemo_rl.data_plane.ledger.events import EVENTS_FILE, EventLog, EventSink
from nemo_rl.data_plane.ledger.journal import Journal
from nemo_rl.data_plane.ledger.ledger import Args, Ledger, Reply
from nemo_rl.data_plane.ledger.recovery import RecoverableLedger
from nemo_rl.errors import (
    DataPlaneClosed,
    DataPlaneError,
    DataPlaneTimeout,
    LedgerLost,
    from_record,
    to_record,
)

__all__ = [
    "InProcessHost",
    "LedgerHost",
    "LedgerService",
    "RequestCounts",
    "build_ledger",
    "build_service",
    "final_loss",
    "read_reply",
]


class LedgerHost(ABC):
    """One client's way to the ledger."""

    @property
    @abstractmethod
    def address(self) -> LedgerAddress: ...

    @abstractmethod
    def call(self, op: str, args: Args, *, timeout_s: float, handles: Handles | None = None) -> Reply:
        """Run one operation of the ledger; errors are raised.

        Args:
            handles: of the chunks that a commit brings; the reply to `locate` has those of its chunks as `handles`.
        """

    @abstractmethod
    def close(self) -> None:
        """End this side; the owner's close also ends the ledger. Idempotent."""


def build_service(
    config: DataPlaneConfig,
    *,
    run_id: str,
    validate: bool = False,
    log_dir: Path | None = None,
    journal: Path | None = None,
) -> LedgerService:
    """Return a ledger behind its lock.

    Args:
        log_dir: where its events are written, if the config asks for them.
        journal: file of `create_journal`, from which the ledger is recovered; None for a fresh one without a journal.

    Raises:
        DataPlaneError: the journal is not one of this run, or damaged.
    """
    has_events = log_dir is not None and config.observability.event_log
    path = log_dir / EVENTS_FILE if log_dir is not None and has_events else None
    if journal is not None:
        return _recovered_service(config, run_id=run_id, validate=validate, events=path, journal=journal)
    events = None if path is None else EventLog(path, run_id=run_id)
    ledger = build_ledger(config, run_id=run_id, validate=validate, on_event=events)
    return LedgerService(ledger, on_close=events.close if events is not None else None)


def _recovered_service(
    config: DataPlaneConfig, *, run_id: str, validate: bool, events: Path | None, journal: Path
) -> LedgerService:
    opened = Journal(journal, run_id=run_id, sync=config.ledger.fsync)
    ledger = RecoverableLedger(
        lambda on_event: build_ledger(config, run_id=run_id, validate=validate, on_event=on_event),
        opened,
        keep_s=2 * config.timeout_s,
        snapshot_bytes=config.ledger.journal_bytes,
        events=None if events is None else EventLog(events, run_id=run_id, goes_on=not opened.is_fresh),
    )
    if not opened.is_fresh:
        ledger.resume(now=time.monotonic())
    return LedgerService(ledger, on_close=ledger.close)


def build_ledger(
    config: DataPlaneConfig, *, run_id: str, validate: bool = False, on_event: EventSink | None = None
) -> Ledger:
    return Ledger(
        run_id=run_id,
        capacity_rows=config.storage_capacity.rows,
        capacity_bytes=config.storage_capacity.bytes,
        lease_s=config.lease_s,
        on_event=on_event,
        validate=validate,
    )


def read_reply(reply: Mapping[str, object]) -> Reply:
    """Return the result of a request, or the error that it carries."""
    error = reply.get("error")
    if error is not None:
        assert isinstance(error, dict), f"malformed reply: {reply}"
        raise from_record(error)
    result = reply["ok"]
    assert isinstance(result, dict), f"malformed reply: {reply}"
    return result


@contextmanager
def final_loss() -> Iterator[None]:
    """Raise the loss of a ledger that nobody starts again as the end of the data plane."""
    try:
        yield
    except LedgerLost as error:
        raise DataPlaneClosed(str(error)) from error


class LedgerService:
    """A ledger with the one lock that serialises its calls; shared by the threads of one process."""

    def __init__(
        self,
        ledger: Ledger | RecoverableLedger,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._clock, self._on_close = clock, on_close
        self.run_id = ledger.run_id
        self._ledger = ledger
        self._counts = RequestCounts()
        self._lock = threading.Lock()
        self._is_closed = False

    def handle(self, request: Mapping[str, object], *, timeout_s: float) -> Reply:
        """Serve one request under the lock.

        Raises:
            DataPlaneTimeout: other callers held the ledger for `timeout_s`.
            DataPlaneClosed: after `close`.
        """
        if not self._lock.acquire(timeout=max(timeout_s, 0.0)):
            raise DataPlaneTimeout(f"the ledger was busy for {timeout_s:.1f} s")
        try:
            if self._is_closed:
                raise DataPlaneClosed(f"the ledger of run {self.run_id!r} has been closed by its owner")
            now = self._clock()
            if request.get("op") in ("report", "watch"):
                return self._watch(request, now)
            started = time.perf_counter()
            reply = self._ledger.handle(request, now=now)
            self._counts.add(request, reply, seconds=time.perf_counter() - started, now=now)
            return reply
        finally:
            self._lock.release()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def _watch(self, request: Mapping[str, object], now: float) -> Reply:
        """Serve `report` (a client's own counts) and `watch` (everything that is known of the run): no ledger state is
        changed.
        """
        if request["op"] == "report" and request.get("run") == self.run_id:
            return self._report(request.get("args"), now)
        reply: Reply = {"now": now, "run_id": self.run_id, **self._counts.view(now)}
        for op in ("stats", "inspect"):
            answer = self._ledger.handle({**request, "op": op}, now=now)
            if "error" in answer:
                return answer
            reply[op] = answer["ok"]
        return {"ok": reply}

    def _report(self, args: object, now: float) -> Reply:
        try:
            assert isinstance(args, dict), "args must be a dict"
            self._counts.report(args, now)
        except (AssertionError, KeyError) as error:
            return {"error": to_record(DataPlaneError(f"the ledger could not serve 'report': {error!r}"))}
        return {"ok": {}}


class InProcessHost(LedgerHost):
    """The ledger of this process."""

    def __init__(self, service: LedgerService, *, is_owner: bool) -> None:
        self._service = service
        self._is_owner = is_owner

    @property
    def address(self) -> LedgerAddress:
        return LedgerAddress(kind="in_process", run_id=self._service.run_id)

    def call(self, op: str, args: Args, *, timeout_s: float, handles: Handles | None = None) -> Reply:
        request = {"run": self._service.run_id, "op": op, "args": args, "handles": handles}
        return read_reply(self._service.handle(request, timeout_s=timeout_s))

    def close(self) -> None:
        if self._is_owner:
            self._service.close()


WAITING_S = 2.0
"""A put that was blocked counts as waiting for so long after it has last asked; it asks ten times a second."""


@dataclass(slots=True)
class CountedClient:
    """One client, by what it sends."""

    stage: str = ""
    """The stage of its last call that had one."""
    seen: float = 0.0
    """Time of its last request, in the service's seconds."""
    calls: int = 0
    is_closed: bool = False
    totals: dict[str, Any] | None = None
    """Its own counts since its start (`Totals.to_plain`); None before its first report."""


@dataclass(slots=True)
class RequestCounts:
    """Counts of one service. Not thread-safe: the service's lock guards it."""

    clients: dict[str, CountedClient] = field(default_factory=dict)
    operations: dict[str, list[float]] = field(default_factory=dict)
    """Operation of the ledger -> its requests and the seconds that they took."""
    errors: dict[str, dict[str, int]] = field(default_factory=dict)
    """Operation -> kind of error -> requests that it ended."""
    waiting: dict[tuple[str, str, str, int], float] = field(default_factory=dict)
    """Put -> when it was last blocked."""

    def report(self, args: Args, now: float) -> None:
        totals = args["totals"]
        assert isinstance(totals, dict), f"totals: expected a dict, got {totals!r}"
        client = self._client(args, now)
        if client is not None:
            client.totals, client.is_closed = totals, bool(args["is_last"])

    def add(self, request: Mapping[str, object], reply: Reply, *, seconds: float, now: float) -> None:
        op, args = str(request.get("op")), request.get("args")
        counted = self.operations.setdefault(op, [0, 0.0])
        counted[0] += 1
        counted[1] += seconds
        error, result = reply.get("error"), reply.get("ok")
        if isinstance(error, dict):
            kinds = self.errors.setdefault(op, {})
            kinds[error["kind"]] = kinds.get(error["kind"], 0) + 1
        if not isinstance(args, dict):
            return
        client = self._client(args, now)
        if client is not None:
            client.calls += 1
        if op in ("reserve", "commit"):
            self._add_put(args, is_blocked=isinstance(result, dict) and "blocked" in result, now=now)

    def view(self, now: float) -> Reply:
        """Return everything as plain values, ages instead of times; later requests leave them as they are."""
        return {
            "operations": {op: list(counted) for op, counted in self.operations.items()},
            "errors": {op: dict(kinds) for op, kinds in self.errors.items()},
            "puts_waiting": sum(now - at < WAITING_S for at in self.waiting.values()),
            "clients": {
                label: {
                    "stage": client.stage,
                    "seen_s": now - client.seen,
                    "calls": client.calls,
                    "is_closed": client.is_closed,
                    "totals": client.totals,
                }
                for label, client in self.clients.items()
            },
        }

    def _client(self, args: Args, now: float) -> CountedClient | None:
        """Return the client that has signed a request; observers sign none."""
        label = args.get("who")
        if not isinstance(label, str) or not label:
            return None
        client = self.clients.get(label)
        if client is None:
            client = self.clients[label] = CountedClient()
        client.seen = now
        client.stage = str(args.get("stage") or client.stage)
        return client

    def _add_put(self, args: Args, *, is_blocked: bool, now: float) -> None:
        keys = args.get("keys")
        if not isinstance(keys, list) or not keys:
            return
        put = (str(args.get("who")), str(args.get("partition")), str(keys[0]), len(keys))
        if not is_blocked:
            self.waiting.pop(put, None)
            return
        self.waiting = {other: at for other, at in self.waiting.items() if now - at < WAITING_S}
        self.waiting[put] = now
