"""The ledger's rules about claims: which rows a task may have, who holds them, and when they are done.

Called by `ledger.py` only. A row is handed to one consumer per task at a time; a consumer whose lease has ended learns
so (`LeaseExpired`) before anything changes.

The ledger's answer to a read: the chunks that hold the bytes of the rows.

Called by `ledger.py` only. The answer names every row and every field asked for, or it is an error.

Arguments of requests to the ledger, checked for their kind: text, numbers, lists and records.

Used by `ledger`. A request of another kind is an error of its client, told as an assertion that names the argument.

`KeyedRows`: rows whose columns the store keeps under the rows' own keys, where a place can be written once only.

Called by `ledger.py` only, for stores that have a `ColumnStore`. A put announces itself (`begin`) before its bytes go
to the store and is told which families it may write in place: those that no put has ever touched for these rows. All
others go to chunks, so no reader ever meets a value that is being replaced. The one invariant: a row is freed in the
store only when it is cleared and no announced put of it is under way, and it is not written again before it is freed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import TypeAlias

from nemo_rl.data_plane.keys import group_uid
from nemo_rl.data_plane.ledger.state import Chunk, ClaimLease, FamilyColumn, Partition, TaskCursor
from nemo_rl.errors import FieldNotProduced, LeaseExpired, SchemaMismatch, VersionMismatch, name_some

__all__ = [
    "Claims",
    "KeyedRows",
    "check_held",
    "explain",
    "finish_written",
    "form",
    "lacking",
    "locate",
    "number",
    "overview",
    "parse",
    "pick_rows",
    "records",
    "release",
    "seconds",
    "text",
    "texts",
    "versions_of",
]


Claims: TypeAlias = Mapping[str, Mapping[str, int]]
"""Task -> key -> claim id: what the caller believes to hold, by its meta or as the client that claimed."""

MAX_GROUPS_NAMED = 5
"""Waiting groups that the text of a deadline names."""


def parse(claims: object) -> Claims:
    """Return the `claims` argument of a request."""
    assert isinstance(claims, dict), f"claims: expected a dict, got {claims!r}"
    return claims


def pick_rows(
    partition: Partition,
    cursor: TaskCursor,
    *,
    needed: Mapping[str, frozenset[str]],
    batch_size: int,
    groups: Sequence[str] = (),
) -> list[str]:
    """Pick up to `batch_size` pending rows that have every needed field; whole groups if the partition says so.

    Args:
        groups: uids of the only groups to pick from, in this order; none: all groups, first come first served.
    """
    if partition.group_size is not None:
        return _pick_groups(partition, cursor, needed, batch_size=batch_size, groups=groups)
    pending: Iterable[str] = cursor.pending
    if groups:
        named = [uid for uid in dict.fromkeys(groups) if uid in partition.groups]
        pending = (key for uid in named for key in _rows_left(partition, cursor, uid))
        pending = (key for key in pending if key in cursor.pending)
    return list(islice((key for key in pending if partition.is_ready(key, needed)), batch_size))


def versions_of(partition: Partition, keys: Sequence[str], families: Iterable[str]) -> dict[str, int | list[int]]:
    """Return family -> its version, or one per row where the rows were not written together."""
    found: dict[str, int | list[int]] = {}
    for family in families:
        column = partition.columns[family]
        each = [column.version_of(key) for key in keys]
        found[family] = each[0] if len(set(each)) == 1 else each
    return found


def _pick_groups(
    partition: Partition,
    cursor: TaskCursor,
    needed: Mapping[str, frozenset[str]],
    *,
    batch_size: int,
    groups: Sequence[str],
) -> list[str]:
    assert partition.group_size is not None
    if batch_size < partition.group_size:
        raise SchemaMismatch(
            f"claims hand out whole groups of {partition.group_size} rows, but batch_size is {batch_size}; "
            "ask for at least one group"
        )
    picked: list[str] = []
    found = [uid for uid in groups if uid in partition.groups] if groups else map(group_uid, cursor.pending)
    for uid in dict.fromkeys(found):
        keys = _rows_left(partition, cursor, uid)
        if _why_group_waits(partition, cursor, uid, needed) is not None:
            continue
        if len(picked) + len(keys) > batch_size:
            break
        picked += keys
    return picked


def _rows_left(partition: Partition, cursor: TaskCursor, uid: str) -> list[str]:
    return [key for key in partition.groups[uid].keys if key not in cursor.done]


def _why_group_waits(
    partition: Partition, cursor: TaskCursor, uid: str, needed: Mapping[str, frozenset[str]]
) -> str | None:
    """Return what a group lacks before it can be claimed, in words; None when it can be claimed."""
    assert partition.group_size is not None
    group, keys = partition.groups[uid], _rows_left(partition, cursor, uid)
    if len(group.put) < partition.group_size:
        return f"{len(group.put)} of {partition.group_size} rows were put"
    held = sum(key not in cursor.pending for key in keys)
    if held:
        return f"{held} of {len(keys)} rows are claimed"
    late = sum(not partition.is_ready(key, needed) for key in keys)
    return f"{late} of {len(keys)} rows are not written" if late else None


def explain(
    partition: Partition, cursor: TaskCursor, *, needed: Mapping[str, frozenset[str]], now: float
) -> dict[str, object]:
    """Explain why no row can be claimed, for the text of a deadline error."""
    late: Counter[str] = Counter()
    for key in cursor.pending:
        for family, names in needed.items():
            column = partition.columns[family]
            late.update(name for name in names if not column.has(key, frozenset((name,))))
    waiting = [] if partition.group_size is None else list(dict.fromkeys(group_uid(key) for key in cursor.pending))
    leases = {id(lease): lease for lease in cursor.leases.values() if not lease.has_expired}.values()
    return {
        "live": len(partition.rows),
        "pending": len(cursor.pending),
        "done": len(cursor.done),
        "not_written": dict(late),
        "groups": [
            [uid, _why_group_waits(partition, cursor, uid, needed) or "more rows than batch_size"]
            for uid in waiting[:MAX_GROUPS_NAMED]
        ],
        "num_groups": len(waiting),
        "holders": [[lease.consumer_id, len(lease.keys), now - lease.taken] for lease in leases],
    }


def overview(
    partitions: Iterable[Partition], claims: Iterable[tuple[str, str, ClaimLease]], *, now: float
) -> dict[str, object]:
    """Return live rows by task and state, and the claims that hold; a lease past its time holds none."""
    held = [claim for claim in claims if claim[2].keys and claim[2].expires > now]
    leased: Counter[tuple[str, str]] = Counter()
    for partition_id, task_name, lease in held:
        leased[partition_id, task_name] += len(lease.keys)
    tasks = {
        p.name: {
            name: {
                "pending": len(p.rows) - len(cursor.done) - leased[p.name, name],
                "leased": leased[p.name, name],
                "done": len(cursor.done),
            }
            for name, cursor in p.tasks.items()
        }
        for p in partitions
    }
    shown = [[partition_id, task, lease.consumer_id, len(lease.keys)] for partition_id, task, lease in held]
    return {"tasks": tasks, "claims": shown}


def check_held(partition: Partition, keys: Sequence[str], claims: Claims, *, now: float) -> None:
    """Raise when the caller's lease of a row is over: handed on, finished by another, cleared, or not renewed."""
    for task_name, held in claims.items():
        cursor = partition.tasks.get(task_name)
        if cursor is not None:
            _check_owner(cursor, task_name, {key: held[key] for key in keys if key in held}, now=now)


