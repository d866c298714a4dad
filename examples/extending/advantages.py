"""An advantage estimator of your own: the reward less the mean of the whole step, without regard to groups."""

from __future__ import annotations

import torch

from nemo_rl.algorithms.advantage_estimator import GroupStats
from nemo_rl.config.schema import GRPOConfig

__all__ = ["BatchBaseline"]


class BatchBaseline:
    """Options: `scale`, a factor of all advantages."""

    def __init__(self, *, config: GRPOConfig) -> None:
        self._scale = float(config.adv_estimator.options.get("scale") or 1.0)

    def __call__(self, rewards: torch.Tensor, stats: GroupStats) -> torch.Tensor:
        del stats
        return (rewards - rewards.mean()) * self._scale
