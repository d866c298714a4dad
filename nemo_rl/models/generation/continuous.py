"""`ContinuousDecoding`: the rows of several `stream` and `feed` calls in one running batch, from which new weights need
no rest.

    ContinuousDecoding.stream, feed (a thread for each call)
      |- _line_up         groups wait in line, first come first served; `add_to_feed` brings those of a feed
      |- _take_turn       the thread that finds nobody decoding decodes a turn for all
      |    |- _plan       groups whose stream was closed leave, waiting ones join where places are free
      |    `- _decode     a token of every live row; groups whose rows have all ended go to their streams
      |- freeze, thaw     around a refit: rows stand still at a token boundary, and go on with other weights
      `- switch           rows that join from here on have another adapter; with `finish` running ones keep theirs

Used by the engines, which bring a `TurnBatch`. Invariants: a turn is decoded by one thread; weights change between
turns alone, while no row without a name is being decoded, so that such rows have one version; every named group that
joins or leaves, and every change of weights, is an entry of the schedule, and named rows depend on these entries, their
prompts and seeds alone. Every wait ends at a deadline after the last progress of the engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from threading import Condition

from nemo_rl.errors import WorkerError
from nemo_rl.models.generation.requests import (
    EngineLoad,
    GenerationOutput,
    GenerationRequest,
    GroupSamples,
    RowRequest,
)
from nemo_rl.models.generation.schedule import BatchEvents, ScheduleEntry, Script
from nemo_rl.models.generation.turn_batch import (
    NAMED,
    ContinuousSpec,
    LoadCount,
    RowGroup,
    StreamCall,
    TurnAttempt,
    TurnBatch,
    TurnPlan,
    TurnRow,
    in_order,
    joined_output,
    standstill_text,
)

__all__ = ["ContinuousDecoding"]

STAGE = "generation"


class ContinuousDecoding:
    """Merges the rows of several calls into one running batch.

    Args:
        version: returns the version of the engine's weights.
    """

    def __init__(self, batch: TurnBatch, spec: ContinuousSpec, *, version: Callable[[], int]) -> None:
        self._batch, self._spec, self._version = batch, spec, version
        self._changed = Condition()
        self._is_busy = self._is_closing = self._is_frozen = self._is_ending = False
        """A turn is being decoded; a refit waits; rows stand still; `end` waits."""
        self._recomputes = False
        self._attempts: list[TurnAttempt] = []
        self._held = version()
        self._streams: list[StreamCall] = []
        self._feeds: dict[str, StreamCall] = {}
        """Feeds by name, also those that were closed."""
        self._lines: dict[bool, deque[RowGroup]] = {True: deque(), False: deque()}
        """Groups with rows that wait, by whether they have names."""
        self._live: dict[int, RowGroup] = {}
        self._num_live = {True: 0, False: 0}
        """Live rows, by whether their groups have names."""
        self._gone: list[RowGroup] = []
        """Groups whose stream was closed when rows of theirs had joined."""
        self._keys, self._lanes = count(), count(NAMED + 1)
        self._turns, self._events = 0, BatchEvents(engine=spec.number)
        """Turns decoded; events, of which the new ones go with the next samples of named groups."""
        self._script = Script(spec.script, engine=spec.number)
        self._progress = time.monotonic()
        self._load = LoadCount()

    def take_load(self) -> EngineLoad:
        """Return what was done since the last call."""
        with self._changed:
            return self._load.take()

    def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Sample all rows, in the order of the request."""
        found = list(self.stream(request))
        return in_order(found, request) if found else GenerationOutput.empty(weight_version=self._version())

    def stream(self, request: GenerationRequest) -> Iterator[GroupSamples]:
        """Yield whole groups as they end.

        Raises:
            WorkerError: nothing has moved for too long, or the script cannot be followed.
        """
        rows = self._checked_rows(request)
        with self._changed:
            stream = StreamCall(lane=next(self._lanes))
            self._streams.append(stream)
            self._line_up(stream, request, rows, first=0)
        yield from self._served(stream)

    def feed(self, name: str) -> Iterator[GroupSamples]:
        """Yield what `add_to_feed` brings, as it ends, until the feed is closed. A feed without rows waits for ever.

        Raises:
            WorkerError: as `stream`.
        """
        with self._changed:
            stream = self._feed_of(name)
        if stream is not None:
            yield from self._served(stream)

    def add_to_feed(self, name: str, request: GenerationRequest, first: int) -> None:
        """Let groups of one row join a feed; they are forgotten where it was closed.

        Raises:
            ValueError: groups have more rows.
        """
        rows = self._checked_rows(request)
        if len(rows) != len(request.prompt_ids):
            raise ValueError(
                f"feed {name!r}: expected one seed for each of {len(request.prompt_ids)} prompts, got {len(rows)}"
            )
        with self._changed:
            stream = self._feed_of(name)
            if stream is not None:
                self._line_up(stream, request, rows, first=first)

    def close_feed(self, name: str) -> None:
        """Take the rows of a feed out and end it; its name is not used again. Idempotent."""
        with self._changed:
            stream = self._feed_of(name)
            if stream is not None:
                self._close(stream)

    def abort_in_feed(self, name: str, numbers: Collection[int]) -> None:
        """Take the groups with these numbers in the feed out of the line and of the batch."""
        with self._changed:
            stream = self._feed_of(name)
            if stream is not None:
                for group in [group for group in stream.open if group.number in numbers]:
                    self._take_out(group)
                self._progressed()

    def abort(self, names: Collection[str]) -> None:
        """Take the groups with these names out of the line and of the batch; their streams never give them."""
        with self._changed:
            for stream in self._streams:
                for group in [group for group in stream.open if group.name in names]:
                    self._take_out(group)
            self._progressed()

    def freeze(self) -> None:
        """Let rows without names, and with `drain` all running ones, end, and all others stand still. Idempotent."""
        with self._changed:
            self._is_closing, self._progress = True, time.monotonic()
        while not self._is_frozen:
            self._take_turn(until=self._try_to_freeze, waits_for="the rows that must end before new weights")

    def thaw(self) -> None:
        """Let rows go on, with the weights that the engine has now. Idempotent."""
        with self._changed:
            if not self._is_frozen:
                # A refit that was given up before rows stood still.
                self._is_closing = False
                self._progressed()
                return
            version = self._version()
            if version < 0:
                raise WorkerError("the engine has no complete weights; bring them before it goes on", stage=STAGE)
            if version != self._held:
                self._swap(version)
            self._is_frozen = self._is_closing = False
            self._progressed()

    @property
    def is_frozen(self) -> bool:
        return self._is_frozen

    def switch(self, use: Callable[[], None]) -> None:
        """Change the adapter of rows that join from here on, between two turns; while rows stand still `thaw` does the
        rest.

        Args:
            use: lets the engine have another version.
        """
        if self._spec.in_flight != "finish":
            with self.at_rest():
                use()
            return

        def attempt(_: set[int]) -> bool:
            if not self._is_frozen and not self._may_swap:
                return False
            use()
            if not self._is_frozen:
                self._swap(self._version())
            return True

        self.between_turns(attempt, waits_for="the turn of a new adapter")

    def between_turns(self, attempt: Callable[[set[int]], bool], *, waits_for: str) -> None:
        """Try something between two turns, again and again while rows go on, until it succeeds or raises.

        Args:
            attempt: is given the versions of the adapter that rows have, or are to have, to their end.
            waits_for: text for the error at the deadline.
        """
        pending = TurnAttempt(run=attempt)
        with self._changed:
            self._attempts.append(pending)
            self._progressed()
        while not self._take_turn(until=lambda: pending.is_over, waits_for=waits_for):
            pass
        if pending.failure is not None:
            raise pending.failure

    def _try_attempts(self) -> None:
        begun = {stream.adapter for stream in self._streams if stream.open and stream.adapter is not None}
        for attempt in [*self._attempts]:
            if attempt.ends(begun | {group.spans[key][-1][1] for key, group in self._live.items()}):
                self._attempts.remove(attempt)
                self._progressed()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Let rows stand still inside the block, and go on behind it where they have gone on before."""
        was_frozen = self._is_frozen
        self.freeze()
        try:
            yield
        finally:
            # Weights that are not whole must not be sampled from.
            if not was_frozen and self._version() >= 0:
                self.thaw()

    def check_rest(self) -> None:
        """Stand still where nothing runs, as in an engine that was just started.

        Raises:
            WorkerError: rows are running.
        """
        with self._changed:
            if not self._is_frozen and not self._live:
                self._is_closing = True
                self._try_to_freeze()
            if not self._is_frozen:
                raise WorkerError("rows are running: call finish_generation before new weights come", stage=STAGE)

    def check_idle(self) -> None:
        """Raise WorkerError while rows run or stand still."""
        with self._changed:
            if self._live:
                raise WorkerError(f"{len(self._live)} rows are running, so that the engine cannot sleep", stage=STAGE)

    def end(self, error: BaseException) -> None:
        """Fail every stream, when the turn that is being decoded has ended."""
        with self._changed:
            self._is_ending, self._progress = True, time.monotonic()
            while self._is_busy:
                self._wait("the end of a turn")
            self._is_ending = False
            self._fail(error)

    def _checked_rows(self, request: GenerationRequest) -> list[RowRequest]:
        rows = self._batch.rows_of(request)
        self._spec.check_group(request)
        return rows

    def _line_up(
        self, stream: StreamCall, request: GenerationRequest, rows: Sequence[RowRequest], *, first: int
    ) -> None:
        """Let the groups of a request wait for places."""
        self._lines[bool(request.names)].extend(stream.add(request, rows, first=first, keys=self._keys))
        self._progressed()

    def _feed_of(self, name: str) -> StreamCall | None:
        """Return the feed, which is made where there was none; None where it was closed."""
        if name not in self._feeds:
            self._feeds[name] = StreamCall(lane=next(self._lanes), is_feed=True)
            self._streams.append(self._feeds[name])
        stream = self._feeds[name]
        return None if stream.is_closed else stream

    def _served(self, stream: StreamCall) -> Iterator[GroupSamples]:
        """Yield groups of the stream as they end, until no more can come."""
        try:
            while not stream.is_over or stream.ended or stream.failure is not None:
                found = self._next(stream)
                if found is not None:
                    yield found
        finally:
            self._close(stream)

    def _take_out(self, group: RowGroup) -> None:
        line = self._lines[bool(group.name)]
        group.stream.open.remove(group)
        if group in line:
            line.remove(group)
        if group.spans:
            self._gone.append(group)

    def _next(self, stream: StreamCall) -> GroupSamples | None:
        """Decode, or wait for another thread that does, until groups of the stream have ended; None where those that
        were left have been aborted."""
        while not self._take_turn(
            until=lambda: stream.failure is not None or bool(stream.ended) or stream.is_over,
            waits_for=f"groups of {len(stream.open)} prompts",
            is_idle=lambda: stream.is_feed and not stream.open,
        ):
            pass
        with self._changed:
            if stream.failure is not None:
                raise stream.failure
            found, stream.ended = stream.ended, []
            if not found:
                return None
            entries = tuple[ScheduleEntry, ...]()
            if any(group.name for group, _ in found):
                entries = self._events.take()
        return GroupSamples(
            groups=tuple(group.number for group, _ in found),
            output=joined_output([output for _, output in found]),
            schedule=entries,
            seconds=tuple(group.seconds for group, _ in found),
        )

    def _take_turn(
        self, *, until: Callable[[], bool], waits_for: str, is_idle: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait for `until`, or until nobody decodes, and decode one turn then; return `until()` as it was before.

        Args:
            is_idle: returns whether there is nothing to wait for at present, so that no deadline holds.
        """
        with self._changed:
            while True:
                if until():
                    return True
                turn = None if self._is_busy or self._is_ending else self._plan()
                if turn is not None:
                    self._is_busy = True
                    break
                # Groups that left in the plan may have been all that was waited for.
                if is_idle():
                    self._changed.wait(self._spec.deadline_s)
                elif not until():
                    self._wait(waits_for)
        self._decode(turn)
        return False

    def _wait(self, waits_for: str) -> None:
        left = self._progress + self._spec.deadline_s - time.monotonic()
        if left <= 0:
            raise WorkerError(
                f"generation engine {self._spec.number} has waited {self._spec.deadline_s:.0f} s for {waits_for} "
                "without a token: "
                + standstill_text(self._script, self._live, is_busy=self._is_busy, is_frozen=self._is_frozen),
                stage=STAGE,
            )
        self._changed.wait(left)

    def _progressed(self) -> None:
        self._progress = time.monotonic()
        self._changed.notify_all()

    def _plan(self) -> TurnPlan | None:
        """Return the next turn; None where no row can go on. Groups whose stream was closed leave here."""
        self._drop(self._gone)
        self._gone = []
        # Both here, and not in the waiting thread alone, which may find the lock taken again after every turn.
        self._try_attempts()
        if self._is_closing and self._try_to_freeze():
            return None
        if not self._live and not self._is_frozen:
            # An engine that is never frozen gets new weights between requests.
            self._held = self._version()
        try:
            named = self._named_joining()
        except WorkerError as error:
            self._fail(error)
            raise
        others = self._others_joining()
        with_named = named is not None and self._num_live[True] > 0
        if not with_named and not self._num_live[False]:
            return None
        recomputes, self._recomputes = self._recomputes and with_named, self._recomputes and not with_named
        # A stable order by length, as in request mode.
        joining = sorted([*(named or ()), *others], key=lambda each: (each.lane, len(each.row.prompt)))
        return TurnPlan(joining=joining, with_named=with_named, recomputes=recomputes)

    def _named_joining(self) -> list[TurnRow] | None:
        """Return the named rows that join now; None where named rows must stand still."""
        if self._is_frozen:
            return None
        if self._script:
            return self._scripted()
        if self._is_closing and self._spec.in_flight == "drain":
            return []
        line, free, groups = self._lines[True], self._spec.places - self._num_live[True], list[RowGroup]()
        while line and len(line[0].keys) <= free:
            free -= len(line[0].keys)
            groups.append(line.popleft())
        return self._joined(groups)

    def _scripted(self) -> list[TurnRow] | None:
        while self._script and self._script.next.turn <= self._turns:
            entry = self._script.next
            if entry.turn < self._turns or entry.number != self._events.count:
                raise self._script.lost(turn=self._turns, number=self._events.count, num_live=self._num_live[True])
            if entry.kind == "swap":
                return None
            if entry.kind == "leave":
                self._script.take()
                self._drop({group.name: group for group in self._live.values() if group.name in entry.groups}.values())
                continue
            waiting = {group.name: group for group in self._lines[True]}
            if any(name not in waiting for name in entry.groups):
                return None
            self._script.take()
            groups_in_order = [waiting[name] for name in entry.groups]
            for group in groups_in_order:
                self._lines[True].remove(group)
            return self._joined(groups_in_order)
        if self._script and not self._num_live[True]:
            raise self._script.lost(turn=self._turns, number=self._events.count, num_live=0)
        return []

    def _joined(self, groups: Sequence[RowGroup]) -> list[TurnRow]:
        if not groups:
            return []
        self._events.add("join", turn=self._turns, groups=tuple(group.name for group in groups))
        return [self._join_row(group) for group in groups for _ in group.keys]

    def _others_joining(self) -> list[TurnRow]:
        """Return rows without names that join now, as many as there is room for."""
        line, free, found = self._lines[False], self._spec.places - self._num_live[False], list[TurnRow]()
        for group in list(line):
            if len(found) == free:
                break
            if self._is_frozen or (self._is_closing and not group.stream.has_begun):
                continue
            # Rows of a feed need not have one version: each waits for new weights by itself.
            group.stream.has_begun = not group.stream.is_feed
            while group.waiting and len(found) < free:
                found.append(self._join_row(group))
            if not group.waiting:
                line.remove(group)
        return found

    def _join_row(self, group: RowGroup) -> TurnRow:
        row = group.waiting.popleft()
        if not group.spans:
            group.joined = time.monotonic()
        group.live.add(row.key)
        adapter = row.row.adapter
        if adapter is None and self._spec.in_flight == "finish":
            adapter = group.stream.adapter_of(group, held=self._held)
        group.spans[row.key] = [(0, self._held if adapter is None else adapter)]
        self._live[row.key] = group
        self._num_live[bool(group.name)] += 1
        return row if adapter is None else replace(row, adapter=adapter)

    def _decode(self, turn: TurnPlan) -> None:
        """Decode a turn; an error fails every stream."""
        began = time.monotonic()
        try:
            if turn.recomputes:
                self._batch.recompute()
            if turn.joining:
                self._batch.join(turn.joining)
            keys = self._batch.turn(with_named=turn.with_named)
            with self._changed:
                self._turns += turn.with_named
                groups = self._settle(keys)
            outputs = [(group, group.with_spans(self._batch.take(group.request, group.keys))) for group in groups]
            with self._changed:
                for group, output in outputs:
                    # Not one that was aborted meanwhile.
                    if group in group.stream.open:
                        group.stream.open.remove(group)
                        group.stream.ended.append((group, output))
                        group.seconds = time.monotonic() - group.joined
                        if group.name:
                            self._load.group_seconds.append(group.seconds)
                self._gone = [group for group in self._gone if group not in groups]
        except BaseException as error:
            with self._changed:
                self._is_busy = False
                self._fail(error)
            if not isinstance(error, Exception):
                raise
        else:
            with self._changed:
                self._is_busy = False
                self._load.busy_s += time.monotonic() - began
                self._progressed()

    def _settle(self, keys: Collection[int]) -> list[RowGroup]:
        """Take ended rows off the live ones, and return the groups whose rows have all ended, in order."""
        found = dict[int, RowGroup]()
        for key in keys:
            group = self._live.pop(key)
            group.live.discard(key)
            self._num_live[bool(group.name)] -= 1
            if not group.live and not group.waiting:
                found[id(group)] = group
        return list(found.values())

    def _try_to_freeze(self) -> bool:
        """Freeze where nothing is left that must happen before, and return whether rows stand still."""
        if self._is_frozen or self._is_busy:
            return self._is_frozen
        if self._num_live[False] or any(group.stream.has_begun for group in self._lines[False]):
            return False
        if self._spec.in_flight == "drain" and self._num_live[True]:
            return False
        if not self._may_swap:
            return False
        self._is_frozen = True
        self._progressed()
        return True

    @property
    def _may_swap(self) -> bool:
        return self._script.allows_swap(turn=self._turns, number=self._events.count)

    def _swap(self, version: int) -> None:
        """Stamp the tokens that follow with another version."""
        self._script.take_swap(version)
        self._held = version
        self._events.add("swap", turn=self._turns, version=version)
        if self._spec.in_flight == "finish":
            return
        lengths = self._batch.lengths()
        for key, group in self._live.items():
            spans, start = group.spans[key], lengths.get(key, 0)
            if spans[-1][0] == start:
                spans.pop()
            spans.append((start, version))
        self._recomputes = self._spec.in_flight == "recompute" and bool(self._live)

    def _close(self, stream: StreamCall) -> None:
        """Take the rows of a stream out that nobody wants; with a script those stay that the script keeps."""
        with self._changed:
            if stream.is_closed:
                return
            stream.is_closed, stream.ended = True, []
            self._streams.remove(stream)
            kept = self._script.names
            for group in [*stream.open]:
                if group.name not in kept and not (self._script and group.name and group.live):
                    self._take_out(group)
            self._progressed()

    def _drop(self, groups: Collection[RowGroup]) -> None:
        if not groups:
            return
        names = tuple(group.name for group in groups if group.name)
        if names:
            self._events.add("leave", turn=self._turns, groups=names)
        lengths = self._batch.lengths()
        self._load.thrown_tokens += sum(lengths.get(key, 0) for group in groups for key in group.live)
        self._batch.drop([key for group in groups for key in group.keys])
        for group in groups:
            self._num_live[bool(group.name)] -= len(group.live)
            for key in group.live:
                del self._live[key]
            # So that the end of its stream does not let it leave again.
            group.live.clear()
            group.spans.clear()
        self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        """Let every stream raise the error; the batch is empty then."""
        keys = [key for stream in self._streams for group in stream.open for key in group.keys]
        for stream in self._streams:
            stream.failure, stream.open = stream.failure or error, []
        self._batch.drop([*keys, *self._live])
        self._live, self._num_live, self._gone = {}, {True: 0, False: 0}, []
        self._lines = {True: deque(), False: deque()}
        self._progressed()
