"""The rules of one partition of the ledger: rows, versions, claims and groups. Slow and plain, from dicts.

They share no code with `nemo_rl.data_plane.ledger`. `ledger_specification` adds requests, chunks and capacity to them;
`PlaneModel` uses them for clients. A request that the rules forbid raises the error that the caller must see.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from nemo_rl.data_plane.keys import group_uid
from nemo_rl.errors import DataPlaneError, FieldNotProduced, KeysNotFound, LeaseExpired, SchemaMismatch, VersionMismatch

Claims: TypeAlias = Mapping[str, Mapping[str, int]]
"""Task -> key -> claim: what a caller believes to hold."""


class Difference(AssertionError):
    """Something was done that the rules do not allow."""


def demand(is_right: bool, rule: str) -> None:
    """Raise when a rule is broken."""
    if not is_right:
        raise Difference(rule)


@dataclass
class RowState:
    """One live row."""

    owner: str = ""
    put_at: float = 0.0
    length: int | None = None
    tags: dict[str, object] = field(default_factory=dict)
    cells: dict[str, object] = field(default_factory=dict)
    """Written field -> where its value is: chunk and index for the ledger, the value itself for `PlaneModel`."""
    versions: dict[str, int] = field(default_factory=dict)
    """Family -> version of what is written."""


@dataclass
class PartitionRules:
    """Rows in order of their first put, with what each task did with them."""

    families: Mapping[str, str]
    """Declared field -> the family it travels in."""
    writes: Mapping[str, Iterable[str]]
    """Task -> the declared fields that it writes."""
    group_size: int | None
    lease_s: float
    rows: dict[str, RowState] = field(default_factory=dict)
    leases: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    """(task, key) -> claim and the time at which it ends; it stays here until the row is handed on or done."""
    done: dict[tuple[str, str], int] = field(default_factory=dict)
    """(task, key) -> the claim under which it was done, 0 for none."""
    put_keys: dict[str, set[str]] = field(default_factory=dict)
    """Group -> different keys that were put since it has live rows, cleared ones included."""
    highest: dict[tuple[str, str], int] = field(default_factory=dict)
    """(key, family) -> the highest version it ever had, also before it was cleared."""

    # ---- writing

    def check_declared(self, fields: Iterable[str]) -> None:
        """A request that names a field that is not declared is refused and changes nothing."""
        if not self.families.keys() >= set(fields):
            raise DataPlaneError("a field is not declared")

    def check_put(
        self, keys: Sequence[str], *, lengths: Sequence[int] | None, claims: Claims, may_create: bool, now: float
    ) -> None:
        """A put is refused when a row has another length, when a claim that it comes under is lost, or when it may not
        create rows and one does not exist; in this order.
        """
        for key, length in zip(keys, lengths or (), strict=bool(lengths)):
            if key in self.rows and self.rows[key].length not in (None, length):
                raise SchemaMismatch("a row has another length")
        for task, held in claims.items():
            if task in self.writes and any(self.has_lost(task, key, held[key], now) for key in keys if key in held):
                raise LeaseExpired("a claim of the writer is lost")
        if not may_create and any(key not in self.rows for key in keys):
            raise KeysNotFound("late results do not bring rows back")

    def check_versions(self, keys: Sequence[str], fields: Iterable[str], versions: Mapping[str, int]) -> None:
        """A version names one content of a row's family for ever: a rewrite gets a new one, and so does a row that was
        cleared. Fields that are added to rows of one version leave that version as it is.
        """
        demand(versions.keys() == {self.families[name] for name in fields}, "a version for each family written")
        for family, version in versions.items():
            added = {name for name in fields if self.families[name] == family}
            rows = [self.rows.get(key, RowState()) for key in keys]
            before = {row.versions.get(family, 0) for row in rows}
            if len(before) == 1 and before != {0} and not any(added & row.cells.keys() for row in rows):
                demand(before == {version}, "fields that are added keep the version, so that metas stay good")
            for key, row in zip(keys, rows, strict=True):
                is_same = version == row.versions.get(family) and not added & row.cells.keys()
                is_new = version > self.highest.get((key, family), 0)
                demand(is_same or is_new, "an old meta never matches new rows")

    def put(self, keys: Sequence[str], cells: Mapping[str, Sequence[object]], versions: Mapping[str, int]) -> None:
        """All cells of a put are written at one moment. A row is done for a task once all that the task writes is
        there, under the claim that has the row at that moment, if any.
        """
        for i, key in enumerate(keys):
            row = self.rows.setdefault(key, RowState())
            self.put_keys.setdefault(group_uid(key), set()).add(key)
            row.cells |= {name: column[i] for name, column in cells.items()}
            row.versions |= versions
            self.highest |= {(key, family): version for family, version in versions.items()}
            for task, writes in self.writes.items():
                if cells.keys() & set(writes) and row.cells.keys() >= set(writes) and (task, key) not in self.done:
                    self._finish(task, key)

    # ---- reading

    def check_read(
        self, keys: Sequence[str], fields: Sequence[str], versions: Mapping[str, int | Sequence[int]]
    ) -> None:
        """A read is answered in full, or refused: a row does not exist, a field is not declared or not written, or a
        family has another version than the reader expects; in this order.
        """
        if any(key not in self.rows for key in keys):
            raise KeysNotFound("a row does not exist")
        self.check_declared(fields)
        if any(name not in self.rows[key].cells for key in keys for name in fields):
            raise FieldNotProduced("a field is not written")
        for family in {self.families[name] for name in fields} & versions.keys():
            wanted = versions[family]
            each = [wanted] * len(keys) if isinstance(wanted, int) else list(wanted)
            if self.versions_of(keys, family) != each:
                raise VersionMismatch("a family was rewritten")

    def versions_of(self, keys: Sequence[str], family: str) -> list[int]:
        return [self.rows[key].versions[family] for key in keys]

    # ---- claims

    def is_free(self, task: str, key: str, now: float) -> bool:
        """A row is free for a task until it is claimed, and again when the claim's lease has ended; never when done."""
        is_held = (task, key) in self.leases and self.leases[task, key][1] > now
        return (task, key) not in self.done and not is_held

    def claimable(
        self, task: str, fields: Sequence[str], count: int, *, groups: Sequence[str] = (), now: float
    ) -> list[str]:
        """A claim gets free rows that have all fields, in order of their first put, or of the groups that it names.

        With a group size it gets whole groups: as many different keys were put as the size, and every row that is not
        done is free and has the fields. It stops at the first such group that would be too much.
        """
        self.check_declared(fields)
        if self.group_size is not None and count < self.group_size:
            raise SchemaMismatch("a claim must have room for a group")
        named = [key for uid in dict.fromkeys(groups) for key in self.rows if group_uid(key) == uid]
        free = [key for key in (named if groups else self.rows) if self.is_free(task, key, now)]
        ready = [key for key in free if self.rows[key].cells.keys() >= set(fields)]
        if self.group_size is None:
            return ready[:count]
        picked: list[str] = []
        for uid in dict.fromkeys(map(group_uid, free)):
            left = [key for key in self.rows if group_uid(key) == uid and (task, key) not in self.done]
            if len(self.put_keys[uid]) < self.group_size or not set(left) <= set(ready):
                continue
            if len(picked) + len(left) > count:
                break
            picked += left
        return picked

    def lease(self, task: str, keys: Sequence[str], claim: int, now: float) -> None:
        """A claim is a lease: it ends after `lease_s` unless a heartbeat renews it."""
        self.leases |= {(task, key): (claim, now + self.lease_s) for key in keys}

    def renew(self, claim: int, now: float) -> bool:
        """A heartbeat renews the rows that are still under the claim, also when its lease had ended; return whether
        there are any.
        """
        kept = [at for at, (number, _) in self.leases.items() if number == claim]
        self.leases |= {at: (claim, now + self.lease_s) for at in kept}
        return bool(kept)

    def has_lost(self, task: str, key: str, claim: int, now: float) -> bool:
        """A claim on a row is lost when its lease has ended, when the row was cleared or handed on, and when it was
        done under another claim. A row that was done under none is lost to nobody.
        """
        if (task, key) in self.leases:
            number, ends = self.leases[task, key]
            return number != claim or ends <= now
        return self.done.get((task, key)) not in (claim, 0)

    def release(self, task: str, keys: Sequence[str], held: Mapping[str, int], now: float) -> None:
        """A release makes rows done that are under the caller's claims; cleared rows and done ones are skipped."""
        live = [key for key in keys if key in self.rows]
        if any(self.has_lost(task, key, held[key], now) for key in live if key in held):
            raise LeaseExpired("a claim is lost")
        left = [key for key in live if (task, key) not in self.done]
        if any(key not in held for key in left):
            raise LeaseExpired("a row is under no claim of the caller")
        for key in left:
            self._finish(task, key)

    def is_consumed(self, task: str, now: float) -> bool:
        return not any(self.is_free(task, key, now) for key in self.rows)

    # ---- life cycle

    def clear(self, keys: Iterable[str] | None) -> int:
        """Clearing ends everything about rows but the memory of their versions; return how many there were."""
        gone = [key for key in dict.fromkeys(self.rows if keys is None else keys) if key in self.rows]
        for key in gone:
            del self.rows[key]
        for held in (self.leases, self.done):
            for at in [at for at in held if at[1] in gone]:
                del held[at]
        live = {group_uid(key) for key in self.rows}
        self.put_keys = {uid: put for uid, put in self.put_keys.items() if uid in live}
        return len(gone)

    def _finish(self, task: str, key: str) -> None:
        self.done[task, key] = self.leases.pop((task, key), (0, 0.0))[0]
