"""`KeptRates`: the learning rates of the kept steps in place of a schedule, for a worker that has other schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nemo_rl.models.policy.workers.engine import Schedule

__all__ = ["KeptRates"]


class KeptRates(Schedule):
    """One rate per training call.

    Args:
        own: of the worker, which sets whatever else follows a schedule.
        groups: of the optimizer.
    """

    def __init__(self, own: Schedule, groups: Callable[[], list[dict[str, Any]]], rates: Sequence[float]) -> None:
        self._own, self._groups, self._rates = own, groups, list(rates)
        self._calls = 0

    def apply(self) -> float:
        """The rate of the next call is in the optimizer."""
        self._own.apply()
        # A step that did not end has kept no rate.
        rate = self._rates[min(self._calls, len(self._rates) - 1)]
        for group in self._groups():
            group["lr"] = rate
        return rate

    def advance(self) -> None:
        """One call is done."""
        self._own.advance()
        self._calls += 1
