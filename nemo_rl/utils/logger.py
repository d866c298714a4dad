"""Sends the metrics of a run to its trackers: `Logger`, built by `build_logger`.

Called by the trainer on the driver. A tracker that fails warns once and is switched off; it never stops a run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from nemo_rl.config.parts import TRACKERS
from nemo_rl.config.run import LoggerConfig
from nemo_rl.errors import ConfigError
from nemo_rl.utils.trackers import (
    METRICS_FILE,
    JsonlTracker,
    MlflowTracker,
    TensorboardTracker,
    Tracker,
    WandbTracker,
    has_mlflow,
    has_wandb,
)

__all__ = ["REWARD_METRIC", "VAL_ACCURACY_METRIC", "Logger", "build_logger", "check_trackers"]

logger = logging.getLogger(__name__)

REWARD_METRIC = "train/reward"
"""Mean reward of a step's samples, read by the reward curve."""
VAL_REWARD_METRIC = "val/reward"
VAL_ACCURACY_METRIC = "val/accuracy"
"""Mean reward of a validation, read by the reward curve."""


class Logger:
    """Sends metrics to every tracker."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    @property
    def active(self) -> tuple[str, ...]:
        return tuple(tracker.name for tracker in self._trackers)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record `metrics` of `step`; may be called several times for one step with other names."""
        plain = {name: float(value) for name, value in metrics.items()}
        for tracker in list(self._trackers):
            if not _attempt(f"tracker {tracker.name!r}", partial(tracker.log, plain, step=step)):
                self._trackers.remove(tracker)
                _attempt(f"closing tracker {tracker.name!r}", tracker.close)

    def close(self) -> None:
        """Close every tracker. Idempotent."""
        for tracker in self._trackers:
            _attempt(f"closing tracker {tracker.name!r}", tracker.close)
        self._trackers.clear()


def build_logger(cfg: LoggerConfig, *, run_config: Mapping[str, object], resume_step: int | None = None) -> Logger:
    """Return the trackers that `cfg` names.

    Args:
        run_config: the resolved config as plain values, shown by trackers that can.
        resume_step: last finished step of the run that is continued; None for a new run.

    Raises:
        ConfigError: a tracker's extra is not installed, or a user-defined tracker cannot be imported.
    """
    check_trackers(cfg)
    makers: list[tuple[str, Callable[[], Tracker]]] = [
        ("jsonl", lambda: JsonlTracker(cfg.log_dir / METRICS_FILE, resume_step=resume_step))
    ]
    if cfg.tensorboard_enabled:
        makers.append(("tensorboard", lambda: TensorboardTracker(cfg.log_dir / "tensorboard", resume_step=resume_step)))
    if cfg.wandb_enabled:
        makers.append(("wandb", lambda: WandbTracker(cfg.wandb, log_dir=cfg.log_dir, run_config=run_config)))
    if cfg.mlflow_enabled:
        makers.append(("mlflow", lambda: MlflowTracker(cfg.mlflow, log_dir=cfg.log_dir, run_config=run_config)))
    makers += [(name, partial(_own_tracker, name, cfg, run_config)) for name in cfg.trackers]
    trackers: list[Tracker] = []
    for name, make in makers:
        _attempt(f"tracker {name!r}", partial(_append_made, trackers, make))
    return Logger(trackers)


def check_trackers(cfg: LoggerConfig) -> None:
    """Raise a ConfigError when a tracker that is on cannot be imported."""
    for own in cfg.trackers:
        TRACKERS.load(own, key="logger.trackers")
    for name, is_missing in (
        ("wandb", cfg.wandb_enabled and not has_wandb()),
        ("mlflow", cfg.mlflow_enabled and not has_mlflow()),
    ):
        if is_missing:
            raise ConfigError(
                f"logger.{name}_enabled: {name} is not installed; run `pip install -e '.[{name}]'` in the checkout, or "
                "set it to false"
            )


def _own_tracker(name: str, cfg: LoggerConfig, run_config: Mapping[str, object]) -> Tracker:
    return TRACKERS.load(name, key="logger.trackers")(log_dir=cfg.log_dir, run_config=run_config)


def _append_made(trackers: list[Tracker], make: Callable[[], Tracker]) -> None:
    trackers.append(make())


def _attempt(what: str, action: Callable[[], object]) -> bool:
    try:
        action()
    except Exception as error:  # noqa: BLE001  (third-party services fail in ways of their own; none may stop a run)
        logger.warning("%s failed and is switched off: %s: %s", what, type(error).__name__, error)
        return False
    return True
