"""Rows of single turns that have no reward: their siblings are treated as a smaller group."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from nemo_rl.algorithms.grpo import LEFT_OUT, score_rows
from nemo_rl.config.env import Ending
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.environments.interfaces import NO_REWARD
from nemo_rl.experience.payload import SampleStats, left_out_metrics, single_turns

UIDS = ["a"] * 4 + ["b"] * 4
REWARDS = np.asarray([0.1, 0.0, 0.9, 0.5, 0.3, 0.2, 0.8, 0.4], dtype=np.float32)


def _stats(unscored: tuple[str, ...]) -> SampleStats:
    truncated = np.zeros(8, dtype=np.bool_)
    rewards = np.where([bool(why) for why in unscored] or [False] * 8, 0, REWARDS).astype(np.float32)
    return SampleStats(
        rewards=rewards,
        truncated=truncated,
        response_lengths=np.full(8, 3, dtype=np.int32),
        conversations=single_turns(unscored, truncated, group_size=4),
    )


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo", "maxrl", "gdpo"])
def test_siblings_of_an_unscored_row_are_a_smaller_group(name: str) -> None:
    config = GRPOConfig.model_validate({"adv_estimator": {"name": name}})
    components = {"judge": REWARDS, "other": REWARDS[::-1].copy()}
    whole = replace(_stats(()), components=components)
    found = score_rows(replace(_stats(("",) * 5 + ("500",) + ("",) * 2), components=components), UIDS, config)
    rest = [0, 1, 2, 3, 4, 6, 7]
    expected = score_rows(whole.select(rest), [UIDS[row] for row in rest], config)
    assert torch.equal(found.advantages[rest], expected.advantages)
    assert torch.equal(found.sample_mask, torch.tensor([1.0] * 5 + [0.0] + [1.0] * 2))
    assert found.why_no_weight(5) == LEFT_OUT


def test_all_rows_with_a_reward_give_the_bits_of_a_run_without_judges() -> None:
    config = GRPOConfig()
    plain = replace(_stats(()), conversations=None)
    assert torch.equal(score_rows(_stats(()), UIDS, config).advantages, score_rows(plain, UIDS, config).advantages)


def test_a_group_with_one_reward_trains_nothing() -> None:
    stats = _stats(("x", "x", "", "x") + ("",) * 4)
    found = score_rows(stats, UIDS, GRPOConfig())
    assert found.sample_mask.tolist() == [0.0] * 4 + [1.0] * 4 and not found.advantages[:4].any()
    metrics = left_out_metrics(stats)
    assert metrics["left_out_rows"].value == 4 and metrics[f"ending/{Ending.JUDGE_ERROR}"].value == 3
    again = SampleStats.from_json(stats.to_json())
    assert again.conversations is not None and stats.conversations is not None
    assert np.array_equal(again.conversations.is_scored, stats.conversations.is_scored)


def test_no_reward_at_all_leaves_a_step_without_an_update() -> None:
    found = score_rows(_stats(("x",) * 8), UIDS, GRPOConfig())
    assert not found.sample_mask.any() and found.why_no_update() == f"no row has a weight: {LEFT_OUT}"


def test_a_row_whose_reward_is_none_is_counted_apart_from_failures() -> None:
    stats = replace(_stats(("", NO_REWARD, "500", "") + (NO_REWARD,) * 4), leaves_none=True)
    metrics = left_out_metrics(stats)
    assert metrics["left_out_rows"].value == 6
    assert (metrics["ending/judge_error"].value, metrics["ending/no_reward"].value) == (1, 5)
    found = score_rows(stats, UIDS, GRPOConfig())
    assert found.sample_mask.tolist() == [1.0, 0.0, 0.0, 1.0] + [0.0] * 4
    kept = stats.select([0, 3])
    alone = score_rows(replace(kept, conversations=None), ["a", "a"], GRPOConfig())
    assert torch.equal(found.advantages[[0, 3]], alone.advantages), "as if the others had not been sampled"
    again = SampleStats.from_json(stats.to_json())
    assert again.leaves_none and kept.leaves_none and again.concat(kept).leaves_none
