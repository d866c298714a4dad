"""Columns as they are about to be sent: checked against the declared schema, rows concatenated.

`check_columns` is the gate of every put: what passes it can be encoded, and nothing is sent before it has passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from nemo_rl.data_plane.chunks.ragged import is_object_stack, is_object_value, object_rows
from nemo_rl.data_plane.chunks.tags import Tags, TagTable
from nemo_rl.data_plane.schema import FieldSpec
from nemo_rl.errors import SchemaMismatch, name_some
from nemo_rl.jagged import lengths_of, values_of

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = [
    "Columns",
    "FlatColumn",
    "check_columns",
    "check_keys",
    "check_tags",
    "column_types",
    "dtype_name",
    "token_lengths",
    "torch_dtype",
]

Columns: TypeAlias = "Mapping[str, torch.Tensor | Sequence[object]] | TensorDict"
"""Field name -> rows. A tensor `[N, ...]` (jagged nested for ragged rows) or a list of N JSON-like objects, also as a
TensorDict holds them. Another dtype than the declared one is cast where no value changes."""

Lengths = npt.NDArray[np.int64]

_MAX_DEPTH = 32
"""Deepest nesting of an object value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatColumn:
    """One column of N rows."""

    spec: FieldSpec
    values: torch.Tensor | None
    """`[sum(lengths), *trailing]` for ragged rows, `[N, *trailing]` else; contiguous, on CPU; None for objects."""
    lengths: Lengths | None
    """Entries per row of a ragged column."""
    objects: list[object] | None = None

    @property
    def dtype(self) -> str:
        return "object" if self.values is None else dtype_name(self.values.dtype)

    @property
    def trailing(self) -> tuple[int, ...]:
        return () if self.values is None else tuple(self.values.shape[1:])