def _check_owner(cursor: TaskCursor, task_name: str, held: Mapping[str, int], *, now: float) -> None:
    lost: list[str] = []
    owners: set[str] = set()
    for key, claim_id in held.items():
        lease = cursor.leases.get(key)
        if lease is not None and lease.claim_id == claim_id:
            if lease.expires > now:
                continue
            owners.add(f"nobody yet: no heartbeat came for {now - lease.expires:.1f} s beyond the lease")
        elif lease is not None:
            owners.add(f"consumer {lease.consumer_id!r}")
        elif cursor.done.get(key) in (claim_id, 0):
            continue
        else:
            owners.add("a consumer that finished them" if key in cursor.done else "nobody: they were cleared")
        lost.append(key)
    if lost:
        raise LeaseExpired(
            f"task {task_name!r}: the claim on {len(lost)} rows has ended; they went to "
            f"{name_some(sorted(owners))}: {name_some(lost)}; drop this work, or raise data_plane.lease_s"
        )


def finish_written(partition: Partition, keys: Sequence[str], written: frozenset[str]) -> None:
    """Writing a task's fields is the signal that its stage is done for these rows."""
    for cursor in partition.tasks.values():
        if not cursor.writes & written:
            continue
        needed = {} if cursor.writes <= written else partition.by_family(cursor.writes)
        for key in keys:
            if key not in cursor.done and partition.is_ready(key, needed):
                cursor.finish(key)


