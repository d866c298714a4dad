"""The ledger's rules about claims: which rows a task may have, who holds them, and when they are done.

Called by `ledger.py` only. A row is handed to one consumer per task at a time; a consumer whose lease has ended learns
so (`LeaseExpired`) before anything changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TypeAlias

from nemo_rl.data_plane.keys import group_uid
from nemo_rl.data_plane.ledger.state import ClaimLease, Partition, TaskCursor
from nemo_rl.errors import LeaseExpired, SchemaMismatch, name_some

__all__ = [
    "Claims",
    "check_held",
    "explain",
    "finish_written",
    "overview",
    "parse",
    "pick_rows",
    "release",
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
