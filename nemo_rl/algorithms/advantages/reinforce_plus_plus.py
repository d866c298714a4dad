"""REINFORCE++ and its form with a group baseline (arXiv 2501.03262), normalised over the tokens of the step.

Without a KL in the reward and with a discount of 1, the return of every token of a row is the row's reward: whitening
over tokens is whitening over rows, each weighted by its response tokens. With a KL in the reward, the return of a token
is the reward less the penalties from there on, and every token has an advantage of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nemo_rl.algorithms.advantage_estimator import GroupStats
from nemo_rl.algorithms.token_estimator import TokenEstimator, TokenRows
from nemo_rl.config.schema import GRPOConfig
from nemo_rl.experience.payload import RowScalars

__all__ = ["ReinforcePlusPlus", "ReinforcePlusPlusBaseline", "TokenReinforcePlusPlus", "whiten_over_tokens"]

VARIANCE_EPSILON = 1e-8
"""Added to the variance."""


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus:
    """`reinforce_plus_plus`: A_i = whiten(R_i) over all response tokens of the step; groups play no part."""

    config: GRPOConfig

    def __call__(self, rewards: torch.Tensor, stats: GroupStats, *, rows: RowScalars) -> torch.Tensor:
        return whiten_over_tokens(rewards.double(), _lengths(rows)).float()


class TokenReinforcePlusPlus(TokenEstimator):
    """`reinforce_plus_plus` with `loss_fn.use_kl_in_reward`: A_t = whiten(R - beta sum of k1 from t on).

    Example:
        beta 0.1, k1 of three tokens 0.2, -0.1, 0.3 and R 1 give the returns 0.96, 0.98, 0.97.
    """

    whitens = True

    def __call__(self, rows: TokenRows) -> torch.Tensor:
        return rows.returns


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusBaseline:
    """`reinforce_plus_plus_baseline`: the same of R_i - mean of the group."""

    config: GRPOConfig

    def __call__(self, rewards: torch.Tensor, stats: GroupStats, *, rows: RowScalars) -> torch.Tensor:
        centred_N = torch.where(stats.row_is_trivial, 0.0, rewards.double() - stats.mean[stats.row_group])
        return whiten_over_tokens(centred_N, _lengths(rows)).float()


def whiten_over_tokens(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """`[N]` float64: (v - mean) / sqrt(variance + 1e-8), each row counted once for each of its tokens.

    The variance is unbiased. Equal values, and a step of one token, give 0.

    Args:
        values: `[N]` float64.
        lengths: `[N]` float64, tokens.

    Example:
        Values 1 and 0 with 1 and 3 tokens give 1.5 and -0.5.
    """
    if bool((values == values[:1]).all()):
        return torch.zeros_like(values)
    num_tokens = lengths.sum()
    centred_N = values - (values * lengths).sum() / num_tokens
    variance = (centred_N.square() * lengths).sum() / (num_tokens - 1).clamp(min=1)
    return centred_N / (variance + VARIANCE_EPSILON).sqrt()


def _lengths(rows: RowScalars) -> torch.Tensor:
    return torch.from_numpy(rows.response_lengths).double()
