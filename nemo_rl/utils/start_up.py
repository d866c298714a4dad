"""How long the processes of a run may take to start, and the progress messages while the run waits.

`setup` makes one `StartUp` from `cluster.worker_start_timeout_s`; everything that starts a process takes it. Invariant:
there is no other deadline for a start, so a machine that is merely slow needs one key.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nemo_rl.config.base import START_TIMEOUT_S

__all__ = ["DEFAULT_START", "StartUp"]

logger = logging.getLogger(__name__)

TELL_EVERY_S = 10.0
"""Long enough that a quiet machine says nothing, short enough that nobody believes it hangs."""


def _log(text: str) -> None:
    logger.info("%s", text)


@dataclass(frozen=True, kw_only=True, slots=True)
class StartUp:
    """The patience of one run.

    Example:
        >>> StartUp(timeout_s=90).too_late("TransferQueue did not start")
        'TransferQueue did not start within 90 s; raise cluster.worker_start_timeout_s if this machine is only slow'
    """

    timeout_s: float = START_TIMEOUT_S
    """Of each start by itself."""
    report: Callable[[str], None] = _log
    """Gets a line every few seconds, from another thread."""
    every_s: float = TELL_EVERY_S

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Inside it a person sees what is waited for: `waiting for TransferQueue, 40 s`."""
        started, done = time.monotonic(), threading.Event()

        def report() -> None:
            while not done.wait(self.every_s):
                self.report(f"waiting for {what}, {time.monotonic() - started:.0f} s")

        thread = threading.Thread(target=report, name="start-up", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def too_late(self, what: str) -> str:
        """The text of the error past the deadline."""
        return f"{what} within {self.timeout_s:g} s; raise cluster.worker_start_timeout_s if this machine is only slow"


DEFAULT_START = StartUp()
"""For a data plane without a recipe."""
