"""`ScheduleEntry`: what the batch of one continuous engine did, turn by turn, so that it can be done again.

Written by `nemo_rl.models.generation.continuous`, kept by a run, and given to an engine as `EngineSpec.script`. A turn
decodes one token of every row of the batch. Pure: imports neither torch nor an engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

from nemo_rl.errors import WorkerError

__all__ = ["BatchEvents", "ScheduleEntry", "Script"]

EventKind = Literal["join", "swap", "leave"]
"""`join`: groups joined the batch; `swap`: new weights; `leave`: the groups' stream was closed before they ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleEntry:
    """One event of an engine's batch.

    Example:
        >>> entry = ScheduleEntry(engine=0, number=3, turn=12, kind="join", groups=("4.0",))
        >>> ScheduleEntry.from_json(entry.to_json()) == entry
        True
    """

    engine: int
    number: int
    """Number of the event among those of this engine, from 0 on."""
    turn: int
    """Turns decoded before the event."""
    kind: EventKind
    groups: tuple[str, ...] = ()
    """Names of the groups, as `GenerationRequest.names` has them."""
    version: int | None = None
    """Version of the weights from here on, of a `swap`."""

    def to_json(self) -> dict[str, object]:
        found: dict[str, object] = {
            "engine": self.engine,
            "number": self.number,
            "turn": self.turn,
            "kind": self.kind,
        }
        if self.groups:
            found["groups"] = list(self.groups)
        if self.version is not None:
            found["version"] = self.version
        return found

    @classmethod
    def from_json(cls, found: Mapping[str, object]) -> ScheduleEntry:
        """Return the entry that `to_json` has written.

        Raises:
            ValueError: it is not one.
        """
        numbers = {name: found.get(name) for name in ("engine", "number", "turn")}
        kind, groups, version = found.get("kind"), found.get("groups", []), found.get("version")
        is_whole = (
            all(isinstance(value, int) for value in numbers.values())
            and kind in get_args(EventKind)
            and isinstance(groups, list)
            and all(isinstance(group, str) for group in groups)
            and (version is None or isinstance(version, int))
        )
        if not is_whole:
            raise ValueError(f"expected an event of an engine's schedule, got {dict(found)!r}")
        return cls(
            **cast(dict[str, int], numbers),
            kind=cast(EventKind, kind),
            groups=tuple(cast(list[str], groups)),
            version=cast("int | None", version),
        )


class BatchEvents:
    """The events of an engine, as they happen.

    Args:
        engine: number of the engine.
    """

    def __init__(self, *, engine: int) -> None:
        self._engine, self._new = engine, list[ScheduleEntry]()
        self.count = 0
        """Events so far."""

    def add(self, kind: EventKind, *, turn: int, groups: tuple[str, ...] = (), version: int | None = None) -> None:
        """Add an event; the arguments are those of `ScheduleEntry`."""
        self._new.append(
            ScheduleEntry(engine=self._engine, number=self.count, turn=turn, kind=kind, groups=groups, version=version)
        )
        self.count += 1

    def take(self) -> tuple[ScheduleEntry, ...]:
        """Return the events since the last call."""
        found, self._new = tuple(self._new), []
        return found


class Script:
    """The events that an engine is to do again, of which the first one is the next.

    Args:
        engine: number of the engine, whose events alone count.
    """

    def __init__(self, entries: Iterable[ScheduleEntry], *, engine: int) -> None:
        self._engine, self._left = engine, deque(entry for entry in entries if entry.engine == engine)

    def __bool__(self) -> bool:
        return bool(self._left)

    @property
    def next(self) -> ScheduleEntry:
        return self._left[0]

    @property
    def names(self) -> set[str]:
        return {name for entry in self._left for name in entry.groups}

    def take(self) -> ScheduleEntry:
        """Return the next event, which is over then."""
        return self._left.popleft()

    def allows_swap(self, *, turn: int, number: int) -> bool:
        """Return whether weights may change now, as far as the script goes; `number` of events have been."""
        if not self._left:
            return True
        return self.next.kind == "swap" and self.next.turn == turn and self.next.number == number

    def take_swap(self, version: int) -> None:
        """Count a change of weights, if there is a script.

        Raises:
            WorkerError: they are not those of the run that wrote it.
        """
        if self._left:
            entry = self.take()
            if entry.version != version:
                raise WorkerError(
                    f"generation engine {self._engine} follows a script whose event {entry.number} brings weights "
                    f"of version {entry.version}, got {version}; refits must come as in the run that wrote it",
                    stage="generation",
                )

    def lost(self, *, turn: int, number: int, num_live: int) -> WorkerError:
        """Return the error of an engine that cannot follow any more."""
        return WorkerError(
            f"generation engine {self._engine} cannot follow its script: at turn {turn}, after {number} events, with "
            f"{num_live} rows running, event {self.next.number} is to happen at turn {self.next.turn}. Weights, "
            "prompts and seeds must be those of the run that wrote it",
            stage="generation",
        )
