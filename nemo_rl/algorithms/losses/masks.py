"""Which tokens a loss counts, and with which weight."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["token_weights", "valid_token_mask", "weighed"]


def valid_token_mask(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """`[N, T]` bool: tokens with a weight. Position 0 is never predicted and never counts."""
    mask_NT = batch["token_mask"].bool() & (batch["sample_mask"] > 0)[:, None]
    mask_NT[:, 0] = False
    return mask_NT


def token_weights(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """`[N, T]` float32: the weight of its row for tokens that count, 0 for the others."""
    return torch.where(valid_token_mask(batch), batch["sample_mask"].float()[:, None], 0.0)


def weighed(values_NT: torch.Tensor, weight_NT: torch.Tensor) -> torch.Tensor:
    """What each token adds to a sum, 0 where it has no weight; without gradient."""
    return torch.where(weight_NT > 0, values_NT.detach(), 0.0) * weight_NT
