"""A ledger that outlives its process: `RecoverableLedger` in front of `Ledger`, and the numbers of calls.

    call --> reply known? --> Ledger.handle --> Journal.append --> events, reply
    a new process: snapshot --> Ledger.load, then Ledger.handle for each frame --> `resume` extends the leases

Built by `host.build_service`; `host_ray` asks again with the same number when the process has died. Invariant: what a
client or the event log has been told is in the journal, so a call that is made again changes nothing twice: either its
change is there and its reply is repeated, or it never happened.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgpack

from nemo_rl.data_plane.ledger.events import Event, EventLog
from nemo_rl.data_plane.ledger.journal import Journal
from nemo_rl.data_plane.ledger.ledger import Args, Ledger, Reply
from nemo_rl.errors import DataPlaneError, to_record

__all__ = ["CallNumbers", "RecoverableLedger"]

logger = logging.getLogger(__name__)

READS = frozenset({"describe", "locate", "gone", "list", "explain", "stats", "inspect"})
"""Operations that change nothing."""


class CallNumbers:
    """Numbers of one client's calls, by which the ledger knows a call that is made again. Thread-safe.

    Example:
        >>> numbers = CallNumbers("client")
        >>> with numbers.next() as first, numbers.next() as second:
        ...     second
        {'client': 'client', 'number': 2, 'oldest': 1}
    """

    def __init__(self, client: str) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._last = 0
        self._open: dict[int, None] = {}

    @contextmanager
    def next(self) -> Iterator[Args]:
        """Number the call that is made inside the block; `oldest` is the lowest number that may still be asked for."""
        with self._lock:
            self._last += 1
            number = self._last
            self._open[number] = None
            oldest = next(iter(self._open))
        try:
            yield {"client": self._client, "number": number, "oldest": oldest}
        finally:
            with self._lock:
                del self._open[number]


@dataclass(slots=True)
class _Caller:
    """One client's replies that it may still ask for again."""

    oldest: int = 0
    seen: float = 0.0
    """Ledger's seconds of the latest change that it asked for."""
    replies: dict[int, Reply] = field(default_factory=dict)

    def forget_before(self, oldest: int) -> None:
        """The client has the replies of all calls with lower numbers."""
        if oldest > self.oldest:
            self.oldest = oldest
            self.replies = {number: reply for number, reply in self.replies.items() if number >= oldest}


