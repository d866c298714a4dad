"""Ragged columns: padded tensors to jagged ones and back, without loops over rows.

Used by `column_io` and by workers. The one invariant: padding exists only in dense batches, never on the wire.
tensordict's types are recognised without importing tensordict, which costs a process as much as torch does: a value can
only be one of them where tensordict is loaded already.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypeGuard

import numpy as np
import torch

from nemo_rl.data_plane.chunks.dense import cut_rows, pad_rows
from nemo_rl.data_plane.schema import TOKEN_ALIGNED_FIELDS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict, Column
from nemo_rl.errors import SchemaMismatch
from nemo_rl.jagged import lengths_of, nest, values_of

if TYPE_CHECKING:
    from tensordict import NonTensorData, NonTensorStack, TensorDictBase

__all__ = [
    "is_object_stack",
    "is_object_value",
    "is_table",
    "materialize",
    "object_rows",
    "pack_per_token_field",
    "pad_nested",
    "response_from_nested",
    "to_nested_by_length",
    "unwrap_wire_stripped_payload",
]


def is_table(value: object) -> TypeGuard[TensorDictBase]:
    """Return whether the value is a TensorDict of any kind."""
    return _is_kind(value, "TensorDictBase")


def is_object_value(value: object) -> TypeGuard[NonTensorData]:
    """Return whether the value is the NonTensorData that a TensorDict holds in place of an object."""
    return _is_kind(value, "NonTensorData")


def is_object_stack(value: object) -> TypeGuard[NonTensorStack]:
    """Return whether the value is an object column, one NonTensorData per row."""
    return _is_kind(value, "NonTensorStack")


def _is_kind(value: object, name: str) -> bool:
    loaded = sys.modules.get("tensordict")
    # While another thread imports it, the module lacks its names.
    kind = vars(loaded).get(name) if loaded is not None else None
    return kind is not None and isinstance(value, kind)


_NO_BYTES = np.empty(0, dtype=np.uint8)


def to_nested_by_length(padded: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Cut the padding: `[N, S, ...]` and lengths `[N]` -> jagged `[N, (length), ...]`.

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
    return nest(cut_rows(padded.detach().cpu(), cut.numpy()), cut)


def pack_per_token_field(column: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return a per-token column as jagged rows of `lengths`; a dense column may be wider (the junk is cut).

    Raises:
        SchemaMismatch: a nested column whose rows have other lengths, or a dense one that is too narrow.
    """
    if not column.is_nested:
        return to_nested_by_length(column, lengths)
    found = lengths_of(column)
    if found.tolist() != lengths.tolist():
        raise SchemaMismatch(f"expected rows of lengths {lengths.tolist()[:5]}..., got {found.tolist()[:5]}...")
    return column


def response_from_nested(full: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Return the entries that predict each response token: one position to the left of the masked ones.

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
    """Pad jagged `[N, (length), ...]` -> dense `[N, width, ...]`, padded on the right; width None takes the longest
    row.
    """
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
    jagged: Collection[str] = (),
) -> BatchedDataDict:
    """Return dense columns: ragged ones padded (to `pad_to` when token-aligned, else to their longest row) but for
    those in `jagged`, objects as lists.

    Columns that are dense already stay as they are, whatever their dims are.
    """
    columns = BatchedDataDict()
    for name in rows.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        column = rows.get(name) if is_table(rows) else rows[name]
        if not isinstance(column, torch.Tensor):
            columns[name] = object_rows(column)
        elif column.is_nested and name not in jagged:
            width = pad_to if name in token_aligned else None
            columns[name] = pad_nested(column, pad=pad_values.get(name, 0.0), width=width)
        else:
            columns[name] = column
    return columns


def object_rows(column: object) -> list[object]:
    """Return an object column of a TensorDict as a list.

    Raises:
        SchemaMismatch: a `NonTensorData` that does not say which row has which value.
    """
    if is_object_value(column):
        column = _rows_of_data(column)
    rows = column.tolist() if is_object_stack(column) or isinstance(column, np.ndarray) else column
    assert isinstance(rows, Sequence), f"an object column is a sequence, got {type(rows).__name__}"
    return [row.data if is_object_value(row) else unwrap_wire_stripped_payload(row) for row in rows]


def _rows_of_data(column: NonTensorData) -> object:
    """Return the column, as `tensordict[name]` does: an array of objects, or a value that is that of every row."""
    value, batch_size = column.data, column.batch_size
    if isinstance(value, np.ndarray) and value.ndim:
        return value
    if len(batch_size) != 1 or isinstance(value, list | tuple):
        raise SchemaMismatch(
            f"a NonTensorData of batch size {list(batch_size)} that holds a {type(value).__name__} does not say which "
            "row has which value; pass a list, an array of objects or a NonTensorStack"
        )
    return [value] * batch_size[0]


def unwrap_wire_stripped_payload(payload: object) -> object:
    """Return None for a `NonTensorData` that lost its value on the wire; all else passes through.

    An encoder that knows only tensors sends a `NonTensorData` as what it inherits: a TensorDict without batch dims and
    without entries. Exactly that signature means "nothing is left".
    """
    is_stripped = is_table(payload) and payload.batch_size == torch.Size() and payload.is_empty()
    return None if is_stripped else payload
