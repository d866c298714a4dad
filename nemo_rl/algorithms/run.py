"""One run from config to closing line; called by the command line."""

from __future__ import annotations

from rich.console import Console

from nemo_rl.algorithms.grpo_sync import RunSummary
from nemo_rl.algorithms.setup import open_trainer
from nemo_rl.config.schema import MasterConfig
from nemo_rl.utils.panel import closing_line
from nemo_rl.utils.reward_curve import write_reward_curve

__all__ = ["run"]


def run(config: MasterConfig, *, console: Console) -> RunSummary:
    """Trains, writes the reward curve, and prints what was reached and where it lies."""
    with open_trainer(config, console=console) as trainer:
        summary = trainer.fit()
    log_dir = config.logger.log_dir
    if config.logger.reward_curve:
        write_reward_curve(log_dir / "metrics.jsonl", log_dir / "reward_curve.png")
    console.print(
        closing_line(summary.first_accuracy, summary.last_accuracy, summary.num_steps, summary.seconds),
        style="bold",
        markup=False,
        highlight=False,
    )
    for what, path in (
        ("metrics", log_dir / "metrics.jsonl"),
        ("TensorBoard events", log_dir / "tensorboard" if config.logger.tensorboard_enabled else None),
        ("resolved config", log_dir / "config.yaml"),
        ("rollouts", log_dir / "rollouts" if config.logger.num_rollouts_to_log else None),
        ("reward curve", log_dir / "reward_curve.png" if config.logger.reward_curve else None),
        ("last checkpoint", summary.last_checkpoint),
    ):
        if path is not None:
            console.print(f"  {what:<20}{path}", markup=False, highlight=False)
    return summary
