"""`RequestCounts`: what a ledger's service sees of its clients, beside the ledger and no part of its state.

Kept by `host.LedgerService`, under its lock. A client reports its own counts (`meter.CountReporter`); the service adds
who has called, when, how often, and what the ledger refused. Nothing here is needed to serve a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_rl.data_plane.ledger.ledger import Args, Reply

__all__ = ["RequestCounts"]

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
    """Clients by label."""
    operations: dict[str, list[float]] = field(default_factory=dict)
    """Operation of the ledger -> its requests and the seconds that they took."""
    errors: dict[str, dict[str, int]] = field(default_factory=dict)
    """Operation -> kind of error -> requests that it ended."""
    waiting: dict[tuple[str, str, str, int], float] = field(default_factory=dict)
    """Put -> when it was last blocked."""

    def report(self, args: Args, now: float) -> None:
        """Keep what a client has counted."""
        totals = args["totals"]
        assert isinstance(totals, dict), f"totals: expected a dict, got {totals!r}"
        client = self._client(args, now)
        if client is not None:
            client.totals, client.is_closed = totals, bool(args["is_last"])

    def add(self, request: Mapping[str, object], reply: Reply, *, seconds: float, now: float) -> None:
        """Count one request that the ledger has answered."""
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
