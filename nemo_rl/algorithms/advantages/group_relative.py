"""Advantages within groups: GRPO (arXiv 2402.03300), leave-one-out (2402.14740) and Dr.GRPO (2503.20783).

Called by the driver on small per-row vectors. Shapes: N rows, P groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nemo_rl.algorithms.advantage_estimator import GroupStats
from nemo_rl.config.schema import GRPOConfig

__all__ = ["DrGRPO", "GroupAdvantages", "LeaveOneOut", "estimate_advantages"]

STD_EPSILON = 1e-4
"""Added to the standard deviation of a group, as TRL does; others take 1e-6."""
SIBLING_STD_EPSILON = 1e-6
"""Added to the standard deviation of a row's siblings, as NeMo-RL does."""


@dataclass(frozen=True, kw_only=True)
class GroupAdvantages:
    """`grpo`: by the keys `normalize_rewards`, `use_leave_one_out_baseline` and `use_leave_one_out_std`."""

    config: GRPOConfig

    def __call__(self, rewards: torch.Tensor, stats: GroupStats) -> torch.Tensor:
        return estimate_advantages(
            rewards,
            stats,
            leave_one_out=self.config.use_leave_one_out_baseline,
            normalize=self.config.normalize_rewards,
            leave_one_out_std=self.config.use_leave_one_out_std,
        )


@dataclass(frozen=True, kw_only=True)
class DrGRPO:
    """`dr_grpo`: A_i = R_i - mean, without division: no group counts more because its rewards are alike."""

    config: GRPOConfig

    def __call__(self, rewards: torch.Tensor, stats: GroupStats) -> torch.Tensor:
        return estimate_advantages(rewards, stats, leave_one_out=False, normalize=False)


@dataclass(frozen=True, kw_only=True)
class LeaveOneOut:
    """`rloo`: A_i = R_i - mean of its siblings, without division, so that its baseline does not depend on the row."""

    config: GRPOConfig

    def __call__(self, rewards: torch.Tensor, stats: GroupStats) -> torch.Tensor:
        return estimate_advantages(rewards, stats, leave_one_out=True, normalize=False)


def estimate_advantages(
    rewards: torch.Tensor,
    stats: GroupStats,
    *,
    leave_one_out: bool,
    normalize: bool,
    leave_one_out_std: bool = False,
) -> torch.Tensor:
    """`[N]` float32 advantages, exactly 0 in trivial groups.

    A_i = R_i - b_i, with b_i the mean of the other rows of the group (leave-one-out, arXiv 2402.14740) or of all its
    rows; divided by (std + 1e-4) when `normalize` is set. A group of one row has no siblings and gets 0.

    With `leave_one_out_std` the divisor is (std of the other rows + 1e-6), and a row whose siblings are all equal is
    not divided.
    """
    group_N = stats.row_group
    advantages_N = rewards.double() - stats.mean[group_N]
    if leave_one_out:
        # R_i - (sum - R_i) / (G - 1) equals G / (G - 1) * (R_i - mean).
        advantages_N = advantages_N * (stats.count / (stats.count - 1).clamp(min=1))[group_N]
    if normalize:
        advantages_N = advantages_N / (
            _sibling_divisor(rewards, stats) if leave_one_out_std else stats.row_std + STD_EPSILON
        )
    advantages_N = torch.where(stats.row_is_trivial, 0.0, advantages_N)
    return advantages_N.float()


def _sibling_divisor(rewards: torch.Tensor, stats: GroupStats) -> torch.Tensor:
    """`[N]` float64: unbiased deviation of the other rows of the group, plus epsilon; 1 where they are equal."""
    group_N, rewards_N = stats.row_group, rewards.double()
    count_N = stats.count[group_N]
    # Of G rows with deviations d from their mean, the others' squares sum to sum(d^2) - d_i^2 G / (G - 1).
    squares_N = stats.std[group_N].square() * (count_N - 1)
    deviation_N = rewards_N - stats.mean[group_N]
    squares_N = squares_N - deviation_N.square() * count_N / (count_N - 1).clamp(min=1)
    std_N = (squares_N.clamp(min=0) / (count_N - 2).clamp(min=1)).sqrt()
    return torch.where(_has_equal_siblings(rewards_N, stats), 1.0, std_N + SIBLING_STD_EPSILON)


def _has_equal_siblings(rewards_N: torch.Tensor, stats: GroupStats) -> torch.Tensor:
    """`[N]` bool, by exact equality."""
    group_N, zeros_P = stats.row_group, torch.zeros(len(stats.count), dtype=torch.float64)
    found_N = stats.row_is_trivial
    for which in ("amax", "amin"):
        extreme_N = zeros_P.scatter_reduce(0, group_N, rewards_N, which, include_self=False)[group_N]
        is_extreme_N = rewards_N == extreme_N
        num_extreme_P = zeros_P.index_add(0, group_N, is_extreme_N.double())
        found_N = found_N | (~is_extreme_N & (num_extreme_P == stats.count - 1)[group_N])
    return found_N
