"""A put that waits for capacity: the client asks the ledger again until the put fits or its deadline is near.

Used by `LedgerClient`. A wait ends with the ledger's grant or with `CapacityExceeded`; it never loses a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from nemo_rl.data_plane.ledger.ledger import Args, Reply
from nemo_rl.errors import CapacityExceeded

__all__ = ["FIRST_POLL_S", "LONGEST_POLL_S", "RoomWait"]

FIRST_POLL_S, LONGEST_POLL_S = 0.002, 0.1
"""A waiting call asks the ledger again after so long, doubling."""
LAST_CALLS_S = 0.05
"""Kept back from the deadline, so that the end of a wait can still be reported to the ledger."""


@dataclass(slots=True)
class RoomWait:
    """The waiting of one put.

    Args:
        ask: one ledger operation of this put.
        deadline: monotonic seconds.
        what: the put, for the error.
    """

    ask: Callable[[str, Args], Reply]
    deadline: float
    what: str
    waited_s: float = 0.0
    """Seconds blocked so far."""
    _told_s: float = 0.0
    """Of these, what the ledger knows."""

    def granted(self, op: str, args: Args) -> Reply:
        """The reply of `op` once it is not blocked.

        Raises:
            CapacityExceeded: the deadline came first, or the ledger says that no wait can help.
        """
        poll_s = FIRST_POLL_S
        while True:
            asked = time.monotonic()
            reply = self.ask(op, {**args, "waited_s": self.untold_s()})
            blocked = reply.get("blocked")
            if blocked is None:
                return reply
            if time.monotonic() + poll_s + LAST_CALLS_S > self.deadline:
                self.waited_s += time.monotonic() - asked
                raise CapacityExceeded(
                    f"{self.what}: no capacity: {blocked}; waited {self.waited_s:.1f} s; clear rows sooner, put "
                    "fewer rows at a time, or raise the limit"
                )
            time.sleep(poll_s)
            self.waited_s += time.monotonic() - asked
            poll_s = min(poll_s * 2, LONGEST_POLL_S)

    def untold_s(self) -> float:
        """Seconds blocked since the last report to the ledger."""
        untold, self._told_s = self.waited_s - self._told_s, self.waited_s
        return untold
