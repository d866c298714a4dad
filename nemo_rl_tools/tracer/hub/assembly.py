"""`Assembly`: parts of all ranks and microbatches of one group, put together to frames when a phase is complete.

    begin, end       of every rank; the n-th `begin` of a phase by a rank belongs to the n-th by the others
    parts, tables    between them
    closed phases    every rank has ended, or is gone; or `assembly_s` after the first end

Invariant: no more than `assembly_bytes` wait; what is left out is counted in `Frame.dropped`. Nothing here does I/O.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from nemo_rl.tracer.frame import BadFrame, Frame, FramePart, FrameTable, Where
from nemo_rl.tracer.protocol import HubLimits
from nemo_rl.tracer.reducer import PerToken, Sample, WholeTensor
from nemo_rl_tools.tracer.hub.parts import (
    PictureRows,
    RankTokens,
    StepKeys,
    TokenParts,
    WholeParts,
    check_part,
    draw_sample,
    table_of,
)

__all__ = ["Assembly", "Phase"]

STEPS_OPEN = 8
"""Steps that ranks may be apart; what comes for older ones is refused."""


@dataclass(slots=True)
class Phase:
    """The parts of one phase of one step that have come so far."""

    run: str
    step: int
    name: str
    keys: StepKeys
    begun: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    dropped: Counter[int] = field(default_factory=Counter)
    """Rank -> messages that it dropped; those that the hub itself left out are under -1."""
    wholes: dict[Where, WholeParts] = field(default_factory=dict)
    tokens: dict[Where, TokenParts] = field(default_factory=dict)
    num_bytes: int = 0
    deadline_s: float | None = None
    missing: tuple[int, ...] = ()
    is_closed: bool = False

    def frames(self, limit: int) -> Iterator[FrameTable | Frame]:
        """Yield the frames of the phase, a table before the frames that refer to it, and let the parts go.

        Args:
            limit: bytes that one picture may need; larger ones are left out.
        """
        tables: dict[bytes, PictureRows] = {}
        for where in sorted((*self.wholes, *self.tokens), key=lambda where: (where.update, where.site.order)):
            # Taken out one by one, so that the parts of frames that were sent are freed.
            if where in self.wholes:
                yield self._of_whole(where, self.wholes.pop(where))
            else:
                yield from self._of_tokens(where, self.tokens.pop(where), tables, limit)

    def _of_whole(self, where: Where, whole: WholeParts) -> Frame:
        reducer = where.reducer
        assert isinstance(reducer, WholeTensor), where
        frame = Frame(
            where=where,
            payload=reducer.finish(whole.payload),
            num_features=whole.num_features,
            num_parts=whole.num_parts,
            num_not_finite=whole.num_not_finite,
        )
        return self._signed(frame)

    def _of_tokens(
        self, where: Where, parts: TokenParts, tables: dict[bytes, PictureRows], limit: int
    ) -> Iterator[FrameTable | Frame]:
        reducer, tokens = where.reducer, parts.tokens()
        assert isinstance(reducer, PerToken), where
        if not parts.fits(len(tokens.codes), reducer, limit):
            self.dropped[-1] += 1
            return
        merged = parts.merge(tokens.codes, reducer)
        if isinstance(reducer, Sample):
            kept = draw_sample(tokens.codes, self.keys, reducer.n)
            tokens, merged = RankTokens(tokens.codes[kept], tokens.ids[kept]), merged[kept]
        content = tokens.codes.tobytes() + tokens.ids.tobytes()
        rows = tables.get(content)
        if rows is None:
            rows = tables[content] = table_of(tokens, self.keys, run=self.run, step=self.step)
            yield rows.table
        frame = Frame(
            where=where,
            payload=reducer.finish(merged[rows.order], parts.num_features),
            table=rows.table.name,
            num_features=parts.num_features,
            num_parts=parts.num_parts,
            num_not_finite=parts.num_not_finite,
        )
        yield self._signed(frame)

    def _signed(self, frame: Frame) -> Frame:
        return replace(frame, missing=self.missing, dropped=sum(self.dropped.values()), wall_s=time.time())


class _AssemblyStep:
    def __init__(self) -> None:
        self.keys = StepKeys()
        self.phases: dict[tuple[str, int], Phase] = {}
        """(name, times it was begun before) -> phase."""
        self.begins: Counter[tuple[str, int]] = Counter()
        """(phase, rank) -> times that the rank has begun the phase."""


class Assembly:
    """Assembles the pictures of one run and one group of ranks."""

    def __init__(self, run: str, *, limits: HubLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.run, self.world = run, 0
        self.num_late = 0
        """Parts that came after their phase was closed, or without one."""
        self._limits, self._clock = limits, clock
        self._here: set[int] = set()
        self._gone: set[int] = set()
        self._steps: dict[int, _AssemblyStep] = {}
        self._current: dict[int, Phase] = {}
        self._tables: dict[int, dict[str, tuple[int, RankTokens]]] = {}
        """Rank -> name of a table -> step and tokens."""
        self._told_dropped: Counter[int] = Counter()
        self.num_bytes = 0
        """Size of all waiting parts."""

    def connect(self, rank: int, world: int) -> None:
        """Add a rank, also one that comes again."""
        self.world = world
        self._here.add(rank)
        self._gone.discard(rank)
        self._forget_tables(rank)

    def disconnect(self, rank: int) -> None:
        """Remove a rank, which is not waited for any more."""
        self._here.discard(rank)
        self._gone.add(rank)
        at = self._current.pop(rank, None)
        if at is not None:
            self._start_deadline(at)
        self._forget_tables(rank)

    def set_keys(self, step: int, keys: Sequence[str]) -> None:
        """Set the order of the rows of a step."""
        if (found := self._step(step)) is not None:
            found.keys.set_order(keys)

    def begin(self, rank: int, step: int, phase: str) -> None:
        """Begin a phase of a rank."""
        for name, (of_step, tokens) in [*self._tables.get(rank, {}).items()]:
            if of_step < step:
                del self._tables[rank][name]
                self.num_bytes -= tokens.num_bytes
        found = self._step(step)
        if found is None:
            self._current.pop(rank, None)
            return
        times = found.begins[phase, rank]
        found.begins[phase, rank] += 1
        at = found.phases.setdefault((phase, times), Phase(self.run, step, phase, found.keys))
        at.begun.add(rank)
        self._current[rank] = at

    def add_table(self, rank: int, table: FrameTable) -> None:
        """Raises:
        BadFrame: it cannot be used.
        """
        found = self._step(table.step)
        if table.run != self.run or found is None:
            raise BadFrame(
                f"table of run {table.run[:80]!r}, step {table.step}: this run is {self.run!r}, or is further"
            )
        if self.num_bytes + 3 * table.tokens.nbytes > self._limits.assembly_bytes:
            raise BadFrame("too many tables wait")
        tokens = RankTokens.of(table, found.keys)
        mine = self._tables.setdefault(rank, {})
        if table.name in mine:
            self.num_bytes -= mine[table.name][1].num_bytes
        mine[table.name] = (table.step, tokens)
        self.num_bytes += tokens.num_bytes

    def add_part(self, rank: int, part: FramePart) -> None:
        """Raises:
        BadFrame: it is none of this rank's phase, or does not fit its reducer.
        """
        where, reducer, phase = part.where, part.where.reducer, self._current.get(rank)
        if part.rank != rank or where.run != self.run:
            raise BadFrame(
                f"expected a part of rank {rank} of run {self.run!r}, got rank {part.rank} of {where.run[:80]!r}"
            )
        if phase is None or phase.is_closed or (where.step, where.phase) != (phase.step, phase.name):
            self.num_late += 1
            return
        self._note_dropped(phase, rank, part.dropped_before)
        if self.num_bytes + part.payload.nbytes > self._limits.assembly_bytes:
            phase.dropped[-1] += 1
            return
        try:
            added = self._add(phase, rank, part) if isinstance(reducer, PerToken) else self._add_whole(phase, part)
        except BadFrame:
            phase.dropped[-1] += 1
            raise
        phase.num_bytes += added
        self.num_bytes += added

    def end(self, rank: int, step: int, phase: str, dropped: int) -> None:
        """End a phase of a rank, which has sent all of it.

        Args:
            dropped: frames that it has dropped since the run began.
        """
        at = self._current.pop(rank, None)
        if at is None or (at.step, at.name) != (step, phase):
            return
        self._note_dropped(at, rank, dropped)
        self._told_dropped[rank] = max(dropped, self._told_dropped[rank])
        at.ended.add(rank)
        self._start_deadline(at)

    def take_closed(self, *, all_of_them: bool = False) -> list[Phase]:
        """Return phases that are complete or overdue, oldest first; they are the caller's now, until `release`.

        Args:
            all_of_them: also those that still wait.
        """
        closed = []
        for found in self._steps.values():
            for at in found.phases.values():
                if not at.is_closed and (all_of_them or self._is_done(at)):
                    at.is_closed = True
                    at.missing = tuple(sorted(set(range(self.world)) - at.ended))
                    closed.append(at)
        return closed

    def release(self, phase: Phase) -> None:
        """Release a phase that was taken: its frames are out and its parts count no more."""
        self.num_bytes -= phase.num_bytes
        phase.num_bytes = 0

    def seconds_left(self) -> float | None:
        """Return the seconds until a phase is overdue, or None where no phase waits."""
        open_phases = [at for found in self._steps.values() for at in found.phases.values() if not at.is_closed]
        deadlines = [at.deadline_s for at in open_phases if at.deadline_s is not None]
        return max(0.0, min(deadlines) - self._clock()) if deadlines else None

    def _start_deadline(self, at: Phase) -> None:
        if at.deadline_s is None:
            at.deadline_s = self._clock() + self._limits.assembly_s

    def _is_done(self, at: Phase) -> bool:
        waits_for = at.begun | set(range(self.world)) if self.world else at.begun
        is_overdue = at.deadline_s is not None and self._clock() >= at.deadline_s
        return is_overdue or waits_for <= at.ended | self._gone

    def _step(self, step: int) -> _AssemblyStep | None:
        """Return the step, or None where ranks are already further."""
        if step in self._steps:
            return self._steps[step]
        if len(self._steps) >= STEPS_OPEN:
            # A step that no phase waits for goes first.
            settled = [
                number for number, found in self._steps.items() if all(at.is_closed for at in found.phases.values())
            ]
            oldest = min(settled, default=None)
            if oldest is None or step < oldest:
                return None
            del self._steps[oldest]
        return self._steps.setdefault(step, _AssemblyStep())

    def _forget_tables(self, rank: int) -> None:
        self.num_bytes -= sum(tokens.num_bytes for _, tokens in self._tables.pop(rank, {}).values())

    def _note_dropped(self, phase: Phase, rank: int, dropped: int) -> None:
        phase.dropped[rank] = max(phase.dropped[rank], dropped - self._told_dropped[rank])

    def _add(self, phase: Phase, rank: int, part: FramePart) -> int:
        step_and_tokens = self._tables.get(rank, {}).get(part.table or "")
        if step_and_tokens is None or step_and_tokens[0] != phase.step:
            raise BadFrame(f"{part.where.reducer}: expected a table that was sent before, got {str(part.table)[:80]!r}")
        tokens = step_and_tokens[1].take(part.rows)
        check_part(part, len(tokens.codes))
        reducer = part.where.reducer
        assert isinstance(reducer, PerToken), part.where
        parts = phase.tokens.get(part.where)
        if parts is None:
            parts = phase.tokens[part.where] = TokenParts(part.span.whole)
        return parts.add(part, tokens, reducer)

    def _add_whole(self, phase: Phase, part: FramePart) -> int:
        check_part(part, None)
        reducer = part.where.reducer
        assert isinstance(reducer, WholeTensor), part.where
        whole = phase.wholes.get(part.where)
        if whole is None:
            whole = phase.wholes[part.where] = WholeParts(part.payload, part.span.whole)
        return whole.add(part, reducer)
