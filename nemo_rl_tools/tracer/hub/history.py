"""`History`: frames and tables of the last steps, as messages, for viewers that come later or step back.

Invariant: never more than `history_bytes`; the oldest steps go first, and a frame never stays without its table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from nemo_rl.tracer.frame import Frame, FrameSite, FrameTable, Where
from nemo_rl.tracer.reducer import Reducer

__all__ = ["History", "Kept", "Place"]

Place = tuple[str, str, FrameSite, Reducer]
"""Run, phase, site and reducer: one picture of the page, which newer frames replace."""


@dataclass(slots=True, eq=False)
class KeptTable:
    """A table as a message."""

    run: str
    name: str
    message: bytes
    num_users: int = 0
    """Steps whose frames refer to it."""


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A frame as a message, with its table."""

    where: Where
    message: bytes
    table: KeptTable | None

    @property
    def place(self) -> Place:
        return (self.where.run, self.where.phase, self.where.site, self.where.reducer)


@dataclass(slots=True, eq=False)
class _HistoryStep:
    frames: dict[Where, Kept] = field(default_factory=dict)
    tables: dict[str, KeptTable] = field(default_factory=dict)


class History:
    """Keeps the frames of all runs."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self.num_bytes = max_bytes, 0
        self._steps: dict[tuple[str, int], _HistoryStep] = {}
        self._tables: dict[tuple[str, str], KeptTable] = {}
        self._latest: dict[Place, Kept] = {}

    def add_table(self, table: FrameTable) -> KeptTable:
        found = self._tables.get((table.run, table.name))
        if found is None:
            found = self._tables[table.run, table.name] = KeptTable(table.run, table.name, table.encode())
            self.num_bytes += len(found.message)
        self._use(found, self._steps.setdefault((table.run, table.step), _HistoryStep()))
        self._shrink()
        return found

    def add_frame(self, frame: Frame) -> Kept:
        """Keep it in place of an earlier one of the same step."""
        where = frame.where
        table = None if frame.table is None else self._tables.get((where.run, frame.table))
        kept = Kept(where, frame.encode(), table)
        step = self._steps.setdefault((where.run, where.step), _HistoryStep())
        if table is not None:
            self._use(table, step)
        if (old := step.frames.pop(where, None)) is not None:
            self.num_bytes -= len(old.message)
        step.frames[where] = kept
        self.num_bytes += len(kept.message)
        self._latest[kept.place] = kept
        self._shrink()
        return kept

    def latest(self) -> list[Kept]:
        """Return the last frame of each place, as they came."""
        return sorted(self._latest.values(), key=lambda kept: (kept.where.run, kept.where.step, kept.where.site.order))

    def of_steps(self, run: str, first: int, last: int) -> Iterator[Kept]:
        """Yield the frames of a span of steps, both ends included; what is let go meanwhile is left out."""
        steps = sorted(step for of_run, step in self._steps if of_run == run and first <= step <= last)
        for step in steps:
            found = self._steps.get((run, step))
            yield from [] if found is None else [*found.frames.values()]

    def _use(self, table: KeptTable, step: _HistoryStep) -> None:
        if table.name not in step.tables:
            step.tables[table.name] = table
            table.num_users += 1

    def _shrink(self) -> None:
        while self.num_bytes > self._max_bytes and len(self._steps) > 1:
            step = self._steps.pop(next(iter(self._steps)))
            for kept in step.frames.values():
                self._drop(kept)
            for table in step.tables.values():
                table.num_users -= 1
                if not table.num_users:
                    self._drop_table(table)
        # One step that is too large alone.
        for step in self._steps.values() if self.num_bytes > self._max_bytes else ():
            while step.frames and self.num_bytes > self._max_bytes:
                self._drop(step.frames.pop(next(iter(step.frames))))
            for name in [] if step.frames else [*step.tables]:
                self._drop_table(step.tables.pop(name))

    def _drop(self, kept: Kept) -> None:
        self.num_bytes -= len(kept.message)
        if self._latest.get(kept.place) is kept:
            del self._latest[kept.place]

    def _drop_table(self, table: KeptTable) -> None:
        self.num_bytes -= len(table.message)
        del self._tables[table.run, table.name]
