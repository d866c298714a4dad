"""Ragged columns: padded tensors to jagged ones and back, without loops over rows.

Used by `column_io` and by workers. The one invariant: padding exists only in dense batches, never on the wire.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from nemo_rl.data_plane.chunks.dense import pad_rows
from nemo_rl.data_plane.chunks.tables import is_object_stack, is_object_value, is_table
from nemo_rl.data_plane.schema import TOKEN_ALIGNED_FIELDS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict, Column
from nemo_rl.errors import SchemaMismatch, name_some

if TYPE_CHECKING:
    from tensordict import NonTensorData, TensorDictBase

__all__ = [
    "is_packed",
    "lengths_of",
    "materialize",
    "nest",
    "object_rows",
    "offsets_of",
    "pack_per_token_field",
    "pad_nested",
    "response_from_nested",
    "stack_or_nest",
    "to_nested_by_length",
    "unwrap_wire_stripped_payload",
    "values_of",
]


_NO_BYTES = np.empty(0, dtype=np.uint8)


def nest(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """A jagged nested tensor over rows laid end to end: values `[sum(lengths), ...]`, lengths `[N]`."""
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, dim=0, out=offsets[1:])
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def offsets_of(nested: torch.Tensor) -> torch.Tensor:
    """`[N + 1]` int64 row offsets of a jagged nested tensor."""
    offsets: torch.Tensor = cast("Any", nested).offsets()
    return offsets


def lengths_of(nested: torch.Tensor) -> torch.Tensor:
    """`[N]` int64 row lengths of a nested tensor."""
    if is_packed(nested):
        return offsets_of(nested).diff()
    return torch.tensor([row.shape[0] for row in nested.unbind()], dtype=torch.int64)


def is_packed(nested: torch.Tensor) -> bool:
    """Whether the rows lie end to end, ragged in their first dim and without holes between them."""
    if nested.layout is not torch.jagged:
        return False
    jagged = cast("Any", nested)
    # A transposed jagged tensor has offsets too, but into another dim of its values; torch has no public accessor.
    return jagged.lengths() is None and jagged._ragged_idx == 1


def values_of(nested: torch.Tensor) -> torch.Tensor:
    """`[sum(lengths), ...]`: the rows of a nested tensor laid end to end, without holes.

    Raises:
        SchemaMismatch: rows that differ in more than their first dim.
    """
    if is_packed(nested):
        return nested.values()
    return _lay_end_to_end(list(nested.unbind()))


def _lay_end_to_end(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    trailing = {tuple(row.shape[1:]) for row in rows}
    if len(trailing) != 1 or len({row.dim() for row in rows}) != 1 or rows[0].dim() == 0:
        raise SchemaMismatch(
            f"expected rows that differ in their first dim only, got shapes "
            f"{name_some(list(row.shape) for row in rows)}; pad the other dims"
        )
    return torch.cat(list(rows))


def to_nested_by_length(padded: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Cuts the padding: `[N, S, ...]` and lengths `[N]` -> jagged `[N, (length), ...]`.

    Raises:
        SchemaMismatch: fewer than two dims, another number of rows, or a length outside 0..S.
    """
    if padded.dim() < 2:
        raise SchemaMismatch(f"expected a padded column [N, S, ...], got shape {list(padded.shape)}")
    cut = lengths.detach().to(device="cpu", dtype=torch.int64)
    if cut.shape != padded.shape[:1]:
        raise SchemaMismatch(f"expected lengths [{padded.shape[0]}], got shape {list(lengths.shape)}")
    width = padded.shape[1]
    if cut.numel() and (int(cut.max()) > width or int(cut.min()) < 0):
        raise SchemaMismatch(f"lengths {int(cut.min())}..{int(cut.max())} do not fit a padded column of width {width}")
    mask = torch.arange(width) < cut[:, None]
    return nest(padded.detach().cpu()[mask], cut)


