"""Reaching a tensor inside a model: at the input or the output of a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nemo_rl.models.policy.recording.taps import Deliver, Detach

__all__ = ["at_input", "at_output", "first_tensor"]

Pick = Callable[[Any], torch.Tensor]


def first_tensor(value: Any) -> torch.Tensor:
    """Of a module that gives a tensor, or several of which the first is meant."""
    found = value if isinstance(value, torch.Tensor) else value[0]
    assert isinstance(found, torch.Tensor)
    return found


def at_output(module: torch.nn.Module, pick: Pick = first_tensor) -> Callable[[Deliver], Detach]:
    """Sees what `pick` makes of the module's output."""

    def attach(deliver: Deliver) -> Detach:
        def look(_: torch.nn.Module, __: object, output: Any) -> None:
            deliver(pick(output))

        return module.register_forward_hook(look).remove

    return attach


def at_input(module: torch.nn.Module, pick: Pick = first_tensor) -> Callable[[Deliver], Detach]:
    """Sees what `pick` makes of the module's first argument, positional or `hidden_states`."""

    def attach(deliver: Deliver) -> Detach:
        def look(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            deliver(pick(args[0] if args else kwargs["hidden_states"]))

        return module.register_forward_pre_hook(look, with_kwargs=True).remove

    return attach
