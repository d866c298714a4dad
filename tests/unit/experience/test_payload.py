"""Rollouts become aligned columns; nothing per token reaches the driver's record."""

from __future__ import annotations

import math

import numpy as np
import torch

from nemo_rl.experience.payload import RowScalars, build_columns, mean_of_scored, mint_keys
from nemo_rl.models.generation.interfaces import GenerationOutput


def output() -> GenerationOutput:
    return GenerationOutput(
        token_ids=torch.tensor([7, 8, 9, 5, 6, 4], dtype=torch.int32),
        logprobs=torch.tensor([-0.7, -0.8, -0.9, -0.5, -0.6, -0.4]),
        lengths=torch.tensor([2, 1, 2, 1]),
        truncated=torch.tensor([False, False, True, False]),
        weight_version=3,
    )


def test_columns_are_prompt_then_response_then_padding():
    batch = build_columns([(1, 2), (3,)], output(), group_size=2, pad_token_id=99)
    assert batch.tensor("input_ids").tolist() == [[1, 2, 7, 8], [1, 2, 9, 99], [3, 5, 6, 99], [3, 4, 99, 99]]
    assert batch.tensor("input_lengths").tolist() == [4, 3, 3, 2]
    assert batch.tensor("token_mask").int().tolist() == [[0, 0, 1, 1], [0, 0, 1, 0], [0, 1, 1, 0], [0, 1, 0, 0]]
    expected = torch.tensor([[0, 0, -0.7, -0.8], [0, 0, -0.9, 0], [0, -0.5, -0.6, 0], [0, -0.4, 0, 0]])
    torch.testing.assert_close(batch.tensor("generation_logprobs"), expected)
    assert batch.tensor("input_ids").dtype == torch.int32


def test_keys_are_unique_and_name_their_group():
    keys = mint_keys(3, 2)
    assert len(set(keys)) == 6
    assert [key.rsplit("_g", 1)[1] for key in keys] == ["0", "1"] * 3
    assert len({key.rsplit("_g", 1)[0] for key in keys}) == 3


def test_the_drivers_record_holds_row_vectors_only_and_selects_rows():
    carry = RowScalars(
        rewards=np.array([1.0, 0.0, 0.5], dtype=np.float32),
        group_ids=np.array([0, 0, 1], dtype=np.int32),
        truncated=np.array([False, True, False]),
        response_lengths=np.array([4, 5, 6], dtype=np.int32),
    )
    picked = carry.select([2, 0])
    assert picked.rewards.tolist() == [0.5, 1.0] and picked.response_lengths.tolist() == [6, 4]


def test_the_mean_of_a_component_is_that_of_the_rows_that_have_one():
    assert mean_of_scored(np.array([1.0, math.nan, 0.0, 0.5], dtype=np.float32)) == 0.5
    assert math.isnan(mean_of_scored(np.array([math.nan], dtype=np.float32)))
