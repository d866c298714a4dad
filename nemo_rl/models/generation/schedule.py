"""`ScheduleEntry`: what the batch of one continuous engine did, turn by turn, so that it can be done again.

Written by `nemo_rl.models.generation.continuous`, kept by a run, and given to an engine as `EngineSpec.script`. A turn
decodes one token of every row of the batch. Pure: imports neither torch nor an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

__all__ = ["EventKind", "ScheduleEntry"]

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
    """Number of the engine."""
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
        """Return the entry as a JSON object."""
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