class _CallReplies:
    """Replies by client and number.

    Args:
        keep_s: seconds after which no call is made again; the replies of a client that has been silent for so long are
            dropped.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._callers: OrderedDict[str, _Caller] = OrderedDict()

    def find(self, request: Mapping[str, Any]) -> Reply | None:
        """Return the reply that the call got before, if it changed anything then."""
        caller = self._callers.get(request.get("client", ""))
        if caller is None:
            return None
        number = request["number"]
        caller.forget_before(request["oldest"])
        if number < caller.oldest:
            text = f"call {number} of {request['client']} came after its client had ended it; nothing was changed"
            return {"error": to_record(DataPlaneError(text))}
        return caller.replies.get(number)

    def keep(self, request: Mapping[str, Any], reply: Reply, *, now: float) -> None:
        client = request.get("client")
        if client is None:
            return
        caller = self._callers.setdefault(client, _Caller())
        caller.forget_before(request["oldest"])
        caller.seen, caller.replies[request["number"]] = now, reply
        self._callers.move_to_end(client)
        while self._callers and now - next(iter(self._callers.values())).seen > self._keep_s:
            self._callers.popitem(last=False)

    def dump(self) -> list[list[object]]:
        return [[name, c.oldest, c.seen, [[i, r] for i, r in c.replies.items()]] for name, c in self._callers.items()]

    def load(self, dumped: list[list[Any]]) -> None:
        """Take over what `dump` returned."""
        for name, oldest, seen, replies in dumped:
            self._callers[name] = _Caller(oldest, seen, dict(replies))


class RecoverableLedger:
    """A ledger whose changes are in a journal before anybody is told of them.

    Args:
        build: makes a fresh ledger that hands its events to the function given.
        keep_s: seconds after which no client makes a call again.
        snapshot_bytes: size of the journal at which a snapshot replaces it.
        events: the run's event log; None where there is none.
    """

    def __init__(
        self,
        build: Callable[[Callable[[Event], None] | None], Ledger],
        journal: Journal,
        *,
        keep_s: float,
        snapshot_bytes: int,
        events: EventLog | None = None,
    ) -> None:
        self._journal, self._log, self._snapshot_bytes = journal, events, snapshot_bytes
        self._made: list[Event] = []
        """Events of the request that is being served."""
        self._ledger = build(None if events is None else self._made.append)
        self.run_id = self._ledger.run_id
        self._replies = _CallReplies(keep_s)
        self._num_events = 0
        """Events of changes so far: their numbers in the log."""
        self.last_change = 0.0
        """Ledger's seconds of the latest change."""
        self.num_replayed = 0
        self._is_journalled = True
        started = time.monotonic()
        self._replay()
        self._replay_s = time.monotonic() - started

    def handle(self, request: Mapping[str, object], *, now: float) -> Reply:
        """Serve one request; its change is in the journal when this returns.

        Args:
            now: see `Ledger.handle`.
        """
        known = self._replies.find(request)
        if known is not None:
            return known
        if request.get("op") in READS or not self._is_journalled:
            reply = self._ledger.handle(request, now=now)
            self._release_events(is_change=False)
            return reply
        try:
            content = _packed(request, now)
        except (TypeError, ValueError, OverflowError) as error:
            return {"error": to_record(DataPlaneError(f"the ledger's journal cannot carry {request}: {error}"))}
        num_expired, blocked_s = self._ledger.num_expired, self._ledger.blocked_s
        reply = self._ledger.handle(request, now=now)
        if self._ledger.num_expired > num_expired or _is_change(request, reply):
            self._append(content, now)
            self._replies.keep(request, reply, now=now)
        elif self._ledger.blocked_s != blocked_s:
            self._append(_packed(_waiting_of(request), now), now)
        self._release_events(is_change=True)
        if self._journal.num_bytes > self._snapshot_bytes and self._is_journalled:
            self._take_snapshot(now)
        return reply

    def resume(self, *, now: float) -> None:
        """Go on after a recovery: claims and reservations that were good get a full lease from `now`."""
        self.handle({"run": self.run_id, "op": "extend", "args": {"lost_at": self.last_change}}, now=now)
        if self._log is not None:
            event: Event = {"event": "recover", "run": self.run_id, "keys": (), "n": self._num_events}
            self._log({**event, "changes": self.num_replayed, "seconds": round(self._replay_s, 3)})

    def dump(self, *, now: float) -> Args:
        """Return the state of the ledger, as `Ledger.dump` does."""
        return self._ledger.dump(now=now)

    def close(self) -> None:
        self._journal.close()
        if self._log is not None:
            self._log.close()

    def _replay(self) -> None:
        state = self._journal.state
        if state is not None:
            self._ledger.load(state["ledger"])
            self._replies.load(state["replies"])
            self._num_events, self.last_change = state["events"], state["now"]
        for record in self._journal.replay():
            now = record.pop("t")
            request = {"run": self.run_id, **record}
            reply = self._ledger.handle(request, now=now)
            self._replies.keep(request, reply, now=now)
            self._release_events(is_change=True, age_s=max(time.monotonic() - now, 0.0))
            self.last_change, self.num_replayed = now, self.num_replayed + 1

    def _append(self, content: bytes, now: float) -> None:
        self.last_change = now
        try:
            self._journal.append(content)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Go on without a journal: a full disk must not end a run that lives."""
        self._is_journalled = False
        logger.warning(
            "run %s: the ledger's journal %s cannot be written: %s; the run goes on, but it ends if the ledger's "
            "process dies",
            self.run_id,
            self._journal.path,
            error,
        )
        self._journal.give_up()

    def _take_snapshot(self, now: float) -> None:
        started = time.perf_counter()
        if self._log is not None:
            self._log.flush()  # the frames from which its events could be made again are about to go
        state: Args = {
            "ledger": self._ledger.dump(now=now),
            "replies": self._replies.dump(),
            "events": self._num_events,
            "now": self.last_change,
        }
        before = self._journal.num_bytes
        try:
            self._journal.restart(state)
        except OSError as error:
            logger.warning("run %s: no snapshot of the ledger: %s; its journal grows on", self.run_id, error)
        # A large state would be written again and again for a few changes.
        self._snapshot_bytes = max(self._snapshot_bytes, 2 * self._journal.num_bytes)
        logger.debug(
            "the ledger's journal: %d bytes became %d in %.3f s",
            before,
            self._journal.num_bytes,
            time.perf_counter() - started,
        )

    def _release_events(self, *, is_change: bool, age_s: float = 0.0) -> None:
        """Hand on the events of a request: those of a change are numbered, those of a read repeat the last number."""
        if not self._made or self._log is None:
            return
        for event in self._made:
            self._num_events += is_change
            if self._num_events > self._log.last_number or not is_change:
                self._log({**event, "n": self._num_events}, age_s=age_s)
        self._made.clear()


def _packed(request: Mapping[str, object], now: float) -> bytes:
    content: bytes = msgpack.packb({"t": now, **{k: v for k, v in request.items() if k not in ("run", "timeout_s")}})
    return content


def _is_change(request: Mapping[str, Any], reply: Reply) -> bool:
    """Return whether a request has changed the ledger, apart from leases that were over and seconds of waiting."""
    result = reply.get("ok")
    if not isinstance(result, dict):
        # An operation that failed in the middle is repeated as it was; a refusal has changed nothing.
        error = reply["error"]
        return isinstance(error, dict) and error["kind"] == DataPlaneError.__name__
    if "blocked" in result or request["op"] == "consumption":
        return False
    return request["op"] != "claim" or bool(result["keys"])


def _waiting_of(request: Mapping[str, Any]) -> Args:
    """Return the request that counts the seconds for which a put has waited, and does nothing else."""
    return {"op": "waited", "args": {"waited_s": request["args"]["waited_s"]}}
