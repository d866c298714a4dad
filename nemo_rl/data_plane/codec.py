"""Encodes rows as chunk payloads, and decodes them.

A chunk holds consecutive rows of one put and one family and describes itself, so a payload is never empty and can be
read by itself:

    4 bytes magic | 4 bytes header length | msgpack header | columns, one after the other

The header names each column, its dtype, its trailing dims and which table of row lengths it uses. Rows are jagged:
no padding is ever encoded. A chunk travels as parts (header, columns): encoding copies nothing, a store copies each
byte once, and so does reading. Neither direction has a loop over rows.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod

import msgpack
import numpy as np
import torch

from nemo_rl.data_plane.chunks.columns import FlatColumn, Lengths, torch_dtype
from nemo_rl.data_plane.chunks.dense import Bytes, lay_end_to_end, pad_rows
from nemo_rl.data_plane.chunks.ragged import (
    materialize,
    pack_per_token_field,
    response_from_nested,
    to_nested_by_length,
)
from nemo_rl.data_plane.interfaces import Parts
from nemo_rl.data_plane.schema import FieldSpec
from nemo_rl.errors import SchemaMismatch
from nemo_rl.jagged import stack_or_nest

__all__ = [
    "ChunkReader",
    "EncodedChunk",
    "GatheredColumn",
    "encode_rows",
    "gather",
    "gather_padded",
    "join",
    "materialize",
    "pack_per_token_field",
    "response_from_nested",
    "stack_or_nest",
    "to_nested_by_length",
]

Run = Sequence[int]
"""`[chunk, first row, rows]`."""

_MAGIC = b"NRL1"
_PREFIX = struct.Struct("<4sI")


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedChunk:
    """A payload and what the ledger needs to know about it."""

    family: str
    fields: tuple[str, ...]
    first: int
    """First row of the put in this chunk."""
    rows: int
    parts: Parts
    """Header, then the columns; views of the columns' own memory."""
    sizes: tuple[int, ...]
    """Bytes of each field."""
    row_sizes: Mapping[str, bytes]
    """uint64 bytes of each row, of the fields whose rows differ in size."""

    @property
    def nbytes(self) -> int:
        return self.parts[0].nbytes + sum(self.sizes)


def join(parts: Parts) -> memoryview:
    """Return one chunk as one buffer of its own."""
    return np.concatenate([_as_bytes(part) for part in parts]).data


@dataclass(frozen=True, kw_only=True, slots=True)
class _ColumnBytes:
    """A column as bytes."""

    column: FlatColumn
    content: Bytes
    starts: Lengths
    """`[N + 1]` byte offset of each row."""

    @property
    def is_ragged(self) -> bool:
        """True where rows can differ in size."""
        return self.column.objects is not None or self.column.lengths is not None


def encode_rows(columns: Mapping[str, FlatColumn], *, num_rows: int, chunk_bytes: int) -> list[EncodedChunk]:
    """Return chunks of about `chunk_bytes` for each family; a larger row is a chunk of its own."""
    families: dict[str, list[FlatColumn]] = {}
    for column in columns.values():
        families.setdefault(column.spec.family, []).append(column)
    chunks: list[EncodedChunk] = []
    for family, members in families.items():
        even: dict[int, Lengths] = {}  # columns of a family mostly have the same rows
        sources = [_as_source(column, num_rows, even) for column in members]
        totals = np.sum([source.starts for source in sources], axis=0)
        for first, stop in _split(totals, chunk_bytes):
            parts = _encode_chunk(sources, first, stop)
            chunks.append(
                EncodedChunk(
                    family=family,
                    fields=tuple(column.spec.name for column in members),
                    first=first,
                    rows=stop - first,
                    parts=parts,
                    sizes=tuple(part.nbytes for part in parts[1:]),
                    row_sizes=_row_sizes(sources, first, stop),
                )
            )
    return chunks


def _as_source(column: FlatColumn, num_rows: int, even: dict[int, Lengths]) -> _ColumnBytes:
    """`even` has the starts of rows of one size, by that size; filled here."""
    if column.objects is not None:
        packed = [msgpack.packb(value, strict_types=True) for value in column.objects]
        sizes = np.fromiter((len(p) for p in packed), dtype=np.int64, count=num_rows)
        content: Bytes = np.frombuffer(b"".join(packed), dtype=np.uint8)
        return _ColumnBytes(column=column, content=content, starts=_starts(sizes))
    assert column.values is not None
    content = column.values.reshape(-1).view(torch.uint8).numpy()
    entry = column.values.element_size() * prod(column.trailing)
    if column.lengths is not None:
        return _ColumnBytes(column=column, content=content, starts=_starts(column.lengths * entry))
    if entry not in even:
        even[entry] = np.arange(num_rows + 1, dtype=np.int64) * entry
    return _ColumnBytes(column=column, content=content, starts=even[entry])


def _row_sizes(sources: Sequence[_ColumnBytes], first: int, stop: int) -> dict[str, bytes]:
    tables = {s.column.spec.name: np.diff(s.starts[first : stop + 1]) for s in sources if s.is_ragged}
    return {name: sizes.astype(np.uint64).tobytes() for name, sizes in tables.items() if (sizes != sizes[0]).any()}


def _starts(sizes: Lengths) -> Lengths:
    starts = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts


