"""Events of rows: who records them, the history of one row, and `data_plane_events.jsonl`.

`Recorder` is called by `ledger.py` after each change; it stays pure: an event is a dict of plain values that goes to
the sink given by the host and into the history of every live row that it names. `host.build_service` gives an
`EventLog` as the sink, one JSON line per event; `nemo-rl data-plane` reads the file, during the run and after it. The
thread of the ledger only queues an event; another one makes its keys compact and writes it.

`RowHistory` and `RunHistory`: the life of one row, and the totals of a run, as its event log tells them.

`nemo-rl data-plane`, `nemo-rl inspect RUN row KEY` and the page of `nemo-rl view` show them.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from nemo_rl.data_plane.keys import cut_key, index_of, key_of, split_key
from nemo_rl.data_plane.ledger.state import Partition, Row, TaskCursor
from nemo_rl.errors import UserError, boundary, shorten
from nemo_rl.utils.files import read_tail

__all__ = [
    "EVENTS_FILE",
    "Event",
    "EventLog",
    "EventSink",
    "Recorder",
    "RowHistory",
    "compact_keys",
    "expand_keys",
    "explain_row",
    "histories_of_keys",
    "history_of_key",
    "names_key",
    "read_events",
    "read_history",
]

logger = logging.getLogger(__name__)


Event: TypeAlias = dict[str, object]
"""`event`, `t` (the ledger's seconds), `who` (client label), `stage`, `partition`, `keys`, and what its kind adds."""
EventSink: TypeAlias = Callable[[Event], None]

MAX_HISTORY = 64
"""Events remembered per live row: four times what a row sees in a step; of a longer life the middle is forgotten."""
KEPT_FIRST = 8
"""First events of a longer life that are kept: who made the row and what it was written with."""


class Recorder:
    """Makes events and hands them on; does nothing without a sink."""

    def __init__(self, sink: EventSink | None) -> None:
        self._sink = sink
        self.is_on = sink is not None

    def __call__(
        self,
        kind: str,
        args: Mapping[str, object],
        keys: Sequence[str],
        now: float,
        *,
        rows: Mapping[str, Row] | None = None,
        **more: object,
    ) -> None:
        """Record one event.

        Args:
            args: the request that caused it.
            rows: rows of the partition; those named by `keys` remember the event.
        """
        if self._sink is None:
            return
        event: Event = {
            "event": kind,
            "t": now,
            "who": args.get("who", ""),
            "stage": args.get("stage", ""),
            "partition": args["partition"],
            "keys": keys,
            **more,
        }
        for key in keys if rows is not None else ():
            history = rows[key].history  # type: ignore[index]
            history.append(event)
            if len(history) > MAX_HISTORY:
                del history[KEPT_FIRST]
        self._sink(event)


def explain_row(partition: Partition, key: str, *, now: float) -> Event:
    """Return one live row: owner, age, tags, what is written, what each task did with it, and its history."""
    row = partition.rows[key]
    written: dict[str, object] = {}
    for name, spec in partition.specs.items():
        column = partition.columns[spec.family]
        if column.has(key, frozenset((name,))):
            chunk, _ = column.place_of(key, name)
            written[name] = {"version": column.version_of(key), "chunk": chunk.chunk_id}
    return {
        "partition": partition.name,
        "key": key,
        "owner": row.owner,
        "age_s": now - row.put_at,
        "length": row.length,
        "tags": {name: values[key] for name, values in partition.tags.items() if key in values},
        "fields": written,
        "tasks": {name: _task_state(cursor, key) for name, cursor in partition.tasks.items()},
        "history": [_shown(event, now) for event in row.history],
    }


def _task_state(cursor: TaskCursor, key: str) -> str:
    lease = cursor.leases.get(key)
    if key in cursor.done:
        return "done"
    if lease is None:
        return "pending"
    return f"{'expired claim of' if lease.has_expired else 'claimed by'} {lease.consumer_id}"


def _shown(event: Mapping[str, object], now: float) -> Event:
    """Return an event without its keys, with its age instead of the ledger's time."""
    keys, at = event["keys"], event["t"]
    assert isinstance(keys, Sequence) and isinstance(at, float | int)
    rest = {name: value for name, value in event.items() if name not in ("keys", "t")}
    return {**rest, "rows": len(keys), "age_s": now - at}


EVENTS_FILE = "data_plane_events.jsonl"
FLUSH_POLL_S = 0.5
TAIL_BYTES = 1 << 16
"""More than almost every line has."""


class EventLog:
    """The sink of a ledger's events; appends, so that a resumed run continues the file."""

    def __init__(self, path: Path, *, run_id: str, goes_on: bool = False) -> None:
        """Args:
        goes_on: the ledger has come back, and its events with it.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        last = _cut_torn_line(path)
        number = json.loads(last).get("n", 0) if goes_on and last else 0
        assert isinstance(number, int), f"malformed event: {last!r}"
        self.last_number = number
        """The highest number (`n`) of an event in the file, where a recovered ledger numbers them."""
        self._file = path.open("a", encoding="utf-8")
        self._queue: queue.SimpleQueue[tuple[float, Event] | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="data-plane-events", daemon=True)
        self._thread.start()
        if not goes_on:
            self({"event": "open", "run": run_id, "keys": ()})
            self.flush()

    def __call__(self, event: Event, *, age_s: float = 0.0) -> None:
        self._queue.put((time.time() - age_s, event))

    def flush(self) -> None:
        """Return when what is queued is in the file, or cannot be written."""
        written = threading.Event()
        self._queue.put(written)
        while not written.wait(FLUSH_POLL_S) and self._thread.is_alive():
            continue

    def close(self) -> None:
        """Write what is queued and end the thread. Idempotent."""
        self._queue.put(None)
        self._thread.join()
        self._file.close()

    def _write(self) -> None:
        while (queued := self._queue.get()) is not None:
            try:
                if isinstance(queued, threading.Event):
                    self._file.flush()
                    queued.set()
                    continue
                self._file.write(_line(*queued))
                if self._queue.empty():
                    self._file.flush()
            except OSError as error:
                logger.warning("%s: events are no longer written: %s", self.path, error)
                return


def compact_keys(keys: Iterable[str]) -> dict[str, object]:
    """Return keys by group: `groups` (uid -> indices as ranges) and, for keys of another form, `keys`.

    Example:
        >>> compact_keys(["a_g0", "a_g1", "a_g3", "solo"])
        {'groups': {'a': '0-1,3'}, 'keys': ['solo']}
    """
    groups: dict[str, list[str]] = {}
    for key in keys:
        uid, index = cut_key(key)
        groups.setdefault(uid, []).append(index if uid else key)
    packed: dict[str, str] = {}
    others = groups.pop("", [])  # keys without a mark, and keys that start with it
    for uid, indices in groups.items():
        ranges = _ranges(tuple(indices))
        if ranges is None:
            others += [key_of(uid, index) for index in indices]
        else:
            packed[uid] = ranges
    return {name: value for name, value in {"groups": packed, "keys": others}.items() if value}


def expand_keys(event: Mapping[str, object]) -> list[str]:
    groups, others = _groups(event), event.get("keys", [])
    assert isinstance(others, list), f"malformed event: {event}"
    return [key_of(uid, i) for uid, ranges in groups.items() for i in _indices(ranges)] + others


def names_key(event: Mapping[str, object], key: str) -> bool:
    """Return whether an event of the file names `key`."""
    others, parts = event.get("keys", []), split_key(key)
    assert isinstance(others, list), f"malformed event: {event}"
    ranges = None if parts is None else _groups(event).get(parts[0])
    return key in others or (ranges is not None and parts is not None and parts[1] in _indices(ranges))


def read_events(path: Path) -> Iterator[dict[str, object]]:
    """Yield the events of a file; a last line that was cut off by a kill is left out.

    Raises:
        UserError: a line is no event; its number is named.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.endswith(b"\n"):
                with boundary(UserError, f"{path}: line {number}: expected an event of the data plane"):
                    event = _event(line)
                yield event


def _event(line: bytes) -> dict[str, object]:
    event = json.loads(line)
    if not (isinstance(event, dict) and isinstance(event.get("event"), str)):
        raise ValueError(f"got {shorten(repr(line))}")
    if not isinstance(event.get("time"), float | int):
        raise ValueError(f"got no time in {shorten(repr(line))}")
    return event


def _cut_torn_line(path: Path) -> bytes:
    """Cut off what a kill has left of a last line, so that the next one starts anew; return the last whole line."""
    if not path.exists():
        return b""
    size, wanted = path.stat().st_size, TAIL_BYTES
    tail = read_tail(path, wanted)
    while tail.count(b"\n") < 2 and wanted < size:
        wanted *= 4
        tail = read_tail(path, wanted)
    whole = tail[: tail.rfind(b"\n") + 1]
    if len(whole) < len(tail):
        os.truncate(path, size - len(tail) + len(whole))
    return whole[:-1].rpartition(b"\n")[2]


def _line(at: float, event: Event) -> str:
    keys = event["keys"]
    assert isinstance(keys, Sequence)
    rest = {name: value for name, value in event.items() if name not in ("keys", "t") and value != ""}
    shown = {"time": round(at, 4), **rest, "rows": len(keys), **compact_keys(keys)}
    return json.dumps(shown, separators=(",", ":")) + "\n"


@lru_cache(maxsize=4096)  # whole groups come again and again
def _ranges(indices: tuple[str, ...]) -> str | None:
    """`0-3,7` of ("0", "1", "2", "3", "7") in any order; None when one of them is no plain number."""
    numbers = sorted(number for number in map(index_of, indices) if number is not None)
    if len(numbers) < len(indices):
        return None
    ranges: list[str] = []
    first = last = numbers[0]
    for number in [*numbers[1:], -1]:
        if number == last + 1:
            last = number
            continue
        ranges.append(str(first) if first == last else f"{first}-{last}")
        first = last = number
    return ",".join(ranges)


def _indices(ranges: str) -> list[int]:
    found: list[int] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _groups(event: Mapping[str, object]) -> Mapping[str, str]:
    groups = event.get("groups", {})
    assert isinstance(groups, dict), f"malformed event: {event}"
    return groups


TRAIN_STAGE = "train"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowMoment:
    """An event in the life of a row, as people read it."""

    seconds: float
    """Seconds since 1970."""
    name: str
    details: str
    """The actor, the stage or task, the fields and the reason."""

    @property
    def clock(self) -> str:
        """Return date and time of this machine's zone, with milliseconds."""
        return datetime.fromtimestamp(self.seconds).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


@dataclass(frozen=True, slots=True)
class RowHistory:
    """The events that name one key, in order."""

    key: str
    events: list[dict[str, object]]

    @property
    def outcome(self) -> str:
        """Return the outcome: trained, dropped and why, or still live."""
        reads = [e for e in self.events if e["event"] == "read" and e.get("stage") == TRAIN_STAGE]
        end = self.events[-1] if self.events[-1]["event"] == "clear" else None
        reason = f"{end.get('reason') or 'no reason given'}" if end is not None else ""
        if reads:
            readers = sorted({str(event["who"]) for event in reads})
            return f"trained by {', '.join(readers)}; " + (f"cleared: {reason}" if end else "not cleared yet")
        return f"dropped: {reason}" if end else "live, not trained yet"

    @property
    def partition(self) -> str:
        return str(self.events[0]["partition"])

    def moments(self) -> Iterator[RowMoment]:
        is_made = False
        for event in self.events:
            is_first_put = event["event"] == "commit" and not is_made
            is_made = event["event"] != "clear" and (is_made or is_first_put)
            at = event["time"]
            assert isinstance(at, float | int), f"malformed event: {event}"
            name = "made" if is_first_put else str(event["event"])
            yield RowMoment(seconds=at, name=name, details=_details(event))

    def lines(self) -> list[str]:
        """Return one line per event, then the outcome."""
        moments = [f"  {moment.clock}  {moment.name:<8} {moment.details}" for moment in self.moments()]
        return [f"{self.key} in partition {self.partition}", *moments, f"outcome: {self.outcome}"]


@dataclass(slots=True)
class RunHistory:
    """Totals of the events of a run folder; the last run counts where several have written to it."""

    run_id: str = ""
    first: float = 0.0
    last: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    made: int = 0
    put_bytes: int = 0
    cleared: Counter[str] = field(default_factory=Counter)
    """Rows by reason."""
    left: dict[str, dict[str, None]] = field(default_factory=dict)
    """Partition -> keys that were never cleared."""

    def add(self, event: Mapping[str, object]) -> None:
        kind, at = str(event["event"]), event["time"]
        assert isinstance(at, float | int)
        self.counts[kind] += 1
        self.last = at
        if kind in ("open", "register", "recover"):
            self.first = self.first or at
            self.run_id = str(event.get("run", self.run_id))
            return
        rows, keys = self.left.setdefault(str(event["partition"]), {}), expand_keys(event)
        if kind == "commit":
            size = event["nbytes"]
            assert isinstance(size, int)
            self.put_bytes += size
            before = len(rows)
            rows.update(dict.fromkeys(keys))
            self.made += len(rows) - before
        elif kind == "clear":
            self.cleared[str(event.get("reason") or "no reason given")] += len(keys)
            for key in keys:
                rows.pop(key, None)

    def as_record(self) -> dict[str, object]:
        return {
            "run_id": self.run_id,
            "running": False,
            "seconds": self.last - self.first,
            "events": dict(self.counts),
            "rows_made": self.made,
            "put_bytes": self.put_bytes,
            "cleared": dict(self.cleared),
            "left": {name: list(rows) for name, rows in self.left.items() if rows},
        }

    def lines(self) -> list[str]:
        num_left = sum(map(len, self.left.values()))
        return [
            f"run {self.run_id}, ended; {self.last - self.first:.1f} s from the first event to the last",
            f"  rows made {self.made:,}, bytes put {self.put_bytes:,}, rows never cleared {num_left:,}",
            *(f"  {count:>8,} rows cleared: {reason}" for reason, count in self.cleared.most_common()),
            *(f"  {count:>8,} x {kind}" for kind, count in self.counts.most_common()),
        ]


def read_history(path: Path) -> RunHistory:
    """Return the totals of the last run in an event log.

    Raises:
        UserError: the file is damaged.
    """
    history = RunHistory()
    for event in read_events(path):
        if event["event"] == "open":
            history = RunHistory()
        history.add(event)
    return history


def history_of_key(path: Path, key: str) -> RowHistory | None:
    """Return the life of one key; None when no event names it.

    Raises:
        UserError: the file is damaged.
    """
    return histories_of_keys(path, [key]).get(key)


def histories_of_keys(path: Path, keys: Iterable[str]) -> dict[str, RowHistory]:
    """Return the lives of keys that events name, in one pass over the file.

    Raises:
        UserError: the file is damaged.
    """
    found: dict[str, list[dict[str, object]]] = {key: [] for key in keys}
    by_group: dict[str, list[str]] = {}
    for key in found:
        by_group.setdefault(cut_key(key)[0], []).append(key)
    for event in read_events(path):
        for key in _candidates(event, by_group):
            if names_key(event, key):
                found[key].append(event)
    return {key: RowHistory(key, events) for key, events in found.items() if events}


def _candidates(event: Mapping[str, object], by_group: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield those of many keys whose group an event names, or that have none: few, where an event has many."""
    groups = event.get("groups", {})
    assert isinstance(groups, dict), f"malformed event: {event}"
    named = by_group.keys() if event.get("keys") else by_group.keys() & groups.keys()
    return (key for uid in named for key in by_group[uid])


def _details(event: Mapping[str, object]) -> str:
    fields = event.get("fields")
    parts = [
        f"by {event['who']}" if event.get("who") else "",
        f"stage {event['stage']}" if event.get("stage") else "",
        f"task {event['task']}" if event.get("task") else "",
        f"consumer {event['by']}" if event.get("by") else "",
        f"fields {', '.join(map(str, fields))}" if isinstance(fields, Sequence) else "",
        f"with {event['rows']} rows in all",
        f"because: {event['reason']}" if event.get("reason") else "",
    ]
    return ", ".join(part for part in parts if part)
