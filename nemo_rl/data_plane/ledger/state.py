"""Records of the ledger: partitions, rows, chunk references, cursors and leases. Plain Python, no I/O.

Only the `ledger*` modules change them. A family of a partition is a column of cells, so that whole puts and reads are
handled by dict operations instead of loops. Invariants are written down once, in `check_invariants`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple, TypeAlias

from nemo_rl.data_plane.keys import group_uid
from nemo_rl.data_plane.schema import FieldSpec

__all__ = [
    "Chunk",
    "ClaimLease",
    "FamilyColumn",
    "LedgerGroup",
    "Partition",
    "Row",
    "RowPiece",
    "SplitRow",
    "TaskCursor",
    "check_invariants",
]

TagScalar: TypeAlias = str | int | float | bool | None

MAX_REMEMBERED_KEYS = 65_536
"""Cleared keys of one partition whose last version is remembered; more of them raise the version of all new rows."""


@dataclass(slots=True, eq=False)
class Chunk:
    """One payload in the store: consecutive rows of one put and one family."""

    chunk_id: str
    nbytes: int
    fields: frozenset[str]
    rows: int
    sizes: Mapping[str, int]
    """Bytes of each field."""
    row_sizes: Mapping[str, Sequence[int]]
    """Bytes of each row, of the fields whose rows differ in size."""
    version: int
    """Version that its family got with this put."""
    form: Mapping[str, bytes] = field(default_factory=dict)
    """Bytes that its readers need besides its payload, as its writer gave them."""
    is_keyed: bool = False
    """Its cells are not one payload: the store has each under the key of its row."""
    cells: int = 0
    """Fields of rows that are read from it; it is dropped at 0."""
    live: dict[str, int] = field(default_factory=dict)
    """Bytes of each field that belong to live cells."""

    def __post_init__(self) -> None:
        self.cells, self.live = self.rows * len(self.fields), dict(self.sizes)

    @property
    def live_bytes(self) -> int:
        """Bytes of the chunk's live cells and of its header."""
        return self.nbytes - sum(self.sizes.values()) + sum(self.live.values())

    def size_of(self, name: str, at: int) -> int:
        """Return bytes of one cell."""
        table = self.row_sizes.get(name)
        return self.sizes.get(name, 0) // self.rows if table is None else table[at]


class RowPiece(NamedTuple):
    """The chunk that holds some fields of one row, and the row's index in it."""

    chunk: Chunk
    at: int
    """Row inside the chunk."""
    fields: frozenset[str]


@dataclass(slots=True)
class SplitRow:
    """One family of one row whose fields were written by different puts."""

    version: int
    pieces: list[RowPiece]

    def has(self, fields: frozenset[str]) -> bool:
        return all(any(name in piece.fields for piece in self.pieces) for name in fields)

    def place_of(self, name: str) -> tuple[Chunk, int]:
        return next((piece.chunk, piece.at) for piece in self.pieces if name in piece.fields)


@dataclass(slots=True)
class FamilyColumn:
    """One family of a partition: key -> where its bytes are. A key is in `whole` or in `split`, or not written."""

    whole: dict[str, tuple[Chunk, int]] = field(default_factory=dict)
    split: dict[str, SplitRow] = field(default_factory=dict)

    def has(self, key: str, fields: frozenset[str]) -> bool:
        place = self.whole.get(key)
        if place is not None:
            return fields <= place[0].fields
        return key in self.split and self.split[key].has(fields)

    def has_all(self, keys: Iterable[str]) -> bool:
        """Return whether every row has something written."""
        return all(key in self.whole or key in self.split for key in keys)

    def version_of(self, key: str) -> int:
        """0 when nothing was written."""
        place = self.whole.get(key)
        if place is not None:
            return place[0].version
        return self.split[key].version if key in self.split else 0

    def place_of(self, key: str, name: str) -> tuple[Chunk, int]:
        return self.whole[key] if key in self.whole else self.split[key].place_of(name)

    def next_version(self, keys: Sequence[str], fields: frozenset[str]) -> int:
        """Return one more than the rows have when one of `fields` is rewritten; 0 when no row has any."""
        whole = self.whole
        chunks = {whole[key][0] for key in keys if key in whole}
        version = max((chunk.version + (not fields.isdisjoint(chunk.fields)) for chunk in chunks), default=0)
        for key in keys if self.split else ():
            cell = self.split.get(key)
            if cell is not None:
                is_rewrite = any(not fields.isdisjoint(piece.fields) for piece in cell.pieces)
                version = max(version, cell.version + is_rewrite)
        return version

    def attach(self, keys: Sequence[str], chunk: Chunk) -> list[RowPiece]:
        """Point rows at a new chunk; return the cells that it replaces."""
        whole, split = self.whole, self.split
        if whole.keys().isdisjoint(keys) and (not split or split.keys().isdisjoint(keys)):
            whole.update(zip(keys, zip(repeat(chunk), range(len(keys)), strict=False), strict=False))
            return []
        left: list[RowPiece] = []
        for index, key in enumerate(keys):
            place = whole.get(key)
            if place is None:
                self._attach_to_split(key, index, chunk, left)
            elif place[0].fields <= chunk.fields:
                left.append(RowPiece(*place, place[0].fields))
                whole[key] = (chunk, index)
            else:
                del whole[key]
                left.append(RowPiece(*place, place[0].fields & chunk.fields))
                old = RowPiece(*place, place[0].fields - chunk.fields)
                split[key] = SplitRow(chunk.version, [old, RowPiece(chunk, index, chunk.fields)])
        return left

    def _attach_to_split(self, key: str, index: int, chunk: Chunk, left: list[RowPiece]) -> None:
        cell = self.split.pop(key, None)
        kept: list[RowPiece] = []
        for old in cell.pieces if cell is not None else ():
            left.append(old._replace(fields=old.fields & chunk.fields))
            if rest := old.fields - chunk.fields:
                kept.append(old._replace(fields=rest))
        if kept:
            self.split[key] = SplitRow(chunk.version, [*kept, RowPiece(chunk, index, chunk.fields)])
        else:
            self.whole[key] = (chunk, index)

    def remove(self, key: str) -> list[RowPiece]:
        place = self.whole.pop(key, None)
        if place is not None:
            return [RowPiece(*place, place[0].fields)]
        cell = self.split.pop(key, None)
        return cell.pieces if cell is not None else []