def _split(starts: Lengths, chunk_bytes: int) -> list[tuple[int, int]]:
    """Return row ranges whose bytes stay within the target; one row at least."""
    ranges: list[tuple[int, int]] = []
    first, num_rows = 0, len(starts) - 1
    while first < num_rows:
        stop = int(np.searchsorted(starts, starts[first] + chunk_bytes, side="right")) - 1
        stop = max(stop, first + 1)
        ranges.append((first, stop))
        first = stop
    return ranges


def _encode_chunk(sources: Sequence[_ColumnBytes], first: int, stop: int) -> list[memoryview]:
    tables: list[bytes] = []
    described: list[list[object]] = []
    parts: list[memoryview] = []
    for source in sources:
        column = source.column
        low, high = int(source.starts[first]), int(source.starts[stop])
        parts.append(source.content[low:high].data)
        lengths = np.diff(source.starts[first : stop + 1]) if column.objects is not None else column.lengths
        table = -1
        if lengths is not None:
            own = lengths if column.objects is not None else lengths[first:stop]
            packed = own.astype(np.uint32).tobytes()
            table = tables.index(packed) if packed in tables else len(tables)
            if table == len(tables):
                tables.append(packed)
        described.append([column.spec.name, column.dtype, list(column.trailing), table, high - low])
    header = msgpack.packb({"rows": stop - first, "tables": tables, "columns": described})
    return [memoryview(_PREFIX.pack(_MAGIC, len(header)) + header), *parts]


@dataclass(frozen=True, kw_only=True, slots=True)
class _ColumnIndex:
    """The place of one column in a chunk."""

    dtype: str
    trailing: tuple[int, ...]
    lengths: Lengths | None
    starts: Lengths
    """`[rows + 1]` byte offset of each row in the column."""
    content: Bytes


@dataclass(slots=True)
class ChunkReader:
    """Reads row ranges out of one chunk.

    Raises:
        SchemaMismatch: the payload is no chunk, or shorter than its header says.
    """

    parts: Parts
    columns: dict[str, _ColumnIndex] = field(init=False)
    num_bytes_used: int = field(init=False, default=0)
    """Bytes of the columns asked for so far."""

    def __post_init__(self) -> None:
        size = sum(part.nbytes for part in self.parts)
        first = self.parts[0]
        if first.nbytes < _PREFIX.size:
            raise SchemaMismatch(f"a payload of {size} bytes is not a chunk")
        magic, header_bytes = _PREFIX.unpack_from(first, 0)
        at = _PREFIX.size + header_bytes
        if magic != _MAGIC or at > first.nbytes:
            raise SchemaMismatch(f"a payload of {size} bytes that starts with {bytes(magic)!r} is not a chunk")
        header = msgpack.unpackb(first[_PREFIX.size : at])
        tables = [np.frombuffer(table, dtype=np.uint32).astype(np.int64) for table in header["tables"]]
        columns = header["columns"]
        if len(self.parts) == 1:
            contents = _split_columns(first[at:], [column[4] for column in columns], size)
        else:
            contents = list(self.parts[1:])
        if len(contents) != len(columns):
            raise SchemaMismatch(f"a chunk of {len(columns)} columns was read back with {len(contents)}")
        self.columns = {}
        known: dict[tuple[int, int], Lengths] = {}  # columns of a family mostly have the same rows
        for (name, dtype, trailing, table, num_bytes), content in zip(columns, contents, strict=True):
            lengths = None if table < 0 else tables[table]
            entry = 1 if dtype == "object" else torch_dtype(dtype).itemsize * prod(trailing)
            starts = known.get((table, entry))
            if starts is None:
                counts = np.ones(header["rows"], dtype=np.int64) if lengths is None else lengths
                starts = known[table, entry] = _starts(counts * entry)
            if int(starts[-1]) != num_bytes or content.nbytes != num_bytes:
                raise SchemaMismatch(
                    f"column {name!r} of a chunk has {num_bytes} bytes by its header, {int(starts[-1])} by its row "
                    f"lengths, and {content.nbytes} were read back"
                )
            self.columns[name] = _ColumnIndex(
                dtype=dtype, trailing=tuple(trailing), lengths=lengths, starts=starts, content=_as_bytes(content)
            )

    def rows(self, name: str, first: int, count: int) -> Bytes:
        """Return the bytes of `count` rows of a column."""
        index = self.columns[name]
        low, high = int(index.starts[first]), int(index.starts[first + count])
        self.num_bytes_used += high - low
        return index.content[low:high]


def _split_columns(content: memoryview, sizes: Sequence[int], total: int) -> list[memoryview]:
    if sum(sizes) != content.nbytes:
        raise SchemaMismatch(f"a chunk of {total - content.nbytes + sum(sizes)} bytes was read back with {total} bytes")
    starts = [0, *accumulate(sizes)]
    return [content[low:high] for low, high in pairwise(starts)]


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
    parts = [readers[chunk].rows(spec.name, first, count) for chunk, first, count in runs]
    lengths: Lengths | None = None
    if spec.is_object or spec.is_ragged:
        tables = [_lengths_in(index, run[1], run[2]) for index, run in zip(indexes, runs, strict=True)]
        lengths = np.concatenate(tables) if tables else np.zeros(0, dtype=np.int64)
    content = lay_end_to_end(parts)
    if spec.is_object:
        assert lengths is not None
        starts = _starts(lengths).tolist()
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
    sources = [
        (readers[run[0]].rows(spec.name, run[1], run[2]), _lengths_in(index, run[1], run[2]))
        for index, run in zip(indexes, runs, strict=True)
    ]
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
