"""Reductions from a value for every token to one number: which tokens count, and the mean over tokens, sequences or a
length.

Invariant: divisors are the counts of the whole global batch (`LossScale`), so the parts of microbatches and ranks add
up to the same number however rows were laid out. Rows without a token that counts add 0 and are in no divisor. Shapes:
N rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nemo_rl.config.loss import LossConfig
from nemo_rl.models.policy.interfaces import LossScale

__all__ = [
    "constant_length",
    "normalize",
    "sequence_mean",
    "token_mean",
    "token_weights",
    "valid_token_mask",
    "weighed",
]


def valid_token_mask(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return `[N, T]` bool, True on tokens with a weight. Position 0 is never predicted and never counts."""
    mask_NT = batch["token_mask"].bool() & (batch["sample_mask"] > 0)[:, None]
    mask_NT[:, 0] = False
    return mask_NT


def token_weights(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return `[N, T]` float32: the weight of its row for tokens that count, 0 for the others."""
    return torch.where(valid_token_mask(batch), batch["sample_mask"].float()[:, None], 0.0)


def weighed(values_NT: torch.Tensor, weight_NT: torch.Tensor) -> torch.Tensor:
    """Return what each token adds to a sum, 0 where it has no weight; without gradient."""
    return torch.where(weight_NT > 0, values_NT.detach(), 0.0) * weight_NT


def normalize(
    values_NT: torch.Tensor, weight_NT: torch.Tensor, *, scale: LossScale, config: LossConfig
) -> torch.Tensor:
    """Return the mean that the recipe asks for; tokens of weight 0 have no part in it, whatever their value is."""
    weighed_NT = torch.where(weight_NT > 0, values_NT, 0.0) * weight_NT
    if config.constant_length is not None:
        return constant_length(weighed_NT, scale=scale, length=config.constant_length)
    if config.normalization == "token":
        return token_mean(weighed_NT, scale=scale)
    return sequence_mean(weighed_NT, weight_NT, scale=scale)


def token_mean(weighed_NT: torch.Tensor, *, scale: LossScale) -> torch.Tensor:
    """sum w L / sum w over the tokens (DAPO, arXiv 2503.14476)."""
    return weighed_NT.sum() / (scale.valid_tokens or 1.0)


def sequence_mean(weighed_NT: torch.Tensor, weight_NT: torch.Tensor, *, scale: LossScale) -> torch.Tensor:
    """Mean over rows of the mean over a row's T_i tokens (GRPO, arXiv 2402.03300)."""
    means_N = weighed_NT.sum(1) / (weight_NT > 0).sum(1).clamp(min=1)
    return means_N.sum() / (scale.valid_sequences or 1.0)


def constant_length(weighed_NT: torch.Tensor, *, scale: LossScale, length: int) -> torch.Tensor:
    """Mean over rows of sum L / C: no row gains by being longer or shorter (Dr.GRPO, arXiv 2503.20783)."""
    return weighed_NT.sum() / ((scale.valid_sequences or 1.0) * length)
