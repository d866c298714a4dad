"""The ledger's rules about puts: what a commit is refused for, before anything changes.

Called by `ledger.py` only; a store that shows rows to other programs has its puts checked before their bytes are sent
as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from nemo_rl.data_plane.ledger import claims as claim_rules
from nemo_rl.data_plane.ledger.state import Partition
from nemo_rl.errors import KeysNotFound, SchemaMismatch, name_some

__all__ = ["ColumnTypes", "check", "check_present", "is_any_written"]

ColumnTypes: TypeAlias = dict[str, tuple[str, tuple[int, ...]]]
"""Field -> dtype and trailing dims."""
Keys: TypeAlias = Sequence[str]
Record: TypeAlias = Mapping[str, object]


def check(partition: Partition, keys: Keys, put: Record, typed: Sequence[Record], *, now: float) -> ColumnTypes:
    """Check a put, with `column_types` in its `typed` records, against the partition; return the types it settles."""
    column_types = _check_column_types(partition, keys, typed, put["lengths"])
    claim_rules.check_held(partition, keys, claim_rules.parse(put["claims"]), now=now)
    if not put["may_create"]:
        check_present(partition, keys)
    return column_types


def check_present(partition: Partition, keys: Keys) -> None:
    if not all(map(partition.rows.__contains__, keys)):
        missing = [key for key in keys if key not in partition.rows]
        raise KeysNotFound(
            f"partition {partition.name!r}: {len(missing)} of {len(keys)} rows do not exist (never put, or cleared): "
            f"{name_some(missing)}"
        )


def is_any_written(partition: Partition, keys: Keys, chunks: Sequence[Record]) -> bool:
    """Return whether a cell that a put would write has a value already."""
    for record in chunks:
        family, fields = record["family"], record["fields"]
        assert isinstance(family, str) and isinstance(fields, list), f"malformed chunk record: {record}"
        column = partition.columns[family]
        if any(column.has(key, frozenset((name,))) for name in fields for key in keys):
            return True
    return False


def _check_column_types(partition: Partition, keys: Keys, typed: Sequence[Record], lengths: object) -> ColumnTypes:
    """dtype, trailing dims and lengths must agree with what the partition already holds."""
    where = f"partition {partition.name!r}"
    if isinstance(lengths, list):
        for key, length in zip(keys, lengths, strict=True):
            row = partition.rows.get(key)
            if row is not None and row.length is not None and row.length != length:
                raise SchemaMismatch(f"{where}: row {key!r} has {row.length} tokens, got a column with {length}")
    settled: ColumnTypes = {}
    for record in typed:
        column_types = record["column_types"]
        assert isinstance(column_types, dict)
        for name, (dtype, trailing) in column_types.items():
            column_type = (dtype, tuple(trailing))
            before = partition.column_types.get(name)
            if before is not None and before != column_type:
                raise SchemaMismatch(
                    f"{where}: field {name!r} holds {before[0]} rows with trailing dims {list(before[1])}, "
                    f"got {dtype} with {list(trailing)}"
                )
            settled[name] = column_type
    return settled
