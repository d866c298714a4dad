"""Totals of data plane calls: per operation, stage and field; they add up over processes.

Made by `observability.MetricsDataPlaneClient`, read by the step's metrics. Durations go into fixed log-spaced buckets,
so the percentiles of several processes are those of all their calls, to within half a bucket (4.5 %).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import cast

__all__ = ["OperationCount", "Totals", "merge_snapshots"]

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
    """Keys, lengths and tags, in their compact form."""
    buckets: dict[int, int] = field(default_factory=dict)
    """Bucket of the duration -> calls."""

    @classmethod
    def of_call(cls, ms: float, *, has_failed: bool, payload_bytes: int, meta_bytes: int) -> OperationCount:
        """One call."""
        bucket = math.floor(math.log2(max(ms, FASTEST_MS)) * BUCKETS_PER_DOUBLING)
        return cls(1, int(has_failed), ms, payload_bytes, meta_bytes, {bucket: 1})

    def add(self, other: OperationCount) -> None:
        self.count += other.count
        self.errors += other.errors
        self.ms += other.ms
        self.payload_bytes += other.payload_bytes
        self.meta_bytes += other.meta_bytes
        for bucket, calls in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + calls

    def percentile_ms(self, share: float) -> float:
        """Milliseconds within which `share` of the calls ended: the middle of their bucket; 0 without calls."""
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
    field_bytes: dict[str, int] = field(default_factory=dict)
    """Field -> payload bytes put and fetched."""
    over_read_bytes: int = 0
    """Bytes that stores moved and nobody asked for."""

    def add(self, stage: str, operation: str, cost: OperationCount) -> None:
        self.stages.setdefault(stage, {}).setdefault(operation, OperationCount()).add(cost)

    def add_fields(self, sizes: Mapping[str, int]) -> None:
        for name, size in sizes.items():
            self.field_bytes[name] = self.field_bytes.get(name, 0) + size

    def snapshot(self) -> dict[str, object]:
        """As plain values, for other processes."""
        operations: dict[str, OperationCount] = {}
        total = OperationCount()
        for counts in self.stages.values():
            for operation, count in counts.items():
                operations.setdefault(operation, OperationCount()).add(count)
                total.add(count)
        return {
            "operations": {name: asdict(count) for name, count in operations.items()},
            "stages": {s: {name: asdict(c) for name, c in counts.items()} for s, counts in self.stages.items()},
            "payload_bytes": total.payload_bytes,
            "meta_bytes": total.meta_bytes,
            "field_bytes": dict(self.field_bytes),
            "over_read_bytes": self.over_read_bytes,
        }


def merge_snapshots(snapshots: Iterable[Mapping[str, object]]) -> dict[str, object]:
    """The sum of the snapshots of several processes, in the same form."""
    merged = Totals()
    for snapshot in snapshots:
        stages = cast("Mapping[str, Mapping[str, Mapping[str, float]]]", snapshot["stages"])
        for stage, counts in stages.items():
            for operation, count in counts.items():
                merged.add(stage, operation, OperationCount(**count))  # type: ignore[arg-type]
        merged.add_fields(cast("Mapping[str, int]", snapshot.get("field_bytes", {})))
        merged.over_read_bytes += cast("int", snapshot.get("over_read_bytes", 0))
    return merged.snapshot()
