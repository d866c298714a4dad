"""`TurnBatch`: the rows that an engine decodes token by token, and the groups and calls that they are of.

Used by `ContinuousDecoding`, whose lock guards `StreamCall` and `RowGroup`; one turn is a token of every live row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from nemo_rl.errors import ConfigError, name_some
from nemo_rl.models.generation.requests import (
    EngineLoad,
    EngineSpec,
    GenerationOutput,
    GenerationRequest,
    GroupSamples,
    RowRequest,
)
from nemo_rl.models.generation.schedule import ScheduleEntry, Script

__all__ = [
    "DEADLINE_S",
    "NAMED",
    "ContinuousSpec",
    "LoadCount",
    "RowGroup",
    "StreamCall",
    "TurnAttempt",
    "TurnBatch",
    "TurnPlan",
    "TurnRow",
    "in_order",
    "joined_output",
    "standstill_text",
]

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
    lane: int
    """`NAMED`, or the number of its stream: rows of different lanes need not be decoded in one forward pass."""
    adapter: int | None = None
    """Version of the adapter that it has to its end; None: the one in use, also where that changes."""


class TurnBatch(ABC):
    """The rows of an engine that are decoded token by token; one thread at a time calls it."""

    @abstractmethod
    def rows_of(self, request: GenerationRequest) -> list[RowRequest]:
        """Return all rows; called by any thread. Raises where the engine cannot sample them."""

    @abstractmethod
    def join(self, rows: Sequence[TurnRow]) -> None:
        """Take rows in, in this order."""

    @abstractmethod
    def turn(self, *, with_named: bool) -> Collection[int]:
        """Decode a token of every live row, and return the keys of those that have ended.

        Args:
            with_named: False: rows of the lane `NAMED` stand still.
        """

    @abstractmethod
    def recompute(self) -> None:
        """Compute the caches of live rows anew before the next turn: the weights have changed."""

    @abstractmethod
    def lengths(self) -> Mapping[int, int]:
        """Return key -> response tokens so far, of all live rows."""

    @abstractmethod
    def take(self, request: GenerationRequest, keys: Sequence[int]) -> GenerationOutput:
        """Return rows of the request that have ended, in this order, and forget them."""

    @abstractmethod
    def drop(self, keys: Collection[int]) -> None:
        """Forget rows, live or ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContinuousSpec:
    """Settings of `ContinuousDecoding`."""

    number: int
    places: int
    """Rows that are decoded together, of groups with names; the others have as many of their own."""
    in_flight: Literal["drain", "recompute", "keep", "finish"] = "recompute"
    """Treatment of running rows at a refit, as `policy.generation.in_flight` names it."""
    script: tuple[ScheduleEntry, ...] = ()
    """The schedule to be followed; empty: groups join as there is room."""
    deadline_s: float = DEADLINE_S
    """Longest time without progress before a thread that waits gives up."""

    def check_group(self, request: GenerationRequest) -> None:
        """Raises:
        ConfigError: a group has more rows than there are places.
        """
        size = request.group_size
        if request.names and size > self.places:
            raise ConfigError(
                f"policy.generation.max_batch_size: expected room for the {size} rows of a group, got "
                f"{self.places}; raise it, or lower grpo.num_generations_per_prompt"
            )

    @classmethod
    def of(cls, spec: EngineSpec, *, places: int) -> ContinuousSpec:
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
    live: set[int] = field(default_factory=set)
    joined: float = 0.0
    """Monotonic seconds at which its first row joined."""
    seconds: float = 0.0
    """Time from then to the end of its last row, once that has ended."""
    spans: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Version spans of each row that has joined."""

    def with_spans(self, output: GenerationOutput) -> GenerationOutput:
        return output.with_spans(tuple(tuple(self.spans[key]) for key in self.keys))


@dataclass(kw_only=True, slots=True, eq=False)
class StreamCall:
    """One `stream` or `feed` call."""

    lane: int
    """Lane of its rows without names."""
    is_feed: bool = False
    """True: groups may come until it is closed."""
    open: list[RowGroup] = field(default_factory=list)
    ended: list[tuple[RowGroup, GenerationOutput]] = field(default_factory=list)
    adapter: int | None = None
    """Version of the adapter of all its rows, where it has begun and rows finish under theirs."""
    has_begun: bool = False
    """True when a row of a request without names has joined, whose other rows then get the same weights."""
    is_closed: bool = False
    failure: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Return whether no group will end any more."""
        return self.is_closed or not (self.open or self.is_feed)

    def adapter_of(self, group: RowGroup, *, held: int) -> int:
        """Return the version of the adapter that a row of a group has to its end; rows of one call without names have
        one.

        Args:
            held: version in use.
        """
        if group.name or self.is_feed:
            return held
        if self.adapter is None:
            self.adapter = held
        return self.adapter

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


@dataclass(kw_only=True, slots=True, eq=False)
class TurnAttempt:
    """Something that a thread waits for and that happens between two turns, in whatever thread decodes."""

    run: Callable[[set[int]], bool]
    """Given the versions of adapters that rows have, returns whether it has succeeded."""
    is_over: bool = False
    failure: Exception | None = None

    def ends(self, live: set[int]) -> bool:
        """Run it, and return whether it is over."""
        try:
            self.is_over = self.run(live)
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits
            self.failure, self.is_over = error, True
        return self.is_over


@dataclass(kw_only=True, slots=True)
class LoadCount:
    """The work of an engine since it was asked last."""

    busy_s: float = 0.0
    """Seconds of turns."""
    thrown_tokens: int = 0
    """Tokens of rows that left."""
    group_seconds: list[float] = field(default_factory=list)

    def take(self) -> EngineLoad:
        found = EngineLoad(
            busy_s=self.busy_s, thrown_tokens=self.thrown_tokens, group_seconds=tuple(self.group_seconds)
        )
        self.busy_s, self.thrown_tokens, self.group_seconds = 0.0, 0, []
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnPlan:
    """The plan of one turn."""

    joining: Sequence[TurnRow]
    with_named: bool
    recomputes: bool


def joined_output(outputs: Sequence[GenerationOutput]) -> GenerationOutput:
    """Return the rows of all outputs, with versions in the shortest form."""
    output = GenerationOutput.joined(outputs)
    return output.with_spans(output.row_spans)


def in_order(found: Sequence[GroupSamples], request: GenerationRequest) -> GenerationOutput:
    """Return all rows of a request, whose groups have come in any order."""
    groups, size = [group for samples in found for group in samples.groups], request.group_size
    order = sorted(range(len(groups)), key=groups.__getitem__)
    output = joined_output([samples.output for samples in found])
    return output.select([place * size + row for place in order for row in range(size)])


def standstill_text(script: Script, live: Collection[int], *, is_busy: bool, is_frozen: bool) -> str:
    """Return what stands still in an engine, in words."""
    if is_busy:
        return "a turn has not ended"
    if is_frozen:
        return "rows stand still for a refit that has not ended"
    if script:
        entry = script.next
        return f"the script's next event is {entry.kind} {name_some(entry.groups)} at turn {entry.turn}"
    return f"{len(live)} rows are running"
