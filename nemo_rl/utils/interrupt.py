"""Interrupts: Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 are handled alike, wherever they arrive.

The command line installs `install`. An interrupt is raised as KeyboardInterrupt; libraries turn that into errors of
their own (a failed save, for example), so a handler of errors asks `received` first. Inside `finishing`, around the
steps of a run, the signals that clusters send before they take a machine do not interrupt: the step ends first.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from types import FrameType

from nemo_rl.utils.exits import INTERRUPTED

__all__ = [
    "NOTICES",
    "SIGNALS",
    "end_at_once",
    "finishing",
    "ignore",
    "install",
    "installed",
    "is_noticed",
    "raise_if_received",
    "received",
    "saving",
]

NOTICES = (signal.SIGTERM, signal.SIGUSR1)
"""The signals that clusters send some time before they take a machine."""
SIGNALS = (signal.SIGINT, signal.SIGHUP, *NOTICES)

AGAIN_AFTER_S = 30.0
"""Seconds until a signal may break off the teardown that an earlier one has begun."""

TWICE_S = 3.0
"""Seconds in which a second SIGTERM is the first one, sent to a process and to its group."""
SAVE_LOOK_S = 0.2

_received: list[float] = []


@dataclass(slots=True)
class _Notice:
    """The signals that have come while a run can still end its step."""

    came: SimpleQueue[str | None] = field(default_factory=SimpleQueue)
    """Name of each signal, then None at the end of the block. Its `put` may interrupt itself, as a handler does."""
    since: float | None = None
    """Monotonic time of the first one."""
    is_saving: bool = False
    is_late: bool = False
    is_over: bool = False

    def takes(self, number: int) -> bool:
        """(in the handler) Return whether the work goes on after this signal."""
        now = time.monotonic()
        if self.is_over or self.is_late or number not in NOTICES:
            return False
        if self.since is None:
            self.since = now
            self.came.put(signal.Signals(number).name)
            return True
        return number == signal.SIGUSR1 or now - self.since < TWICE_S


_notices: list[_Notice] = []
"""One of each `finishing` since `install`; the last counts."""


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
    """Let `SIGNALS` interrupt the process; one that is ignored (a shell's background job, nohup) stays ignored.

    SIGUSR2, which means nothing here, is ignored, also by what this process starts.
    """
    _received.clear()
    _notices.clear()
    _handle_by(_interrupt)
    if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)


@contextmanager
def installed() -> Iterator[None]:
    """`install` for the block alone: after it the process handles signals as before.

    Outside the main thread, where Python hands out no signals, it changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGUSR2)}
    install()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        _received.clear()
        _notices.clear()


@contextmanager
def finishing(grace_s: float, *, tell: Callable[[str], None]) -> Iterator[None]:
    """Let `NOTICES` inside the block be asked for (`is_noticed`) and not interrupt.

    A second SIGTERM interrupts, and so does the end of `grace_s`, unless a checkpoint is being saved then.

    Args:
        grace_s: seconds that the block may go on after the first one.
        tell: gets a line when it comes, from another thread.
    """
    notice = _Notice()
    watch = threading.Thread(target=_hurry, args=(notice, grace_s, tell), name="grace", daemon=True)
    watch.start()
    _notices.append(notice)
    try:
        yield
    finally:
        notice.is_over = True
        if notice.since is not None:
            # Everything is being ended now: another signal would leave half of it.
            _received.append(time.monotonic())
        notice.came.put(None)
        watch.join()


@contextmanager
def saving() -> Iterator[None]:
    """Around a save: it may take longer than the grace."""
    notice = _notices[-1] if _notices else _Notice()
    notice.is_saving = True
    try:
        yield
    finally:
        notice.is_saving = False


def is_noticed() -> bool:
    """Return whether the run is to end after its step."""
    return bool(_notices) and _notices[-1].since is not None


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
    del frame
    if _notices and not _received and _notices[-1].takes(number):
        return
    now = time.monotonic()
    is_first = not _received or now - _received[-1] > AGAIN_AFTER_S
    if is_first:
        _received.append(now)
        raise KeyboardInterrupt


def _hurry(notice: _Notice, grace_s: float, tell: Callable[[str], None]) -> None:
    """Interrupt the main thread when the grace of a notice is over."""
    name = notice.came.get()
    if name is None:
        return
    tell(f"{name}: ending after this step, which may take {grace_s:g} s (cluster.grace_s)")
    wait_s = grace_s
    while True:
        try:
            notice.came.get(timeout=wait_s)
            return
        except Empty:
            wait_s = SAVE_LOOK_S
        if not notice.is_saving:
            break
    tell(f"{name}: the step has not ended within {grace_s:g} s; raise cluster.grace_s where more time is left")
    notice.is_late = True
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGTERM)
