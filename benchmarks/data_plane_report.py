"""From raw samples to the figures that `data_plane.py` reports and holds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.table import Table

from benchmarks.common import Hold, Spread

__all__ = ["HOLDS", "Samples", "holds_of", "ways_table"]


@dataclass(kw_only=True, slots=True)
class Samples:
    """Every turn of one way with one batch, in seconds."""

    session: str
    batch: str
    way: str
    put: list[float] = field(default_factory=list)
    get: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)

    @property
    def totals(self) -> list[float]:
        return [put + get for put, get in zip(self.put, self.get, strict=True)]

    @property
    def median(self) -> float:
        return statistics.median(self.totals)


HOLDS: Mapping[str, Hold] = {
    "worker_shm_vs_memcpy": Hold(most=3.0),
    "worker_ray_node_vs_memcpy": Hold(most=3.0),
    "ray_vs_tuned_tq": Hold(least=7.0),
    "ray_vs_tuned_tq_ragged": Hold(least=4.0),
    "tq_vs_tuned_tq_small": Hold(least=4.0),
    "tq_vs_tuned_tq_large": Hold(least=1.3),
    "mooncake_vs_tq_mooncake": Hold(least=3.0),
    "fields_32_vs_1": Hold(most=1.5),
    "ledger_overhead_pct": Hold(most=10.0),
    "over_read_transfer_queue_large": Hold(most=1.5),
    "over_read_transfer_queue_small": Hold(most=2.0),
    "blocks_8_shards_time": Hold(most=1.0),
    "checksums_transfer_queue_large_pct": Hold(most=10.0),
    "checksums_transfer_queue_small_pct": Hold(most=10.0),
    "checksums_mooncake_large_pct": Hold(most=10.0),
    "checksums_mooncake_small_pct": Hold(most=10.0),
    "scalar_tags_16k_ms": Hold(most=20.0),
    "driver_ms_16384": Hold(most=200.0),
    "driver_p95_vs_median_16384": Hold(most=1.3),
}


def holds_of(sessions: Sequence[str]) -> dict[str, Hold]:
    """The bounds on figures of these sessions."""
    return {name: hold for name, hold in HOLDS.items() if _session_of(name) in sessions}


def _session_of(figure: str) -> str:
    return "mooncake" if "mooncake" in figure else "tuned"


def ways_table(samples: Sequence[Samples], num_bytes: Mapping[str, int]) -> Table:
    """Milliseconds per way: put, get, both with their range, and the parts of our own clients."""
    table = Table(title="put + get, ms: median (min..max)")
    for name in ("batch", "session", "way", "put", "get", "put + get", "MB/s", "of which"):
        table.add_column(name, justify="left" if name in ("batch", "session", "way", "of which") else "right")
    for one in samples:
        parts = _median_parts(one.parts)
        table.add_row(
            one.batch,
            one.session,
            one.way,
            _ms(one.put),
            _ms(one.get),
            _ms(one.totals),
            f"{num_bytes[one.batch] / one.median / 1e6:.0f}",
            " ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in parts.items()),
        )
    return table


def _median_parts(turns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for turn in turns for name in turn)
    return {name: statistics.median(turn.get(name, 0.0) for turn in turns) for name in names}


def _ms(seconds: Sequence[float]) -> str:
    spread: Callable[[Sequence[float]], Spread] = Spread.of
    found = spread([value * 1e3 for value in seconds])
    return f"{found.median:.1f} ({found.minimum:.1f}..{found.maximum:.1f})"