@dataclass(slots=True)
class Row:
    sequence: int
    """Order of first put inside the partition."""
    owner: str = ""
    """Label of the client that created it."""
    put_at: float = 0.0
    """Seconds on the ledger's clock."""
    length: int | None = None
    history: list[Mapping[str, object]] = field(default_factory=list)
    """Events that named it; kept only where events are recorded."""


@dataclass(slots=True)
class ClaimLease:
    """One claim. It expires when no heartbeat came until `expires`, and ends when its rows are done or handed on."""

    claim_id: int
    consumer_id: str
    taken: float
    expires: float
    keys: set[str]
    has_expired: bool = False


@dataclass(slots=True)
class TaskCursor:
    """The claims of one consumer task. Each live row is pending, under a lease, or done."""

    writes: frozenset[str]
    """Fields the task produces: a row that has them all is done for it."""
    pending: dict[str, None] = field(default_factory=dict)
    """Keys of pending rows, in order of first put."""
    leases: dict[str, ClaimLease] = field(default_factory=dict)
    """Rows of expired leases stay here, and are pending too, until another consumer claims them."""
    done: dict[str, int] = field(default_factory=dict)
    """Key -> the claim under which it was finished, 0 when there was none."""

    def forget(self, key: str) -> None:
        self.pending.pop(key, None)
        self.done.pop(key, None)
        self._unlease(key)

    def forget_all(self) -> None:
        for lease in self.leases.values():
            lease.keys.clear()
        for held in (self.pending, self.done, self.leases):
            held.clear()

    def finish(self, key: str) -> None:
        self.pending.pop(key, None)
        lease = self.leases.get(key)
        self.done[key] = 0 if lease is None else lease.claim_id
        self._unlease(key)

    def lease(self, key: str, lease: ClaimLease) -> None:
        self.pending.pop(key, None)
        self._unlease(key)
        self.leases[key] = lease
        lease.keys.add(key)

    def expire(self, now: float, rows: Mapping[str, Row]) -> list[ClaimLease]:
        """Make rows of leases that ended without a heartbeat pending again; return these leases."""
        over = {id(lease): lease for lease in self.leases.values() if lease.expires <= now and not lease.has_expired}
        if not over:
            return []
        for lease in over.values():
            lease.has_expired = True
            self.pending.update(dict.fromkeys(lease.keys))
        self.pending = dict.fromkeys(sorted(self.pending, key=lambda key: rows[key].sequence))
        return list(over.values())

    def _unlease(self, key: str) -> None:
        lease = self.leases.pop(key, None)
        if lease is not None:
            lease.keys.discard(key)


@dataclass(slots=True)
class LedgerGroup:
    keys: dict[str, None] = field(default_factory=dict)
    """Live rows, in order of first put."""
    put: set[str] = field(default_factory=set)
    """Keys put since the group has live rows, cleared ones included: it is complete with as many as the group size."""


