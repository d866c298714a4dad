"""MaxRL (arXiv 2602.02710): advantages in units of the group's success rate."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nemo_rl.algorithms.advantage_estimator import GroupStats
from nemo_rl.config.schema import GRPOConfig

__all__ = ["MaxRL"]


@dataclass(frozen=True, kw_only=True)
class MaxRL:
    """`maxrl`: A_i = (R_i - mean) / mean, 0 in groups whose mean is not above 0: rare successes count most.

    For rewards that are not negative.

    Example:
        Rewards 1, 0, 0, 0 give 3, -1, -1, -1.
    """

    config: GRPOConfig

    def __call__(self, rewards: torch.Tensor, stats: GroupStats) -> torch.Tensor:
        mean_N = stats.mean[stats.row_group]
        advantages_N = (rewards.double() - mean_N) / torch.where(mean_N > 0, mean_N, 1.0)
        return torch.where((mean_N > 0) & ~stats.row_is_trivial, advantages_N, 0.0).float()
