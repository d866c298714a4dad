"""Where a ledger lives: the protocol of its hosts, and the host inside this process.

`client.LedgerClient` talks to a `LedgerHost`. Every call ends by its deadline, and a host raises only errors of the
data plane: what the ledger refused, `DataPlaneTimeout` when it is slow, `DataPlaneClosed` when it is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.address import LedgerAddress
from nemo_rl.data_plane.ledger import Args, Ledger, Reply
from nemo_rl.errors import DataPlaneClosed, DataPlaneTimeout, from_record

__all__ = ["InProcessHost", "LedgerHost", "LedgerService", "build_ledger", "read_reply"]


class LedgerHost(Protocol):
    """One client's way to the ledger."""

    @property
    def address(self) -> LedgerAddress: ...

    def call(self, op: str, args: Args, *, timeout_s: float) -> Reply:
        """One operation of the ledger; errors are raised."""

    def close(self) -> None:
        """Ends this side; the owner's close also ends the ledger. Idempotent."""


def build_ledger(config: DataPlaneConfig, *, run_id: str, validate: bool = False) -> Ledger:
    """A fresh ledger with the limits of the config."""
    return Ledger(
        run_id=run_id,
        capacity_rows=config.capacity_rows,
        capacity_bytes=config.capacity_bytes,
        lease_s=config.lease_s,
        validate=validate,
    )


def read_reply(reply: Mapping[str, object]) -> Reply:
    """The result of a request, or the error that it carries."""
    error = reply.get("error")
    if error is not None:
        assert isinstance(error, dict), f"malformed reply: {reply}"
        raise from_record(error)
    result = reply["ok"]
    assert isinstance(result, dict), f"malformed reply: {reply}"
    return result


class LedgerService:
    """A ledger with the one lock that serialises its calls; shared by the threads of one process."""

    def __init__(self, ledger: Ledger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.run_id = ledger.run_id
        self._ledger = ledger
        self._lock = threading.Lock()
        self._is_closed = False

    def handle(self, request: Mapping[str, object], *, timeout_s: float) -> Reply:
        """One request under the lock.

        Raises:
            DataPlaneTimeout: other callers held the ledger for `timeout_s`.
            DataPlaneClosed: after `close`.
        """
        if not self._lock.acquire(timeout=max(timeout_s, 0.0)):
            raise DataPlaneTimeout(f"the ledger was busy for {timeout_s:.1f} s")
        try:
            if self._is_closed:
                raise DataPlaneClosed(f"the ledger of run {self.run_id!r} has been closed by its owner")
            return self._ledger.handle(request, now=self._clock())
        finally:
            self._lock.release()

    def close(self) -> None:
        """Later requests fail."""
        with self._lock:
            self._is_closed = True


class InProcessHost:
    """The ledger of this process."""

    def __init__(self, service: LedgerService, *, is_owner: bool) -> None:
        self._service = service
        self._is_owner = is_owner

    @property
    def address(self) -> LedgerAddress:
        return LedgerAddress(kind="in_process", run_id=self._service.run_id)

    def call(self, op: str, args: Args, *, timeout_s: float) -> Reply:
        request = {"run": self._service.run_id, "op": op, "args": args}
        return read_reply(self._service.handle(request, timeout_s=timeout_s))

    def close(self) -> None:
        if self._is_owner:
            self._service.close()