def release(partition: Partition, task_name: str, *, keys: Sequence[str], claims: Claims, now: float) -> list[str]:
    """Return the rows that a release finishes; those that are done or cleared already are skipped.

    Raises:
        LeaseExpired: a row is under another claim than the caller's, or under none.
    """
    cursor = partition.tasks[task_name]
    held = claims.get(task_name, {})
    live = [key for key in keys if key in partition.rows]
    _check_owner(cursor, task_name, {key: held[key] for key in live if key in held}, now=now)
    unfinished = [key for key in live if key not in cursor.done]
    unclaimed = [key for key in unfinished if key not in held]
    if unclaimed:
        is_held = any(key in cursor.leases and cursor.leases[key].expires > now for key in unclaimed)
        raise LeaseExpired(
            f"task {task_name!r}: rows are not claimed by {'the caller' if is_held else 'anybody'}: "
            f"{name_some(unclaimed)}; release the meta that get_meta returned"
        )
    return unfinished


def locate(
    partition: Partition, keys: Sequence[str], fields: Sequence[str], *, expected: Mapping[str, int | Sequence[int]]
) -> dict[str, object]:
    """Return chunks, runs of rows in them, and the types of the columns.

    Raises:
        FieldNotProduced: a field is not written for every row. VersionMismatch: a family has another version than the
            caller expects.
    """
    needed = partition.by_family(fields)
    places = {family: _whole_rows(partition.columns[family], keys, names) for family, names in needed.items()}
    for family, names in needed.items():
        if places[family] is None:
            _check_written(partition, keys, family, names)
    for family, cells in places.items():
        if family in expected:
            _check_version(partition, keys, family, cells, expected[family])
    table: dict[Chunk, int] = {}
    placements: list[dict[str, object]] = []
    for family, names in needed.items():
        cells = places[family]
        if cells is not None:
            placements.append({"fields": sorted(names), "runs": _runs(cells, table)})
            continue
        column = partition.columns[family]
        for name in sorted(names):
            placements.append({"fields": [name], "runs": _runs((column.place_of(k, name) for k in keys), table)})
    column_types = {name: [*partition.column_types[name]] for name in fields if name in partition.column_types}
    chunks = [chunk.chunk_id for chunk in table]
    more: dict[str, object] = {}
    if any(chunk.form for chunk in table):
        more["forms"] = [dict(chunk.form) for chunk in table]
    if any(chunk.is_keyed for chunk in table):
        more |= _mark_keyed(placements, list(table))
    return {"chunks": chunks, "placements": placements, "column_types": column_types, **more}


def _mark_keyed(placements: list[dict[str, object]], chunks: Sequence[Chunk]) -> dict[str, object]:
    """Add to each placement how many bytes its cells under the rows' keys have; return which chunks stand for such."""
    for placement in placements:
        runs, fields = placement["runs"], placement["fields"]
        assert isinstance(runs, list) and isinstance(fields, list)
        placement["sizes"] = {
            name: [
                size
                for number, first, count in runs
                if (chunk := chunks[number]).is_keyed
                for size in (chunk.size_of(name, at) for at in range(first, first + count))
            ]
            for name in fields
        }
    return {"keyed": [i for i, chunk in enumerate(chunks) if chunk.is_keyed]}


