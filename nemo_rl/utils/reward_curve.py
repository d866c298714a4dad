"""`reward_curve.png` from `metrics.jsonl`: reward per step with its components, and validations.

Called by the launcher at the end of a run; also usable on the file of an old or a running one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from nemo_rl.utils.files import replace_file
from nemo_rl.utils.logger import REWARD_METRIC, VAL_ACCURACY_METRIC, VAL_REWARD_METRIC
from nemo_rl.utils.trackers import read_metrics

__all__ = ["write_reward_curve"]

TRAINING_LABEL = "training reward"


def write_reward_curve(metrics: Path, picture: Path) -> Path | None:
    """Draw the picture; return None when the file holds no reward yet."""
    series: dict[str, dict[float, float]] = {}
    for row in read_metrics(metrics):
        for name, label in _labels(row).items():
            series.setdefault(label, {})[row["step"]] = row[name]
    if TRAINING_LABEL not in series:
        return None
    figure = Figure(figsize=(7, 4), layout="constrained")
    # A canvas of its own: no global pyplot state, no display.
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for label, points in series.items():
        is_validation = label.startswith("validation")
        axes.plot(list(points), list(points.values()), label=label, linewidth=1, marker="o" if is_validation else None)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.grid(alpha=0.3)
    axes.legend()
    return replace_file(picture, lambda path: figure.savefig(path, dpi=120))


def _labels(row: Mapping[str, float]) -> dict[str, str]:
    """Return the rewards in a line of metrics: name -> label of the curve."""
    measured = VAL_ACCURACY_METRIC if VAL_ACCURACY_METRIC in row else VAL_REWARD_METRIC
    labels = {REWARD_METRIC: TRAINING_LABEL, measured: f"validation {measured.removeprefix('val/')}"}
    components = (name for name in row if name.startswith(f"{REWARD_METRIC}/"))
    labels |= {name: f"training {name.removeprefix(f'{REWARD_METRIC}/')}" for name in components}
    return {name: label for name, label in labels.items() if name in row}
