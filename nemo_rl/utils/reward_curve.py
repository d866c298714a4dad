"""`reward_curve.png` from `metrics.jsonl`: reward per step and validation accuracy.

Called by the launcher at the end of a run; also usable on the file of an old or a running one.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from nemo_rl.utils.files import replace_file
from nemo_rl.utils.logger import REWARD_METRIC, VAL_ACCURACY_METRIC
from nemo_rl.utils.trackers.jsonl import read_metrics

__all__ = ["write_reward_curve"]


def write_reward_curve(metrics: Path, picture: Path) -> Path | None:
    """Draws the picture; returns None when the file holds no reward yet."""
    rewards: dict[float, float] = {}
    accuracies: dict[float, float] = {}
    for row in read_metrics(metrics):
        for name, series in ((REWARD_METRIC, rewards), (VAL_ACCURACY_METRIC, accuracies)):
            if name in row:
                series[row["step"]] = row[name]
    if not rewards:
        return None
    figure = Figure(figsize=(7, 4), layout="constrained")
    # A canvas of its own: no global pyplot state, no display.
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(list(rewards), list(rewards.values()), label="training reward", linewidth=1)
    if accuracies:
        axes.plot(list(accuracies), list(accuracies.values()), label="validation accuracy", marker="o")
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.grid(alpha=0.3)
    axes.legend()
    return replace_file(picture, lambda path: figure.savefig(path, dpi=120))
