"""The ledger's answer to a read: the chunks that hold the bytes of the rows.

Called by `ledger.py` only. The answer names every row and every field asked for, or it is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nemo_rl.data_plane.ledger.state import Chunk, FamilyColumn, Partition
from nemo_rl.errors import FieldNotProduced, VersionMismatch, name_some

__all__ = ["locate"]


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
