"""Settings of trackers and files (`logger` section)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from nemo_rl.config.base import FilePath, Section, Text
from nemo_rl.config.parts import TRACKERS

__all__ = ["LoggerConfig", "MlflowConfig", "WandbConfig"]


class WandbConfig(Section):
    """Weights & Biases (extra `wandb`)."""

    project: Text = "nemo_rl"
    """Project that the run appears in."""
    name: str | None = None
    """Name of the run; null lets wandb choose one."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes the run to the log folder; `wandb sync` uploads it later."""


class MlflowConfig(Section):
    """MLflow (extra `mlflow`)."""

    experiment_name: Text = "nemo_rl"
    """Experiment that the run appears in."""
    run_name: str | None = None
    """Name of the run; null lets MLflow choose one."""
    tracking_uri: str | None = None
    """Server, for example `http://host:5000`; null writes files to `mlflow/` in the log folder."""


class LoggerConfig(Section):
    """Trackers and files of a run. `metrics.jsonl` is always written."""

    log_dir: FilePath = Path("results/logs")
    """Folder of everything a run writes. It holds one run: another start in it is refused, or continues that run."""
    overwrite: bool = False
    """Remove what an earlier run wrote to the folders of this one, and nothing else, before starting."""
    tensorboard_enabled: bool = True
    """Write TensorBoard events to `tensorboard/`."""
    wandb_enabled: bool = False
    """Send metrics to Weights & Biases."""
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    mlflow_enabled: bool = False
    """Send metrics to MLflow."""
    mlflow: MlflowConfig = Field(default_factory=MlflowConfig)
    trackers: tuple[Annotated[str, TRACKERS], ...] = ()
    """Trackers of your own, each `module:Class`; see docs/extending.md."""
    num_rollouts_to_log: NonNegativeInt = 16
    """Readable rollouts per step written to `rollouts/step_N.jsonl`, and per validation to `rollouts/val_step_N.jsonl`:
    text, reward and its components, and of training rows advantage, masks, weight version, tokens and the
    log-probabilities of rollout and trainer; `nemo-rl inspect RUN rollouts` reads them."""
    reward_curve: bool = True
    """Write `reward_curve.png` at the end."""
    worker_level: Literal["DEBUG", "INFO", "WARNING"] = "INFO"
    """The level from which workers write to `workers/<kind>_<rank>.log`; warnings also appear with rank and stage on
    the driver. Only under Ray."""
    live_panel: bool = True
    """A panel that redraws itself on a terminal; elsewhere, and when false, one plain line per step."""
    console: Literal["short", "full"] = "short"
    """The content of that line and panel: step, reward, validation, loss, tokens per second, elapsed and remaining
    time; `full` adds KL, mismatch, engines, endings, the seconds and bytes of each stage, and the refit."""
