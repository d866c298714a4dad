"""`RunView`: a run's data plane at one moment, as its ledger's service tells it (`watch`).

Read by the metrics endpoint (`metrics_endpoint`) and by `nemo-rl data-plane top`. A view is plain records; it changes
nothing in the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl.data_plane.client.operation_counts import Totals
from nemo_rl.data_plane.ledger.host import LedgerHost

__all__ = ["ClaimView", "ClientView", "RunView", "view_of"]


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
