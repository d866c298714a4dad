"""What an event log says: the history of one sample, and the totals of a run. Read by `nemo_rl.cli.data_plane`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from nemo_rl.data_plane.ledger.events import expand_keys, names_key, read_events

__all__ = ["RowHistory", "RunHistory", "history_of_key", "read_history"]

TRAIN_STAGE = "train"


@dataclass(frozen=True, slots=True)
class RowHistory:
    """The events that name one key, in order."""

    key: str
    events: list[dict[str, object]]

    @property
    def outcome(self) -> str:
        """Trained, dropped and why, or still live."""
        reads = [e for e in self.events if e["event"] == "read" and e.get("stage") == TRAIN_STAGE]
        end = self.events[-1] if self.events[-1]["event"] == "clear" else None
        reason = f"{end.get('reason') or 'no reason given'}" if end is not None else ""
        if reads:
            readers = sorted({str(event["who"]) for event in reads})
            return f"trained by {', '.join(readers)}; " + (f"cleared: {reason}" if end else "not cleared yet")
        return f"dropped: {reason}" if end else "live, not trained yet"

    def lines(self) -> list[str]:
        """One line per event, then the outcome."""
        is_made = False
        lines = [f"{self.key} in partition {self.events[0]['partition']}"]
        for event in self.events:
            is_first_put = event["event"] == "commit" and not is_made
            is_made = event["event"] != "clear" and (is_made or is_first_put)
            lines.append(f"  {_clock(event)}  {'made' if is_first_put else event['event']:<8} {_details(event)}")
        return [*lines, f"outcome: {self.outcome}"]


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
        if kind in ("open", "register"):
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
        """For machines."""
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
        """For people."""
        num_left = sum(map(len, self.left.values()))
        return [
            f"run {self.run_id}, ended; {self.last - self.first:.1f} s from the first event to the last",
            f"  rows made {self.made:,}, bytes put {self.put_bytes:,}, rows never cleared {num_left:,}",
            *(f"  {count:>8,} rows cleared: {reason}" for reason, count in self.cleared.most_common()),
            *(f"  {count:>8,} x {kind}" for kind, count in self.counts.most_common()),
        ]


def read_history(path: Path) -> RunHistory:
    """The totals of the last run in an event log."""
    history = RunHistory()
    for event in read_events(path):
        if event["event"] == "open":
            history = RunHistory()
        history.add(event)
    return history


def history_of_key(path: Path, key: str) -> RowHistory | None:
    """The life of one key; None when no event names it."""
    events = [event for event in read_events(path) if names_key(event, key)]
    return RowHistory(key, events) if events else None


def _clock(event: Mapping[str, object]) -> str:
    at = event["time"]
    assert isinstance(at, float | int)
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def _details(event: Mapping[str, object]) -> str:
    """Who, for which stage or task, which fields, and why."""
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
