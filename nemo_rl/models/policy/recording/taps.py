"""`Tap`: how one site of a model is reached on one rank, and how its tensor lies there.

Made by the engines (`nemo_rl.models.dtensor.sites`, `nemo_rl.models.megatron.sites`), used by `SiteRecorder`.
Invariant: a tap delivers the tensor of one pass of this rank, and says how rows and positions lie in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from nemo_rl.records.record import Split
from nemo_rl.records.sites import SiteKind

__all__ = ["Deliver", "Detach", "Order", "Tap", "TapList", "Taps", "Tokens"]

Deliver = Callable[[torch.Tensor], None]
Detach = Callable[[], None]


class Tokens(Enum):
    """Which of this rank's positions a tensor has."""

    ALL = auto()
    """All that this context rank holds."""
    CHUNK = auto()
    """This tensor rank's part of them (sequence parallel)."""
    KEPT = auto()
    """Those whose logits are computed (`ForwardInputs.keep_K`)."""


class Order(Enum):
    """How rows n and positions s of a pass lie in a tensor."""

    ROWS = auto()
    """`[n, s, ...]`"""
    POSITIONS = auto()
    """`[s, n, ...]`"""
    ROWS_FLAT = auto()
    """`[n * s, ...]`"""
    POSITIONS_FLAT = auto()
    """`[s * n, ...]`"""

    def by_rows(self, value: torch.Tensor, num_rows: int) -> torch.Tensor:
        """`[n, s, ...]`, a view."""
        match self:
            case Order.ROWS:
                return value
            case Order.POSITIONS:
                return value.transpose(0, 1)
            case Order.ROWS_FLAT:
                return value.unflatten(0, (num_rows, -1))
        return value.unflatten(0, (-1, num_rows)).transpose(0, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tap:
    """One site on this rank."""

    kind: SiteKind
    layer: int | None = None
    attach: Callable[[Deliver], Detach]
    """Lets a function see the tensor in every pass from here on; returns what ends that."""
    order: Order = Order.ROWS
    tokens: Tokens = Tokens.ALL
    split: Split | None = None
    """This rank's part of the last dimension."""


class TapList:
    """Collects the taps of a model, and what cannot be one.

    Args:
        order: of tensors that do not say another.
    """

    def __init__(self, *, order: Order) -> None:
        self.taps: list[Tap] = []
        self.unobserved: dict[SiteKind, str] = {}
        self._order = order

    def add(
        self,
        kind: SiteKind,
        layer: int | None,
        attach: Callable[[Deliver], Detach],
        *,
        tokens: Tokens = Tokens.ALL,
        split: Split | None = None,
        order: Order | None = None,
    ) -> None:
        """As the fields of `Tap`."""
        chosen = self._order if order is None else order
        self.taps.append(Tap(kind=kind, layer=layer, attach=attach, tokens=tokens, split=split, order=chosen))

    def cannot(self, why: str, *kinds: SiteKind) -> None:
        """The model does not give these."""
        self.unobserved.update(dict.fromkeys(kinds, why))


@dataclass(frozen=True, kw_only=True, slots=True)
class Taps:
    """All sites of a model on this rank."""

    taps: tuple[Tap, ...]
    unobserved: Mapping[SiteKind, str]
    """Sites that this model does not give -> why."""
    chunk: tuple[int, int] = (0, 1)
    """Index and number of the equal parts of the positions, for `Tokens.CHUNK`."""
    loss_factor: Callable[[], float] = field(default=lambda: 1.0)
    """What the loss is multiplied by before its backward pass: gradients are divided by it."""
    gradients: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    """(collective) Whole gradients of the loss by Hugging Face names, on every rank."""
