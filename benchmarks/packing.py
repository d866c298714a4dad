"""How well rows are packed and shared among data-parallel ranks, all algorithms side by side.

    python benchmarks/packing.py --seed N --json FILE [--draws N] [--quick] [--algorithm NAME]

Lengths of three shapes (`packing_lengths.py`), 128 to 4096 rows, 8 to 64 ranks, several seeds each. Exit code 1 when a
plan breaks an invariant, or the algorithm in question (`balanced`) misses a bound of `packing_report.py`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

# A script's own folder is on the path, its package is not.
sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console

from benchmarks.common import environment, load_average, write_json
from benchmarks.packing_lengths import MAX_LENGTH, SHAPES, draw_lengths
from benchmarks.packing_report import Case, Samples, algorithms_table, cases_table, missed_bounds, plan_problems
from nemo_rl.config.policy import PackingAlgorithm
from nemo_rl.distributed.packing import plan_packs

__all__ = ["Options", "main", "measure"]

CAPACITY = 2 * MAX_LENGTH
"""Tokens per microbatch."""
ROWS, RANKS, DRAWS = (128, 512, 1024, 4096), (8, 32, 64), 20
QUICK_ROWS, QUICK_RANKS, QUICK_DRAWS = (128, 1024), (8, 64), 3
TABLE_WIDTH = 170


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What is measured."""

    seed: int
    draws: int = DRAWS
    num_rows: Sequence[int] = ROWS
    num_ranks: Sequence[int] = RANKS


def measure(options: Options) -> list[Samples]:
    """Every algorithm on every case; the algorithms take turns on the same lengths, so that noise meets all alike."""
    algorithms: tuple[PackingAlgorithm, ...] = get_args(PackingAlgorithm)
    results: list[Samples] = []
    for shape, num_rows, num_ranks in itertools.product(SHAPES, options.num_rows, options.num_ranks):
        case = Case(shape=shape, num_rows=num_rows, num_ranks=num_ranks)
        samples = {algorithm: Samples(case=case, algorithm=algorithm) for algorithm in algorithms}
        for draw in range(options.draws):
            lengths = draw_lengths(shape, num_rows, seed=options.seed + draw)
            for algorithm in algorithms:
                # Planning is one thread's work: its CPU time does not depend on who else uses the machine.
                started = time.process_time()
                plan = plan_packs(lengths, capacity=CAPACITY, dp_world=num_ranks, algorithm=algorithm)
                seconds = time.process_time() - started
                problems = plan_problems(plan, lengths, capacity=CAPACITY)
                samples[algorithm].add(plan, seconds=seconds, problems=problems)
        results += samples.values()
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first draw; later draws count on from it")
    parser.add_argument("--json", type=Path, required=True, help="file for raw samples and figures")
    parser.add_argument("--draws", type=int, help="seeds per case")
    parser.add_argument("--quick", action="store_true", help="few cases and draws; time is not held")
    parser.add_argument(
        "--algorithm", choices=get_args(PackingAlgorithm), default="balanced", help="the one whose bounds are held"
    )
    given = parser.parse_args(arguments)
    options = (
        Options(seed=given.seed, draws=given.draws or QUICK_DRAWS, num_rows=QUICK_ROWS, num_ranks=QUICK_RANKS)
        if given.quick
        else Options(seed=given.seed, draws=given.draws or DRAWS)
    )
    load_before = load_average()
    samples = measure(options)
    missed = missed_bounds(samples, algorithm=given.algorithm)
    console = Console(width=TABLE_WIDTH)
    console.print(cases_table(samples, algorithm=given.algorithm), algorithms_table(samples))
    report = {
        **environment(),
        "load_average": {"before": load_before, "after": load_average()},
        "seed": options.seed,
        "draws": options.draws,
        "capacity": CAPACITY,
        "algorithm": given.algorithm,
        "samples": [one.as_json() for one in samples],
        "missed": missed,
    }
    write_json(given.json, report)
    for line in missed:
        console.print(line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
