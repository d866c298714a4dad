"""`ClientLink`: one client's way to its ledger and its store. Calls have deadlines, errors say whose they are.

Used by `ledger_client`, `writes` and `reads`. The one invariant: nothing reaches the host or the store after
`end`, and no call outlives its deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

from nemo_rl.data_plane.address import DataPlaneAddress, Handles
from nemo_rl.data_plane.batch_meta import Version
from nemo_rl.data_plane.client.stage_clock import StageClock
from nemo_rl.data_plane.client.stage_context import current_stage
from nemo_rl.data_plane.interfaces import PayloadStore
from nemo_rl.data_plane.labels import chunk_id, client_label
from nemo_rl.data_plane.ledger.host import LedgerHost
from nemo_rl.data_plane.ledger.ledger import Args, Reply
from nemo_rl.errors import DataPlaneClosed, DataPlaneError, DataPlaneTimeout, PayloadLost

__all__ = ["Call", "ClientLink", "names_of", "plain_versions", "versions_of"]

_T = TypeVar("_T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """One public call: its deadline, and what an error message says about it."""

    what: str
    deadline: float
    started: float

    def left(self) -> float:
        """Seconds until the deadline."""
        return max(self.deadline - time.monotonic(), 0.0)

    def age(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.started


class ClientLink:
    """Host, store, deadline, counters and clock of one client."""

    def __init__(self, *, host: LedgerHost, store: PayloadStore, address: DataPlaneAddress) -> None:
        self.store, self.address, self._host = store, address, host
        self.timeout_s = address.config.timeout_s
        self.label = client_label(store.place)
        self.clock = StageClock()
        self._lock = threading.Lock()
        self._num_chunks = 0
        self._has_ended = False
        self._counters = {"put_bytes": 0, "get_bytes": 0, "over_read_bytes": 0}

    @property
    def counters(self) -> dict[str, int]:
        """Payload bytes put and got, and bytes read but not asked for."""
        with self._lock:
            return dict(self._counters)

    def count(self, what: str, num_bytes: int) -> None:
        """Adds to a counter."""
        with self._lock:
            self._counters[what] += num_bytes

    def begin(self, what: str) -> Call:
        """A call with the client's deadline."""
        self.check_open()
        now = time.monotonic()
        return Call(what=what, deadline=now + self.timeout_s, started=now)

    def check_open(self) -> None:
        """Raises DataPlaneClosed after `end`."""
        if self._has_ended:
            raise DataPlaneClosed(f"this client of run {self.address.run_id!r} is closed")

    def ask(self, call: Call, op: str, args: Args, *, handles: Handles | None = None) -> Reply:
        """One operation of the ledger, signed with the client's label and its stage."""
        signed: Args = {**args, "who": self.label, "stage": current_stage.get()}
        with self.clock.measure("ledger"):
            return self.timed(call, lambda: self._host.call(op, signed, timeout_s=call.left(), handles=handles))

    def notify(self, op: str, args: Args) -> Reply:
        """An operation outside of any call: heartbeats, and reservations that are given back."""
        return self._host.call(op, args, timeout_s=self.timeout_s)

    def timed(self, call: Call, action: Callable[[], _T]) -> _T:
        """Runs one step of a call; when a peer is gone or silent, the error names the call, its owner and its age."""
        self.check_open()
        try:
            return action()
        except (DataPlaneClosed, DataPlaneTimeout, PayloadLost) as error:
            raise type(error)(
                f"{call.what}: {error}; deadline {self.timeout_s:.1f} s, age {call.age():.1f} s, "
                f"owner: run {self.address.run_id!r} in process {self.address.process_id}"
            ) from error

    def new_ids(self, count: int) -> list[str]:
        """Ids for chunks, each used once."""
        with self._lock:
            first = self._num_chunks
            self._num_chunks += count
        return [chunk_id(self.address.run_id, self.label, first + i) for i in range(count)]

    def drop(self, chunk_ids: Sequence[str]) -> None:
        """Frees chunks that no row reads any more; the rows are settled already, so a failure is only reported."""
        if not chunk_ids:
            return
        try:
            self.store.drop(chunk_ids, timeout_s=self.timeout_s)
        except DataPlaneError as error:
            logger.warning("could not free %d chunks of run %s: %s", len(chunk_ids), self.address.run_id, error)

    def end(self) -> bool:
        """Later calls fail; False when it had ended before."""
        with self._lock:
            was_open, self._has_ended = not self._has_ended, True
        return was_open

    def close(self) -> None:
        """Closes store and host, both also when one of them fails."""
        with ExitStack() as closing:
            closing.callback(self._host.close)
            closing.callback(self.store.close)


def names_of(value: object) -> list[str]:
    """A list of strings out of a reply."""
    assert isinstance(value, list), f"malformed reply: {value!r}"
    return value


def versions_of(reply: Reply) -> dict[str, Version]:
    """Family versions out of a reply."""
    versions = reply["versions"]
    assert isinstance(versions, dict), f"malformed reply: {reply}"
    return versions


def plain_versions(versions: Mapping[str, Version]) -> dict[str, int | list[int]]:
    """Family versions for a request."""
    return {family: version if isinstance(version, int) else list(version) for family, version in versions.items()}
