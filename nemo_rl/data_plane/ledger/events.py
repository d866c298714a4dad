"""What happened to rows: events of the ledger, and the history of one row.

`Recorder` is called by `ledger.py` after each change; it stays pure: an event is a dict of plain values that goes to
the sink given by the host and into the history of every live row that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from nemo_rl.data_plane.ledger.state import Partition, Row, TaskCursor

__all__ = ["Event", "EventSink", "Recorder", "explain_row"]

Event: TypeAlias = dict[str, object]
"""`event`, `t` (the ledger's seconds), `who` (client label), `stage`, `partition`, `keys`, and what its kind adds."""
EventSink: TypeAlias = Callable[[Event], None]

MAX_HISTORY = 64
"""Events remembered per live row: four times what a row sees in a step; of a longer life the middle is forgotten."""
KEPT_FIRST = 8
"""Of a longer life the first events stay: who made the row and what it was written with."""


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
        """Records one event.

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
    """One live row: owner, age, tags, what is written, what each task did with it, and its history."""
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
    """An event without its keys, with its age instead of the ledger's time."""
    keys, at = event["keys"], event["t"]
    assert isinstance(keys, Sequence) and isinstance(at, float | int)
    rest = {name: value for name, value in event.items() if name not in ("keys", "t")}
    return {**rest, "rows": len(keys), "age_s": now - at}
