"""Seconds per named stage of one step: `with timer.time("rollout"): ...`.

Called by the trainer; times of a name that is entered several times in a step add up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Timer"]


class Timer:
    """Wall-clock seconds by name, in the order in which the names were first entered.

    Example:
        >>> ticks = iter([10.0, 12.5])
        >>> timer = Timer(clock=lambda: next(ticks))
        >>> with timer.time("train"):
        ...     pass
        >>> timer.seconds()
        {'train': 2.5}
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.perf_counter, on_enter: Callable[[str], None] | None = None
    ) -> None:
        """Args:
        on_enter: called with the name of each stage that begins.
        """
        self._clock = clock
        self._on_enter = on_enter
        self._seconds: dict[str, float] = {}

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to `name`, also when the block raises."""
        self._seconds.setdefault(name, 0.0)
        if self._on_enter is not None:
            self._on_enter(name)
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[name] += self._clock() - start

    def add(self, name: str, seconds: float) -> None:
        """Adds time that was measured elsewhere, for example inside a worker."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def seconds(self) -> dict[str, float]:
        """A copy of the sums since the last `reset`."""
        return dict(self._seconds)

    def reset(self) -> None:
        """Starts the next step."""
        self._seconds.clear()
