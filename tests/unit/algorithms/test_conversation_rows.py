"""Rows of conversations: statistics count each scored conversation once, and its rows share what it gets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nemo_rl.algorithms.grpo import EQUAL, LEFT_OUT, VOID, score_rows, select_train_rows
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.experience.payload import ConversationStats, SampleStats


def rows_of(
    rewards: list[float], sample: list[int], *, scored: list[bool] | None = None, void: list[bool] | None = None
) -> SampleStats:
    count = len(rewards)
    return SampleStats(
        rewards=np.asarray(rewards, dtype=np.float32),
        truncated=np.zeros(count, dtype=np.bool_),
        response_lengths=np.arange(1, count + 1, dtype=np.int32),
        conversations=ConversationStats(
            sample=np.asarray(sample, dtype=np.int32),
            is_scored=np.asarray(scored or [True] * count),
            endings=np.zeros(count, dtype=np.uint8),
            num_turns=np.ones(count, dtype=np.int32),
            is_void=np.asarray(void or [False] * count),
        ),
    )


def single(rewards: list[float]) -> SampleStats:
    count = len(rewards)
    return SampleStats(
        rewards=np.asarray(rewards, dtype=np.float32),
        truncated=np.zeros(count, dtype=np.bool_),
        response_lengths=np.arange(1, count + 1, dtype=np.int32),
    )


def test_a_conversation_that_was_left_out_changes_no_advantage_of_the_others():
    expected = score_rows(single([1.0, 0.0, 3.0]), ["u"] * 3, GRPOConfig())
    found = score_rows(
        rows_of([1.0, 0.0, 0.0, 3.0], [0, 1, 2, 3], scored=[True, True, False, True]), ["u"] * 4, GRPOConfig()
    )
    assert found.advantages[[0, 1, 3]].tolist() == expected.advantages.tolist()
    assert found.sample_mask.tolist() == [1, 1, 0, 1] and found.advantages[2] == 0
    assert found.stats.count.tolist() == [3] and found.stats.mean.tolist() == expected.stats.mean.tolist()
    assert found.why_no_weight(2) == LEFT_OUT and found.why_no_weight(0) is None


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "maxrl", "reinforce_plus_plus_baseline"])
def test_a_conversation_of_several_rows_counts_once_in_the_baseline(name):
    config = GRPOConfig.model_validate({"adv_estimator": {"name": name}})
    whole = single([1.0, 0.0, 3.0])
    whole = SampleStats(
        rewards=whole.rewards, truncated=whole.truncated, response_lengths=np.asarray([1, 2 + 3 + 4, 5], dtype=np.int32)
    )
    expected = score_rows(whole, ["u"] * 3, config).advantages.tolist()
    found = score_rows(rows_of([1.0, 0.0, 0.0, 0.0, 3.0], [0, 1, 1, 1, 2]), ["u"] * 5, config).advantages.tolist()
    assert found == [expected[0], *[expected[1]] * 3, expected[2]]


def test_the_rows_of_a_conversation_share_a_weight_where_the_loss_is_a_mean_over_rows():
    rows = rows_of([1.0, 0.0, 0.0, 3.0], [0, 1, 1, 2])
    by_row = score_rows(rows, ["u"] * 4, GRPOConfig(), by_conversation=True)
    assert by_row.sample_mask.tolist() == [1, 0.5, 0.5, 1]
    assert score_rows(rows, ["u"] * 4, GRPOConfig()).sample_mask.tolist() == [1, 1, 1, 1]


def test_a_group_without_a_scored_conversation_has_no_statistic_and_no_weight():
    rows = rows_of([1.0, 0.0, 1.0, 0.0], [0, 1, 0, 1], scored=[False, False, True, True])
    found = score_rows(rows, ["u", "u", "v", "v"], GRPOConfig())
    assert found.stats.count.tolist() == [0, 2] and found.sample_mask.tolist() == [0, 0, 1, 1]
    assert bool(found.advantages.isfinite().all()) and found.stats.row_group.tolist() == [0, 0, 1, 1]
    nothing = score_rows(rows_of([1.0, 0.0], [0, 1], scored=[False, False]), ["u", "u"], GRPOConfig())
    assert nothing.sample_mask.tolist() == [0, 0] and LEFT_OUT in nothing.why_no_update()


def test_a_void_turn_takes_the_weight_of_its_row_and_leaves_it_in_the_baseline():
    rows = rows_of([1.0, 0.0, 3.0], [0, 1, 2], void=[False, True, False])
    found, plain = (
        score_rows(rows, ["u"] * 3, GRPOConfig()),
        score_rows(single([1.0, 0.0, 3.0]), ["u"] * 3, GRPOConfig()),
    )
    assert found.advantages.tolist() == plain.advantages.tolist() and found.sample_mask.tolist() == [1, 0, 1]
    assert found.why_no_weight(1) == VOID
    equal = score_rows(rows_of([1.0, 1.0], [0, 1], void=[False, True]), ["u", "u"], GRPOConfig())
    assert equal.why_no_weight(1) == EQUAL


def test_all_rows_of_a_conversation_are_trained_in_one_optimizer_step():
    rows = rows_of([1.0, 0.0, 0.0, 1.0, 0.0, 0.0], [0, 1, 1, 0, 1, 1])
    scored = score_rows(rows, ["u", "u", "u", "v", "v", "v"], GRPOConfig())
    policy = PolicyConfig.model_validate(
        {"model_name": "m", "train_global_batch_size": 2, "dynamic_batching": {"enabled": True}}
    )
    found = select_train_rows(scored, [4] * 6, policy, layout=ParallelLayout())
    assert found.rows == (0, 1, 2, 3, 4, 5) and found.batch_sizes == (3, 3)


def test_stats_of_conversations_are_selected_and_joined_with_their_rows():
    rows = rows_of([1.0, 0.0, 2.0], [0, 1, 1], scored=[True, False, False])
    assert rows.concat(rows).select([4, 0]).is_scored.tolist() == [False, True]
    assert torch.tensor(rows.is_scored).tolist() == [True, False, False] and single([1.0]).is_scored.tolist() == [True]
