"""Rows that are sampled until the hardest kind of chain sum is solved: with the curriculum of its recipe and without.

    python benchmarks/curriculum_learning.py --json FILE [--seeds 1 2 3] [--steps 60] [--reached 0.8]

Trains the recipe once for each seed and each way of drawing prompts. A run ends at the first validation, on prompts of
the hardest kind alone, whose accuracy is `--reached`. Prints the rows that each has sampled, and the ratio of their
medians. Exit code 1 when a run did not get there, or a bound of `--bounds` is missed: of the ratio of medians, and of
the ratio at each seed.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

# A script's own folder is on the path, its package is not.
sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.common import ROOT, environment, load_average, write_json
from nemo_rl.algorithms.run import run
from nemo_rl.config.load import load_config
from nemo_rl.utils.trackers import METRICS_FILE, read_metrics

__all__ = ["Learned", "main"]

RECIPE = ROOT / "configs/recipes/grpo_curriculum_cpu.yaml"
UNIFORM = ("data.curriculum.variance=null",)
MOST_RATIO, MOST_OF_A_SEED = 0.6, 0.8


@dataclass(kw_only=True)
class Learned:
    """One run."""

    seed: int
    has_curriculum: bool
    steps: list[int] = field(default_factory=list)
    """Steps after which the hardest kind was measured."""
    accuracy: list[float] = field(default_factory=list)
    rows: int | None = None
    """Sampled until the accuracy was reached; None: it was not."""
    seconds: float = 0.0


def learn(learned: Learned, *, steps: int, reached: float, folder: Path, more: Sequence[str] = ()) -> Learned:
    """Train until the accuracy is reached, at most so many steps."""
    log_dir = folder / f"{learned.seed}_{'curriculum' if learned.has_curriculum else 'uniform'}"
    overrides = [
        f"grpo.max_num_steps={steps}",
        f"grpo.seed={learned.seed}",
        f"grpo.stop_at_validation_accuracy={reached}",
        f"logger.log_dir={log_dir}",
        "logger.tensorboard_enabled=false",
        "logger.reward_curve=false",
        "checkpointing.enabled=false",
        *(() if learned.has_curriculum else UNIFORM),
        *more,
    ]
    config = load_config(RECIPE, overrides)
    learned.seconds = run(config, console=Console(file=io.StringIO())).seconds
    for row in read_metrics(log_dir / METRICS_FILE):
        if "val/accuracy" in row:
            learned.steps.append(int(row["step"]))
            learned.accuracy.append(row["val/accuracy"])
    if learned.accuracy[-1] >= reached:
        learned.rows = learned.steps[-1] * config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt
    return learned


def missed(runs: Sequence[Learned], bounds: Sequence[float]) -> list[str]:
    """Return a line for each bound that is missed."""
    if lost := [f"seed {each.seed}" for each in runs if each.rows is None]:
        return [f"not solved: {', '.join(lost)}"]
    rows = {way: [each.rows or 0 for each in runs if each.has_curriculum is way] for way in (True, False)}
    lines = []
    ratio = statistics.median(rows[True]) / statistics.median(rows[False])
    if ratio > bounds[0]:
        lines.append(f"ratio of medians {ratio:.2f}, bound {bounds[0]}")
    for with_it, without in zip(rows[True], rows[False], strict=True):
        if with_it / without > bounds[1]:
            lines.append(f"{with_it} rows against {without}: {with_it / without:.2f}, bound {bounds[1]}")
    return lines


def main(arguments: Sequence[str]) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the curves here")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--reached", type=float, default=0.8, help="accuracy at which a run ends")
    parser.add_argument("--bounds", type=float, nargs=2, default=[MOST_RATIO, MOST_OF_A_SEED])
    parser.add_argument("overrides", nargs="*", help="settings of all runs")
    given = parser.parse_intermixed_args(arguments)
    runs = [Learned(seed=seed, has_curriculum=way) for seed in given.seeds for way in (False, True)]
    table = Table("seed", "prompts", "rows until solved", "accuracy of the hardest", "steps", "seconds")
    before = load_average()
    with tempfile.TemporaryDirectory() as folder:
        for each in runs:
            learn(each, steps=given.steps, reached=given.reached, folder=Path(folder), more=given.overrides)
            way = "by curriculum" if each.has_curriculum else "uniform"
            shown = "not solved" if each.rows is None else f"{each.rows:,}"
            numbers = (f"{each.accuracy[-1]:.3f}", str(each.steps[-1]), f"{each.seconds:.0f}")
            table.add_row(str(each.seed), way, shown, *numbers)
    Console().print(table)
    lines = missed(runs, given.bounds)
    if given.json is not None:
        record = {"runs": [asdict(each) for each in runs], "missed": lines, "bounds": given.bounds}
        loads = {"load_before": before, "load_after": load_average()}
        write_json(given.json, {**record, **loads, "environment": environment()})
    for line in lines:
        print(f"missed: {line}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
