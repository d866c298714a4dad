"""The journal of a ledger: a framed log from which a new process builds the same ledger.

Its head is `{"run", "state"}`: `state` is a snapshot, None at the beginning of a run, and the frames behind it are the
changes since. Used by `recovery.py`; the driver makes the file.

The records of a ledger as plain values, and back. Called by `ledger.py` only.

What msgpack carries, nothing that could run code. Order is kept wherever a ledger depends on it, so a ledger that was
loaded answers every request as the one that was dumped; sets are sorted, so equal ledgers give equal bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from nemo_rl.data_plane.ledger.state import (
    Chunk,
    ClaimLease,
    FamilyColumn,
    LedgerGroup,
    Partition,
    Row,
    RowPiece,
    SplitRow,
    TaskCursor,
)
from nemo_rl.data_plane.schema import spec_from_record
from nemo_rl.errors import DataPlaneError
from nemo_rl.utils.files import replace_file
from nemo_rl.utils.framed_log import (
    JOURNAL,
    DamagedLog,
    ForeignLog,
    TornFrame,
    begin,
    frame,
    read_frames,
    read_head,
    write_all,
)

__all__ = [
    "JOURNAL_FILE",
    "Journal",
    "create_journal",
    "declared_partition",
    "dump_chunk",
    "dump_claims",
    "dump_partition",
    "load_chunk",
    "load_claims",
    "load_partition",
    "load_scalars",
    "remove_journal",
]


JOURNAL_FILE = "ledger.journal"
_GIVEN_UP = b"GONE"
"""In place of the magic of a journal that lacks changes."""


def create_journal(path: Path, *, run_id: str) -> None:
    """Write the journal of a ledger that has not served a request yet, in place of an older one."""
    replace_file(path, lambda temporary: os.close(_write(temporary, begin(JOURNAL, {"run": run_id, "state": None}))))


def remove_journal(path: Path) -> None:
    """Remove a journal, and a snapshot that a kill has left half written."""
    path.unlink(missing_ok=True)
    _remove_unfinished(path)


class Journal:
    """One open journal. Not thread-safe: the ledger's host serialises its calls.

    Example:
        >>> import msgpack, tempfile
        >>> path = Path(tempfile.mkdtemp()) / JOURNAL_FILE
        >>> create_journal(path, run_id="r")
        >>> with Journal(path, run_id="r") as journal:
        ...     journal.append(msgpack.packb("first"))
        >>> with Journal(path, run_id="r") as journal:
        ...     list(journal.replay())
        ['first']
    """

    def __init__(self, path: Path, *, run_id: str, sync: bool = False) -> None:
        """Open a journal; `replay` has to be read to its end before the first `append`.

        Args:
            sync: write each frame through to the disk.

        Raises:
            DataPlaneError: it does not exist, is of another run or a newer format, was given up, or is damaged.
        """
        self.path, self._run_id, self._sync = path, run_id, sync
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DataPlaneError(f"run {run_id!r}: the ledger's journal cannot be opened: {error}") from error
        try:
            _remove_unfinished(path)
            self.state, self.num_bytes = self._read_beginning()
            """`num_bytes` is the size of the file once `replay` was read."""
            self.is_fresh = self.state is None and os.fstat(self._file).st_size == self.num_bytes
            """True when no ledger has changed anything before this one."""
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def replay(self) -> Iterator[Any]:
        """Yield the content of each frame behind the snapshot, then cut off a frame that was not written to its end."""
        with os.fdopen(os.dup(self._file), "rb") as file:
            try:
                for found in read_frames(file, self.num_bytes):
                    self.num_bytes = found.end
                    yield found.text
            except DamagedLog as problem:
                raise self._damaged(problem) from problem
        os.ftruncate(self._file, self.num_bytes)
        os.lseek(self._file, self.num_bytes, os.SEEK_SET)

    def append(self, content: bytes) -> None:
        """Write one frame.

        Raises:
            OSError: it is not in the file as a whole; `give_up` or `restart` must follow.
        """
        written = frame(content, at=self.num_bytes)
        write_all(self._file, written)
        if self._sync:
            os.fsync(self._file)
        self.num_bytes += len(written)

    def restart(self, state: Mapping[str, object]) -> None:
        """Put a new file with a snapshot in place of this one, at once.

        Raises:
            OSError: the file is as it was.
        """
        content, opened = begin(JOURNAL, {"run": self._run_id, "state": state}), []

        def write(temporary: Path) -> None:
            opened.append(_write(temporary, content))
            if self._sync:
                os.fsync(opened[0])

        try:
            replace_file(self.path, write)
        except OSError:
            for file in opened:
                os.close(file)
            raise
        os.close(self._file)
        self._file, self.num_bytes = opened[0], len(content)
        if self._sync:
            _sync_folder(self.path.parent)

    def give_up(self) -> None:
        """Mark the file as one that lacks changes, which works on a full disk: nobody recovers from it."""
        try:
            os.pwrite(self._file, _GIVEN_UP, 0)
        except OSError:
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._file)

    def _read_beginning(self) -> tuple[dict[str, Any] | None, int]:
        """Return the snapshot, and the byte at which the first frame behind it begins."""
        where = f"run {self._run_id!r}: the ledger's journal {self.path}"
        with os.fdopen(os.dup(self._file), "rb") as file:
            if file.read(len(_GIVEN_UP)) == _GIVEN_UP:
                raise DataPlaneError(f"{where} was given up when it could not be written; the run cannot go on")
            try:
                found = read_head(file, JOURNAL)
            except ForeignLog as problem:
                raise DataPlaneError(f"{where} cannot be read: {problem}") from problem
            except TornFrame as problem:
                raise DataPlaneError(f"{where} has no beginning ({problem}); the run cannot go on") from problem
            except DamagedLog as problem:
                raise self._damaged(problem) from problem
        if found.text["run"] != self._run_id:
            raise DataPlaneError(f"{where} is of run {found.text['run']!r}; expected one of {self._run_id!r}")
        return found.text["state"], found.end

    def _damaged(self, problem: DamagedLog) -> DataPlaneError:
        return DataPlaneError(
            f"run {self._run_id!r}: the ledger's journal {self.path} is damaged: {problem}; the run cannot go "
            "on; check the disk"
        )


def _remove_unfinished(path: Path) -> None:
    for left in path.parent.glob(f".{path.stem}.*.tmp{path.suffix}"):
        left.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> int:
    """Write a file that only its owner may read; return it open, at its end."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        write_all(file, content)
    except OSError:
        os.close(file)
        raise
    return file


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