@dataclass(slots=True)
class Partition:
    name: str
    declaration: dict[str, object]
    """The request that registered it, for idempotence and for `describe`."""
    specs: dict[str, FieldSpec]
    num_samples: int
    group_size: int | None
    tasks: dict[str, TaskCursor]
    added: list[dict[str, object]] = field(default_factory=list)
    """Columns declared since, as the requests gave them."""
    declared: int = 1
    """Number of this declaration; another number means that the partition was dropped and declared anew."""
    rows: dict[str, Row] = field(default_factory=dict)
    columns: dict[str, FamilyColumn] = field(default_factory=dict)
    """Family -> its cells."""
    tags: dict[str, dict[str, TagScalar]] = field(default_factory=dict)
    """Name -> key -> value: a dict per row costs ten times as much."""
    groups: dict[str, LedgerGroup] = field(default_factory=dict)
    column_types: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Field -> dtype and trailing dims, settled by its first write."""
    num_put: int = 0
    nbytes: int = 0
    """Bytes of live cells, and of the headers of their chunks."""
    peak_rows: int = 0
    peak_bytes: int = 0
    field_bytes: dict[str, int] = field(default_factory=dict)
    top_version: int = 0
    """The highest version that any family ever had here."""
    first_version: int = 1
    """Version of a family that no row of a put has yet; above the versions of all rows that were forgotten."""
    cleared: dict[str, int] = field(default_factory=dict)
    """Cleared keys -> highest version they had: if they come back, they get a higher one."""

    def add_row(self, key: str, *, owner: str, now: float) -> Row:
        row = Row(self.num_put, owner, now)
        self.num_put += 1
        self.rows[key] = row
        uid = group_uid(key)
        group = self.groups.get(uid)
        if group is None:
            group = self.groups[uid] = LedgerGroup()
        group.keys[key] = None
        group.put.add(key)
        for task in self.tasks.values():
            task.pending[key] = None
        return row

    def remove_row(self, key: str) -> list[RowPiece]:
        """Forget a row; return the cells that it had."""
        del self.rows[key]
        uid = group_uid(key)
        group = self.groups[uid]
        del group.keys[key]
        if not group.keys:
            del self.groups[uid]
        for task in self.tasks.values():
            task.forget(key)
        for values in self.tags.values():
            values.pop(key, None)
        self.cleared[key] = max((column.version_of(key) for column in self.columns.values()), default=0)
        return [piece for column in self.columns.values() for piece in column.remove(key)]

    def remove_all(self) -> list[Chunk]:
        """Forget every row; return the chunks of the partition, each once."""
        # Dicts, not sets: a ledger that repeats these requests must give the same replies.
        chunks = dict.fromkeys(chunk for column in self.columns.values() for chunk, _ in column.whole.values())
        chunks |= dict.fromkeys(
            p.chunk for c in self.columns.values() for cell in c.split.values() for p in cell.pieces
        )
        self.columns = {family: FamilyColumn() for family in self.columns}
        for task in self.tasks.values():
            task.forget_all()
        for held in (self.rows, self.groups, self.tags):
            held.clear()
        return list(chunks)

    def put_tags(self, keys: Sequence[str], tags: object) -> None:
        """Add or replace tags, given by name or, where rows differ, by row."""
        if isinstance(tags, dict):
            for name, values in tags.items():
                self.tags.setdefault(name, {}).update(zip(keys, values, strict=True))
        elif isinstance(tags, list):
            for key, row in zip(keys, tags, strict=True):
                for name, value in row.items():
                    self.tags.setdefault(name, {})[key] = value

    def tags_of(self, keys: Sequence[str]) -> dict[str, list[TagScalar]] | list[dict[str, TagScalar]]:
        held = {name: values for name, values in self.tags.items() if values}
        asked = set(keys)
        if all(values.keys() >= asked for values in held.values()):
            return {name: [values[key] for key in keys] for name, values in held.items()}
        return [{name: values[key] for name, values in held.items() if key in values} for key in keys]

    def forget_cleared(self) -> None:
        """Keep the memory of cleared keys small: an empty partition starts above all versions that it ever gave."""
        if not self.rows or len(self.cleared) > MAX_REMEMBERED_KEYS:
            self.first_version = self.top_version + 1
            self.cleared.clear()

    def next_versions(self, keys: Sequence[str], written: Mapping[str, frozenset[str]]) -> dict[str, int]:
        """Return version of each family (-> its fields) after a put: the same for all rows of the put.

        It was never given before, unless the put only adds fields to rows that have the family: then their metas stay
        good.
        """
        lowest = self.first_version
        if self.cleared:
            lowest = max(lowest, 1 + max((self.cleared.get(key, 0) for key in keys), default=0))
        versions = {}
        for family, fields in written.items():
            column = self.columns[family]
            version = column.next_version(keys, fields)
            # A row that has the family is above all that was cleared; what was forgotten since does not concern it.
            versions[family] = version if version >= lowest or column.has_all(keys) else lowest
        return versions

    def by_family(self, fields: Iterable[str]) -> dict[str, frozenset[str]]:
        grouped: dict[str, set[str]] = {}
        for name in fields:
            grouped.setdefault(self.specs[name].family, set()).add(name)
        return {family: frozenset(names) for family, names in grouped.items()}

    def is_ready(self, key: str, needed: Mapping[str, frozenset[str]]) -> bool:
        """Every needed field (family -> fields) of the row is written."""
        return all(self.columns[family].has(key, names) for family, names in needed.items())

    def oldest_put(self) -> float | None:
        """Return seconds of the host's clock at which the oldest live row was first put; None when there is none."""
        return next(iter(self.rows.values())).put_at if self.rows else None


