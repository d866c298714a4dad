"""`Sight`: one tensor that a site has shown, and `SiteSink`: who keeps something of it.

Between `SiteObserver`, which makes them, and what writes or sends them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from nemo_rl.records.record import Place, Split, TokenTable
from nemo_rl.records.sites import Direction, SiteKind

__all__ = ["PassRows", "Sight", "SiteSink"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PassRows:
    """Where the tokens of a pass lie in a tensor `[n, s, ...]`."""

    number: int
    """Unique within the call."""
    at: tuple[torch.Tensor, ...]
    """Index of each of the R tokens in the first two dimensions."""
    table: TokenTable
    """Row, position and id of each."""
    is_whole: bool = False
    """Every place holds a token, and they are listed in the order of the tensor."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sight:
    """What a site shows in one pass of this rank."""

    place: Place
    value: torch.Tensor
    """`[n, s, ...]` where there are rows, a view of the model's own tensor: not to be changed. Else of any shape."""
    rows: PassRows | None = None
    split: Split | None = None
    """This rank's part of the last dimension; None has all of it."""
    is_first: bool
    """Of the ranks that have the very same tensor this is the first."""

    def tokens(self) -> torch.Tensor:
        """`[R, ...]` without padding; a view where there is none, else a copy."""
        assert self.rows is not None, "a tensor without tokens"
        return self.value.flatten(0, 1) if self.rows.is_whole else self.value[self.rows.at]


class SiteSink(Protocol):
    """Keeps something of what is seen, and changes nothing."""

    def takes(self, kind: SiteKind, layer: int | None, direction: Direction) -> bool:
        """Whether it wants to see this site; the same on every rank for what no layer shows."""

    def see(self, sight: Sight) -> None:
        """One tensor; called by one thread at a time."""
