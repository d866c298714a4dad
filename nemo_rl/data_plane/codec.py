"""Encodes rows as chunks; `chunks.reader` reads them.

A chunk holds consecutive rows of one put and one family and describes itself, so a payload is never empty and can be
read by itself:

    4 bytes magic | 4 bytes header length | msgpack header | columns, one after the other

The header names each column, its dtype, its trailing dims and which table of row lengths it uses. Rows are jagged:
no padding is ever encoded. A chunk travels as parts (header, columns): encoding copies nothing, a store copies each
byte once, and so does reading. Neither direction has a loop over rows.

For a store that moves whole payloads, a chunk is cut into blocks of consecutive rows, each stored by itself, and the
ledger keeps its header: a reader of some rows moves their blocks alone.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TypeAlias

import msgpack
import numpy as np
import torch
import xxhash

from nemo_rl.data_plane.chunks.columns import FlatColumn, Lengths
from nemo_rl.data_plane.chunks.ragged import (
    Bytes,
    materialize,
    pack_per_token_field,
    response_from_nested,
    to_nested_by_length,
)
from nemo_rl.data_plane.interfaces import Parts
from nemo_rl.data_plane.keys import block_ids
from nemo_rl.errors import SchemaMismatch
from nemo_rl.jagged import stack_or_nest

__all__ = [
    "HEAD_PREFIX_BYTES",
    "ChunkForm",
    "EncodedChunk",
    "checksum",
    "encode_rows",
    "join",
    "materialize",
    "pack_per_token_field",
    "response_from_nested",
    "split_head",
    "stack_or_nest",
    "starts_of",
    "to_nested_by_length",
]

ChunkForm: TypeAlias = Mapping[str, bytes]
"""Bytes that the ledger keeps of a chunk for its readers: `checksums` (uint64, of the header, then of each column block
by block), and of a chunk in blocks its `head` and `cuts` (uint32: first row of each block, and the number of rows)."""

COLUMNS_OF_A_BLOCK = 4
"""Blocks of a family with many more columns are larger: each column of each block costs time."""
_MAGIC = b"NRL1"
_PREFIX = struct.Struct("<4sI")
HEAD_PREFIX_BYTES = _PREFIX.size
"""Bytes in front of the msgpack part of a header."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedChunk:
    """A chunk and what the ledger needs to know about it."""

    family: str
    fields: tuple[str, ...]
    first: int
    """First row of the put in this chunk."""
    rows: int
    head: memoryview
    columns: tuple[memoryview, ...]
    """Views of the columns' own memory."""
    row_sizes: Mapping[str, bytes]
    """uint64 bytes of each row, of the fields whose rows differ in size."""
    cuts: Sequence[int] = ()
    """First row of each block, and the number of rows; empty for a chunk that is stored whole."""
    blocks: Sequence[Parts] = ()
    """The columns of each block, views of `columns`."""
    has_checksums: bool = False

    @property
    def parts(self) -> Parts:
        return [self.head, *self.columns]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each field."""
        return tuple(column.nbytes for column in self.columns)

    @property
    def nbytes(self) -> int:
        return self.head.nbytes + sum(self.sizes)

    @property
    def num_blocks(self) -> int:
        """Blocks that are stored by themselves; 0 for a chunk that is stored whole."""
        return len(self.blocks)

    def payloads(self, chunk_id: str) -> dict[str, Parts]:
        """Return what goes to the store, by the ids under which it lies there."""
        return dict(zip(block_ids(chunk_id), self.blocks or [self.parts], strict=True))

    def form(self) -> ChunkForm:
        """Return what readers need besides the payloads; empty for a whole chunk without checksums."""
        form: dict[str, bytes] = {}
        if self.cuts:
            form |= {"head": bytes(self.head), "cuts": np.array(self.cuts, dtype=np.uint32).tobytes()}
        if self.has_checksums:
            sums = [checksum(self.head), *[checksum(part) for block in self.blocks or [self.columns] for part in block]]
            form["checksums"] = np.array(sums, dtype=np.uint64).tobytes()
        return form


def join(parts: Parts) -> memoryview:
    return np.concatenate([np.frombuffer(part, dtype=np.uint8) for part in parts if part.nbytes] or [_NOTHING]).data


_NOTHING: Bytes = np.empty(0, dtype=np.uint8)


def checksum(content: memoryview) -> int:
    """Return the 64-bit checksum of some bytes (XXH3, https://xxhash.com)."""
    return xxhash.xxh3_64_intdigest(content)


def split_head(parts: Parts) -> tuple[memoryview, Parts]:
    """Return the header of a chunk and what lies behind it.

    Raises:
        SchemaMismatch: it is no chunk.
    """
    first = parts[0]
    size = sum(part.nbytes for part in parts)
    if first.nbytes < _PREFIX.size:
        raise SchemaMismatch(f"a payload of {size} bytes is not a chunk")
    magic, header_bytes = _PREFIX.unpack_from(first, 0)
    at = _PREFIX.size + header_bytes
    if magic != _MAGIC or at > first.nbytes:
        raise SchemaMismatch(f"a payload of {size} bytes that starts with {bytes(magic)!r} is not a chunk")
    behind = parts[1:] if len(parts) > 1 else [first[at:]]
    return first[:at], behind


@dataclass(frozen=True, kw_only=True, slots=True)
class _ColumnBytes:
    column: FlatColumn
    content: Bytes
    starts: Lengths
    """`[N + 1]` byte offset of each row."""

    @property
    def is_ragged(self) -> bool:
        """True where rows can differ in size."""
        return self.column.objects is not None or self.column.lengths is not None


def encode_rows(
    columns: Mapping[str, FlatColumn],
    *,
    num_rows: int,
    chunk_bytes: int,
    block_bytes: int | None = None,
    has_checksums: bool = False,
) -> list[EncodedChunk]:
    """Return chunks of about `chunk_bytes` for each family; a larger row is a chunk of its own.

    Args:
        block_bytes: cuts the chunks into blocks of about so many bytes; None leaves them whole.
    """
    families: dict[str, list[FlatColumn]] = {}
    for column in columns.values():
        families.setdefault(column.spec.family, []).append(column)
    chunks: list[EncodedChunk] = []
    for family, members in families.items():
        even: dict[int, Lengths] = {}  # columns of a family mostly have the same rows
        sources = [_as_source(column, num_rows, even) for column in members]
        totals = np.sum([source.starts for source in sources], axis=0)
        for first, stop in _split(totals, chunk_bytes):
            cuts: list[int] = []
            if block_bytes is not None:
                target = block_bytes * max(1, len(members) // COLUMNS_OF_A_BLOCK)
                cuts = [*(low for low, _ in _split(totals[first : stop + 1], target)), stop - first]
            head, contents = _encode_chunk(sources, first, stop)
            chunks.append(
                EncodedChunk(
                    family=family,
                    fields=tuple(column.spec.name for column in members),
                    first=first,
                    rows=stop - first,
                    head=head,
                    columns=contents,
                    row_sizes=_row_sizes(sources, first, stop),
                    cuts=cuts,
                    blocks=_blocks(sources, contents, first, cuts),
                    has_checksums=has_checksums,
                )
            )
    return chunks


def _as_source(column: FlatColumn, num_rows: int, even: dict[int, Lengths]) -> _ColumnBytes:
    """`even` has the starts of rows of one size, by that size; filled here."""
    if column.objects is not None:
        packed = [msgpack.packb(value, strict_types=True) for value in column.objects]
        sizes = np.fromiter((len(p) for p in packed), dtype=np.int64, count=num_rows)
        content: Bytes = np.frombuffer(b"".join(packed), dtype=np.uint8)
        return _ColumnBytes(column=column, content=content, starts=starts_of(sizes))
    assert column.values is not None
    content = column.values.reshape(-1).view(torch.uint8).numpy()
    entry = column.values.element_size() * prod(column.trailing)
    if column.lengths is not None:
        return _ColumnBytes(column=column, content=content, starts=starts_of(column.lengths * entry))
    if entry not in even:
        even[entry] = np.arange(num_rows + 1, dtype=np.int64) * entry
    return _ColumnBytes(column=column, content=content, starts=even[entry])


def _row_sizes(sources: Sequence[_ColumnBytes], first: int, stop: int) -> dict[str, bytes]:
    tables = {s.column.spec.name: np.diff(s.starts[first : stop + 1]) for s in sources if s.is_ragged}
    return {name: sizes.astype(np.uint64).tobytes() for name, sizes in tables.items() if (sizes != sizes[0]).any()}


def starts_of(sizes: Lengths) -> Lengths:
    """Return `[N + 1]` offsets of rows of these sizes that lie end to end."""
    starts = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts


def _split(starts: Lengths, chunk_bytes: int) -> list[tuple[int, int]]:
    """Return row ranges whose bytes stay within the target; one row at least."""
    ranges: list[tuple[int, int]] = []
    first, num_rows, at = 0, len(starts) - 1, starts.tolist()  # bisect beats numpy's search: there is a call per block
    while first < num_rows:
        stop = max(bisect_right(at, at[first] + chunk_bytes, first) - 1, first + 1)
        ranges.append((first, stop))
        first = stop
    return ranges


def _blocks(
    sources: Sequence[_ColumnBytes], contents: Sequence[memoryview], first: int, cuts: Sequence[int]
) -> list[Parts]:
    """Cut the columns of a chunk that begins at row `first` of the put; no cuts give no blocks."""
    if not cuts:
        return []
    by_column = []
    for source, content in zip(sources, contents, strict=True):
        at = (source.starts[first:][cuts] - source.starts[first]).tolist()
        by_column.append([content[low:high] for low, high in pairwise(at)])
    return list(zip(*by_column, strict=True))


def _encode_chunk(sources: Sequence[_ColumnBytes], first: int, stop: int) -> tuple[memoryview, tuple[memoryview, ...]]:
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
    return memoryview(_PREFIX.pack(_MAGIC, len(header)) + header), tuple(parts)