def check_invariants(partitions: Mapping[str, Partition], chunks: Mapping[str, Chunk]) -> None:
    """Raise AssertionError when the records contradict each other (tests run it after every transition)."""
    cells: Counter[tuple[str, str]] = Counter()
    alive: Counter[tuple[str, str]] = Counter()
    for name, partition in partitions.items():
        rows = set(partition.rows)
        assert len(rows) <= partition.num_samples, f"{name}: more rows than declared"
        own: dict[str, Chunk] = {}
        for family, column in partition.columns.items():
            own |= _check_column(f"{name}/{family}", column, rows, cells, alive)
        assert partition.nbytes == sum(chunk.live_bytes for chunk in own.values()), f"{name}: bytes do not add up"
        sizes: Counter[str] = Counter()
        for chunk in own.values():
            sizes.update(chunk.live)
            assert chunk.version <= partition.top_version, f"{name}: a version above the highest"
        assert +sizes == +Counter(partition.field_bytes), f"{name}: bytes by field do not add up"
        grouped = {key for group in partition.groups.values() for key in group.keys}
        assert grouped == rows, f"{name}: groups and rows differ"
        assert all(values.keys() <= rows for values in partition.tags.values()), f"{name}: tags of rows that are gone"
        for uid, group in partition.groups.items():
            assert group.keys and group.keys.keys() <= group.put, f"{name}: group {uid} forgot rows that were put"
        for task_name, task in partition.tasks.items():
            _check_cursor(f"{name}/{task_name}", task, rows)
    assert {chunk_id for chunk_id, _ in cells} == set(chunks), "chunks without rows, or rows without chunks"
    for chunk_id, chunk in chunks.items():
        counted = sum(cells[chunk_id, name] for name in chunk.fields)
        assert chunk.cells == counted, f"chunk {chunk_id}: {chunk.cells} cells, counted {counted}"
        for name, size in chunk.live.items():
            where = chunk_id, name
            # Where rows of one size do not divide the field's bytes, the rest goes with the last of them.
            rest = 0 if name in chunk.row_sizes else chunk.sizes[name] % chunk.rows
            assert size == alive[where] + rest, f"chunk {where}: {size} live bytes, counted {alive[where]}"


def _check_column(
    name: str,
    column: FamilyColumn,
    rows: set[str],
    cells: Counter[tuple[str, str]],
    alive: Counter[tuple[str, str]],
) -> dict[str, Chunk]:
    assert not column.whole.keys() & column.split.keys(), f"{name}: a row is whole and split"
    assert (column.whole.keys() | column.split.keys()) <= rows, f"{name}: a row that is gone has cells"
    own = [RowPiece(*place, place[0].fields) for place in column.whole.values()]
    for cell in column.split.values():
        fields = [f for piece in cell.pieces for f in piece.fields]
        assert len(fields) == len(set(fields)), f"{name}: a field is in two pieces"
        assert cell.version >= max(piece.chunk.version for piece in cell.pieces) >= 1, f"{name}: a version went down"
        own += cell.pieces
    for piece in own:
        for field_name in piece.fields:
            where = piece.chunk.chunk_id, field_name
            cells[where] += 1
            alive[where] += piece.chunk.size_of(field_name, piece.at)
    return {piece.chunk.chunk_id: piece.chunk for piece in own}


def _check_cursor(name: str, task: TaskCursor, rows: set[str]) -> None:
    held = {key for key, lease in task.leases.items() if not lease.has_expired}
    pending = set(task.pending)
    assert pending | held | set(task.done) == rows, f"{name}: a row is neither pending, leased nor done"
    assert not pending & held and not (pending | held) & set(task.done), f"{name}: a row is in two states"
    assert list(task.pending) == [key for key in task.pending if key in rows], f"{name}: an unknown row is pending"
    for key, lease in task.leases.items():
        assert key in lease.keys, f"{name}: lease of {key} does not know it"
