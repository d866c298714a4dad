"""Optimizer and loss scale of the DTensor worker."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from nemo_rl.config.dtensor import OptimizerConfig
from nemo_rl.errors import ConfigError

__all__ = ["LossScaler", "build_optimizer", "class_at"]

# Dynamic loss scale of float16: start high, halve on overflow, double after this many clean steps.
INITIAL_SCALE = 2.0**15
GROWTH_INTERVAL = 1000
MIN_SCALE = 1.0
MAX_SCALE = 2.0**24


_T = TypeVar("_T")


def class_at(path: str, base: type[_T], *, key: str, example: str) -> type[_T]:
    """The class at an import path.

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
    """The optimizer named by import path, in its fused form where class and device have one.

    Raises:
        ConfigError: no such class, or it refuses the arguments.
    """
    weights = list(parameters)
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
    """One kernel over all weights on CUDA; weight by weight where sharded and plain ones are mixed, which no kernel
    over lists takes. The user's own choice is left alone."""
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
        """Whether an overflow may be the scale's fault."""
        return self.is_dynamic and self.scale > MIN_SCALE

    def on_overflow(self) -> None:
        self.scale, self.clean_steps = max(MIN_SCALE, self.scale / 2), 0

    def on_clean_step(self) -> None:
        self.clean_steps += 1
        if self.is_dynamic and self.clean_steps >= GROWTH_INTERVAL:
            self.scale, self.clean_steps = min(MAX_SCALE, self.scale * 2), 0
