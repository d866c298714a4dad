"""Metric values that carry their own reduction, and the seconds of each stage of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Max",
    "Mean",
    "Min",
    "Reduction",
    "Sum",
    "Timer",
    "merge_metrics",
    "reduction_of_json",
    "reduction_to_json",
    "values",
]


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean, kept as total and weight: `Mean(total=12.0, weight=4.0).value == 3.0`."""

    total: float
    weight: float = 1.0

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else 0.0

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)


@dataclass(frozen=True, slots=True)
class Sum:
    value: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


@dataclass(frozen=True, slots=True)
class Max:
    value: float

    def merge(self, other: Max) -> Max:
        return Max(max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Min:
    value: float

    def merge(self, other: Min) -> Min:
        return Min(min(self.value, other.value))


Reduction = Mean | Sum | Max | Min
_KINDS: Mapping[str, type[Mean] | type[Sum] | type[Max] | type[Min]] = {
    kind.__name__: kind for kind in (Mean, Sum, Max, Min)
}


def reduction_to_json(metric: Reduction) -> list[str | float]:
    """Return a metric as a plain list: the name of its reduction, then its numbers."""
    numbers = [metric.total, metric.weight] if isinstance(metric, Mean) else [metric.value]
    return [type(metric).__name__, *numbers]


def reduction_of_json(record: Sequence[Any]) -> Reduction:
    """Return the metric of `reduction_to_json`.

    Raises:
        KeyError: an unknown reduction.
    """
    kind, *numbers = record
    return _KINDS[kind](*numbers)


def merge_metrics(parts: Iterable[Mapping[str, Reduction]]) -> dict[str, Reduction]:
    """Merge the same names over microbatches, ranks or replicas, in the order given.

    Raises:
        TypeError: one name with two kinds of reduction.
    """
    merged: dict[str, Reduction] = {}
    for part in parts:
        for name, metric in part.items():
            present = merged.get(name)
            if present is None:
                merged[name] = metric
            elif type(present) is not type(metric):
                raise TypeError(f"metric {name!r}: {type(present).__name__} and {type(metric).__name__} do not merge")
            else:
                merged[name] = present.merge(metric)  # type: ignore[arg-type]
    return merged


def values(metrics: Mapping[str, Reduction]) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}


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
        """Add the time spent inside to `name`, also when the block raises."""
        self._seconds.setdefault(name, 0.0)
        if self._on_enter is not None:
            self._on_enter(name)
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[name] += self._clock() - start

    def add(self, name: str, seconds: float) -> None:
        """Add time that was measured elsewhere, for example inside a worker."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def seconds(self) -> dict[str, float]:
        """Return a copy of the sums since the last `reset`."""
        return dict(self._seconds)

    def reset(self) -> None:
        self._seconds.clear()
