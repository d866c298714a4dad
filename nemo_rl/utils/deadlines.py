"""The deadlines of a run: process starts, the last save, and third-party code.

`setup` makes one `StartUp` from `cluster.worker_start_timeout_s`, and all that starts a process takes it. There is no
other deadline for a start, so a machine that is merely slow needs one key. `SaveDeadline` is made from
`checkpointing.must_save_by`: a run whose steps and saves take no longer than those before them ends before the limit
with a checkpoint of its last step. Waits for other processes are judged by `awake_s`.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from nemo_rl.config.base import AUTO, START_TIMEOUT_S, seconds_of
from nemo_rl.errors import UserError

__all__ = ["DEFAULT_START", "AwakeClock", "SaveDeadline", "StartUp", "awake_s", "seconds_left", "time_limit"]

logger = logging.getLogger(__name__)

TELL_EVERY_S = 10.0
"""Long enough that a quiet machine says nothing, short enough that nobody believes it hangs."""


TICK_S = 1.0
MISSING_S = 5.0
"""A thread that has not run for so long belongs to a process that was stopped, or to a machine that was."""


class AwakeClock:
    """A monotonic clock without the seconds in which this process was stopped (SIGSTOP, a debugger, a laptop's lid).

    A process that waits for others by it does not take its own pause for their silence. A thread reads it every second.

    Args:
        clock: seconds that go on meanwhile.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._process_id = clock, 0
        self._lock, self._last, self._stopped_s = threading.Lock(), 0.0, 0.0

    def __call__(self) -> float:
        if self._process_id != os.getpid():
            self._begin()
        with self._lock:
            before, self._last = self._last, self._clock()
            self._stopped_s += self._last - before if self._last - before > MISSING_S else 0.0
            return self._last - self._stopped_s

    def _begin(self) -> None:
        """Start the thread, at the first call of this process, which may have been forked."""
        self._lock, self._last, self._process_id = threading.Lock(), self._clock(), os.getpid()
        threading.Thread(target=self._tick, name="awake-clock", daemon=True).start()

    def _tick(self) -> None:
        while True:
            time.sleep(TICK_S)
            self()


awake_s = AwakeClock()
"""The clock of this process's deadlines; its seconds are comparable with each other alone."""


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
    """Seconds for each start by itself."""
    report: Callable[[str], None] = _log
    """Gets a line every few seconds, from another thread."""
    every_s: float = TELL_EVERY_S

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Report regularly what the block waits for: `waiting for TransferQueue, 40 s`."""
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
        """Return the text of the error past the deadline."""
        return f"{what} within {self.timeout_s:g} s; raise cluster.worker_start_timeout_s if this machine is only slow"


DEFAULT_START = StartUp()
"""Start of a data plane without a recipe."""


JOB_END = "SLURM_JOB_END_TIME"
"""Seconds since 1970; `ray.sub` sets it where Slurm does not."""
END_S = 30.0
"""Seconds for the end of the run itself: workers, Ray, files."""
MARGIN = 0.1
"""A step may take this part longer than the longest before it."""


def seconds_left(must_save_by: str, *, variables: Mapping[str, str] | None = None) -> float:
    """Return the seconds from now to the limit, where the run starts now.

    Raises:
        UserError: `auto` outside of a Slurm job.
    """
    if must_save_by != AUTO:
        return seconds_of(must_save_by)
    text = (os.environ if variables is None else variables).get(JOB_END, "")
    if not text.isdecimal():
        raise UserError(
            f"checkpointing.must_save_by: auto needs {JOB_END}, which is {text!r} here; run it as a Slurm job with a "
            "time limit, or give HH:MM:SS"
        )
    return int(text) - time.time()


class SaveDeadline:
    """The deadline of the last save of one run.

    Args:
        limit: on `clock`; None: there is none.
    """

    def __init__(self, limit: float | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._step_s = self._save_s = 0.0
        self._is_saving = False

    @classmethod
    def starting_at(cls, started: float, must_save_by: str | None) -> SaveDeadline:
        """
        Args:
            started: of the run, on the monotonic clock.
        """
        if must_save_by is None:
            return cls()
        now = time.monotonic() if must_save_by == AUTO else started
        return cls(now + seconds_left(must_save_by))

    def step_took(self, seconds: float) -> None:
        self._step_s = max(self._step_s, seconds)

    def save_began(self) -> None:
        """Note that a save runs beside the training from here on, and that the next has to wait for it."""
        self._is_saving = True

    def save_took(self, seconds: float) -> None:
        self._save_s = max(self._save_s, seconds)
        self._is_saving = False

    @property
    def reserve_s(self) -> float:
        """Return the seconds that one more step needs, with its save and one that runs; an unseen save counts as long
        as a step."""
        saves = 2 if self._is_saving else 1
        return (1 + MARGIN) * (self._step_s + saves * (self._save_s or self._step_s)) + END_S

    def left_s(self) -> float:
        """Return the seconds until the limit."""
        return float("inf") if self._limit is None else self._limit - self._clock()

    def is_reached(self) -> bool:
        """Return whether one more step no longer fits."""
        return self.left_s() < self.reserve_s


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError inside the block after `seconds`. Python code alone is interrupted, in the main thread alone.

    A timer of somebody else goes on afterwards with what was left of it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: FrameType | None) -> NoReturn:
        raise TimeoutError(f"not finished within {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, left, interval)
