"""Optimizer, learning rate and loss scale of the DTensor worker."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR

from nemo_rl.config.backends import OptimizerConfig, SchedulerConfig, SchedulerPhase
from nemo_rl.errors import ConfigError

__all__ = ["LearningRate", "LossScaler", "build_optimizer", "learning_rate_factor"]

# Dynamic loss scale of float16: start high, halve on overflow, double after this many clean steps.
INITIAL_SCALE = 2.0**15
GROWTH_INTERVAL = 1000
MIN_SCALE = 1.0
MAX_SCALE = 2.0**24


_T = TypeVar("_T")


def class_at(path: str, base: type[_T], *, key: str, example: str) -> type[_T]:
    """Return the class at an import path.

    Args:
        base: what it must be derived from.
        key: config key for the error.

    Raises:
        ConfigError: no such class, or none of the kind.
    """
    module_name, _, class_name = path.rpartition(".")
    try:
        kind = vars(importlib.import_module(module_name))[class_name] if module_name else None
    except (ImportError, KeyError) as error:
        raise ConfigError(f"{key}: cannot find {path!r}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise ConfigError(f"{key}: expected a torch {base.__name__} such as {example}, got {path!r}")
    return kind


def build_optimizer(config: OptimizerConfig, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of the trained parameters, named by import path, in its fused form where class and device
    have one.

    Raises:
        ConfigError: no such class, or it refuses the arguments.
    """
    weights = [parameter for parameter in parameters if parameter.requires_grad]
    kind = class_at(config.name, torch.optim.Optimizer, key="policy.optimizer.name", example="torch.optim.AdamW")
    kwargs: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in config.kwargs.items()
    }
    kwargs = {**_implementation(kind, weights, kwargs), **kwargs}
    try:
        return kind(weights, **kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"policy.optimizer.kwargs: {config.name} refuses {config.kwargs}: {error}") from error


def _implementation(
    kind: type[torch.optim.Optimizer], weights: list[torch.nn.Parameter], kwargs: dict[str, Any]
) -> dict[str, bool]:
    """Return the keyword of a fused step: one kernel over all weights on CUDA; weight by weight where sharded and
    plain ones are mixed, which no kernel over lists takes. The user's own choice is left alone."""
    known = inspect.signature(kind).parameters
    if {"fused", "foreach"} & kwargs.keys() or "foreach" not in known:
        return {}
    if len({isinstance(weight, DTensor) for weight in weights}) > 1:
        return {"foreach": False}
    is_cuda = all(weight.device.type == "cuda" for weight in weights)
    return {"fused": True} if is_cuda and "fused" in known else {}


class LossScaler:
    """Loss scale: 1 unless the precision is float16, whose small gradients would vanish."""

    def __init__(self, *, precision: str) -> None:
        self.is_dynamic = precision == "float16"
        self.scale = INITIAL_SCALE if self.is_dynamic else 1.0
        self.clean_steps = 0

    def can_retry(self) -> bool:
        """Return whether an overflow may be the scale's fault."""
        return self.is_dynamic and self.scale > MIN_SCALE

    def on_overflow(self) -> None:
        self.scale, self.clean_steps = max(MIN_SCALE, self.scale / 2), 0

    def on_clean_step(self) -> None:
        self.clean_steps += 1
        if self.is_dynamic and self.clean_steps >= GROWTH_INTERVAL:
            self.scale, self.clean_steps = min(MAX_SCALE, self.scale * 2), 0


class LearningRate:
    """Sets the groups of an optimizer before each training call.

    Torch schedulers run on a shadow of the optimizer's settings, without weights: a load of the optimizer cannot
    disturb them, and a resume replays them.

    Example:
        >>> rate = LearningRate(config.scheduler, optimizer, num_steps=100)    # doctest: +SKIP
        >>> rate.apply(); optimizer.step(); rate.advance()                     # doctest: +SKIP
    """

    def __init__(self, config: SchedulerConfig, optimizer: torch.optim.Optimizer, *, num_steps: int) -> None:
        """Args:
        num_steps: training calls of the whole run, where a decay ends unless the config says so.

        Raises:
            ConfigError: no such scheduler, or it refuses the arguments.
        """
        self._config, self._optimizer, self._num_steps = config, optimizer, num_steps
        self._settings = [_settings(group) for group in optimizer.param_groups]
        self._calls_done = 0
        self._chain = _PhaseChain(config, self._settings) if config.phases else None

    @property
    def calls_done(self) -> int:
        return self._calls_done

    def apply(self) -> float:
        """Write the settings of the next call into the optimizer; return the first group's learning rate."""
        for group, values in zip(self._optimizer.param_groups, self._next(), strict=True):
            group.update(values)
        return float(self._optimizer.param_groups[0]["lr"])

    def advance(self) -> None:
        self._calls_done += 1
        if self._chain is not None:
            self._chain.advance()

    def state_dict(self) -> dict[str, float]:
        return {"calls_done": float(self._calls_done)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue the curve after as many calls; replay torch schedulers from the start."""
        self._calls_done = int(state["calls_done"])
        if self._chain is not None:
            self._chain = _PhaseChain(self._config, self._settings)
            for _ in range(self._calls_done):
                self._chain.advance()

    def _next(self) -> list[dict[str, Any]]:
        if self._chain is not None:
            return self._chain.settings()
        factor = learning_rate_factor(self._config, calls_done=self._calls_done, num_steps=self._num_steps)
        return [{"lr": settings["lr"] * factor} for settings in self._settings]


def learning_rate_factor(config: SchedulerConfig, *, calls_done: int, num_steps: int) -> float:
    """Return factor of the optimizer's learning rate in the next training call.

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


class _PhaseChain:
    """`SequentialLR` over the phases, on its own optimizer that has the same settings and no weights."""

    def __init__(self, config: SchedulerConfig, settings: list[dict[str, Any]]) -> None:
        self._names = [set(values) for values in settings]
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], **values} for values in settings]
        self._shadow = _Shadow(groups, dict(settings[0]))
        # Before the schedulers exist, since torch wants this order; a shadow's step does nothing.
        self._shadow.step()
        made = [_build_phase(phase, self._shadow) for phase in config.phases]
        self._schedule = made[0] if len(made) == 1 else SequentialLR(self._shadow, made, list(config.milestones))

    def advance(self) -> None:
        self._shadow.step()
        self._schedule.step()

    def settings(self) -> list[dict[str, Any]]:
        """Return what the schedulers have set, for each group: learning rate, and momentum where a scheduler moves
        it."""
        return [
            {name: group[name] for name in names}
            for names, group in zip(self._names, self._shadow.param_groups, strict=True)
        ]


class _Shadow(torch.optim.Optimizer):
    """Settings without weights."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Do nothing: the shadow has no weights."""


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a torch scheduler may move, read from a new optimizer: its learning rate is the
    configured one."""
    return {name: group[name] for name in ("lr", "betas", "momentum") if name in group}


def _build_phase(phase: SchedulerPhase, optimizer: torch.optim.Optimizer) -> LRScheduler:
    kind = class_at(phase.name, LRScheduler, key="policy.scheduler.phases", example="torch.optim.lr_scheduler.LinearLR")
    if issubclass(kind, ReduceLROnPlateau):
        raise ConfigError(f"policy.scheduler.phases: {phase.name} follows a metric, not the steps; choose another")
    kwargs: dict[str, Any] = phase.kwargs
    try:
        return kind(optimizer, **kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"policy.scheduler.phases: {phase.name} refuses {phase.kwargs}: {error}") from error
