"""Dense batches built row by row from bytes, and concatenated rows, in memory that is already mapped.

Used by `codec` and `ragged.pad_nested`. Fresh memory of 100 MB costs more in page faults than in copying,
so large results come out of `WarmMemory`, which takes a block back when the last tensor over it is gone: a result is
never overwritten while anybody can read it.
"""

from __future__ import annotations

import os
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, pairwise
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from nemo_rl.errors import SchemaMismatch

__all__ = [
    "WARM_MEMORY",
    "Bytes",
    "RowBytes",
    "WarmMemory",
    "copy_end_to_end",
    "cut_rows",
    "lay_end_to_end",
    "pad_rows",
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
