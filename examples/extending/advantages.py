"""Advantage estimators of your own: one number per row from the step's mean, and one per token from its place."""

from __future__ import annotations

import torch

from nemo_rl.algorithms.advantage_estimator import GroupStats
from nemo_rl.algorithms.token_work import TokenEstimator, TokenRows, return_to_go
from nemo_rl.config.grpo import GRPOConfig

__all__ = ["BatchBaseline", "FadingReward"]


class BatchBaseline:
    """Options: `scale`, a factor of all advantages."""

    def __init__(self, *, config: GRPOConfig) -> None:
        self._scale = float(config.adv_estimator.options.get("scale") or 1.0)

    def __call__(self, rewards: torch.Tensor, stats: GroupStats) -> torch.Tensor:
        del stats
        return (rewards - rewards.mean()) * self._scale


class FadingReward(TokenEstimator):
    """One advantage for each token: the less of the reward, the further the token is from the end.

    Option: `discount`, what a token leaves of the next one's.
    """

    def __call__(self, rows: TokenRows) -> torch.Tensor:
        discount = float(self.config.adv_estimator.options.get("discount") or 0.99)
        to_the_end = return_to_go(rows.mask.double()) - 1
        return rows.rewards[:, None] * discount**to_the_end
