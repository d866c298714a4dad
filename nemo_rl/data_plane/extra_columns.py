"""Extra columns of a run: their specs, their values as columns of a put, and their rows in a worker's batch.

`data.extra_columns` declares them. The rollout worker writes them once, with its own columns; the passes that name them
fetch them. Invariant: in a batch a tensor of two or more dims has a token axis, so an extra column that has other dims
is a list there, with one tensor per row and without padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from nemo_rl.config.data import ExtraColumn
from nemo_rl.data_plane.chunks.ragged import object_rows
from nemo_rl.data_plane.schema import FIELDS, FieldSpec, extra_field
from nemo_rl.distributed.batched_data_dict import Column
from nemo_rl.errors import ConfigError
from nemo_rl.jagged import nest

__all__ = ["extra_names", "extra_specs", "extra_values", "is_listed", "rows_as_list"]

OBJECT = "object"


def extra_specs(declared: Mapping[str, ExtraColumn]) -> tuple[FieldSpec, ...]:
    """Return the specs of `data.extra_columns`.

    Raises:
        ConfigError: a name is that of a field of the library.
    """
    if taken := [name for name in declared if name in FIELDS]:
        raise ConfigError([f"data.extra_columns.{name}: a field of the library has this name" for name in taken])
    return tuple(
        extra_field(
            name,
            dtypes=() if column.dtype == OBJECT else (column.dtype,),
            dims=column.dims,
            is_object=column.dtype == OBJECT,
            read_by=column.read_by,
        )
        for name, column in declared.items()
    )


def extra_names(specs: Sequence[FieldSpec], stage: str) -> tuple[str, ...]:
    return tuple(spec.name for spec in specs if stage in spec.read_by)


def is_listed(spec: FieldSpec) -> bool:
    """Return whether a batch holds the column as a list of one tensor per row."""
    return not spec.is_object and bool(spec.dims) and not spec.is_token_aligned


def rows_as_list(column: object) -> list[object]:
    return list(column.unbind()) if isinstance(column, torch.Tensor) else object_rows(column)


def extra_values(spec: FieldSpec, values: Sequence[object], *, lengths: Sequence[int], where: str) -> Column:
    """Return the values of all rows as a column of a put.

    Args:
        values: one per row: a tensor, an array, or numbers in nested lists; anything JSON-like for an object column.
        lengths: tokens of the rows, which a column with a token axis must match.
        where: the values' origin, for messages.

    Raises:
        ConfigError: a value has another dtype or other dims than declared; names row, expected and got.
    """
    if spec.is_object:
        return list(values)
    dtype: torch.dtype = vars(torch)[spec.dtypes[0]]
    rows = [_row(value, spec, dtype, f"{where}, row {number}") for number, value in enumerate(values)]
    if spec.is_ragged:
        # An empty list does not say what its entries would look like.
        trailing = next((row.shape[1:] for row in rows if row.numel()), rows[0].shape[1:] if rows else ())
        rows = [row if row.numel() else row.reshape(0, *trailing) for row in rows]
    shapes = {tuple(row.shape[1:] if spec.is_ragged else row.shape) for row in rows}
    if len(shapes) > 1:
        raise ConfigError(f"{where}: expected rows of one shape for dims {list(spec.dims)}, got {sorted(shapes)}")
    if spec.is_token_aligned:
        for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if len(row) != length:
                raise ConfigError(
                    f"{where}, row {number}: expected a value for each of {length} tokens, got {len(row)}"
                )
    if not spec.is_ragged:
        return torch.stack(rows)
    return nest(torch.cat(rows), torch.tensor([len(row) for row in rows], dtype=torch.int64))


def _row(value: object, spec: FieldSpec, dtype: torch.dtype, where: str) -> torch.Tensor:
    if value is None:
        raise ConfigError(f"{where}: expected a value of dtype {spec.dtypes[0]} and dims {list(spec.dims)}, got none")
    try:
        row = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.asarray(value).copy())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: expected numbers of dims {list(spec.dims)}, got {repr(value)[:80]}") from error
    if row.numel() and row.is_floating_point() and not dtype.is_floating_point:
        raise ConfigError(f"{where}: expected whole numbers ({spec.dtypes[0]}), got {row.dtype}")
    fits = row.dim() == len(spec.dims) or (row.numel() == 0 and spec.is_ragged)
    if fits and row.dim() != len(spec.dims):
        row = row.reshape(0, *(size if isinstance(size, int) else 0 for size in spec.dims[1:]))
    sizes = zip(spec.dims, row.shape, strict=False)
    if not fits or any(isinstance(size, int) and size != found for size, found in sizes):
        raise ConfigError(f"{where}: expected dims {list(spec.dims)}, got shape {list(row.shape)}")
    made = row.to(dtype)
    if not dtype.is_floating_point and dtype is not torch.bool and not bool((made.to(row.dtype) == row).all()):
        raise ConfigError(f"{where}: expected numbers that {spec.dtypes[0]} can hold, got {row.flatten().tolist()[:5]}")
    return made
