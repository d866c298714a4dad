"""One run from config to closing lines; called by the command line."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from nemo_rl.algorithms.grpo_sync import RunSummary
from nemo_rl.algorithms.setup import open_trainer
from nemo_rl.config.schema import LoggerConfig, MasterConfig
from nemo_rl.utils.panel import final_lines
from nemo_rl.utils.reward_curve import write_reward_curve

__all__ = ["run"]


def run(config: MasterConfig, *, console: Console) -> RunSummary:
    """Trains, writes the reward curve, and prints what was reached, how long it all took, and where it lies."""
    started = time.monotonic()
    with open_trainer(config, console=console) as trainer:
        summary = trainer.fit()
    lines = final_lines(
        first_reward=summary.first_reward,
        last_reward=summary.last_reward,
        measure=config.env.measure,
        num_steps=summary.num_steps,
        seconds=time.monotonic() - started,
        paths=_outputs(config.logger, summary),
    )
    for line in lines:
        console.print(line)
    return summary


def _outputs(config: LoggerConfig, summary: RunSummary) -> dict[str, Path]:
    """What the run wrote, by name; a name whose file is not there is left out."""
    log_dir = config.log_dir
    if config.reward_curve:
        write_reward_curve(log_dir / "metrics.jsonl", log_dir / "reward_curve.png")
    found = {
        "metrics": log_dir / "metrics.jsonl",
        "TensorBoard events": log_dir / "tensorboard",
        "resolved config": log_dir / "config.yaml",
        "rollouts": log_dir / "rollouts",
        "reward curve": log_dir / "reward_curve.png",
    }
    if summary.last_checkpoint is not None:
        found["last checkpoint"] = summary.last_checkpoint
    return {name: path for name, path in found.items() if path.exists()}
