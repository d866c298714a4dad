"""Reads rows out of chunks: `ChunkReader` finds them, `gather` and `gather_padded` copy them into columns.

Used by the reading half of a client. A chunk arrives whole, as one buffer or as header and columns, or as some of its
blocks, each with the columns of consecutive rows. Invariant: bytes that have a checksum are compared with it before
they are given out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import msgpack
import numpy as np
import torch

from nemo_rl.data_plane.chunks.columns import Lengths, torch_dtype
from nemo_rl.data_plane.chunks.ragged import Bytes, RowBytes, lay_end_to_end, pad_rows
from nemo_rl.data_plane.codec import HEAD_PREFIX_BYTES, ChunkForm, checksum, split_head, starts_of
from nemo_rl.data_plane.interfaces import Parts
from nemo_rl.data_plane.schema import FieldSpec
from nemo_rl.errors import SchemaMismatch

__all__ = ["ChecksumError", "ChunkReader", "Run", "blocks_of_runs", "gather", "gather_padded"]

SMALL_PIECE_BYTES = 64 << 10
"""Smaller pieces of a column are laid end to end before their rows are padded: a copy more is faster than a loop."""

Run = Sequence[int]
"""`[chunk, first row, rows]`."""

Piece = tuple[Bytes, int, int]
"""Bytes of consecutive rows of a column, the rows, and the number of the block that they are in."""


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
    """Checksums, header and cuts of the chunk, from the ledger."""
    chunk_id: str = ""
    """Names the chunk in errors."""
    columns: dict[str, _ColumnIndex] = field(init=False)
    num_bytes_used: int = field(init=False, default=0)
    """Bytes of the columns asked for so far."""
    _cuts: Sequence[int] = field(init=False)
    _edges: list[list[int]] = field(init=False)
    """Column (and one more for the end) -> the byte in each block where it begins."""
    _blocks: dict[int, list[Bytes]] = field(init=False)
    """The columns of each block that is here, or one array of all."""
    _checksums: list[int] = field(init=False)
    _checked: set[int] = field(init=False, default_factory=set)
    """Places of the checksums that were found to be right."""

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
        header = msgpack.unpackb(head[HEAD_PREFIX_BYTES:])
        tables = [np.frombuffer(table, dtype=np.uint32).astype(np.int64) for table in header["tables"]]
        num_rows = header["rows"]
        cuts = np.frombuffer(self.form["cuts"], dtype=np.uint32) if "cuts" in self.form else np.array([0, num_rows])
        self.columns, self._cuts = {}, cuts.tolist()
        known: dict[tuple[int, int], Lengths] = {}  # columns of a family mostly have the same rows
        edges = [np.zeros(len(cuts) - 1, dtype=np.int64)]
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
            edges.append(edges[-1] + np.diff(starts[cuts]))
        self._edges = [edge.tolist() for edge in edges]
        self._blocks = {block: [_as_bytes(part) for part in parts] for block, parts in payloads.items()}
        self._check_sizes()
        return head

    def _check_sizes(self) -> None:
        """Check that each block has the bytes that the header says."""
        ends = self._edges[-1]
        for block, arrays in self._blocks.items():
            if len(arrays) == 1 and arrays[0].size == ends[block]:
                continue
            found, at = [array.size for array in arrays], [edge[block] for edge in self._edges]
            if found != [at[-1]] and found != [high - low for low, high in pairwise(at)]:
                raise SchemaMismatch(
                    f"the columns {', '.join(self.columns)} of a chunk end at {at[1:]} bytes by its header, and "
                    f"{found} bytes were read back"
                )

    @property
    def has_checksums(self) -> bool:
        """True where `check` compares."""
        return bool(self._checksums)

    def pieces(self, name: str, first: int, count: int, *, checks: bool) -> list[Piece]:
        """Return the bytes of `count` rows of a column, block by block.

        Args:
            checks: compare them with their checksums; otherwise `check` each block before its bytes are given out.
        """
        cuts, starts, stop = self._cuts, self.columns[name].starts, first + count
        self.num_bytes_used += int(starts[stop] - starts[first])
        if not count:
            return []
        low, high = bisect_right(cuts, first) - 1, bisect_left(cuts, stop)
        contents = self._contents(name, low, high)
        if checks:
            self._check(name, low, contents)
        found = [(content, cuts[i + 1] - cuts[i], i) for i, content in enumerate(contents, low)]
        if stop < cuts[high]:
            content, rows, block = found[-1]
            at = int(starts[cuts[block]])
            found[-1] = content[: int(starts[stop]) - at], rows - (cuts[high] - stop), block
        if first > cuts[low]:
            content, rows, block = found[0]
            found[0] = content[int(starts[first]) - int(starts[cuts[low]]) :], rows - (first - cuts[low]), block
        return found

    def check(self, name: str, block: int) -> None:
        """Compare a column of a block with its checksum, the first time it is asked for."""
        self._check(name, block, self._contents(name, block, block + 1))

    def check_column(self, name: str) -> None:
        for block in self._blocks:
            self.check(name, block)

    def _check(self, name: str, first: int, contents: Sequence[Bytes]) -> None:
        """Compare a column of neighbouring blocks, from block `first` on, with their checksums."""
        if not self._checksums:
            return
        place = 1 + first * len(self.columns) + self.columns[name].number
        for content in contents:
            if place not in self._checked:
                if checksum(content.data) != self._checksums[place]:
                    raise ChecksumError(self.chunk_id, name, f"the checksum of its column {name!r} differs")
                self._checked.add(place)
            place += len(self.columns)

    def _contents(self, name: str, first: int, stop: int) -> list[Bytes]:
        """Return a column of the blocks from `first` to `stop`."""
        number, num_columns = self.columns[name].number, len(self.columns)
        lows, highs = self._edges[number], self._edges[number + 1]
        found: list[Bytes] = []
        for block in range(first, stop):
            arrays = self._blocks[block]
            found.append(arrays[number] if len(arrays) == num_columns else arrays[0][lows[block] : highs[block]])
        return found


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
    found = [
        (readers[chunk], piece)
        for chunk, first, count in runs
        for piece in readers[chunk].pieces(spec.name, first, count, checks=False)
    ]
    lengths: Lengths | None = None
    if spec.is_object or spec.is_ragged:
        tables = [_lengths_in(index, run[1], run[2]) for index, run in zip(indexes, runs, strict=True)]
        lengths = np.concatenate(tables) if tables else np.zeros(0, dtype=np.int64)
    content = lay_end_to_end(
        [piece[0] for _, piece in found],
        check=(lambda number: found[number][0].check(spec.name, found[number][1][2]))
        if any(reader.has_checksums for reader in readers)
        else None,
    )
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
        pieces = readers[chunk].pieces(spec.name, first, count, checks=True)
        lengths = _lengths_in(index, first, count)
        if len(pieces) > 1 and sum([content.size for content, _, _ in pieces]) < len(pieces) * SMALL_PIECE_BYTES:
            pieces = [(np.concatenate([content for content, _, _ in pieces]), count, 0)]
        at = 0
        for content, rows, _ in pieces:
            sources.append((content, lengths[at : at + rows]))
            at += rows
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