def _whole_rows(column: FamilyColumn, keys: Sequence[str], names: frozenset[str]) -> list[tuple[Chunk, int]] | None:
    """Chunk and index of each row, or None when a row lacks a field or has its fields in several chunks."""
    whole = column.whole
    try:
        cells = [whole[key] for key in keys]
    except KeyError:
        return None
    return cells if all(names <= chunk.fields for chunk in {chunk for chunk, _ in cells}) else None


def _check_written(partition: Partition, keys: Sequence[str], family: str, names: frozenset[str]) -> None:
    column = partition.columns[family]
    late = [key for key in keys if not column.has(key, names)]
    if late:
        missing = [name for name in sorted(names) if not all(column.has(key, frozenset((name,))) for key in late)]
        raise FieldNotProduced(
            f"partition {partition.name!r}: fields {', '.join(missing)} are not written yet for {len(late)} of "
            f"{len(keys)} rows: {name_some(late)}"
        )


def _check_version(
    partition: Partition,
    keys: Sequence[str],
    family: str,
    cells: list[tuple[Chunk, int]] | None,
    expected: int | Sequence[int],
) -> None:
    if isinstance(expected, int):
        if cells is not None and all(chunk.version == expected for chunk in {chunk for chunk, _ in cells}):
            return
        expected = [expected] * len(keys)
    column = partition.columns[family]
    other = [(key, wanted) for key, wanted in zip(keys, expected, strict=True) if column.version_of(key) != wanted]
    if other:
        key, wanted = other[0]
        raise VersionMismatch(
            f"partition {partition.name!r}: family {family!r} was rewritten: the meta names version {wanted}, the "
            f"ledger holds {column.version_of(key)} for {name_some(key for key, _ in other)}; "
            "use the meta that the rewriting put returned"
        )


def _runs(cells: Iterable[tuple[Chunk, int]], table: dict[Chunk, int]) -> list[list[int]]:
    """Return rows as runs `[chunk, first row, rows]`, in order; `table` numbers the chunks."""
    runs: list[list[int]] = []
    run: list[int] = []
    last: Chunk | None = None
    expected = -1
    for chunk, index in cells:
        if chunk is last and index == expected:
            run[2] += 1
        else:
            run = [table.setdefault(chunk, len(table)), index, 1]
            runs.append(run)
            last = chunk
        expected = index + 1
    return runs


def form(record: Mapping[str, object]) -> dict[str, bytes]:
    form = record.get("form", {})
    assert isinstance(form, dict), f"form: expected a dict, got {form!r}"
    return form


def text(args: Mapping[str, object], name: str) -> str:
    value = args[name]
    assert isinstance(value, str), f"{name}: expected a string, got {value!r}"
    return value


def number(args: Mapping[str, object], name: str) -> int:
    value = args[name]
    assert isinstance(value, int), f"{name}: expected an integer, got {value!r}"
    return value


def seconds(args: Mapping[str, object], name: str) -> float:
    value = args.get(name, 0.0)
    assert isinstance(value, int | float), f"{name}: expected seconds, got {value!r}"
    return float(value)


def texts(args: Mapping[str, object], name: str) -> list[str]:
    value = args[name]
    assert isinstance(value, list), f"{name}: expected a list, got {value!r}"
    return value


def records(args: Mapping[str, object], name: str) -> list[dict[str, object]]:
    value = args[name]
    assert isinstance(value, list), f"{name}: expected a list, got {value!r}"
    return value


FREE_AGAIN_S = 60.0
"""A row that was handed out to be freed, without an answer, is handed out again after so long: its client has died."""


@dataclass(frozen=True, slots=True)
class _PutUnderWay:
    keys: Sequence[str]
    expires: float
    """Seconds of the host's clock at which it counts as dead."""