def pack_per_token_field(column: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """A per-token column as jagged rows of `lengths`; a dense column may be wider (the junk is cut).

    Raises:
        SchemaMismatch: a nested column whose rows have other lengths, or a dense one that is too narrow.
    """
    if not column.is_nested:
        return to_nested_by_length(column, lengths)
    found = lengths_of(column)
    if found.tolist() != lengths.tolist():
        raise SchemaMismatch(f"expected rows of lengths {lengths.tolist()[:5]}..., got {found.tolist()[:5]}...")
    return column


def stack_or_nest(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of one shape stacked, others as a jagged nested tensor; no rows give an empty tensor.

    Raises:
        SchemaMismatch: rows that differ in more than their first dim.
    """
    if not rows:
        return torch.empty(0)
    if all(row.shape == rows[0].shape for row in rows):
        return torch.stack(list(rows))
    return nest(_lay_end_to_end(rows), torch.tensor([row.shape[0] for row in rows], dtype=torch.int64))


def response_from_nested(full: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """What each response token was predicted from: the entries one position to the left of the masked ones.

    Args:
        full: jagged `[N, (length), ...]` over prompt and response.
        response_mask: jagged bool `[N, (length)]`, True on response tokens.

    Raises:
        SchemaMismatch: other lengths, or a response token at position 0, which nothing predicts.
    """
    if lengths_of(full).tolist() != lengths_of(response_mask).tolist():
        raise SchemaMismatch("response_mask: expected the row lengths of the full column")
    mask, lengths = values_of(response_mask), lengths_of(full)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    starts = offsets[:-1][lengths > 0]
    if bool(mask[starts].any()):
        raise SchemaMismatch("response_mask: a row starts with a response token; position 0 has no predecessor")
    counts = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.to(torch.int64).cumsum(0)])[offsets].diff()
    return nest(values_of(full)[torch.nonzero(mask).squeeze(1) - 1], counts)


def pad_nested(nested: torch.Tensor, *, pad: float, width: int | None = None) -> torch.Tensor:
    """Jagged `[N, (length), ...]` -> dense `[N, width, ...]`, padded on the right; width None takes the longest row."""
    lengths, values = lengths_of(nested), values_of(nested)
    content = values.detach().contiguous().view(-1).view(torch.uint8).numpy() if values.numel() else _NO_BYTES
    source = (content, lengths.numpy())
    return pad_rows([source], dtype=values.dtype, trailing=tuple(values.shape[1:]), pad=pad, width=width)


def materialize(
    rows: TensorDictBase | Mapping[str, Column],
    *,
    pad_values: Mapping[str, float],
    pad_to: int | None = None,
    token_aligned: Collection[str] = TOKEN_ALIGNED_FIELDS,
) -> BatchedDataDict:
    """Dense columns: ragged ones padded (to `pad_to` when token-aligned, else to their longest row), objects as lists.

    Columns that are dense already stay as they are, whatever their dims are.
    """
    columns = BatchedDataDict()
    for name in rows.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        column = rows.get(name) if is_table(rows) else rows[name]
        if not isinstance(column, torch.Tensor):
            columns[name] = object_rows(column)
        elif column.is_nested:
            width = pad_to if name in token_aligned else None
            columns[name] = pad_nested(column, pad=pad_values.get(name, 0.0), width=width)
        else:
            columns[name] = column
    return columns


def object_rows(column: object) -> list[object]:
    """An object column of a TensorDict as a list.

    Raises:
        SchemaMismatch: a `NonTensorData` that does not say which row has which value.
    """
    if is_object_value(column):
        column = _rows_of_data(column)
    rows = column.tolist() if is_object_stack(column) or isinstance(column, np.ndarray) else column
    assert isinstance(rows, Sequence), f"an object column is a sequence, got {type(rows).__name__}"
    return [row.data if is_object_value(row) else unwrap_wire_stripped_payload(row) for row in rows]


def _rows_of_data(column: NonTensorData) -> object:
    """An array of objects is the column, as `tensordict[name]` gives it; any other value is that of every row."""
    value, batch_size = column.data, column.batch_size
    if isinstance(value, np.ndarray) and value.ndim:
        return value
    if len(batch_size) != 1 or isinstance(value, list | tuple):
        raise SchemaMismatch(
            f"a NonTensorData of batch size {list(batch_size)} that holds a {type(value).__name__} says not which row "
            "has which value; pass a list, an array of objects or a NonTensorStack"
        )
    return [value] * batch_size[0]


def unwrap_wire_stripped_payload(payload: object) -> object:
    """None for a `NonTensorData` that lost its value on the wire; all else passes through.

    An encoder that knows only tensors sends a `NonTensorData` as what it inherits: a TensorDict without batch dims and
    without entries. Exactly that signature means "nothing is left".
    """
    is_stripped = is_table(payload) and payload.batch_size == torch.Size() and payload.is_empty()
    return None if is_stripped else payload
