"""GDPO (arXiv 2601.05242): every component of the reward is normalised in its groups before they are added."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nemo_rl.algorithms.advantage_estimator import GroupStats
from nemo_rl.algorithms.advantages.group_relative import estimate_advantages
from nemo_rl.config.schema import GRPOConfig
from nemo_rl.errors import ConfigError
from nemo_rl.experience.payload import RowScalars

__all__ = ["GDPO"]


@dataclass(frozen=True, kw_only=True)
class GDPO:
    """`gdpo`: S_i = sum over components k of w_k A_ik, A_ik as `grpo` makes it of R_ik; A = (S - mean) / std over rows.

    So two components that would cancel in a sum of rewards keep their signals. Weights are
    `grpo.adv_estimator.component_weights`, 1 where none is named. A row that was not scored counts 0 in all.
    The standard deviation is unbiased; equal sums give 0.
    """

    config: GRPOConfig

    def __call__(self, rewards: torch.Tensor, stats: GroupStats, *, rows: RowScalars) -> torch.Tensor:
        """
        Raises:
            ConfigError: the reward has fewer than two components, or a weight is for none of them.
        """
        weights = self._weights(rows)
        sums_N = torch.zeros(len(rewards), dtype=torch.float64)
        for name, weight in weights.items():
            part_N = torch.from_numpy(rows.components[name]).nan_to_num(nan=0.0)
            sums_N += weight * self._advantages(part_N, stats).double()
        if bool((sums_N == sums_N[:1]).all()):
            return torch.zeros(len(rewards))
        return ((sums_N - sums_N.mean()) / sums_N.std()).float()

    def _advantages(self, part: torch.Tensor, stats: GroupStats) -> torch.Tensor:
        return estimate_advantages(
            part,
            stats.of(part),
            leave_one_out=self.config.use_leave_one_out_baseline,
            normalize=self.config.normalize_rewards,
            leave_one_out_std=self.config.use_leave_one_out_std,
        )

    def _weights(self, rows: RowScalars) -> dict[str, float]:
        given, names = self.config.adv_estimator.component_weights, sorted(rows.components)
        unknown = sorted(set(given) - set(names))
        if unknown:
            raise ConfigError(f"grpo.adv_estimator.component_weights.{unknown[0]}: the reward has only {names}")
        if len(names) < 2:
            raise ConfigError(
                f"grpo.adv_estimator.name: 'gdpo' needs a reward with at least two components, got {names}; let "
                "env.reward_function return them by name, or set grpo.adv_estimator.name=grpo"
            )
        return {name: given.get(name, 1.0) for name in names}
