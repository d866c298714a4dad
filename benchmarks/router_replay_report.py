"""From raw samples to the figures that `router_replay.py` reports and holds.

Pure functions of measured numbers. Symbols: d = log-probability of the trainer - that of the rollout, r = e^d.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch
from rich.table import Table

from benchmarks.common import Hold

__all__ = [
    "HOLDS",
    "Bytes",
    "Comparison",
    "Mismatch",
    "Overhead",
    "bytes_table",
    "figures_of",
    "median_interval",
    "numerics_table",
    "overhead_table",
]

SMALL, MIDDLE, LARGE = 1.1, 1.28, 2.0
"""Ratios beyond which tokens are counted; 1.28 is where the recipes clip, beyond 2 a token dominates its batch."""
CONFIDENCE = 0.95
PERCENT = 100.0
NUM_EXTREMES = 50
"""Largest differences that a report keeps of each seed."""
HELD_EXPERTS = 128

HOLDS: Mapping[str, Hold] = {
    "tokens_free_beyond_1.28": Hold(least=20.0),
    "f2_r3": Hold(most=0.0),
    "f128_reduction": Hold(least=4.0),
    "k3_r3": Hold(most=1e-4),
    "overhead_forward_low_pct": Hold(most=3.0),
    "bytes_per_token_vs_bound": Hold(most=1.15),
    "bytes_per_token_vs_bound_bit_packed": Hold(most=1.02),
}
"""The first one guards the third: a reduction of next to nothing says nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """How far log-probabilities of the sampled tokens are from the rollout's.

    Example:
        >>> one = Mismatch(differences=torch.tensor([0.0, 0.3, -0.8]), loss=0.0)
        >>> one.count_beyond(1.28), one.count_beyond(2.0)
        (2, 1)
    """

    differences: torch.Tensor
    """`[M]` float32: d of every sampled token."""
    loss: float
    """Clipped policy-gradient loss of the batch, with the rollout's log-probabilities as the old ones."""

    @property
    def k3(self) -> float:
        """mean(r - 1 - log r)."""
        d = self.differences.double()
        return float((d.exp() - 1 - d).mean())

    @property
    def largest(self) -> float:
        return float(self.differences.abs().max())

    def count_beyond(self, ratio: float) -> int:
        """Tokens with max(r, 1 / r) > ratio."""
        return int((self.differences.abs() > math.log(ratio)).sum())

    def share_beyond(self, ratio: float) -> float:
        return self.count_beyond(ratio) / len(self.differences)

    def to_json(self) -> dict[str, object]:
        extremes = self.differences.abs().topk(min(NUM_EXTREMES, len(self.differences))).values
        return {
            "tokens": len(self.differences),
            "k3": self.k3,
            "f11": self.share_beyond(SMALL),
            "f128": self.share_beyond(MIDDLE),
            "f2": self.share_beyond(LARGE),
            "max_abs_difference": self.largest,
            "loss": self.loss,
            "extremes": extremes.tolist(),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One seed and worker, with the model's own routes and with the rollout's; or several pooled."""

    worker: str
    seeds: tuple[int, ...]
    free: Mismatch
    replayed: Mismatch
    flips: float
    """Share of pairs of token and layer for which the trainer alone would choose other experts than the rollout."""

    @classmethod
    def pooled(cls, parts: Sequence[Comparison]) -> Comparison:
        """All tokens of some seeds of one worker."""

        def join(found: Sequence[Mismatch]) -> Mismatch:
            return Mismatch(
                differences=torch.cat([one.differences for one in found]),
                loss=statistics.fmean(one.loss for one in found),
            )

        return cls(
            worker=parts[0].worker,
            seeds=tuple(seed for part in parts for seed in part.seeds),
            free=join([part.free for part in parts]),
            replayed=join([part.replayed for part in parts]),
            flips=statistics.fmean(part.flips for part in parts),
        )

    @property
    def reduction(self) -> float:
        """Tokens beyond 1.28 without replay for each one with it."""
        return self.free.count_beyond(MIDDLE) / max(self.replayed.count_beyond(MIDDLE), 1)

    def to_json(self) -> dict[str, object]:
        return {
            "worker": self.worker,
            "seeds": list(self.seeds),
            "flips_per_token_layer": self.flips,
            "free": self.free.to_json(),
            "replayed": self.replayed.to_json(),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """CPU seconds of interleaved pairs of one forward pass."""

    worker: str
    tokens: int
    hidden: int
    free_s: tuple[float, ...]
    replayed_s: tuple[float, ...]

    @property
    def differences_pct(self) -> list[float]:
        """Of each pair, what replay adds to the pass without it."""
        pairs = zip(self.free_s, self.replayed_s, strict=True)
        return [PERCENT * (replayed / free - 1) for free, replayed in pairs]

    @property
    def median_pct(self) -> float:
        return statistics.median(self.differences_pct)

    @property
    def interval_pct(self) -> tuple[float, float]:
        return median_interval(self.differences_pct)

    def to_json(self) -> dict[str, object]:
        low, high = self.interval_pct
        summary = {"median_pct": self.median_pct, "low_pct": low, "high_pct": high, "confidence": CONFIDENCE}
        return {**asdict(self), **summary}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bytes:
    """What routes take in the data plane, chunk headers and row offsets included."""

    num_experts: int
    top_k: int
    num_layers: int
    bound_per_token: float
    """ceil(log2 E) * L * K bits, in bytes."""
    per_token: Mapping[str, float] = field(default_factory=dict)
    """Form on the wire -> bytes."""

    def ratio(self, form: str) -> float:
        return self.per_token[form] / self.bound_per_token

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "vs_bound": {form: self.ratio(form) for form in self.per_token}}


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """Order statistics between which the median lies with at least 95 % confidence; the range where too few are there.

    Of n samples the k-th smallest is above the median with the probability that fewer than k of n fair coins show
    heads.
    """
    ordered, n = sorted(samples), len(samples)
    tail, cut = 0.0, 0
    while True:
        tail += math.comb(n, cut) / 2**n
        if tail > (1 - CONFIDENCE) / 2:
            break
        cut += 1
    cut = max(cut, 1)
    return ordered[cut - 1], ordered[n - cut]


def figures_of(
    comparisons: Sequence[Comparison], overheads: Sequence[Overhead], bytes_found: Sequence[Bytes]
) -> dict[str, float]:
    """What is held and its neighbours; of several workers the less favourable one, figure by figure."""
    figures: dict[str, float] = {}
    if comparisons:
        figures |= {
            "tokens": float(min(len(one.free.differences) for one in comparisons)),
            "flips_per_token_layer": min(one.flips for one in comparisons),
            "tokens_free_beyond_1.28": float(min(one.free.count_beyond(MIDDLE) for one in comparisons)),
            "k3_free": min(one.free.k3 for one in comparisons),
            "k3_r3": max(one.replayed.k3 for one in comparisons),
            "f11_free": min(one.free.share_beyond(SMALL) for one in comparisons),
            "f11_r3": max(one.replayed.share_beyond(SMALL) for one in comparisons),
            "f128_free": min(one.free.share_beyond(MIDDLE) for one in comparisons),
            "f128_r3": max(one.replayed.share_beyond(MIDDLE) for one in comparisons),
            "f128_reduction": min(one.reduction for one in comparisons),
            "f2_free": min(one.free.share_beyond(LARGE) for one in comparisons),
            "f2_r3": max(one.replayed.share_beyond(LARGE) for one in comparisons),
        }
    if overheads:
        figures["overhead_forward_pct"] = max(one.median_pct for one in overheads)
        figures["overhead_forward_low_pct"] = max(one.interval_pct[0] for one in overheads)
    for one in bytes_found:
        if one.num_experts == HELD_EXPERTS:
            figures["bytes_per_token_vs_bound"] = one.ratio("whole")
            figures["bytes_per_token_vs_bound_bit_packed"] = one.ratio("bit_packed")
    return figures


def numerics_table(comparisons: Sequence[Comparison]) -> Table:
    """Two rows per comparison: the model's own routes, and the rollout's."""
    table = Table(title="log-probabilities of the trainer against the rollout's")
    for name in ("worker", "seeds", "routes", "tokens", "flips", "k3", "> 1.1", "> 1.28", "> 2", "max |d|", "loss"):
        table.add_column(name, justify="left" if name in ("worker", "seeds", "routes") else "right")
    for one in comparisons:
        for routes, found in (("own", one.free), ("replayed", one.replayed)):
            table.add_row(
                one.worker,
                ",".join(map(str, one.seeds)),
                routes,
                f"{len(found.differences):,}",
                f"{one.flips:.2%}",
                f"{found.k3:.3g}",
                *(f"{found.share_beyond(at):.2e} ({found.count_beyond(at)})" for at in (SMALL, MIDDLE, LARGE)),
                f"{found.largest:.3f}",
                f"{found.loss:.5f}",
            )
    return table


def overhead_table(overheads: Sequence[Overhead]) -> Table:
    table = Table(title="one forward pass, CPU time: what replay adds")
    for name in ("worker", "tokens", "hidden", "pairs", "without s", "with s", "difference", "95 % interval"):
        table.add_column(name, justify="left" if name == "worker" else "right")
    for one in overheads:
        low, high = one.interval_pct
        table.add_row(
            one.worker,
            f"{one.tokens:,}",
            str(one.hidden),
            str(len(one.free_s)),
            f"{statistics.median(one.free_s):.3f}",
            f"{statistics.median(one.replayed_s):.3f}",
            f"{one.median_pct:+.2f} %",
            f"{low:+.2f} .. {high:+.2f} %",
        )
    return table


def bytes_table(found: Sequence[Bytes]) -> Table:
    table = Table(title="bytes per token in the data plane, against ceil(log2 E) * L * K bits")
    for name in ("experts", "top k", "layers", "bound", "whole ids", "vs bound", "bit-packed", "vs bound"):
        table.add_column(name, justify="right")
    for one in found:
        cells = [
            cell
            for form in ("whole", "bit_packed")
            for cell in (f"{one.per_token[form]:.1f}", f"{one.ratio(form):.3f}")
        ]
        table.add_row(str(one.num_experts), str(one.top_k), str(one.num_layers), f"{one.bound_per_token:.1f}", *cells)
    return table
