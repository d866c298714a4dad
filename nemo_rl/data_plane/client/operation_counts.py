"""Totals of data plane calls: per operation, stage and field; they add up over processes.

Made by `meter.Meter`, read by the step's metrics. Durations go into fixed log-spaced buckets,
so the percentiles of several processes are those of all their calls, to within half a bucket (4.5 %).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

__all__ = ["OperationCount", "Totals", "sum_totals"]

Plain: TypeAlias = dict[str, Any]
"""Totals as msgpack carries them."""

BUCKETS_PER_DOUBLING = 8
FASTEST_MS = 1e-3
"""Shorter calls share the first bucket."""


@dataclass(slots=True)
class OperationCount:
    """Totals of one operation."""

    count: int = 0
    errors: int = 0
    ms: float = 0.0
    payload_bytes: int = 0
    """Columns put or fetched, padding excluded."""
    meta_bytes: int = 0
    """Keys, lengths and tags, as plain values."""
    buckets: dict[int, int] = field(default_factory=dict)
    """Bucket of the duration -> calls."""
    error_kinds: dict[str, int] = field(default_factory=dict)
    """Class name of the error -> calls that it ended."""

    @classmethod
    def of_call(cls, ms: float, *, error: BaseException | None, payload_bytes: int, meta_bytes: int) -> OperationCount:
        bucket = math.floor(math.log2(max(ms, FASTEST_MS)) * BUCKETS_PER_DOUBLING)
        kinds = {} if error is None else {type(error).__name__: 1}
        return cls(1, len(kinds), ms, payload_bytes, meta_bytes, {bucket: 1}, kinds)

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> OperationCount:
        """Return what `to_plain` gave."""
        count, errors, ms, payload_bytes, meta_bytes, buckets, kinds = plain
        return cls(count, errors, ms, payload_bytes, meta_bytes, dict(buckets), dict(kinds))

    def to_plain(self) -> list[object]:
        """Return the counts as msgpack carries them: its maps have no numbers as keys."""
        buckets = [list(pair) for pair in self.buckets.items()]
        return [self.count, self.errors, self.ms, self.payload_bytes, self.meta_bytes, buckets, self.error_kinds]

    def add(self, other: OperationCount) -> None:
        self.count += other.count
        self.errors += other.errors
        self.ms += other.ms
        self.payload_bytes += other.payload_bytes
        self.meta_bytes += other.meta_bytes
        for bucket, calls in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + calls
        for kind, calls in other.error_kinds.items():
            self.error_kinds[kind] = self.error_kinds.get(kind, 0) + calls

    def within_ms(self, limit_ms: float) -> int:
        """Return the number of calls that took at most `limit_ms`, exactly where it is a power of two."""
        end = math.floor(math.log2(limit_ms) * BUCKETS_PER_DOUBLING)
        return sum(calls for bucket, calls in self.buckets.items() if bucket < end)

    def percentile_ms(self, share: float) -> float:
        """Return milliseconds within which `share` of the calls ended: the middle of their bucket; 0 without calls."""
        rank, seen = share * sum(self.buckets.values()), 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= rank:
                return float(2 ** ((bucket + 0.5) / BUCKETS_PER_DOUBLING))
        return 0.0


@dataclass(slots=True)
class Totals:
    """Everything one process counts."""

    stages: dict[str, dict[str, OperationCount]] = field(default_factory=dict)
    """Stage ("" for calls outside of every stage) -> operation -> its calls."""
    field_bytes: dict[str, int] = field(default_factory=dict)
    """Field -> payload bytes put and fetched."""
    over_read_bytes: int = 0
    """Bytes that stores moved and nobody asked for."""

    def add(self, stage: str, operation: str, cost: OperationCount) -> None:
        self.stages.setdefault(stage, {}).setdefault(operation, OperationCount()).add(cost)

    def add_fields(self, sizes: Mapping[str, int]) -> None:
        for name, size in sizes.items():
            self.field_bytes[name] = self.field_bytes.get(name, 0) + size

    def merge(self, other: Totals) -> None:
        for stage, counts in other.stages.items():
            for operation, count in counts.items():
                self.add(stage, operation, count)
        self.add_fields(other.field_bytes)
        self.over_read_bytes += other.over_read_bytes

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Totals:
        """Return what `to_plain` gave."""
        stages = {
            stage: {operation: OperationCount.from_plain(count) for operation, count in counts.items()}
            for stage, counts in plain["stages"].items()
        }
        return cls(stages, dict(plain["field_bytes"]), plain["over_read_bytes"])

    def to_plain(self) -> Plain:
        stages = {
            stage: {operation: count.to_plain() for operation, count in counts.items()}
            for stage, counts in self.stages.items()
        }
        return {"stages": stages, "field_bytes": self.field_bytes, "over_read_bytes": self.over_read_bytes}

    def copy(self) -> Totals:
        """Return the same counts, which later calls leave as they are."""
        return sum_totals([self])

    @property
    def operations(self) -> dict[str, OperationCount]:
        operations: dict[str, OperationCount] = {}
        for counts in self.stages.values():
            for operation, count in counts.items():
                operations.setdefault(operation, OperationCount()).add(count)
        return operations

    @property
    def payload_bytes(self) -> int:
        return sum(self._each("payload_bytes"))

    @property
    def meta_bytes(self) -> int:
        return sum(self._each("meta_bytes"))

    def _each(self, what: Literal["payload_bytes", "meta_bytes"]) -> Iterator[int]:
        return (getattr(count, what) for counts in self.stages.values() for count in counts.values())


def sum_totals(parts: Iterable[Totals]) -> Totals:
    """Return the totals of several processes, added up."""
    total = Totals()
    for part in parts:
        total.merge(part)
    return total
