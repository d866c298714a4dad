"""Reads rows out of chunks: `ChunkReader` finds them, `gather` and `gather_padded` copy them into columns.

Used by the reading half of a client. A chunk arrives whole, as one buffer or as header and columns, or as some of its
blocks, each with the columns of consecutive rows. Invariant: bytes that have a checksum are compared with it before
they are copied.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod

import msgpack
import numpy as np
import torch

from nemo_rl.data_plane.chunks.columns import Lengths, torch_dtype
from nemo_rl.data_plane.chunks.dense import Bytes, RowBytes, lay_end_to_end, pad_rows
from nemo_rl.data_plane.codec import ChunkForm, checksum, split_head, starts_of
from nemo_rl.data_plane.interfaces import Parts
from nemo_rl.data_plane.schema import FieldSpec
from nemo_rl.errors import SchemaMismatch

__all__ = ["ChecksumError", "ChunkReader", "GatheredColumn", "Run", "blocks_of_runs", "gather", "gather_padded"]

Run = Sequence[int]
"""`[chunk, first row, rows]`."""


class ChecksumError(Exception):
    """Bytes of a chunk are not those that were put; caught where the rows are known."""

    def __init__(self, chunk_id: str, field_name: str, why: str) -> None:
        super().__init__(why)
        self.chunk_id, self.field_name = chunk_id, field_name
        """The column is empty for the header."""


def blocks_of_runs(runs: Sequence[Run], cuts: Sequence[int]) -> range | list[int]:
    """Return the numbers of the blocks that hold the rows of some runs of one chunk, in order.

    Args:
        cuts: first row of each block, and the number of rows.
    """
    found: set[int] = set()
    for _, first, count in runs:
        found.update(range(bisect_right(cuts, first) - 1, bisect_left(cuts, first + count)))
    return sorted(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class _ColumnIndex:
    """The place of one column in a chunk."""

    number: int
    dtype: str
    trailing: tuple[int, ...]
    lengths: Lengths | None
    starts: Lengths
    """`[rows + 1]` byte offset of each row in the column."""


@dataclass(slots=True)
class ChunkReader:
    """Reads row ranges out of one chunk.

    Raises:
        SchemaMismatch: the payload is no chunk, or shorter than its header says.
        ChecksumError: there are checksums, and they are of other bytes.
    """

    payloads: Mapping[int, Parts]
    """Block -> its columns, as one buffer or as one for each; a chunk that is not cut into blocks is block 0, behind
    its header."""
    form: ChunkForm = field(default_factory=dict)
    """As the ledger has it."""
    chunk_id: str = ""
    """Names the chunk in errors."""
    columns: dict[str, _ColumnIndex] = field(init=False)
    num_bytes_used: int = field(init=False, default=0)
    """Bytes of the columns asked for so far."""
    _cuts: Sequence[int] = field(init=False)
    _contents: dict[int, list[memoryview]] = field(init=False)
    _checksums: list[int] = field(init=False)
    _checked: set[tuple[int, int]] = field(init=False, default_factory=set)

    @classmethod
    def of_payload(cls, parts: Parts) -> ChunkReader:
        """Return the reader of a whole chunk without checksums."""
        return cls({0: parts})

    def __post_init__(self) -> None:
        self._checksums = np.frombuffer(self.form.get("checksums", b""), dtype=np.uint64).tolist()
        if not self._checksums:
            self._index()
            return
        try:
            head = self._index()
        except (SchemaMismatch, ValueError, KeyError, TypeError, IndexError) as error:
            raise ChecksumError(self.chunk_id, "", f"it cannot be read: {error}") from error
        if checksum(head) != self._checksums[0]:
            raise ChecksumError(self.chunk_id, "", "the checksum of its header differs")

    def _index(self) -> memoryview:
        """Find the columns; return the bytes of the header."""
        payloads = dict(self.payloads)
        if "head" in self.form:
            head, _ = split_head([memoryview(self.form["head"])])
        else:
            head, payloads[0] = split_head(payloads[0])
        header = msgpack.unpackb(head[8:])
        tables = [np.frombuffer(table, dtype=np.uint32).astype(np.int64) for table in header["tables"]]
        num_rows = header["rows"]
        cuts = np.frombuffer(self.form["cuts"], dtype=np.uint32).tolist() if "cuts" in self.form else [0, num_rows]
        self.columns, self._cuts = {}, cuts
        known: dict[tuple[int, int], Lengths] = {}  # columns of a family mostly have the same rows
        for number, (name, dtype, trailing, table, num_bytes) in enumerate(header["columns"]):
            lengths = None if table < 0 else tables[table]
            entry = 1 if dtype == "object" else torch_dtype(dtype).itemsize * prod(trailing)
            starts = known.get((table, entry))
            if starts is None:
                counts = np.ones(num_rows, dtype=np.int64) if lengths is None else lengths
                starts = known[table, entry] = starts_of(counts * entry)
            if int(starts[-1]) != num_bytes:
                raise SchemaMismatch(
                    f"column {name!r} of a chunk has {num_bytes} bytes by its header, {int(starts[-1])} by its row "
                    "lengths"
                )
            self.columns[name] = _ColumnIndex(
                number=number, dtype=dtype, trailing=tuple(trailing), lengths=lengths, starts=starts
            )
        self._contents = {block: self._split(block, parts) for block, parts in payloads.items()}
        return head

    def _split(self, block: int, parts: Parts) -> list[memoryview]:
        """Return the columns of one block, each of the size that the header says."""
        low, high = self._cuts[block], self._cuts[block + 1]
        sizes = [int(index.starts[high] - index.starts[low]) for index in self.columns.values()]
        if len(parts) == 1 and len(sizes) != 1:
            starts = [0, *accumulate(sizes)]
            contents = [parts[0][start:stop] for start, stop in pairwise(starts)]
            found = parts[0].nbytes
        else:
            contents, found = list(parts), sum(part.nbytes for part in parts)
        if [content.nbytes for content in contents] != sizes or found != sum(sizes):
            raise SchemaMismatch(
                f"the columns {', '.join(self.columns)} of a chunk have {sizes} bytes by its header, and "
                f"{[part.nbytes for part in parts]} were read back"
            )
        return contents

    def pieces(self, name: str, first: int, count: int) -> list[tuple[Bytes, int, int]]:
        """Return the bytes of `count` rows of a column, block by block: bytes, first row, rows."""
        index, cuts, stop = self.columns[name], self._cuts, first + count
        found: list[tuple[Bytes, int, int]] = []
        while first < stop:
            block = bisect_right(cuts, first) - 1
            content, start = self._content(index, block, name), int(index.starts[cuts[block]])
            end = min(stop, cuts[block + 1])
            low, high = int(index.starts[first]) - start, int(index.starts[end]) - start
            found.append((_as_bytes(content[low:high]), first, end - first))
            self.num_bytes_used += high - low
            first = end
        return found

    def check(self, name: str) -> None:
        """Compare the checksums of a column in all blocks that are here."""
        for block in self._contents:
            self._content(self.columns[name], block, name)

    def _content(self, index: _ColumnIndex, block: int, name: str) -> memoryview:
        content = self._contents[block][index.number]
        if self._checksums and (block, index.number) not in self._checked:
            if checksum(content) != self._checksums[1 + block * len(self.columns) + index.number]:
                raise ChecksumError(self.chunk_id, name, f"the checksum of its column {name!r} differs")
            self._checked.add((block, index.number))
        return content


def _as_bytes(content: memoryview) -> Bytes:
    return np.frombuffer(content, dtype=np.uint8) if content.nbytes else _NOTHING


_NOTHING: Bytes = np.empty(0, dtype=np.uint8)


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredColumn:
    """Rows of one column in the order they were asked for, in memory of their own."""

    values: torch.Tensor | None
    lengths: Lengths | None
    objects: list[object] | None = None


def gather(spec: FieldSpec, *, readers: Sequence[ChunkReader], runs: Sequence[Run]) -> GatheredColumn:
    """Return the rows that `runs` name, copied once; no runs give an empty column."""
    indexes = [readers[run[0]].columns[spec.name] for run in runs]
    parts = [
        content for chunk, first, count in runs for content, _, _ in readers[chunk].pieces(spec.name, first, count)
    ]
    lengths: Lengths | None = None
    if spec.is_object or spec.is_ragged:
        tables = [_lengths_in(index, run[1], run[2]) for index, run in zip(indexes, runs, strict=True)]
        lengths = np.concatenate(tables) if tables else np.zeros(0, dtype=np.int64)
    content = lay_end_to_end(parts)
    if spec.is_object:
        assert lengths is not None
        starts = starts_of(lengths).tolist()
        view = content.data
        rows = [msgpack.unpackb(view[a:b]) for a, b in pairwise(starts)]
        return GatheredColumn(values=None, lengths=None, objects=rows)
    dtype, trailing = _layout(spec, indexes)
    count = int(lengths.sum()) if lengths is not None else sum(run[2] for run in runs)
    if content.size:
        values = torch.from_numpy(content).view(torch_dtype(dtype)).reshape(count, *trailing)
    else:
        values = torch.empty(count, *trailing, dtype=torch_dtype(dtype))
    return GatheredColumn(values=values, lengths=lengths)


def gather_padded(
    spec: FieldSpec, *, readers: Sequence[ChunkReader], runs: Sequence[Run], pad: float, width: int | None
) -> torch.Tensor:
    """Return the rows of a ragged column that `runs` name as a dense tensor `[N, width, ...]`, copied once."""
    indexes = [readers[run[0]].columns[spec.name] for run in runs]
    dtype, trailing = _layout(spec, indexes)
    sources: list[RowBytes] = []
    for (chunk, first, count), index in zip(runs, indexes, strict=True):
        for content, at, rows in readers[chunk].pieces(spec.name, first, count):
            sources.append((content, _lengths_in(index, at, rows)))
    return pad_rows(sources, dtype=torch_dtype(dtype), trailing=trailing, pad=pad, width=width)


def _layout(spec: FieldSpec, indexes: Sequence[_ColumnIndex]) -> tuple[str, tuple[int, ...]]:
    """dtype and trailing dims; those of the schema when there are no rows."""
    if len(indexes) == 1:
        return indexes[0].dtype, indexes[0].trailing
    kinds = {(index.dtype, index.trailing) for index in indexes}
    if len(kinds) > 1:
        raise SchemaMismatch(f"field {spec.name!r} is stored with several types: {sorted(kinds)}")
    dims = spec.dims[1:] if spec.is_ragged else spec.dims
    empty = (spec.dtypes[0], tuple(dim if isinstance(dim, int) else 0 for dim in dims))
    return next(iter(kinds), empty)


def _lengths_in(index: _ColumnIndex, first: int, count: int) -> Lengths:
    if index.lengths is None:
        raise SchemaMismatch("a chunk holds a ragged column without row lengths")
    return index.lengths[first : first + count]