Plain: TypeAlias = dict[str, Any]
"""Values that msgpack carries."""

COUNTS = ("num_put", "nbytes", "peak_rows", "peak_bytes", "top_version", "first_version")
"""Numbers of a partition that change."""
TABLES = ("tags", "field_bytes", "cleared")
"""Dicts of a partition that hold plain values."""


def dump_chunk(chunk: Chunk) -> Plain:
    return {
        "id": chunk.chunk_id,
        "nbytes": chunk.nbytes,
        "fields": sorted(chunk.fields),
        "rows": chunk.rows,
        "sizes": dict(chunk.sizes),
        "row_sizes": {name: bytes(memoryview(table)) for name, table in chunk.row_sizes.items()},  # type: ignore[arg-type]
        "version": chunk.version,
        "cells": chunk.cells,
        "live": chunk.live,
        "form": dict(chunk.form),
    }


def load_chunk(dumped: Any) -> Chunk:
    chunk = Chunk(
        chunk_id=dumped["id"],
        nbytes=dumped["nbytes"],
        fields=frozenset(dumped["fields"]),
        rows=dumped["rows"],
        sizes=dumped["sizes"],
        row_sizes={name: memoryview(table).cast("Q") for name, table in dumped["row_sizes"].items()},
        version=dumped["version"],
        form=dumped["form"],
    )
    chunk.cells, chunk.live = dumped["cells"], dumped["live"]
    return chunk


def dump_claims(claims: Mapping[int, tuple[str, str, ClaimLease]]) -> list[list[object]]:
    """
    Args:
        claims: claim id -> partition, task and lease.
    """
    return [
        [i, partition, task, lease.consumer_id, lease.taken, lease.expires, lease.has_expired]
        for i, (partition, task, lease) in claims.items()
    ]


def load_claims(dumped: Any) -> dict[int, tuple[str, str, ClaimLease]]:
    """Return what was dumped; the keys of the leases come with their partitions."""
    return {
        i: (
            partition,
            task,
            ClaimLease(
                claim_id=i, consumer_id=consumer, taken=taken, expires=expires, keys=set(), has_expired=has_expired
            ),
        )
        for i, partition, task, consumer, taken, expires, has_expired in dumped
    }


