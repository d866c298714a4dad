"""Records of the ledger: partitions, rows, chunk references, cursors and leases. Plain Python, no I/O.

Only `ledger.py` changes them. Invariants are written down once, in `check_invariants`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from nemo_rl.data_plane.schema import FieldSpec

__all__ = [
    "Cell",
    "Chunk",
    "Group",
    "Lease",
    "Partition",
    "Piece",
    "Row",
    "TagScalar",
    "TaskCursor",
    "check_invariants",
    "group_uid",
]

TagScalar: TypeAlias = str | int | float | bool | None


def group_uid(key: str) -> str:
    """The group a key belongs to: all before its last `_g`; a key without one is a group of its own."""
    uid, mark, _ = key.rpartition("_g")
    return uid if mark else key


@dataclass(slots=True)
class Chunk:
    """One payload in the store."""

    nbytes: int
    refs: int = 0
    """Pieces of live rows that read from it; it is dropped at 0."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Where some fields of one row are."""

    chunk_id: str
    index: int
    """Row inside the chunk."""
    fields: frozenset[str]


@dataclass(slots=True)
class Cell:
    """One family of one row. More than one piece only when its fields were written by different puts."""

    version: int
    pieces: list[Piece]

    def has(self, fields: frozenset[str]) -> bool:
        if len(self.pieces) == 1:
            return fields <= self.pieces[0].fields
        return all(any(name in piece.fields for piece in self.pieces) for name in fields)

    def piece_of(self, name: str) -> Piece:
        return next(piece for piece in self.pieces if name in piece.fields)


@dataclass(slots=True)
class Row:
    sequence: int
    """Order of first put inside the partition."""
    length: int | None = None
    tags: dict[str, TagScalar] = field(default_factory=dict)
    cells: dict[str, Cell] = field(default_factory=dict)

    def is_ready(self, needed: Mapping[str, frozenset[str]]) -> bool:
        """Every needed field (family -> fields) is written."""
        return all(family in self.cells and self.cells[family].has(names) for family, names in needed.items())


@dataclass(slots=True)
class Lease:
    """One claim. It lapses when no heartbeat came until `expires`, and ends when its rows are done or handed on."""

    claim_id: int
    consumer_id: str
    taken: float
    expires: float
    keys: set[str]
    has_lapsed: bool = False


@dataclass(slots=True)
class TaskCursor:
    """What one consumer task has claimed. Each live row is pending, under a lease, or done."""

    writes: frozenset[str]
    """Fields the task produces: a row that has them all is done for it."""
    pending: dict[str, None] = field(default_factory=dict)
    """In order of first put."""
    leases: dict[str, Lease] = field(default_factory=dict)
    """Rows of lapsed leases stay here, and are pending too, until another consumer claims them."""
    done: dict[str, int] = field(default_factory=dict)
    """Key -> the claim under which it was finished, 0 when there was none."""

    def forget(self, key: str) -> None:
        """The row is gone."""
        self.pending.pop(key, None)
        self.done.pop(key, None)
        self._unlease(key)

    def finish(self, key: str) -> None:
        """The row is done."""
        self.pending.pop(key, None)
        lease = self.leases.get(key)
        self.done[key] = 0 if lease is None else lease.claim_id
        self._unlease(key)

    def lease(self, key: str, lease: Lease) -> None:
        self.pending.pop(key, None)
        self._unlease(key)
        self.leases[key] = lease
        lease.keys.add(key)

    def lapse(self, now: float, rows: Mapping[str, Row]) -> None:
        """Rows of leases that ended without a heartbeat become pending again."""
        lapsed = {id(lease): lease for lease in self.leases.values() if lease.expires <= now and not lease.has_lapsed}
        if not lapsed:
            return
        for lease in lapsed.values():
            lease.has_lapsed = True
            self.pending.update(dict.fromkeys(lease.keys))
        self.pending = dict.fromkeys(sorted(self.pending, key=lambda key: rows[key].sequence))

    def _unlease(self, key: str) -> None:
        lease = self.leases.pop(key, None)
        if lease is not None:
            lease.keys.discard(key)


@dataclass(slots=True)
class Group:
    keys: dict[str, None] = field(default_factory=dict)
    """Live rows, in order of first put."""
    num_put: int = 0
    """Rows ever put, cleared ones included: the group is complete when it reaches the group size."""


@dataclass(slots=True)
class Partition:
    declaration: dict[str, object]
    """The request that registered it, for idempotence and for `describe`."""
    specs: dict[str, FieldSpec]
    num_samples: int
    group_size: int | None
    tasks: dict[str, TaskCursor]
    rows: dict[str, Row] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    layouts: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Field -> dtype and trailing dims, settled by its first write."""
    num_put: int = 0

    def add_row(self, key: str) -> Row:
        row = Row(sequence=self.num_put)
        self.num_put += 1
        self.rows[key] = row
        group = self.groups.setdefault(group_uid(key), Group())
        group.keys[key] = None
        group.num_put += 1
        for task in self.tasks.values():
            task.pending[key] = None
        return row

    def remove_row(self, key: str) -> Row:
        row = self.rows.pop(key)
        uid = group_uid(key)
        group = self.groups[uid]
        del group.keys[key]
        if not group.keys:
            del self.groups[uid]
        for task in self.tasks.values():
            task.forget(key)
        return row

    def by_family(self, fields: Iterable[str]) -> dict[str, frozenset[str]]:
        """Declared fields grouped by family."""
        grouped: dict[str, set[str]] = {}
        for name in fields:
            grouped.setdefault(self.specs[name].family, set()).add(name)
        return {family: frozenset(names) for family, names in grouped.items()}


def check_invariants(partitions: Mapping[str, Partition], chunks: Mapping[str, Chunk]) -> None:
    """Raises AssertionError when the records contradict each other (tests run it after every transition)."""
    refs: Counter[str] = Counter()
    for name, partition in partitions.items():
        rows = set(partition.rows)
        assert len(rows) <= partition.num_samples, f"{name}: more rows than declared"
        for row in partition.rows.values():
            for family, cell in row.cells.items():
                assert cell.version >= 1, f"{name}: family {family} without a version"
                fields = [f for piece in cell.pieces for f in piece.fields]
                assert len(fields) == len(set(fields)), f"{name}: a field of {family} is in two pieces"
                refs.update(piece.chunk_id for piece in cell.pieces)
        grouped = {key for group in partition.groups.values() for key in group.keys}
        assert grouped == rows, f"{name}: groups and rows differ"
        for task_name, task in partition.tasks.items():
            _check_cursor(f"{name}/{task_name}", task, rows)
    assert set(refs) == set(chunks), "chunks without rows, or rows without chunks"
    for chunk_id, chunk in chunks.items():
        assert chunk.refs == refs[chunk_id], f"chunk {chunk_id}: {chunk.refs} references, counted {refs[chunk_id]}"


def _check_cursor(name: str, task: TaskCursor, rows: set[str]) -> None:
    held = {key for key, lease in task.leases.items() if not lease.has_lapsed}
    pending = set(task.pending)
    assert pending | held | set(task.done) == rows, f"{name}: a row is neither pending, leased nor done"
    assert not pending & held and not (pending | held) & set(task.done), f"{name}: a row is in two states"
    assert list(task.pending) == [key for key in task.pending if key in rows], f"{name}: an unknown row is pending"
    for key, lease in task.leases.items():
        assert key in lease.keys, f"{name}: lease of {key} does not know it"
