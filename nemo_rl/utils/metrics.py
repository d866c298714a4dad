"""Metric values that carry their own reduction, so that whoever merges them cannot pick the wrong one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["Max", "Mean", "Min", "Reduction", "Sum", "merge_metrics", "values"]


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


def merge_metrics(parts: Iterable[Mapping[str, Reduction]]) -> dict[str, Reduction]:
    """Merges the same names over microbatches, ranks or replicas, in the order given.

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
    """The reduced numbers."""
    return {name: metric.value for name, metric in metrics.items()}
