"""`Progress`: lines on what an explanation does, how much of it is done and how long it still takes.

Called by `explain_mismatch` and its parts. Invariant: time left is said of the present phase alone, since what follows
depends on its numbers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Progress"]

TELL_EVERY_S = 5.0


class Progress:
    """Reports the present phase from its own thread, from `__enter__` to `__exit__`.

    Args:
        report: gets each line.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._what, self._total, self._done, self._began = "", 0, 0, time.monotonic()
        self._count: Callable[[], int] | None = None
        self._thread = threading.Thread(target=self._tell, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join()

    def begin(self, what: str, *, total: int = 0, count: Callable[[], int] | None = None) -> None:
        """Start a phase.

        Args:
            total: its units of work of about the same length; 0 where nobody knows.
            count: returns the units done; None where `advance` counts them.
        """
        with self._lock:
            self._what, self._total, self._count, self._done = what, total, count, 0
            self._began = time.monotonic()

    def advance(self, units: int = 1) -> None:
        with self._lock:
            self._done += units

    def line(self) -> str:
        with self._lock:
            what, total, began = self._what, self._total, self._began
            done = self._done if self._count is None else self._count()
        taken = time.monotonic() - began
        if not total:
            return f"{what}, {taken:.0f} s"
        left = f", about {taken / done * (total - done):.0f} s left" if 0 < done <= total else ""
        return f"{what}: {done} of {total}, {taken:.0f} s{left}"

    def _tell(self) -> None:
        while not self._ended.wait(TELL_EVERY_S):
            self._report(self.line())
