"""The records of a ledger as plain values, and back. Called by `ledger.py` only.

What msgpack carries, nothing that could run code. Order is kept wherever a ledger depends on it, so a ledger that was
loaded answers every request as the one that was dumped; sets are sorted, so equal ledgers give equal bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
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

__all__ = [
    "declared_partition",
    "dump_chunk",
    "dump_claims",
    "dump_partition",
    "load_chunk",
    "load_claims",
    "load_partition",
    "load_scalars",
]

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
