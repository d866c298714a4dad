"""One run, from the config to the summary and the curve at its end; called by the command line."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from nemo_rl.algorithms.grpo_sync import RunSummary
from nemo_rl.algorithms.processes import worker_forks
from nemo_rl.algorithms.run_folder import CONFIG_FILE, CURVE_FILE
from nemo_rl.algorithms.setup import open_trainer
from nemo_rl.config.logger import LoggerConfig
from nemo_rl.config.r3_trace_env import r3_trace_enabled, trace_folder
from nemo_rl.config.schema import MasterConfig
from nemo_rl.distributed.fork_server import ForkServer
from nemo_rl.utils.deadlines import SaveDeadline
from nemo_rl.utils.files import replace_file
from nemo_rl.utils.logger import REWARD_METRIC, VAL_ACCURACY_METRIC, VAL_REWARD_METRIC
from nemo_rl.utils.memory import PeakMemory
from nemo_rl.utils.panel import final_lines
from nemo_rl.utils.rollout_file import ROLLOUTS
from nemo_rl.utils.trackers import METRICS_FILE, read_metrics

__all__ = ["run", "write_reward_curve"]


def run(config: MasterConfig, *, console: Console, forks: ForkServer | None = None) -> RunSummary:
    """Trains, writes the reward curve, and prints what was reached, how long it all took, and where it lies.

    Args:
        forks: as `worker_forks` opens it for this config; None: it is opened here.
    """
    started = time.monotonic()
    with (
        worker_forks(config) if forks is None else nullcontext(forks) as workers_from,
        PeakMemory() as memory,
        open_trainer(config, console=console, forks=workers_from) as trainer,
    ):
        summary = trainer.fit(deadline=SaveDeadline.starting_at(started, config.checkpointing.must_save_by))
    lines = final_lines(
        first_reward=summary.first_reward,
        last_reward=summary.last_reward,
        measure=config.env.measure,
        num_steps=summary.num_steps,
        seconds=time.monotonic() - started,
        peak_bytes=memory.num_bytes,
        paths=_outputs(config.logger, summary),
    )
    for line in lines:
        console.print(line)
    return summary


def _outputs(config: LoggerConfig, summary: RunSummary) -> dict[str, Path]:
    """Return the files that the run wrote, by name; a name whose file is not there is left out."""
    log_dir = config.log_dir
    if config.reward_curve:
        write_reward_curve(log_dir / METRICS_FILE, log_dir / CURVE_FILE)
    found = {
        "metrics": log_dir / METRICS_FILE,
        "TensorBoard events": log_dir / "tensorboard",
        "resolved config": log_dir / CONFIG_FILE,
        "rollouts": log_dir / ROLLOUTS,
        "reward curve": log_dir / CURVE_FILE,
    }
    if r3_trace_enabled():
        found["route trace"] = Path(trace_folder())
    if summary.last_checkpoint is not None:
        found["last checkpoint"] = summary.last_checkpoint
    if summary.best_checkpoint is not None:
        found["best checkpoint"] = summary.best_checkpoint
    return {name: path for name, path in found.items() if path.exists()}


TRAINING_LABEL = "training reward"


def write_reward_curve(metrics: Path, picture: Path) -> Path | None:
    """Draw the picture; return None when the file holds no reward yet."""
    series: dict[str, dict[float, float]] = {}
    for row in read_metrics(metrics):
        for name, label in _labels(row).items():
            series.setdefault(label, {})[row["step"]] = row[name]
    if TRAINING_LABEL not in series:
        return None
    # Imported when the workers have ended: 20 MiB that the run does without.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

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
