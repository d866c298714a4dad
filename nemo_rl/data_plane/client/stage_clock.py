"""Where the time of a client's calls goes: encode, store, ledger, build. Used by `link`, read by benchmarks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["StageClock"]


class StageClock:
    """Seconds by part of a call, summed over calls. Thread-safe."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Adds the time of the block to `part`, also when it fails."""
        started = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            with self._lock:
                self._seconds[part] = self._seconds.get(part, 0.0) + spent

    def snapshot(self) -> dict[str, float]:
        """Seconds by part since the start."""
        with self._lock:
            return dict(self._seconds)
