"""`TurnBatch`: what `ContinuousDecoding` needs of an engine, and the settings of both.

An engine brings a batch whose rows it decodes token by token; one turn is a token of every live row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from nemo_rl.models.generation.interfaces import EngineSpec, GenerationOutput, GenerationRequest
from nemo_rl.models.generation.rows import RowRequest
from nemo_rl.models.generation.schedule import ScheduleEntry

__all__ = ["NAMED", "ContinuousSpec", "TurnBatch", "TurnRow"]

NAMED = 0
"""Lane of the rows of groups that have names."""
DEADLINE_S = 1800.0
"""Longest time without progress where `policy.generation.engine_timeout_s` is not given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRow:
    """A row that joins a batch."""

    key: int
    """Number of the row; no other row of the engine has it."""
    row: RowRequest
    request: GenerationRequest
    """The request that it is of."""
    lane: int
    """`NAMED`, or the number of its stream: rows of different lanes need not be decoded in one forward pass."""


class TurnBatch(Protocol):
    """The rows of an engine that are decoded token by token; one thread at a time calls it."""

    def rows_of(self, request: GenerationRequest) -> list[RowRequest]:
        """Return all rows; called by any thread. Raises where the engine cannot sample them."""

    def join(self, rows: Sequence[TurnRow]) -> None:
        """Take rows in, in this order."""

    def turn(self, *, with_named: bool) -> Collection[int]:
        """Decode a token of every live row, and return the keys of those that have ended.

        Args:
            with_named: False: rows of the lane `NAMED` stand still.
        """

    def recompute(self) -> None:
        """Compute the caches of live rows anew before the next turn: the weights have changed."""

    def lengths(self) -> Mapping[int, int]:
        """Return key -> response tokens so far, of all live rows."""

    def take(self, request: GenerationRequest, keys: Sequence[int]) -> GenerationOutput:
        """Return rows of the request that have ended, in this order, and forget them."""

    def drop(self, keys: Collection[int]) -> None:
        """Forget rows, live or ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContinuousSpec:
    """Settings of `ContinuousDecoding`."""

    number: int
    """Number of the engine."""
    places: int
    """Rows that are decoded together, of groups with names; the others have as many of their own."""
    in_flight: Literal["drain", "recompute", "keep"] = "recompute"
    """Treatment of running rows at a refit, as `policy.generation.in_flight` names it."""
    script: tuple[ScheduleEntry, ...] = ()
    """The schedule to be followed; empty: groups join as there is room."""
    deadline_s: float = DEADLINE_S
    """Longest time without progress before a thread that waits gives up."""

    @classmethod
    def of(cls, spec: EngineSpec, *, places: int) -> ContinuousSpec:
        """Return the settings of one replica."""
        generation = spec.policy.generation
        return cls(
            number=spec.number,
            places=places,
            in_flight=generation.in_flight,
            script=spec.script,
            deadline_s=generation.engine_timeout_s or DEADLINE_S,
        )
