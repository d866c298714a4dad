"""From the plans of many seeds to the figures that `packing.py` reports and holds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from rich.table import Table

from nemo_rl.distributed.packing import PackPlan

__all__ = ["Case", "Samples", "algorithms_table", "cases_table", "missed_bounds", "plan_problems"]

HELD_RANKS, HELD_ROWS_PER_RANK = 32, 14
"""The balance is held from so many ranks, and rows per rank, on."""
MOST_MEAN, MOST_P95, MOST_BINS = 1.02, 1.05, 1.02
TIMED_ROWS, TIMED_RANKS, MOST_MS = 4096, 64, 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is planned."""

    shape: str
    num_rows: int
    num_ranks: int

    @property
    def is_held(self) -> bool:
        return self.num_ranks >= HELD_RANKS and self.num_rows >= HELD_ROWS_PER_RANK * self.num_ranks

    @property
    def is_timed(self) -> bool:
        return (self.num_rows, self.num_ranks) == (TIMED_ROWS, TIMED_RANKS)

    def __str__(self) -> str:
        return f"{self.shape}, {self.num_rows} rows, DP {self.num_ranks}"


@dataclass(kw_only=True, slots=True)
class Samples:
    """One value per seed of one case and algorithm."""

    case: Case
    algorithm: str
    imbalance: list[float] = field(default_factory=list)
    synchronised: list[float] = field(default_factory=list)
    pad_share: list[float] = field(default_factory=list)
    num_bins: list[int] = field(default_factory=list)
    bins_bound: list[int] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, plan: PackPlan, *, seconds: float, problems: Sequence[str]) -> None:
        """The figures of one plan."""
        load = plan.load
        assert load is not None, "every planner says what its plan costs"
        self.imbalance.append(load.imbalance)
        self.synchronised.append(load.synchronised_ratio)
        self.pad_share.append(load.pad_share)
        self.num_bins.append(load.num_bins)
        self.bins_bound.append(load.bins_bound)
        self.milliseconds.append(1e3 * seconds)
        self.problems += problems

    @property
    def mean(self) -> float:
        return statistics.fmean(self.imbalance)

    @property
    def p95(self) -> float:
        return float(np.quantile(self.imbalance, 0.95))

    @property
    def worst_bins(self) -> float:
        """Microbatches over the minimum, of the worst seed."""
        return max(count / bound for count, bound in zip(self.num_bins, self.bins_bound, strict=True))

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def plan_problems(plan: PackPlan, lengths: Sequence[int], *, capacity: int) -> list[str]:
    """What is wrong with a plan, whoever made it; empty for a right one."""
    rows = sorted(row for rank in range(plan.num_ranks) for row in plan.rows_of_rank(rank))
    problems = [] if rows == list(range(len(lengths))) else ["not every row is planned exactly once"]
    fullest = max(sum(lengths[row] for row in rows) for rank in plan.microbatches for rows in rank)
    if fullest > capacity:
        problems.append(f"a microbatch has {fullest} tokens, the cap is {capacity}")
    if len({len(rank) for rank in plan.microbatches}) > 1:
        problems.append("ranks have different numbers of microbatches")
    return problems


def missed_bounds(all_samples: Sequence[Samples], *, algorithm: str) -> list[str]:
    """One line per bound that does not hold: invariants for everybody, figures for `algorithm`."""
    missed = [f"{one.algorithm}, {one.case}: {problem}" for one in all_samples for problem in one.problems]
    for one in all_samples:
        if one.algorithm != algorithm:
            continue
        bounds: list[tuple[str, float, float]] = []
        if one.case.is_held:
            bounds += [
                ("busiest rank / lower bound, mean", one.mean, MOST_MEAN),
                ("busiest rank / lower bound, p95", one.p95, MOST_P95),
                ("microbatches / minimum, worst", one.worst_bins, MOST_BINS),
            ]
        if one.case.is_timed:
            bounds.append(("CPU milliseconds, median", statistics.median(one.milliseconds), MOST_MS))
        missed += [
            f"{algorithm}, {one.case}: {what}: expected <= {bound:g}, got {value:.4f}"
            for what, value, bound in bounds
            if value > bound
        ]
    return missed


def cases_table(all_samples: Sequence[Samples], *, algorithm: str) -> Table:
    """Every case of one algorithm."""
    table = Table(title=f"{algorithm}: every case (held: from DP {HELD_RANKS} and {HELD_ROWS_PER_RANK} rows per rank)")
    heads = (
        "mean",
        "p95",
        "worst",
        "per-microbatch sync",
        "bins",
        "bins / minimum",
        "padding",
        "CPU ms median",
        "worst ms",
    )
    for head in ("case", "held", *heads):
        table.add_column(head, justify="left" if head == "case" else "right")
    for one in all_samples:
        if one.algorithm == algorithm:
            table.add_row(
                str(one.case),
                "yes" if one.case.is_held else "",
                *(f"{value:.4f}" for value in (one.mean, one.p95, max(one.imbalance))),
                f"{statistics.fmean(one.synchronised):.4f}",
                f"{statistics.fmean(one.num_bins):.0f}",
                f"{one.worst_bins:.4f}",
                f"{100 * statistics.fmean(one.pad_share):.2f} %",
                *(f"{value:.2f}" for value in (statistics.median(one.milliseconds), max(one.milliseconds))),
            )
    return table


def algorithms_table(all_samples: Sequence[Samples]) -> Table:
    """All algorithms side by side, over the held cases of each shape."""
    table = Table(title="all algorithms, held cases: busiest rank / lower bound, then microbatches and time")
    heads = ("mean", "p95", "worst", "per-microbatch sync", "bins / minimum", "CPU ms, worst median")
    for head in ("lengths", "algorithm", *heads):
        table.add_column(head, justify="left" if head in ("lengths", "algorithm") else "right")
    held = [one for one in all_samples if one.case.is_held]
    for shape in dict.fromkeys(one.case.shape for one in held):
        for algorithm in dict.fromkeys(one.algorithm for one in held):
            some = [one for one in held if (one.case.shape, one.algorithm) == (shape, algorithm)]
            imbalance = [value for one in some for value in one.imbalance]
            table.add_row(
                shape,
                algorithm,
                f"{statistics.fmean(imbalance):.4f}",
                f"{float(np.quantile(imbalance, 0.95)):.4f}",
                f"{max(imbalance):.4f}",
                f"{statistics.fmean(value for one in some for value in one.synchronised):.4f}",
                f"{max(one.worst_bins for one in some):.4f}",
                f"{max(statistics.median(one.milliseconds) for one in some):.2f}",
            )
        table.add_section()
    return table
