"""Which rows of a step are trained, with which weight, in which optimizer step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from nemo_rl.algorithms.grpo import ScoredRows, plan_logprobs, plan_train, score_rows, select_train_rows
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.errors import ConfigError
from nemo_rl.experience.payload import SampleStats
from tests.helpers.runs import ROOT, load_recipe

PACKED = {"enabled": True, "train_mb_tokens": 32, "logprob_mb_tokens": 64}
TWO = ParallelLayout(dp=2)
LENGTHS = [5, 6, 7, 8, 5, 6, 7, 8]


def carry(rewards: list[float], truncated: list[bool] | None = None) -> SampleStats:
    count = len(rewards)
    return SampleStats(
        rewards=np.asarray(rewards, dtype=np.float32),
        truncated=np.asarray(truncated or [False] * count),
        response_lengths=np.full(count, 3, dtype=np.int32),
    )


def uids(count: int, prefix: str = "u") -> list[str]:
    """Groups of two rows."""
    return [f"{prefix}{row // 2}" for row in range(count)]


def score(rewards: list[float], prefix: str = "u") -> ScoredRows:
    return score_rows(carry(rewards), uids(len(rewards), prefix), GRPOConfig())


def policy(**fields: object) -> PolicyConfig:
    base = {"model_name": "m", "train_global_batch_size": 4, "dynamic_batching": {"enabled": True}}
    return PolicyConfig.model_validate({**base, **fields})


def test_groups_with_equal_rewards_have_no_weight_and_are_left_out():
    scored = score([1, 1, 0, 1, 0, 0, 1, 0])
    assert scored.sample_mask.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    chosen = select_train_rows(scored, LENGTHS, policy(), layout=TWO)
    assert chosen.rows == (2, 3, 6, 7) and chosen.batch_sizes == (2, 2)


@pytest.mark.parametrize(
    ("overrides", "leaves_out"),
    [
        ({"loss_fn.reference_policy_kl_penalty": "0"}, True),
        ({"loss_fn.reference_policy_kl_penalty": "0.01"}, False),
        ({"loss_fn.reference_policy_kl_penalty": "0.01", "loss_fn.use_kl_in_reward": "true"}, False),
        ({"loss_fn.reference_policy_kl_penalty": "0", "loss_fn.entropy_coefficient": "0.001"}, False),
        ({"loss_fn.reference_policy_kl_penalty": "0", "grpo.adv_estimator.name": "reinforce_plus_plus"}, False),
        ({"loss_fn.reference_policy_kl_penalty": "0.01", "grpo.drop_zero_advantage_groups": "true"}, True),
        ({"loss_fn.reference_policy_kl_penalty": "0", "grpo.drop_zero_advantage_groups": "false"}, False),
    ],
)
def test_equal_groups_are_left_out_by_themselves_where_they_carry_no_gradient(overrides, leaves_out: bool):
    config = load_recipe(
        ROOT / "configs/grpo_sort_cpu.yaml", {"grpo.use_generation_logprobs_as_prev": "false", **overrides}
    )
    assert config.scoring.leaves_equal_groups_out is leaves_out
    scored = score_rows(carry([1, 1, 0, 1]), uids(4), config.scoring)
    assert scored.sample_mask.tolist() == [1 - leaves_out, 1 - leaves_out, 1, 1]


@pytest.mark.parametrize("estimator", ["grpo", "gdpo"])
def test_dynamic_sampling_leaves_equal_groups_out_without_being_told(estimator: str):
    """Of gdpo those alone whose components are equal, too; a component without weight tells nothing."""
    rows = replace(
        carry([1, 1, 0, 1, 0, 0, 1, 1]),
        components={
            "a": np.asarray([1, 0, 0, 1, 0, 0, 1, 1], dtype=np.float32),
            "b": np.asarray([0, 1, 0, 0, 0, 0, np.nan, 0], dtype=np.float32),
            "unused": np.asarray([0, 0, 0, 0, 0, 1, 0, 0], dtype=np.float32),
        },
    )
    section = {"name": estimator, **({"component_weights": {"unused": 0.0}} if estimator == "gdpo" else {})}
    config = {"adv_estimator": section, "drop_zero_advantage_groups": False, "use_leave_one_out_baseline": False}
    for is_dynamic in (False, True):
        grpo = GRPOConfig.model_validate({**config, "use_dynamic_sampling": is_dynamic})
        scored = score_rows(rows, uids(8), grpo)
        kept = [1] * 8 if not is_dynamic else [int(estimator == "gdpo")] * 2 + [1, 1, 0, 0, 0, 0]
        assert scored.sample_mask.tolist() == kept


def test_rows_of_weight_zero_fill_a_step_up_to_the_number_of_ranks():
    scored = score([1, 0, 1, 1, 0, 0, 0, 0])
    chosen = select_train_rows(scored, LENGTHS, policy(), layout=ParallelLayout(dp=3))
    assert chosen.rows == (0, 1, 2) and chosen.batch_sizes == (3,)
    assert scored.sample_mask[list(chosen.rows)].tolist() == [1, 1, 0]


def test_fixed_microbatches_keep_all_rows_of_a_step():
    fixed = policy(dynamic_batching={"enabled": False}, train_micro_batch_size=2)
    scored = score([1, 0, 1, 1, 0, 0, 0, 0])
    chosen = select_train_rows(scored, LENGTHS, fixed, layout=TWO)
    assert chosen.rows == (0, 1, 2, 3) and chosen.batch_sizes == (4,)
    assert plan_train([5] * 4, chosen.batch_sizes, fixed, layout=TWO).steps == (1,)


def test_a_step_without_any_signal_trains_nothing():
    scored = score([1, 1, 0, 0])
    assert select_train_rows(scored, LENGTHS, policy(), layout=TWO).rows == ()


def test_truncated_rows_lose_their_weight_only_when_asked():
    rolled = carry([1, 0, 1, 0], truncated=[False, True, False, False])
    assert score_rows(rolled, uids(4), GRPOConfig()).sample_mask.tolist() == [1, 1, 1, 1]
    filtered = score_rows(rolled, uids(4), GRPOConfig(overlong_filtering=True))
    assert filtered.sample_mask.tolist() == [1, 0, 1, 1]
    assert filtered.advantages[1] < 0, "a filtered row still counts for its group's baseline"


def test_a_step_without_an_update_says_why():
    config = GRPOConfig(overlong_filtering=True)
    assert score([1.0, 1.0]).why_no_update() == "every group has equal rewards"
    cut = score_rows(carry([1.0, 0.0], [True, True]), ["u", "u"], config)
    assert cut.why_no_update() == "no row has a weight: truncated response (grpo.overlong_filtering)"
    both = score_rows(carry([1.0, 0.0, 1.0], [True, True, False]), ["u", "u", "v"], config)
    assert both.why_no_update() == (
        "no row has a weight: truncated response (grpo.overlong_filtering), equal rewards in its group"
    )


@pytest.mark.parametrize("mode", ["dynamic_batching", "sequence_packing"])
def test_logprob_microbatches_keep_the_ranks_of_the_training_plan(mode):
    caps = {"enabled": True, "train_mb_tokens": 20, "logprob_mb_tokens": 60}
    settings = policy(**{"dynamic_batching": {"enabled": False}, mode: caps})
    lengths = [10, 10, 10, 10, 5, 5, 5, 5]
    plan = plan_train(lengths, (4, 4), settings, layout=TWO)
    other = plan_logprobs(plan, lengths, settings, layout=TWO)
    assert len(plan.steps) == 2 and other.steps == (1,)
    for rank in range(2):
        assert set(plan.rows_of_rank(rank)) == set(other.rows_of_rank(rank))


def test_a_plan_that_cannot_be_made_is_a_config_error():
    with pytest.raises(ConfigError, match="cap of a microbatch is 8"):
        plan_train(
            [9, 9], (2,), policy(dynamic_batching={"enabled": True, "train_mb_tokens": 8}), layout=ParallelLayout()
        )


def test_a_step_with_fewer_rows_than_microbatches_is_filled_up_with_its_shortest_rows_of_weight_zero():
    scored = score([1, 0, 1, 1, 1, 1, 1, 1])
    settings = policy(train_global_batch_size=8, dynamic_batching={"enabled": False}, sequence_packing=PACKED)
    lengths = [30, 31, 20, 9, 8, 22, 21, 24]
    # Two rows of 61 tokens under a cap of 32: two microbatches, or on three ranks three.
    assert select_train_rows(scored, lengths, settings, layout=TWO).rows == (0, 1)
    chosen = select_train_rows(scored, lengths, settings, layout=ParallelLayout(dp=3))
    assert chosen.rows == (0, 1, 4) and scored.sample_mask[4] == 0
    plan = plan_train([30, 31, 8], chosen.batch_sizes, settings, layout=ParallelLayout(dp=3))
    assert plan.num_ranks == 3 and plan.steps == (1,)


@pytest.mark.parametrize("mode", ["dynamic_batching", "sequence_packing"])
def test_plans_are_for_the_data_parallel_ranks_and_widths_for_all_axes(mode):
    settings = policy(**{"dynamic_batching": {"enabled": False}, mode: {"enabled": True, "train_mb_tokens": 64}})
    layout = ParallelLayout(dp=2, cp=2, tp=2, sequence_parallel=True)
    plan = plan_train([9, 17, 30, 3], (4,), settings, layout=layout)
    assert plan.num_ranks == 2 and plan.pad_to == 32, "two chunks for each of two context ranks, times two"
    assert plan_logprobs(plan, [9, 17, 30, 3], settings, layout=layout).pad_to == 32


def packed_plan(lengths: list[int], *, cost: tuple[float, float] = (1.0, 0.0), **keys: object) -> PackPlan:
    section = {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 64, **keys}
    settings = policy(dynamic_batching={"enabled": False}, sequence_packing=section)
    return plan_train(lengths, (len(lengths),), settings, layout=TWO, cost=cost)


def test_the_planner_follows_the_config():
    lengths = [20, 60, 60, 20, 20, 20, 20, 20]
    as_given = packed_plan(lengths, algorithm="concatenative")
    assert as_given.microbatches[0] == ((0,), (2,), (6, 7))
    sorted_plan = packed_plan(lengths, algorithm="concatenative", microbatch_order="largest_first")
    assert sorted_plan.microbatches[0] == ((2,), (6, 7), (0,))
    assert packed_plan(lengths).load.num_bins == 4 < as_given.load.num_bins


def test_rows_are_shared_by_the_models_cost():
    lengths = [60, 20, 20, 20, 20, 20, 20, 20]
    by_tokens, by_square = (packed_plan(lengths, cost=cost) for cost in ((1.0, 0.0), (0.0, 1.0)))
    assert {len(by_tokens.rows_of_rank(rank)) for rank in range(2)} == {3, 5}
    assert {len(by_square.rows_of_rank(rank)) for rank in range(2)} == {2, 6}, "attention makes the long row dearer"


def test_scores_of_several_steps_are_joined_and_cut_by_row():
    rewards, names = [1.0, 0, 1, 1, 0, 1, 1, 0], [*uids(4), *uids(4, "v")]
    joined = score(rewards[:4]).concat(score(rewards[4:], "v"))
    assert joined.stats.row_group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert joined.stats.is_zero_variance.tolist() == [False, True, False, False]
    # Groups keep their uid, so that scores of the joined rows are the joined scores, in whatever order the rows stand.
    order = [6, 0, 2, 4, 1, 7, 5, 3]
    rows = carry(rewards[:4]).concat(carry(rewards[4:])).select(order)
    whole, cut = score_rows(rows, [names[row] for row in order], GRPOConfig()), joined.select(order)
    assert torch.equal(whole.advantages, cut.advantages) and torch.equal(whole.sample_mask, cut.sample_mask)
    assert torch.equal(whole.stats.row_group, cut.stats.row_group) and torch.equal(whole.stats.mean, cut.stats.mean)
    alone = joined.select([5, 4])
    assert alone.stats.row_group.tolist() == [0, 0] and alone.stats.count.tolist() == [2.0]
    assert torch.equal(alone.advantages, joined.advantages[[5, 4]])
