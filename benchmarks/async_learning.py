"""How well the sort demo learns from rows of older weights, with and without a correction.

    python benchmarks/async_learning.py --json FILE [--steps 60] [--bounds 1 2 4] [--picture FILE]

Trains the synchronous demo, then the asynchronous one at each bound with `lookahead` equal to it, so that rows are as
old as they may be: once with the truncated importance weights of its recipe, once without any. The recipe loader
refuses the latter, so that the config is changed after it was loaded. Prints the accuracy of the validations and writes
the curves. Exit code 1 when a corrected run stays below `--least`.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

# A script's own folder is on the path, its package is not.
sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.common import ROOT, environment, load_average, write_json
from nemo_rl.algorithms.run import run
from nemo_rl.config.load import load_config
from nemo_rl.config.schema import MasterConfig
from nemo_rl.utils.trackers import METRICS_FILE, read_metrics

__all__ = ["Curve", "main"]

SYNC, ASYNC = ROOT / "configs/grpo_sort_cpu.yaml", ROOT / "configs/recipes/grpo_sort_async_cpu.yaml"
PERIOD = 10
"""Steps between two validations."""


@dataclass(kw_only=True)
class Curve:
    """One run."""

    name: str
    max_staleness: int
    is_corrected: bool
    steps: list[int] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    """Mean training reward of each step."""
    staleness: float = 0.0
    """Mean staleness of the rows that were trained."""
    seconds: float = 0.0


def curve_of(curve: Curve, *, steps: int, folder: Path) -> Curve:
    """Train, and read what the run has logged."""
    config = _config(curve, steps=steps, log_dir=folder / curve.name.replace(" ", "_"))
    summary = run(config, console=Console(file=io.StringIO()))
    ages = []
    for row in read_metrics(config.logger.log_dir / METRICS_FILE):
        if "val/accuracy" in row:
            curve.steps.append(int(row["step"]))
            curve.accuracy.append(row["val/accuracy"])
        if "train/reward" in row:
            curve.reward.append(row["train/reward"])
            ages.append(row.get("rollout/staleness_mean", 0.0))
    curve.staleness, curve.seconds = sum(ages) / len(ages), summary.seconds
    return curve


def _config(curve: Curve, *, steps: int, log_dir: Path) -> MasterConfig:
    overrides = [
        f"grpo.max_num_steps={steps}",
        f"grpo.val_period={PERIOD}",
        f"logger.log_dir={log_dir}",
        "logger.tensorboard_enabled=false",
        "logger.reward_curve=false",
        "checkpointing.enabled=false",
    ]
    if curve.max_staleness == 0:
        return load_config(SYNC, overrides)
    bound = [f"grpo.async.max_staleness={curve.max_staleness}", f"grpo.async.lookahead={curve.max_staleness}"]
    config = load_config(ASYNC, [*overrides, *bound])
    if curve.is_corrected:
        return config
    off = {
        "use_importance_sampling_correction": False,
        "truncated_importance_sampling_type": None,
        "truncated_importance_sampling_ratio": None,
    }
    return config.model_copy(update={"loss_fn": config.loss_fn.model_copy(update=off)})


def draw(curves: Sequence[Curve], picture: Path) -> None:
    """Draw the accuracy of the validations."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for curve in curves:
        style = "-" if curve.is_corrected or curve.max_staleness == 0 else "--"
        axes.plot(curve.steps, curve.accuracy, style, label=curve.name, marker="o", markersize=3, linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("validation accuracy")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(picture, dpi=110)


def main(arguments: Sequence[str]) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the curves here")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--bounds", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--picture", type=Path, help="draw the curves here")
    parser.add_argument("--least", type=float, default=0.85, help="accuracy that corrected runs must reach")
    given = parser.parse_args(arguments)
    curves = [Curve(name="synchronous", max_staleness=0, is_corrected=True)]
    for bound in given.bounds:
        curves.append(Curve(name=f"max_staleness {bound}", max_staleness=bound, is_corrected=True))
        curves.append(Curve(name=f"max_staleness {bound}, uncorrected", max_staleness=bound, is_corrected=False))
    table = Table("run", "accuracy at the end", "best", "mean staleness", "seconds")
    before = load_average()
    with tempfile.TemporaryDirectory() as folder:
        for curve in curves:
            curve_of(curve, steps=given.steps, folder=Path(folder))
            row = (f"{curve.accuracy[-1]:.3f}", f"{max(curve.accuracy):.3f}", f"{curve.staleness:.2f}")
            table.add_row(curve.name, *row, f"{curve.seconds:.0f}")
    Console().print(table)
    if given.picture is not None:
        draw(curves, given.picture)
    if given.json is not None:
        record = {"curves": [asdict(curve) for curve in curves], "load_before": before, "load_after": load_average()}
        write_json(given.json, {**record, "environment": environment()})
    failed = [curve.name for curve in curves if curve.is_corrected and curve.accuracy[-1] < given.least]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
