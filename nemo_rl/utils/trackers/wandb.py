"""The Weights & Biases tracker. The only file that names wandb (extra `wandb`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl.config.schema import WandbConfig
from nemo_rl.utils.trackers.base import Tracker

__all__ = ["WandbTracker", "has_wandb"]

# Longest wait for the service at the start of a run; a machine without network must not hold the run up for long.
INIT_TIMEOUT_S = 30.0


def has_wandb() -> bool:
    """Whether the extra is installed."""
    return importlib.util.find_spec("wandb") is not None


class WandbTracker(Tracker):
    """One wandb run; in `offline` mode everything stays under `log_dir/wandb`."""

    name = "wandb"

    def __init__(self, cfg: WandbConfig, *, log_dir: Path, run_config: Mapping[str, object]) -> None:
        import wandb  # noqa: PLC0415  (optional extra)

        log_dir.mkdir(parents=True, exist_ok=True)
        self._wandb: Any = wandb
        self._run: Any = wandb.init(
            project=cfg.project,
            name=cfg.name,
            mode=cfg.mode,
            dir=str(log_dir),
            config=dict(run_config),
            settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S, silent=True, console="off"),
        )

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
            # Ends the service process that `init` started.
            self._wandb.teardown()
