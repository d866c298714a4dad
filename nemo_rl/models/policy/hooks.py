"""`HookPoint`: how one site of a model is reached on one rank, and how its tensor lies there.

Made by the engines (`workers.dtensor_engine`, `nemo_rl.models.megatron.sites`), used by `SiteObserver`.
Invariant: a hook_point delivers the tensor of one pass of this rank, and says how rows and positions lie in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch

from nemo_rl.distributed.layout import Coordinates
from nemo_rl.records.record import DimSplit
from nemo_rl.records.sites import SiteKind

__all__ = [
    "Deliver",
    "Detach",
    "HookPoint",
    "HookPoints",
    "Order",
    "TapList",
    "TokenPositions",
    "at_input",
    "at_output",
    "first_tensor",
]

Deliver = Callable[[torch.Tensor], None]
Detach = Callable[[], None]


class TokenPositions(Enum):
    """The positions of this rank that a tensor has."""

    ALL = auto()
    """All that this context rank holds."""
    CHUNK = auto()
    """This tensor rank's part of them (sequence parallel)."""
    KEPT = auto()
    """Positions whose logits are computed (`ForwardInputs.keep_K`)."""


class Order(Enum):
    """The order of rows n and positions s of a pass in a tensor."""

    ROWS = auto()
    """`[n, s, ...]`"""
    POSITIONS = auto()
    """`[s, n, ...]`"""
    ROWS_FLAT = auto()
    """`[n * s, ...]`"""
    POSITIONS_FLAT = auto()
    """`[s * n, ...]`"""

    def by_rows(self, value: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Return `[n, s, ...]`, a view."""
        match self:
            case Order.ROWS:
                return value
            case Order.POSITIONS:
                return value.transpose(0, 1)
            case Order.ROWS_FLAT:
                return value.unflatten(0, (num_rows, -1))
        return value.unflatten(0, (-1, num_rows)).transpose(0, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class HookPoint:
    """One site on this rank."""

    kind: SiteKind
    layer: int | None = None
    attach: Callable[[Deliver], Detach]
    """Lets a function see the tensor in every pass from here on; returns what ends that."""
    order: Order = Order.ROWS
    tokens: TokenPositions = TokenPositions.ALL
    split: DimSplit | None = None
    """This rank's part of the last dimension."""


class TapList:
    """Collects the hook points of a model, and what cannot be one.

    Args:
        order: of tensors that do not say another.
    """

    def __init__(self, *, order: Order) -> None:
        self.hook_points: list[HookPoint] = []
        self.unobserved: dict[SiteKind, str] = {}
        self._order = order

    def add(
        self,
        kind: SiteKind,
        layer: int | None,
        attach: Callable[[Deliver], Detach],
        *,
        tokens: TokenPositions = TokenPositions.ALL,
        split: DimSplit | None = None,
        order: Order | None = None,
    ) -> None:
        chosen = self._order if order is None else order
        self.hook_points.append(
            HookPoint(kind=kind, layer=layer, attach=attach, tokens=tokens, split=split, order=chosen)
        )

    def cannot(self, why: str, *kinds: SiteKind) -> None:
        """Note sites that the model does not give."""
        self.unobserved.update(dict.fromkeys(kinds, why))


@dataclass(frozen=True, kw_only=True, slots=True)
class HookPoints:
    """All sites of a model on this rank."""

    hook_points: tuple[HookPoint, ...]
    unobserved: Mapping[SiteKind, str]
    """Sites that this model does not give -> why."""
    place: Coordinates
    chunk: tuple[int, int] = (0, 1)
    """Index and number of the equal parts of the positions, for `TokenPositions.CHUNK`."""
    loss_factor: Callable[[], float] = field(default=lambda: 1.0)
    """Factor of the loss before its backward pass: gradients are divided by it."""
    gradients: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    """(collective) Whole gradients of the loss by Hugging Face names, on every rank."""
    weights: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    """(collective) Full weights by Hugging Face names, on every rank."""

    # One of the ranks that have the very same tensor shows it.

    def shows(self, hook_point: HookPoint) -> bool:
        """Return a site of the model; all have their own parts where the tensor axis splits features or
        positions."""
        is_split = (hook_point.split is not None and hook_point.split.count > 1) or (
            hook_point.tokens is TokenPositions.CHUNK and self.chunk[1] > 1
        )
        return is_split or self.place.tp == 0

    @property
    def shows_inputs(self) -> bool:
        """Return the tokens of a pass, which all stages and tensor ranks have."""
        return self.place.tp == 0 and self.place.pp == 0

    @property
    def shows_outputs(self) -> bool:
        """Return whether this rank shows what is computed of log-probabilities, which tensor and context ranks have
        alike."""
        return self.place.tp == 0 and self.place.cp == 0

    @property
    def shows_whole(self) -> bool:
        """Return whether this rank shows what every rank has whole."""
        return self.place == Coordinates(dp=0, cp=0, tp=0, pp=0)


Pick = Callable[[Any], torch.Tensor]


def first_tensor(value: Any) -> torch.Tensor:
    """Return the tensor that a module gives, or the first of several."""
    found = value if isinstance(value, torch.Tensor) else value[0]
    assert isinstance(found, torch.Tensor)
    return found


def at_output(module: torch.nn.Module, pick: Pick = first_tensor) -> Callable[[Deliver], Detach]:
    """See what `pick` makes of the module's output."""

    def attach(deliver: Deliver) -> Detach:
        def look(_: torch.nn.Module, __: object, output: Any) -> None:
            deliver(pick(output))

        return module.register_forward_hook(look).remove

    return attach


def at_input(module: torch.nn.Module, pick: Pick = first_tensor) -> Callable[[Deliver], Detach]:
    """See what `pick` makes of the module's first argument, positional or `hidden_states`."""

    def attach(deliver: Deliver) -> Detach:
        def look(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            deliver(pick(args[0] if args else kwargs["hidden_states"]))

        return module.register_forward_pre_hook(look, with_kwargs=True).remove

    return attach
