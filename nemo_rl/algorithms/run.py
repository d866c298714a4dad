"""One run, from the config to the summary at its end; called by the command line."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from nemo_rl.algorithms.grpo_sync import RunSummary
from nemo_rl.algorithms.run_folder import CONFIG_FILE, CURVE_FILE
from nemo_rl.algorithms.setup import open_trainer
from nemo_rl.algorithms.worker_forks import worker_forks
from nemo_rl.config.r3_trace_env import r3_trace_enabled, trace_folder
from nemo_rl.config.schema import LoggerConfig, MasterConfig
from nemo_rl.distributed.fork_server import ForkServer
from nemo_rl.utils.deadlines import SaveDeadline
from nemo_rl.utils.memory import PeakMemory
from nemo_rl.utils.panel import RunReport, final_lines
from nemo_rl.utils.reward_curve import write_reward_curve
from nemo_rl.utils.rollout_file import ROLLOUTS
from nemo_rl.utils.trackers import METRICS_FILE

__all__ = ["run"]


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
    report = RunReport(
        first_reward=summary.first_reward,
        last_reward=summary.last_reward,
        measure=config.env.measure,
        num_steps=summary.num_steps,
        seconds=time.monotonic() - started,
        peak_bytes=memory.num_bytes,
        paths=_outputs(config.logger, summary),
    )
    for line in final_lines(report):
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
