"""Padding row by row, and memory that is reused only when nobody reads it."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
import torch

from nemo_rl.data_plane.chunks import ragged
from nemo_rl.data_plane.chunks.ragged import LEAST_BYTES, PARALLEL_BYTES, WarmMemory, lay_end_to_end, pad_rows
from nemo_rl.errors import SchemaMismatch


def sources(rows: list[torch.Tensor], splits: int) -> list:
    groups = [rows[i::splits] for i in range(splits)]
    return [
        (
            torch.cat(group).contiguous().view(-1).view(torch.uint8).numpy(),
            np.array([len(row) for row in group], dtype=np.int64),
        )
        for group in groups
    ]


@pytest.mark.parametrize("dtype", [torch.int16, torch.bfloat16, torch.float32, torch.bool])
@pytest.mark.parametrize("trailing", [(), (3, 5), (400,), (1200,)])
@pytest.mark.parametrize("pad", [0.0, 1.0])
def test_rows_are_padded_on_the_right_whatever_their_size(dtype: torch.dtype, trailing: tuple, pad: float) -> None:
    lengths = [4, 0, 7, 1, 7, 2]
    rows = [torch.randint(0, 2, (length, *trailing)).to(dtype) for length in lengths]
    dense = pad_rows(sources(rows, 2), dtype=dtype, trailing=trailing, pad=pad, width=9)
    assert dense.dtype == dtype and dense.shape == (6, 9, *trailing)
    for got, row in zip(dense, [*rows[0::2], *rows[1::2]], strict=True):
        assert torch.equal(got[: len(row)], row)
        assert (got[len(row) :] == torch.tensor(pad).to(dtype)).all()


def test_a_row_over_the_pad_target_is_refused_and_no_rows_are_a_batch() -> None:
    with pytest.raises(SchemaMismatch, match="a row of 7 tokens does not fit the pad target of 6"):
        pad_rows(sources([torch.zeros(7)], 1), dtype=torch.float32, trailing=(), pad=0, width=6)
    assert pad_rows([], dtype=torch.float32, trailing=(2,), pad=0, width=6).shape == (0, 6, 2)


def test_warm_memory_comes_back_only_when_the_last_view_is_gone() -> None:
    warm = WarmMemory(keep_bytes=64 * LEAST_BYTES)
    tensor = torch.from_numpy(warm.empty(4 * LEAST_BYTES)).view(torch.int32).view(2, -1)
    tensor.fill_(7)
    where, view = tensor.data_ptr(), tensor[1, 5:9]
    del tensor
    gc.collect()
    assert warm.free_bytes == 0
    other = torch.from_numpy(warm.empty(4 * LEAST_BYTES))
    other.zero_()
    assert other.data_ptr() != where and view.tolist() == [7, 7, 7, 7]
    del view
    gc.collect()
    assert warm.free_bytes >= 4 * LEAST_BYTES
    again = warm.empty(4 * LEAST_BYTES)
    assert again.ctypes.data == where


def test_warm_memory_keeps_no_more_than_its_limit() -> None:
    warm = WarmMemory(keep_bytes=5 * LEAST_BYTES)
    blocks = [warm.empty(2 * LEAST_BYTES) for _ in range(4)]
    del blocks
    gc.collect()
    assert 0 < warm.free_bytes <= 5 * LEAST_BYTES


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_parts_are_laid_end_to_end_by_any_number_of_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged, "PARALLEL_BYTES", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(threads)))
    random = np.random.default_rng(threads)
    for _ in range(50):
        sizes = random.integers(0, 9, random.integers(0, 7))
        parts = [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]
        assert lay_end_to_end(parts).tobytes() == b"".join(part.tobytes() for part in parts)


@pytest.mark.parametrize("size", [1 << 10, PARALLEL_BYTES])
def test_each_part_is_checked_once_and_a_wrong_one_is_not_given_out(size: int) -> None:
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 255, part, dtype=np.uint8) for part in (size // 2, size // 4, 7, size // 2)]
    checked: list[int] = []
    laid = lay_end_to_end(parts, check=checked.append)
    assert laid.tobytes() == b"".join(part.tobytes() for part in parts) and sorted(checked) == [0, 1, 2, 3]

    def refuse(number: int) -> None:
        if number == wrong:
            raise ValueError(f"part {number}")

    for wrong in range(4):
        with pytest.raises(ValueError, match=f"part {wrong}"):
            lay_end_to_end(parts, check=refuse)
