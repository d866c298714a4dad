"""What router replay (R3) gives and costs: mismatch of log-probabilities, CPU time of a forward pass, bytes per token.

    python benchmarks/router_replay.py [--quick] --json FILE [--only PART ...] [--without-replay]

Parts: `numerics` (small models with experts, briefly trained with three seeds; rollouts in bfloat16 against a float32
trainer, with the trainer's own routes and with the rollout's), `overhead` (interleaved pairs of one forward pass, both
workers) and `bytes` (routes in the data plane against ceil(log2 E) * L * K bits). Exit code 1 when a bound of
`router_replay_report.HOLDS` is missed or was not measured. `--without-replay` plants the fault that `numerics` must
find: replay is switched off behind its back.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

# A script's own folder is on the path, its package is not.
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from rich.console import Console

from benchmarks.common import check_figures, environment, figures_table, load_average, write_json
from benchmarks.router_replay_bytes import measure_bytes
from benchmarks.router_replay_models import ENGINES, trained_model, write_wide_model
from benchmarks.router_replay_numerics import compare, sample
from benchmarks.router_replay_overhead import OverheadCase, measure_overhead
from benchmarks.router_replay_report import (
    HOLDS,
    Bytes,
    Comparison,
    Overhead,
    bytes_table,
    figures_of,
    numerics_table,
    overhead_table,
)

__all__ = ["PARTS", "Options", "Results", "main", "measure"]

logger = logging.getLogger(__name__)

PARTS = ("numerics", "overhead", "bytes")
SEEDS = (0, 1, 2)
TABLE_WIDTH = 170


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What is measured."""

    parts: Sequence[str] = PARTS
    seeds: Sequence[int] = SEEDS
    num_prompts: int = 512
    """Of each seed; eight responses each."""
    max_steps: int | None = None
    """Ends the warm start early; None trains to the starter's accuracy."""
    overhead: OverheadCase = field(default_factory=OverheadCase)
    is_replay_off: bool = False


QUICK = Options(
    seeds=(0,), num_prompts=4, max_steps=2, overhead=OverheadCase(hidden=64, num_rows=2, row_tokens=32, num_pairs=2)
)
"""A smoke test: figures mean nothing."""


@dataclass(kw_only=True, slots=True)
class Results:
    """Everything that was measured."""

    comparisons: list[Comparison] = field(default_factory=list)
    """Worker by worker for each seed."""
    overheads: list[Overhead] = field(default_factory=list)
    bytes_found: list[Bytes] = field(default_factory=list)

    @property
    def pooled(self) -> list[Comparison]:
        """Each worker over all seeds."""
        workers = dict.fromkeys(one.worker for one in self.comparisons)
        return [Comparison.pooled([one for one in self.comparisons if one.worker == worker]) for worker in workers]

    def figures(self) -> dict[str, float]:
        return figures_of(self.pooled, self.overheads, self.bytes_found)


def measure(options: Options, folder: Path) -> Results:
    """All parts; models go to `folder`."""
    results = Results()
    if "numerics" in options.parts:
        for seed in options.seeds:
            model = trained_model(folder / f"seed_{seed}", seed=seed, max_steps=options.max_steps)
            rollouts = sample(model, seed=seed, num_prompts=options.num_prompts)
            logger.info("seed %d: %d rollouts, %.1f %% right", seed, rollouts.batch.size, 100 * rollouts.right)
            results.comparisons += compare(model, rollouts, seed=seed, is_replay_off=options.is_replay_off)
    if "overhead" in options.parts:
        wide = write_wide_model(folder / "wide", hidden=options.overhead.hidden)
        results.overheads += [measure_overhead(wide, engine, options.overhead) for engine in ENGINES]
    if "bytes" in options.parts:
        results.bytes_found += measure_bytes()
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file for raw samples and figures")
    parser.add_argument("--quick", action="store_true", help="tiny models and few samples; bounds are missed")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    parser.add_argument("--without-replay", action="store_true", help="plant a fault: replay is off, bounds are missed")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("megatron").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    base = QUICK if given.quick else Options()
    options = replace(base, parts=given.only, is_replay_off=given.without_replay)
    load_before = load_average()
    with tempfile.TemporaryDirectory(prefix="router_replay_") as folder:
        results = measure(options, Path(folder))
    figures = results.figures()
    missed = check_figures(figures, HOLDS)
    console = Console(width=TABLE_WIDTH)
    console.print(numerics_table([*results.comparisons, *results.pooled]), overhead_table(results.overheads))
    console.print(bytes_table(results.bytes_found), figures_table(figures, HOLDS))
    report = {
        **environment(),
        "load_average": {"before": load_before, "after": load_average()},
        "is_quick": given.quick,
        "is_replay_off": given.without_replay,
        **figures,
        "numerics": [one.to_json() for one in results.comparisons],
        "pooled": [one.to_json() for one in results.pooled],
        "overhead": [one.to_json() for one in results.overheads],
        "bytes": [one.to_json() for one in results.bytes_found],
        "missed": missed,
    }
    write_json(given.json, report)
    for line in missed:
        console.print(line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