def dump_partition(partition: Partition, numbers: Mapping[str, int]) -> Plain:
    """
    Args:
        numbers: chunk id -> its place in the list of all chunks.
    """
    rows = partition.rows
    return {
        "declaration": partition.declaration,
        "declared": partition.declared,
        "added": partition.added,
        "keys": list(rows),
        "rows": [[row.sequence, row.owner, row.put_at, row.length] for row in rows.values()],
        "columns": {family: _dump_column(column, numbers) for family, column in partition.columns.items()},
        "groups": [[uid, list(group.keys), sorted(group.put)] for uid, group in partition.groups.items()],
        "column_types": {name: [dtype, list(dims)] for name, (dtype, dims) in partition.column_types.items()},
        "tasks": {name: _dump_cursor(cursor) for name, cursor in partition.tasks.items()},
        **{name: getattr(partition, name) for name in (*COUNTS, *TABLES)},
    }


def declared_partition(declaration: Plain, *, declared: int, first_version: int) -> Partition:
    specs = {str(record["name"]): spec_from_record(record) for record in declaration["fields"]}
    writes, group_size = declaration["task_writes"], declaration["group_size"]
    assert isinstance(writes, dict)
    return Partition(
        name=declaration["partition"],
        declaration=declaration,
        specs=specs,
        num_samples=declaration["num_samples"],
        group_size=group_size,
        tasks={task: TaskCursor(writes=frozenset(writes[task]) & frozenset(specs)) for task in declaration["tasks"]},
        columns={spec.family: FamilyColumn() for spec in specs.values()},
        declared=declared,
        first_version=first_version,
        top_version=first_version - 1,
    )


def load_partition(
    partition: Partition, dumped: Plain, *, chunks: Sequence[Chunk], leases: Mapping[int, ClaimLease]
) -> None:
    """Fill a partition that was just declared.

    Args:
        leases: claim id -> lease, of all claims.
    """
    for name in COUNTS:
        setattr(partition, name, dumped[name])
    for record in dumped["added"]:
        spec = spec_from_record(record)
        partition.specs[spec.name] = spec
        partition.columns.setdefault(spec.family, FamilyColumn())
        partition.added.append(record)
    for name in TABLES:
        load_scalars(getattr(partition, name), dumped[name])
    for key, (sequence, owner, put_at, length) in zip(dumped["keys"], dumped["rows"], strict=True):
        partition.rows[key] = Row(sequence, owner, put_at, length)
    for family, column in dumped["columns"].items():
        _load_column(partition.columns[family], column, chunks)
    for uid, keys, put in dumped["groups"]:
        partition.groups[uid] = LedgerGroup(keys=dict.fromkeys(keys), put=set(put))
    partition.column_types.update(
        {name: (dtype, tuple(dims)) for name, (dtype, dims) in dumped["column_types"].items()}
    )
    for name, cursor in dumped["tasks"].items():
        _load_cursor(partition.tasks[name], cursor, leases)


def load_scalars(target: MutableMapping[str, Any], dumped: Any) -> None:
    """Fill a dict that holds plain values."""
    assert isinstance(dumped, dict), f"malformed snapshot: expected a dict, got {dumped!r}"
    target.update(dumped)


def _dump_column(column: FamilyColumn, numbers: Mapping[str, int]) -> Plain:
    places = column.whole.values()
    return {
        "keys": list(column.whole),
        "chunks": [numbers[chunk.chunk_id] for chunk, _ in places],
        "at": [at for _, at in places],
        "split": [
            [key, cell.version, [[numbers[p.chunk.chunk_id], p.at, sorted(p.fields)] for p in cell.pieces]]
            for key, cell in column.split.items()
        ],
    }


def _load_column(column: FamilyColumn, dumped: Plain, chunks: Sequence[Chunk]) -> None:
    for key, number, at in zip(dumped["keys"], dumped["chunks"], dumped["at"], strict=True):
        column.whole[key] = (chunks[number], at)
    for key, version, pieces in dumped["split"]:
        found = [RowPiece(chunks[number], at, frozenset(fields)) for number, at, fields in pieces]
        column.split[key] = SplitRow(version, found)


def _dump_cursor(cursor: TaskCursor) -> Plain:
    return {
        "pending": list(cursor.pending),
        "leases": [[key, lease.claim_id] for key, lease in cursor.leases.items()],
        "done": cursor.done,
    }


def _load_cursor(cursor: TaskCursor, dumped: Plain, leases: Mapping[int, ClaimLease]) -> None:
    cursor.pending.update(dict.fromkeys(dumped["pending"]))
    for key, claim_id in dumped["leases"]:
        cursor.leases[key] = leases[claim_id]
        leases[claim_id].keys.add(key)
    cursor.done.update(dumped["done"])
