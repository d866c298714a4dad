"""`TurnBatch`: the rows that an engine decodes token by token, and the groups and calls that they are of.

Used by `ContinuousDecoding`, whose lock guards `StreamCall` and `RowGroup`; one turn is a token of every live row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from nemo_rl.models.generation.interfaces import EngineSpec, GenerationOutput, GenerationRequest
from nemo_rl.models.generation.rows import RowRequest
from nemo_rl.models.generation.schedule import ScheduleEntry

__all__ = ["DEADLINE_S", "NAMED", "ContinuousSpec", "RowGroup", "StreamCall", "TurnBatch", "TurnPlan", "TurnRow"]

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


@dataclass(kw_only=True, slots=True, eq=False)
class RowGroup:
    """A group on its way through the engine."""

    stream: StreamCall
    request: GenerationRequest
    number: int
    """Number of its prompt in the request, or in the feed."""
    name: str
    keys: list[int]
    waiting: deque[TurnRow]
    """Rows that have not joined."""
    live: set[int] = field(default_factory=set)
    joined: float = 0.0
    """Monotonic seconds at which its first row joined."""
    seconds: float = 0.0
    """Time from then to the end of its last row, once that has ended."""
    spans: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Version spans of each row that has joined."""


@dataclass(kw_only=True, slots=True, eq=False)
class StreamCall:
    """One `stream` or `feed` call."""

    lane: int
    """Lane of its rows without names."""
    is_feed: bool = False
    """True: groups may come until it is closed."""
    open: list[RowGroup] = field(default_factory=list)
    """Groups that have not ended."""
    ended: list[tuple[RowGroup, GenerationOutput]] = field(default_factory=list)
    """Groups that were not yielded."""
    has_begun: bool = False
    """True when a row of a request without names has joined, whose other rows then get the same weights."""
    is_closed: bool = False
    failure: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Return whether no group will end any more."""
        return self.is_closed or not (self.open or self.is_feed)

    def add(
        self, request: GenerationRequest, rows: Sequence[RowRequest], *, first: int, keys: Iterator[int]
    ) -> list[RowGroup]:
        """Open the groups of a request, and return them in the order in which they are to join.

        Args:
            first: number of the first group.
            keys: gives a key for each row.
        """
        size, found = request.group_size, list[RowGroup]()
        lane = NAMED if request.names else self.lane
        for number in range(len(request.prompt_ids)):
            waiting = deque(
                TurnRow(key=next(keys), row=row, request=request, lane=lane)
                for row in rows[number * size : (number + 1) * size]
            )
            found.append(
                RowGroup(
                    stream=self,
                    request=request,
                    number=first + number,
                    name=request.names[number] if request.names else "",
                    keys=[row.key for row in waiting],
                    waiting=waiting,
                )
            )
        self.open += found
        # Rows without names join row by row: those of like length together, as in a batch of one request.
        return found if request.names else sorted(found, key=lambda each: len(each.waiting[0].row.prompt))


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnPlan:
    """The plan of one turn."""

    joining: Sequence[TurnRow]
    with_named: bool
    recomputes: bool
