"""`ProbeTurns`: after which refits engines and policy score the probe, when the recipe does not say how often.

Fingerprints are compared after every refit. Scoring takes a few forward passes, which is nothing beside the minutes of
a real step and too much beside the second of a toy's: then it waits until receipts have taken their share of the time.
Used by `Receipts`. Invariant: no number of a training depends on a turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["ProbeTurns"]

FIRST_TURNS = 4
"""Refits that are always scored, and whose cost is one of the start."""
MOST_SHARE = 0.015
"""Of the time since then that receipts may take; the rest of 2 % is for what their clocks do not see, such as
fingerprints that are taken while weights are sent."""
LONGEST_WAIT = 10
"""Refits from one turn to the next at the most, whatever they take."""


class ProbeTurns:
    """Whose turn it is, refit by refit.

    Args:
        every: a turn every so many refits; None: after each, as long as `MOST_SHARE` allows.
        clock: seconds.
    """

    def __init__(self, every: int | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._every, self._clock = every, clock
        self._num_done = self._last = 0
        self._began = clock()
        self._spent_s = self._cost_s = 0.0

    def is_due(self) -> bool:
        """Whether the probe is scored after the refit that is being done."""
        if self._every is not None:
            return self._num_done % self._every == 0
        if self._num_done < FIRST_TURNS or self._num_done - self._last >= LONGEST_WAIT:
            return True
        return self._spent_s + self._cost_s <= MOST_SHARE * (self._clock() - self._began)

    def done(self, seconds: float, *, has_probe: bool) -> None:
        """A refit was proved.

        Args:
            seconds: that its receipt took.
            has_probe: whether the probe was scored for it.
        """
        if has_probe:
            self._last, self._cost_s = self._num_done, seconds
        self._num_done += 1
        self._spent_s += seconds
        if self._num_done == FIRST_TURNS:
            self._began, self._spent_s = self._clock(), 0.0
