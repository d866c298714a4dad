"""`RowHistory` and `RunHistory`: the life of one row, and the totals of a run, as its event log tells them.

`nemo-rl data-plane`, `nemo-rl inspect RUN row KEY` and the page of `nemo-rl view` show them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from nemo_rl.data_plane.keys import cut_key
from nemo_rl.data_plane.ledger.events import expand_keys, names_key, read_events

__all__ = ["RowHistory", "histories_of_keys", "history_of_key", "read_history"]

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
