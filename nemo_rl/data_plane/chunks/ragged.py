"""Ragged columns: padded tensors to jagged ones and back, without loops over rows.

Used by `column_io` and by workers. The one invariant: padding exists only in dense batches, never on the wire.
tensordict's types are recognised without importing tensordict, which costs a process as much as torch does: a value can
only be one of them where tensordict is loaded already.

Dense batches built row by row from bytes, and concatenated rows, in memory that is already mapped.

Used by `codec` and `ragged.pad_nested`. Fresh memory of 100 MB costs more in page faults than in copying,
so large results come out of `WarmMemory`, which takes a block back when the last tensor over it is gone: a result is
never overwritten while anybody can read it.
"""

from __future__ import annotations

import os
import sys
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from nemo_rl.data_plane.schema import TOKEN_ALIGNED_FIELDS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict, Column
from nemo_rl.errors import SchemaMismatch
from nemo_rl.jagged import lengths_of, nest, values_of

if TYPE_CHECKING:
    from tensordict import NonTensorData, NonTensorStack, TensorDictBase

__all__ = [
    "WARM_MEMORY",
    "Bytes",
    "RowBytes",
    "WarmMemory",
    "copy_end_to_end",
    "cut_rows",
    "is_object_stack",
    "is_object_value",
    "is_table",
    "lay_end_to_end",
    "materialize",
    "object_rows",
    "pack_per_token_field",
    "pad_nested",
    "pad_rows",
    "response_from_nested",
    "to_nested_by_length",
    "unwrap_wire_stripped_payload",
]


Bytes = npt.NDArray[np.uint8]
RowBytes = tuple[Bytes, npt.NDArray[np.int64]]
"""Rows laid end to end, and the entries of each."""

Check = Callable[[int], None]

LEAST_BYTES = 1 << 16
"""Smaller blocks come from the allocator, which keeps them warm itself; larger ones it gives back to the system."""
PARALLEL_BYTES = 8 << 20
"""Copies of at least so many bytes are shared among threads: one core cannot use the whole memory bandwidth."""
MOST_THREADS = 4
FILLED_ROW_BYTES = 16 << 10
"""Padded rows of at most so many bytes are filled with padding all at once, which is faster than row by row."""
ROW_LOOP_BYTES = 512
"""Rows of at least so many bytes on average are copied one by one; smaller ones by a mask over all entries."""


