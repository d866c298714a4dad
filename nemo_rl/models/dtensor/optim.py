"""Optimizer, learning-rate schedule and loss scale of the DTensor worker.

Invariant: the learning rate of a training call is a function of the number of calls before it, so a resumed run
continues the same curve.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable

import torch

from nemo_rl.config.policy import OptimizerConfig, SchedulerConfig
from nemo_rl.errors import ConfigError

__all__ = ["LossScaler", "build_optimizer", "learning_rate_factor"]

# Dynamic loss scale of float16: start high, halve on overflow, double after this many clean steps.
INITIAL_SCALE = 2.0**15
GROWTH_INTERVAL = 1000
MIN_SCALE = 1.0
MAX_SCALE = 2.0**24


def build_optimizer(config: OptimizerConfig, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer named by import path.

    Raises:
        ConfigError: no such class, or it refuses the arguments.
    """
    module_name, _, class_name = config.name.rpartition(".")
    try:
        kind = vars(importlib.import_module(module_name))[class_name] if module_name else None
    except (ImportError, KeyError) as error:
        raise ConfigError(f"policy.optimizer.name: cannot find {config.name!r}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ConfigError(
            f"policy.optimizer.name: expected a torch optimizer such as torch.optim.AdamW, got {config.name!r}"
        )
    kwargs = {name: tuple(value) if isinstance(value, list) else value for name, value in config.kwargs.items()}
    try:
        return kind(parameters, **kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"policy.optimizer.kwargs: {config.name} refuses {config.kwargs}: {error}") from error


def learning_rate_factor(config: SchedulerConfig, *, calls_done: int, num_steps: int) -> float:
    """Factor of the optimizer's learning rate in the next training call.

    Rises over `warmup_steps` to 1, then follows the shape down to `min_factor` at `decay_steps` and stays there.
    """
    if calls_done < config.warmup_steps:
        return (calls_done + 1) / config.warmup_steps
    if config.name == "constant":
        return 1.0
    end = config.decay_steps or num_steps
    progress = min(1.0, (calls_done - config.warmup_steps) / max(1, end - config.warmup_steps))
    shape = 1.0 - progress if config.name == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    return config.min_factor + (1.0 - config.min_factor) * shape


class LossScaler:
    """Loss scale: 1 unless the precision is float16, whose small gradients would vanish."""

    def __init__(self, *, precision: str) -> None:
        self.is_dynamic = precision == "float16"
        self.scale = INITIAL_SCALE if self.is_dynamic else 1.0
        self.clean_steps = 0

    def can_retry(self) -> bool:
        """Whether an overflow may be the scale's fault."""
        return self.is_dynamic and self.scale > MIN_SCALE

    def on_overflow(self) -> None:
        self.scale, self.clean_steps = max(MIN_SCALE, self.scale / 2), 0

    def on_clean_step(self) -> None:
        self.clean_steps += 1
        if self.is_dynamic and self.clean_steps >= GROWTH_INTERVAL:
            self.scale, self.clean_steps = min(MAX_SCALE, self.scale * 2), 0
