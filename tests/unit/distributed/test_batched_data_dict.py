"""Batches laid under each other keep every column."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict


def test_batches_are_joined_and_padded_or_the_missing_column_is_named():
    wide = {"ids": torch.ones(1, 3), "text": ["a"], "reward": torch.ones(1)}
    narrow = {"ids": torch.ones(2, 2), "text": ["b", "c"], "reward": torch.zeros(2)}
    merged = BatchedDataDict.from_batches([wide, narrow], pad_values={"ids": 7})
    assert merged["text"] == ["a", "b", "c"] and merged.tensor("reward").tolist() == [1, 0, 0]
    assert merged.tensor("ids").tolist() == [[1, 1, 1], [1, 1, 7], [1, 1, 7]]
    assert BatchedDataDict.from_batches([]).size == 0
    for batches in ([wide, {**narrow, "extra": [1, 2]}], [{**narrow, "extra": [1, 2]}, wide]):
        with pytest.raises(ValueError, match=r"column 'extra': expected in all 2 batches, batches \[\d\] lack it"):
            BatchedDataDict.from_batches(batches)
