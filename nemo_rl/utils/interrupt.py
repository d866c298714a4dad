"""Interrupts: Ctrl-C, SIGTERM and SIGHUP are handled alike, wherever they arrive.

The command line installs `install`. An interrupt is raised as KeyboardInterrupt; libraries turn that into errors of
their own (a failed save, for example), so whoever handles an error asks `received` first.
"""

from __future__ import annotations

import signal
from types import FrameType

__all__ = ["SIGNALS", "install", "raise_if_received", "received"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_received: list[int] = []


def install() -> None:
    """Lets `SIGNALS` interrupt the process; one that is ignored (a shell's background job, nohup) stays ignored."""
    _received.clear()
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def received() -> bool:
    """Whether a signal has arrived since `install`."""
    return bool(_received)


def raise_if_received() -> None:
    """
    Raises:
        KeyboardInterrupt: again, where a library kept the first one to itself.
    """
    if _received:
        raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    raise KeyboardInterrupt
