"""`LearningRate`: the schedule of a run, as a factor of its own or as a chain of torch schedulers.

Called by the DTensor worker once per training call. Invariant: the learning rate of a call is a function of the config
and of the number of calls before it, so a resumed run continues the same curve from that number alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR

from nemo_rl.config.dtensor import SchedulerConfig, SchedulerPhase
from nemo_rl.errors import ConfigError
from nemo_rl.models.dtensor.optim import class_at

__all__ = ["LearningRate", "learning_rate_factor"]


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
        self._chain = _Chain(config, self._settings) if config.phases else None

    @property
    def calls_done(self) -> int:
        """Training calls so far."""
        return self._calls_done

    def apply(self) -> float:
        """Writes the settings of the next call into the optimizer; returns the first group's learning rate."""
        for group, values in zip(self._optimizer.param_groups, self._next(), strict=True):
            group.update(values)
        return float(self._optimizer.param_groups[0]["lr"])

    def advance(self) -> None:
        """One training call is done."""
        self._calls_done += 1
        if self._chain is not None:
            self._chain.advance()

    def state_dict(self) -> dict[str, float]:
        """All that a resume needs."""
        return {"calls_done": float(self._calls_done)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continues the curve after as many calls; replays torch schedulers from the start."""
        self._calls_done = int(state["calls_done"])
        if self._chain is not None:
            self._chain = _Chain(self._config, self._settings)
            for _ in range(self._calls_done):
                self._chain.advance()

    def _next(self) -> list[dict[str, Any]]:
        if self._chain is not None:
            return self._chain.settings()
        factor = learning_rate_factor(self._config, calls_done=self._calls_done, num_steps=self._num_steps)
        return [{"lr": settings["lr"] * factor} for settings in self._settings]


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


class _Chain:
    """`SequentialLR` over the phases, on an optimizer of its own that has the same settings and no weights."""

    def __init__(self, config: SchedulerConfig, settings: list[dict[str, Any]]) -> None:
        self._names = [set(values) for values in settings]
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], **values} for values in settings]
        self._shadow = _Shadow(groups, dict(settings[0]))
        # Before the schedulers exist, which is the order that torch wants; a shadow's step does nothing.
        self._shadow.step()
        made = [_build_phase(phase, self._shadow) for phase in config.phases]
        self._schedule = made[0] if len(made) == 1 else SequentialLR(self._shadow, made, list(config.milestones))

    def advance(self) -> None:
        self._shadow.step()
        self._schedule.step()

    def settings(self) -> list[dict[str, Any]]:
        """What the schedulers have set, for each group: learning rate, and momentum where a scheduler moves it."""
        return [
            {name: group[name] for name in names}
            for names, group in zip(self._names, self._shadow.param_groups, strict=True)
        ]


class _Shadow(torch.optim.Optimizer):
    """Settings without weights."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Nothing to update."""


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """What a torch scheduler may move; read when the optimizer is new, so the learning rate is the configured one."""
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
