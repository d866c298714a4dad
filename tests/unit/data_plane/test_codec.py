"""Rows become chunks and come back: every dtype, ragged and empty rows, objects, padding on read only."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from nemo_rl.data_plane.chunks.columns import check_columns
from nemo_rl.data_plane.chunks.reader import ChunkReader, blocks_of_runs, gather, gather_padded
from nemo_rl.data_plane.codec import (
    encode_rows,
    join,
    materialize,
    pack_per_token_field,
    response_from_nested,
    stack_or_nest,
    to_nested_by_length,
)
from nemo_rl.data_plane.keys import chunk_in_blocks
from nemo_rl.data_plane.schema import FIELDS, resolve_fields
from nemo_rl.errors import SchemaMismatch
from nemo_rl.jagged import nest
from tests.helpers.data_planes import ids_column, rows_of


def encoded(columns: dict, num_rows: int, chunk_bytes: int = 1 << 17) -> list:
    specs = {spec.name: spec for spec in resolve_fields(list(columns))}
    checked = check_columns(columns, specs=specs, keys=[f"k{i}" for i in range(num_rows)], where="test")
    return encode_rows(checked, num_rows=num_rows, chunk_bytes=chunk_bytes)


def test_chunks_hold_consecutive_rows_up_to_the_target_and_one_at_least() -> None:
    lengths = [10, 10, 10, 300, 10, 0, 0, 25]
    chunks = encoded({"input_ids": ids_column(lengths)}, 8, chunk_bytes=100)
    assert [(c.first, c.rows) for c in chunks] == [(0, 2), (2, 1), (3, 1), (4, 3), (7, 1)]
    assert all(c.nbytes > 0 for c in chunks)
    values = torch.cat(
        [
            gather(FIELDS["input_ids"], readers=[ChunkReader.of_payload(c.parts)], runs=[(0, 0, c.rows)]).values
            for c in chunks
        ]
    )
    assert values.tolist() == list(range(sum(lengths)))


def test_families_travel_in_chunks_of_their_own_and_padding_is_never_encoded() -> None:
    padded = torch.ones(4, 10_000, dtype=torch.int32)
    lengths = torch.tensor([3, 0, 2, 1], dtype=torch.int32)
    columns = {
        "input_ids": to_nested_by_length(padded, lengths),
        "input_lengths": lengths,
        "sample_mask": torch.ones(4),
    }
    chunks = {c.family: c for c in encoded(columns, 4)}
    assert {family: set(c.fields) for family, c in chunks.items()} == {
        "tokens": {"input_ids", "input_lengths"},
        "sample_mask": {"sample_mask"},
    }
    assert sum(c.nbytes for c in chunks.values()) < 400


def test_runs_over_several_chunks_are_gathered_in_their_order() -> None:
    chunks = encoded({"input_ids": ids_column([1, 2, 3, 4])}, 4, chunk_bytes=12)
    readers = [ChunkReader.of_payload(c.parts) for c in chunks]
    assert [(c.first, c.rows) for c in chunks] == [(0, 2), (2, 1), (3, 1)]
    column = gather(FIELDS["input_ids"], readers=readers, runs=[(2, 0, 1), (0, 1, 1), (1, 0, 1)])
    assert column.values.tolist() == [6, 7, 8, 9, 1, 2, 3, 4, 5] and column.lengths.tolist() == [4, 2, 3]


def test_rows_of_chunks_in_blocks_are_those_of_whole_chunks() -> None:
    lengths = [5, 0, 7, 1, 1, 9, 0, 3, 30, 2]
    columns = {"input_ids": ids_column(lengths), "token_mask": nest(torch.arange(58) % 3 == 0, torch.tensor(lengths))}
    specs = {spec.name: spec for spec in resolve_fields(list(columns))}
    flat = check_columns(columns, specs=specs, keys=[f"k{i}" for i in range(10)], where="test")
    (whole,) = encode_rows(flat, num_rows=10, chunk_bytes=1 << 20)
    (chunk,) = encode_rows(flat, num_rows=10, chunk_bytes=1 << 20, block_bytes=40, has_checksums=True)
    stored = list(chunk.payloads(chunk_in_blocks("r/c/1", chunk.num_blocks)))
    assert len(stored) == chunk.num_blocks > 4 and stored[:2] == ["r/c/1#0", "r/c/1#1"]
    parts = chunk.blocks
    for first in range(10):
        for count in range(10 - first + 1):
            runs = [(0, first, count)]
            blocks = blocks_of_runs(runs, chunk.cuts)
            # Stored as several parts or as one: a store may give back either.
            given = {b: parts[b] if b % 2 else [join(parts[b])] for b in blocks}
            readers = [ChunkReader(given, chunk.form(), "r/c/1")]
            for name in columns:
                found = gather(FIELDS[name], readers=readers, runs=runs)
                expected = gather(FIELDS[name], readers=[ChunkReader.of_payload(whole.parts)], runs=runs)
                assert torch.equal(found.values, expected.values) and (found.lengths == expected.lengths).all()
                dense = gather_padded(FIELDS[name], readers=readers, runs=runs, pad=0.0, width=30)
                assert dense.shape == (count, 30) and dense.sum() == expected.values.sum()


def test_a_payload_that_is_cut_or_foreign_is_refused() -> None:
    (chunk,) = encoded({"input_ids": ids_column([3, 4])}, 2)
    whole = bytes(join(chunk.parts))
    for broken in (b"", b"NRL1", b"XXXX" + whole[4:], whole[:-1], whole + b"x", whole[:20]):
        with pytest.raises((SchemaMismatch, ValueError)):
            ChunkReader.of_payload([memoryview(broken)])
    assert ChunkReader.of_payload([memoryview(whole)]).columns.keys() == {"input_ids"}
    for parts in (chunk.parts[:1], [*chunk.parts, memoryview(b"x")], [chunk.parts[0], chunk.parts[1][:-1]]):
        with pytest.raises(SchemaMismatch):
            ChunkReader.of_payload(parts)


def test_bytes_used_are_those_of_the_rows_asked_for() -> None:
    (chunk,) = encoded({"input_ids": ids_column([3, 4, 5])}, 3)
    reader = ChunkReader.of_payload(chunk.parts)
    gather(FIELDS["input_ids"], readers=[reader], runs=[(0, 1, 1)])
    assert reader.num_bytes_used == 16


def test_padded_rows_are_cut_by_length() -> None:
    padded = torch.arange(24).reshape(2, 4, 3)
    nested = to_nested_by_length(padded, torch.tensor([1, 3]))
    assert rows_of(nested) == [padded[0, :1].tolist(), padded[1, :3].tolist()]
    for lengths in ([1, 5], [-1, 2], [1], [1, 2, 3]):
        with pytest.raises(SchemaMismatch):
            to_nested_by_length(padded, torch.tensor(lengths))
    with pytest.raises(SchemaMismatch, match="padded column"):
        to_nested_by_length(torch.ones(2), torch.tensor([1, 1]))


def test_per_token_columns_may_be_wider_but_not_narrower() -> None:
    wide = torch.arange(12.0).reshape(2, 6)
    lengths = torch.tensor([2, 4])
    packed = pack_per_token_field(wide, lengths)
    assert rows_of(packed) == [[0, 1], [6, 7, 8, 9]]
    assert pack_per_token_field(packed, lengths) is packed
    with pytest.raises(SchemaMismatch):
        pack_per_token_field(wide[:, :3], lengths)
    with pytest.raises(SchemaMismatch, match="expected rows of lengths"):
        pack_per_token_field(packed, torch.tensor([2, 3]))


def test_rows_of_one_shape_are_stacked_and_others_nested() -> None:
    assert stack_or_nest([torch.ones(2), torch.zeros(2)]).shape == (2, 2)
    assert rows_of(stack_or_nest([torch.ones(2), torch.zeros(1)])) == [[1, 1], [0]]
    assert stack_or_nest([]).numel() == 0


def test_response_slices_are_shifted_one_token_to_the_left() -> None:
    lengths = torch.tensor([5, 3, 0, 4])
    full = nest(torch.arange(12), lengths)
    mask = nest(torch.tensor([0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 1], dtype=torch.bool), lengths)
    expected = [
        [row[i - 1] for i, m in enumerate(bits) if m] for row, bits in zip(rows_of(full), rows_of(mask), strict=True)
    ]
    assert rows_of(response_from_nested(full, mask)) == expected == [[1, 2], [], [], [8, 10]]
    with pytest.raises(SchemaMismatch, match="no predecessor"):
        response_from_nested(full, nest(torch.ones(12, dtype=torch.bool), lengths))


def test_only_token_aligned_columns_are_padded_to_the_target() -> None:
    rows = TensorDict(
        {
            "input_ids": ids_column([1, 3], start=5),
            "turns": nest(torch.tensor([7, 8, 9]), torch.tensor([2, 1])),
            "image": torch.ones(2, 2, 2),
            "prompt_text": ["a", "b"],
        },
        batch_size=[2],
    )
    dense = materialize(rows, pad_values={"input_ids": 99, "turns": -1}, pad_to=4)
    assert dense["input_ids"].tolist() == [[5, 99, 99, 99], [6, 7, 8, 99]]
    assert dense["turns"].tolist() == [[7, 8], [9, -1]]
    assert dense["image"].shape == (2, 2, 2) and dense["prompt_text"] == ["a", "b"]
    with pytest.raises(SchemaMismatch, match="does not fit the pad target"):
        materialize(rows, pad_values={}, pad_to=2)


def test_many_small_rows_need_no_loop_over_rows() -> None:
    """1024 rows of 25 tokens: a loop would show as thousands of numpy arrays."""
    lengths = np.full(1024, 25).tolist()
    chunks = encoded({"input_ids": ids_column(lengths), "sample_mask": torch.ones(1024)}, 1024)
    assert len(chunks) == 2 and chunks[0].nbytes < 1024 * 25 * 4 + 5000
