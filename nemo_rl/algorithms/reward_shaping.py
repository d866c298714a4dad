"""Rewards before they become advantages: scaling, and what long and cut responses lose. Pure functions of row scalars.

Called by `score_rows`. Invariant: whether a group is trained is decided on the rewards before this, because a penalty
for length would make every group of equal answers look informative.
"""

from __future__ import annotations

import torch

from nemo_rl.config.rewards import RewardScalingConfig, RewardShapingConfig
from nemo_rl.config.schema import GRPOConfig
from nemo_rl.experience.payload import RowScalars

__all__ = ["overlong_penalty", "rewards_of", "scale_rewards", "shaped_rewards"]


def rewards_of(carry: RowScalars, config: GRPOConfig) -> torch.Tensor:
    """`[N]` float32: what becomes advantages, scaled and shaped as the recipe says."""
    if config.reward_scaling.enabled or config.reward_shaping.enabled:
        return shaped_rewards(carry, config.reward_scaling, config.reward_shaping)
    return torch.tensor(carry.rewards, dtype=torch.float32)


def shaped_rewards(rows: RowScalars, scaling: RewardScalingConfig, shaping: RewardShapingConfig) -> torch.Tensor:
    """`[N]` float32: rewards scaled, then less what the length costs."""
    rewards = torch.tensor(rows.rewards, dtype=torch.float32)
    if scaling.enabled:
        rewards = scale_rewards(rewards, scaling)
    if not shaping.enabled:
        return rewards
    if shaping.stop_properly_penalty_coef is not None:
        return torch.where(torch.from_numpy(rows.truncated), rewards * shaping.stop_properly_penalty_coef, rewards)
    assert shaping.max_response_length is not None, "rule_reward_shaping_is_complete lets no other pass"
    return rewards + overlong_penalty(
        torch.from_numpy(rows.response_lengths),
        longest=shaping.max_response_length,
        buffer=shaping.overlong_buffer_length,
        most=shaping.overlong_buffer_penalty,
    )


def scale_rewards(rewards: torch.Tensor, config: RewardScalingConfig) -> torch.Tensor:
    """`[N]` float32: clamped to [source_min, source_max], mapped linearly to [target_min, target_max]."""
    share = (rewards.clamp(config.source_min, config.source_max) - config.source_min) / (
        config.source_max - config.source_min
    )
    return config.target_min + share * (config.target_max - config.target_min)


def overlong_penalty(lengths: torch.Tensor, *, longest: int, buffer: int, most: float) -> torch.Tensor:
    """`[N]` float32, at most 0: falls linearly from 0 at `longest` - `buffer` tokens to -`most` at `longest`, and no
    further (DAPO, arXiv 2503.14476).

    Example:
        >>> overlong_penalty(torch.tensor([16384, 18432, 24576]), longest=20480, buffer=4096, most=1.0).tolist()
        [-0.0, -0.5, -1.0]
    """
    into_buffer = (lengths.float() - (longest - buffer)) / buffer
    return -most * into_buffer.clamp(0.0, 1.0)