def dtype_name(dtype: torch.dtype) -> str:
    """`int32` for `torch.int32`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """`torch.int32` for `int32`."""
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise SchemaMismatch(f"{name!r} is not a torch dtype")
    return dtype


def check_keys(keys: Sequence[str], *, where: str) -> list[str]:
    """Return the keys as a list: strings, each once."""
    if isinstance(keys, str):
        raise SchemaMismatch(f"{where}: expected a list of keys, got the string {keys!r}; pass [{keys!r}]")
    listed = list(keys)
    if not set(map(type, listed)) <= {str} or "" in listed:
        wrong = [key for key in listed if type(key) is not str or not key]
        raise SchemaMismatch(f"{where}: keys must be non-empty strings, got {name_some(repr(key) for key in wrong)}")
    if len(set(listed)) != len(listed):
        seen: set[str] = set()
        twice = [key for key in listed if key in seen or seen.add(key)]  # type: ignore[func-returns-value]
        raise SchemaMismatch(f"{where}: duplicate keys: {name_some(twice)}")
    return listed


def check_tags(tags: Sequence[Tags], num_rows: int, *, where: str) -> TagTable:
    """Tags as plain dicts: one per key, with string names and primitive values."""
    if len(tags) != num_rows:
        raise SchemaMismatch(f"{where}: expected {num_rows} tag rows, one per key, got {len(tags)}")
    return TagTable.of(tags, where=where)


def check_columns(
    columns: Columns, *, specs: Mapping[str, FieldSpec], keys: Sequence[str], where: str
) -> dict[str, FlatColumn]:
    """Every column against its spec: declared, one row per key, dtype, dims, equal token counts, JSON-like objects.

    Raises:
        SchemaMismatch: names the field, what was expected and what was got.
    """
    checked: dict[str, FlatColumn] = {}
    for name in columns.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        assert isinstance(name, str)
        spec = specs.get(name)
        if spec is None:
            raise SchemaMismatch(f"{where}: field {name!r} is not declared; declared: {name_some(specs, limit=20)}")
        column = columns.get(name)
        at = f"{where}: field {name!r}"
        flat = _object_column(column, spec, at) if spec.is_object else _tensor_column(column, spec, at)
        _check_row_count(flat, len(keys), at)
        checked[name] = flat
    _check_token_lengths(checked, keys, where)
    return checked


def column_types(columns: Mapping[str, FlatColumn]) -> dict[str, list[object]]:
    """Return dtype and trailing dims of the columns that are tensors, for the ledger."""
    return {name: [c.dtype, list(c.trailing)] for name, c in columns.items() if c.values is not None}


def token_lengths(columns: Mapping[str, FlatColumn]) -> Lengths | None:
    for column in columns.values():
        if column.spec.is_token_aligned:
            return column.lengths
    return None


def _check_row_count(flat: FlatColumn, num_rows: int, at: str) -> None:
    if flat.objects is not None:
        found = len(flat.objects)
    elif flat.lengths is not None:
        found = len(flat.lengths)
    else:
        assert flat.values is not None
        found = flat.values.shape[0]
    if found != num_rows:
        raise SchemaMismatch(f"{at}: expected {num_rows} rows, one per key, got {found}")


def _check_token_lengths(columns: Mapping[str, FlatColumn], keys: Sequence[str], where: str) -> None:
    """Token-aligned columns of one put agree with each other and with `input_lengths`."""
    expected: tuple[str, Lengths] | None = None
    if "input_lengths" in columns:
        values = columns["input_lengths"].values
        assert values is not None
        expected = "input_lengths", values.numpy().astype(np.int64)
    for name, column in columns.items():
        if not column.spec.is_token_aligned or column.lengths is None:
            continue
        if expected is None:
            expected = name, column.lengths
        other = np.flatnonzero(column.lengths != expected[1])
        if other.size:
            i = int(other[0])
            raise SchemaMismatch(
                f"{where}: row {keys[i]!r}: field {name!r} has {int(column.lengths[i])} tokens, "
                f"{expected[0]!r} says {int(expected[1][i])}"
            )


def _tensor_column(column: object, spec: FieldSpec, at: str) -> FlatColumn:
    if not isinstance(column, torch.Tensor):
        raise SchemaMismatch(f"{at}: expected a tensor, got {type(column).__name__}; build one with stack_or_nest")
    num_dims = column.dim() - 1
    if num_dims != len(spec.dims):
        raise SchemaMismatch(
            f"{at}: expected rows with dims {list(spec.dims)}, got a column of shape {_shape(column)}; a column is "
            "[N, *dims], ragged rows are a jagged nested tensor"
        )
    lengths: Lengths | None = None
    if column.is_nested:
        if not spec.is_ragged:
            raise SchemaMismatch(f"{at}: expected rows of one shape {list(spec.dims)}, got a nested tensor")
        lengths = lengths_of(column).numpy()
        values = values_of(column)
    else:
        values = column
        if spec.is_ragged:
            lengths = np.full(column.shape[0], column.shape[1], dtype=np.int64)
            values = column.reshape(column.shape[0] * column.shape[1], *column.shape[2:])
    values = _as_declared(values.detach().cpu().contiguous(), spec, at)
    flat = FlatColumn(spec=spec, values=values, lengths=lengths)
    fixed = spec.dims[1:] if spec.is_ragged else spec.dims
    if any(isinstance(want, int) and want != got for want, got in zip(fixed, flat.trailing, strict=True)):
        raise SchemaMismatch(
            f"{at}: expected rows with dims {list(spec.dims)}, got trailing dims {list(flat.trailing)}"
        )
    return flat


def _as_declared(values: torch.Tensor, spec: FieldSpec, at: str) -> torch.Tensor:
    """Return the values in the declared dtype: cast where it is the only one and no value changes, else refused."""
    given = dtype_name(values.dtype)
    if given in spec.dtypes:
        return values
    expected = f"{at}: expected dtype {' or '.join(spec.dtypes)}, got {given}"
    target = torch_dtype(spec.dtypes[0])
    is_narrowing_kind = values.dtype.is_complex or (values.is_floating_point() and not target.is_floating_point)
    if len(spec.dtypes) > 1 or is_narrowing_kind:
        raise SchemaMismatch(expected)
    cast = values.to(target)
    is_other = (cast.to(values.dtype) != values) & (values == values)
    if bool(is_other.any()):
        first = values[is_other].flatten()[0].item()
        raise SchemaMismatch(f"{expected}, and {int(is_other.sum())} values change in a cast, the first is {first}")
    return cast


def _shape(column: torch.Tensor) -> list[str]:
    return [str(size) for size in column.shape]


def _object_column(column: object, spec: FieldSpec, at: str) -> FlatColumn:
    is_no_list = isinstance(column, torch.Tensor | str | bytes)
    is_list = isinstance(column, Sequence | np.ndarray) or is_object_value(column) or is_object_stack(column)
    if is_no_list or not is_list:
        raise SchemaMismatch(f"{at}: expected a list of JSON-like values, got {type(column).__name__}")
    try:
        rows = object_rows(column)
    except SchemaMismatch as error:
        raise SchemaMismatch(f"{at}: {error}") from error
    for i, value in enumerate(rows):
        _check_json(value, f"{at}, row {i}", depth=0)
    return FlatColumn(spec=spec, values=None, lengths=None, objects=rows)


def _check_json(value: object, at: str, *, depth: int) -> None:
    if value is None or type(value) in (str, bool, float):
        return
    if type(value) is int and -(2**63) <= value < 2**64:
        return
    if depth >= _MAX_DEPTH:
        raise SchemaMismatch(f"{at}: nested deeper than {_MAX_DEPTH} levels")
    if type(value) is list:
        for item in value:
            _check_json(item, at, depth=depth + 1)
        return
    if type(value) is dict and all(type(name) is str for name in value):
        for item in value.values():
            _check_json(item, at, depth=depth + 1)
        return
    raise SchemaMismatch(
        f"{at}: expected a JSON-like value (None, bool, int of 64 bits, float, str, list, dict with string keys), "
        f"got {type(value).__name__}"
    )