class WarmMemory:
    """Blocks of memory that were used before. Thread-safe."""

    def __init__(self, *, keep_bytes: int) -> None:
        """Args:
        keep_bytes: most memory kept for later while nobody uses it.
        """
        self._keep_bytes = keep_bytes
        # Blocks come back from finalizers, which may run inside any call: a deque needs no lock.
        self._free: deque[Bytes] = deque()

    def empty(self, num_bytes: int) -> Bytes:
        """`num_bytes` uninitialised bytes; the block returns here when the last view of them is gone."""
        if num_bytes < LEAST_BYTES:
            return np.empty(num_bytes, dtype=np.uint8)
        block = self._take(num_bytes)
        # Views of an array keep the array that owns the memory alive, not the one they were made from. `frombuffer`
        # puts a memoryview between the two, which ends that chain: its life is the life of all views.
        lent = np.frombuffer(block.data, dtype=np.uint8, count=num_bytes)
        assert isinstance(lent.base, memoryview), f"expected a memoryview under the array, got {type(lent.base)}"
        weakref.finalize(lent.base, self._give_back, block).atexit = False
        return lent

    @property
    def free_bytes(self) -> int:
        """Bytes kept for later."""
        return sum(block.nbytes for block in list(self._free))

    def _take(self, num_bytes: int) -> Bytes:
        for _ in range(len(self._free)):
            try:
                block = self._free.popleft()
            except IndexError:
                break
            if num_bytes <= block.nbytes <= 2 * num_bytes:
                return block
            self._free.append(block)
        # A little more than asked for: batches of later steps are about as large, seldom equal.
        return np.empty(num_bytes + num_bytes // 8, dtype=np.uint8)

    def _give_back(self, block: Bytes) -> None:
        self._free.append(block)
        while self.free_bytes > self._keep_bytes and self._free:
            self._free.popleft()


WARM_MEMORY = WarmMemory(keep_bytes=512 << 20)


def lay_end_to_end(parts: Sequence[Bytes], *, check: Check | None = None) -> Bytes:
    """Return a copy of all parts, one after the other; see `copy_end_to_end`."""
    content = WARM_MEMORY.empty(sum([part.size for part in parts]))
    copy_end_to_end(parts, content, check=check)
    return content


def copy_end_to_end(parts: Sequence[Bytes], content: Bytes, *, check: Check | None = None) -> None:
    """Fill `content`, which is as large as all parts together, with the parts one after the other.

    Args:
        check: called once with the number of each part, but perhaps not of one without bytes; what it raises is raised
            here. In large copies other parts are copied meanwhile.
    """
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0))) if content.nbytes >= PARALLEL_BYTES else 1
    if threads == 1:
        if check is not None:
            for number in range(len(parts)):
                check(number)
        if parts:
            np.concatenate(parts, out=content)
        return
    starts = [0, *accumulate(part.size for part in parts)]
    bounds = [content.nbytes * i // threads for i in range(threads + 1)]
    # Numpy holds no lock while it copies. Threads for one copy cost a hundredth of it, and none is left to a fork.
    with ThreadPoolExecutor(threads - 1, thread_name_prefix="copy") as pool:
        copy = partial(_copy_range, parts, starts, content, check)
        others = [pool.submit(copy, low, high) for low, high in pairwise(bounds[1:])]
        copy(*bounds[:2])
        for other in others:
            other.result()


def _copy_range(
    parts: Sequence[Bytes], starts: Sequence[int], content: Bytes, check: Check | None, low: int, high: int
) -> None:
    """The bytes `low` to `high` of all parts laid end to end; checks the parts that begin there."""
    index = bisect_right(starts, low) - 1
    while low < high:
        if check is not None and low == starts[index]:
            check(index)
        stop = min(high, starts[index + 1])
        np.copyto(content[low:stop], parts[index][low - starts[index] : stop - starts[index]])
        low, index = stop, index + 1


def cut_rows(padded: torch.Tensor, lengths: npt.NDArray[np.int64]) -> torch.Tensor:
    """Return the first entries of each row laid end to end: dense `[N, width, ...]` -> `[sum(lengths), ...]`.

    Args:
        padded: on the CPU.
        lengths: `[N]`, each from 0 to the width.
    """
    trailing, dtype = tuple(padded.shape[2:]), padded.dtype
    entry = dtype.itemsize * prod(trailing)
    num_bytes = int(lengths.sum()) * entry
    if not num_bytes:
        return torch.empty(int(lengths.sum()), *trailing, dtype=dtype)
    if num_bytes < len(lengths) * ROW_LOOP_BYTES:
        return padded[torch.arange(padded.shape[1]) < torch.from_numpy(lengths)[:, None]]
    rows = padded.contiguous().view(len(lengths), -1).view(torch.uint8).numpy()
    parts = [row[:size] for row, size in zip(rows, (lengths * entry).tolist(), strict=True)]
    return torch.from_numpy(lay_end_to_end(parts)).view(dtype).view(-1, *trailing)


def pad_rows(
    sources: Sequence[RowBytes],
    *,
    dtype: torch.dtype,
    trailing: tuple[int, ...],
    pad: float,
    width: int | None,
) -> torch.Tensor:
    """Pad rows `[(length), *trailing]` -> dense `[N, width, *trailing]`, padded on the right.

    Args:
        width: None takes the longest row.

    Raises:
        SchemaMismatch: a row is longer than `width`.
    """
    entry = dtype.itemsize * prod(trailing)
    lengths = np.concatenate([counts for _, counts in sources]) if sources else np.zeros(0, dtype=np.int64)
    longest = int(lengths.max()) if lengths.size else 0
    target = longest if width is None else width
    if longest > target:
        raise SchemaMismatch(f"a row of {longest} tokens does not fit the pad target of {target}")
    num_rows, row_bytes = len(lengths), target * entry
    if not num_rows * row_bytes:
        return torch.full((num_rows, target, *trailing), pad, dtype=dtype)
    flat = WARM_MEMORY.empty(num_rows * row_bytes)
    dense = torch.from_numpy(flat).view(dtype).view(num_rows, target, *trailing)
    if int(lengths.sum()) * entry < num_rows * ROW_LOOP_BYTES:
        dense.fill_(pad)
        _copy_by_mask(dense, sources, lengths)
        return dense
    rows = flat.reshape(num_rows, row_bytes)
    if row_bytes <= FILLED_ROW_BYTES:
        dense.fill_(pad)
    else:
        padding = torch.full((target, *trailing), pad, dtype=dtype).view(-1).view(torch.uint8).numpy()
        for row, used in zip(rows, (lengths * entry).tolist(), strict=True):
            row[used:] = padding[used:]
    _copy_by_row(rows, sources, entry)
    return dense


def _copy_by_row(rows: Bytes, sources: Sequence[RowBytes], entry: int) -> None:
    first = 0
    for content, counts in sources:
        at = 0
        for row, size in zip(rows[first : first + len(counts)], (counts * entry).tolist(), strict=True):
            row[:size] = content[at : at + size]
            at += size
        first += len(counts)


def _copy_by_mask(dense: torch.Tensor, sources: Sequence[RowBytes], lengths: npt.NDArray[np.int64]) -> None:
    content = np.concatenate([content for content, _ in sources])
    if content.size:
        mask = torch.arange(dense.shape[1]) < torch.from_numpy(lengths)[:, None]
        dense[mask] = torch.from_numpy(content).view(dense.dtype).view(-1, *dense.shape[2:])


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
