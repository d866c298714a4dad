"""Interrupts: Ctrl-C, SIGTERM and SIGHUP are handled alike, wherever they arrive.

The command line installs `install`. An interrupt is raised as KeyboardInterrupt; libraries turn that into errors of
their own (a failed save, for example), so a handler of errors asks `received` first.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from nemo_rl.utils.exits import INTERRUPTED

__all__ = ["SIGNALS", "end_at_once", "ignore", "install", "raise_if_received", "received"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

AGAIN_AFTER_S = 30.0
"""Seconds until a signal may break off the teardown that an earlier one has begun."""

_received: list[float] = []


def end_at_once() -> None:
    """Let a signal end the process with one line until `install`, while a program only imports."""
    _handle_by(_end)


def ignore() -> None:
    """Ignore further signals: a second one cannot end the process in another way, once an interrupt has ended all that
    it had started.

    Python gives up its handlers when it ends, but not this.
    """
    _handle_by(signal.SIG_IGN)


def install() -> None:
    """Let `SIGNALS` interrupt the process; one that is ignored (a shell's background job, nohup) stays ignored."""
    _received.clear()
    _handle_by(_interrupt)


def received() -> bool:
    """Return whether a signal has arrived since `install`."""
    return bool(_received)


def raise_if_received() -> None:
    """
    Raises:
        KeyboardInterrupt: again, where a library kept the first one to itself.
    """
    if _received:
        raise KeyboardInterrupt


def _handle_by(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    del number, frame
    # No exception: an import would be left half done, and say so.
    os.write(sys.stderr.fileno(), b"interrupted; nothing was started\n")
    os._exit(INTERRUPTED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise for the first signal; one that follows soon would leave half of what the first one is ending."""
    del number, frame
    now = time.monotonic()
    is_first = not _received or now - _received[-1] > AGAIN_AFTER_S
    if is_first:
        _received.append(now)
        raise KeyboardInterrupt