@dataclass(slots=True)
class KeyedRows:
    """The puts under way and the rows left in the store, of one partition. It outlives the partition's declaration."""

    _touched: dict[str, set[str]] = field(default_factory=dict)
    """Field -> rows where a put of this run has written it, or was about to, since they were last freed."""
    _puts: dict[int, _PutUnderWay] = field(default_factory=dict)
    _busy: Counter[str] = field(default_factory=Counter)
    """Announced puts of each row."""
    _leaving: dict[str, float] = field(default_factory=dict)
    """Rows that are cleared, but not freed yet -> when they are handed out to be freed."""
    _num_puts: int = 0

    def begin(
        self,
        live: Collection[str],
        keys: Sequence[str],
        families: Mapping[str, Sequence[str]],
        *,
        now: float,
        lasts_s: float,
    ) -> dict[str, object]:
        """Announce a put: the families that it may write in place, or `blocked`.

        Args:
            live: rows of the partition.
            families: family -> fields that the put writes.
            lasts_s: seconds after which the put counts as dead.
        """
        self.expire(live, now)
        waiting = sum(map(self._leaving.__contains__, keys))
        if waiting:
            return {"blocked": f"{waiting} rows are still being freed", "free": self.due(now)}
        in_place = [
            family
            for family, fields in families.items()
            if all(self._touched.setdefault(name, set()).isdisjoint(keys) for name in fields)
        ]
        for family in in_place:
            self.touch(families[family], keys)
        self._num_puts += 1
        self._puts[self._num_puts] = _PutUnderWay(keys, now + lasts_s)
        self._busy.update(keys)
        return {"put": self._num_puts, "in_place": in_place}

    def touch(self, fields: Iterable[str], keys: Sequence[str]) -> None:
        """Never write these again in place, nor take them for another program's."""
        for name in fields:
            self._touched.setdefault(name, set()).update(keys)

    def is_under_way(self, put: int) -> bool:
        return put in self._puts

    def end(self, put: int, live: Collection[str], now: float) -> None:
        """The put writes nothing any more; those of its rows that do not live are freed."""
        announced = self._puts.pop(put, None)
        if announced is None:
            return
        self._busy.subtract(announced.keys)
        for key in announced.keys:
            if self._busy[key]:
                continue
            del self._busy[key]
            if key in live:
                self._leaving.pop(key, None)  # cleared and made anew by a put that was under way
            else:
                self._leaving[key] = now

    def clear(self, live: Collection[str], keys: Iterable[str], now: float) -> list[str]:
        """The rows are gone; those that a put still writes are freed when it ends. Return what is due."""
        self.expire(live, now)
        self._leaving.update((key, inf if key in self._busy else now) for key in keys)
        return self.due(now)

    def due(self, now: float) -> list[str]:
        if not self._leaving:
            return []
        keys = [key for key, due in self._leaving.items() if due <= now]
        self._leaving.update(dict.fromkeys(keys, now + FREE_AGAIN_S))
        return keys

    def freed(self, keys: Sequence[str]) -> None:
        """The store has nothing of these rows any more."""
        confirmed = {key for key in keys if self._leaving.get(key, inf) < inf}
        for key in confirmed:
            del self._leaving[key]
        for touched in self._touched.values():
            touched.difference_update(confirmed)

    def strangers(self, live: Collection[str], keys: Iterable[str]) -> list[str]:
        return [key for key in keys if key not in live and key not in self._busy and key not in self._leaving]

    def untouched(self, name: str, keys: Iterable[str]) -> list[str]:
        """Return the rows where no put of this run has written the field, so that another program may have."""
        touched = self._touched.get(name, set())
        return [key for key in keys if key not in touched]

    def expire(self, live: Collection[str], now: float) -> None:
        """End the announced puts whose writers must have died."""
        for put in [number for number, announced in self._puts.items() if announced.expires <= now]:
            self.end(put, live, now)


def lacking(
    partition: Partition, keyed: KeyedRows, fields: Sequence[str], keys: Sequence[str] | None
) -> dict[str, list[str]]:
    """Return field -> live rows that lack it and where only another program can have written it."""
    rows = list(partition.rows) if keys is None else [key for key in keys if key in partition.rows]
    found: dict[str, list[str]] = {}
    for name in fields:
        column = partition.columns[partition.specs[name].family]
        wanted = frozenset((name,))
        late = keyed.untouched(name, [key for key in rows if not column.has(key, wanted)])
        if late:
            found[name] = late
    return found
