"""How far log-probabilities of the trainer are from those that the rollout sampled with.

With d = log p_trainer - log p_rollout of a token that the rollout has sampled, `k3` estimates KL(rollout || trainer).
Shapes: M tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nemo_rl.models.logprobs import k3

__all__ = ["Divergence", "divergence"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """Between two sides, over the tokens of all rows."""

    kl: float
    """Mean of k3, nats per token."""
    std_error: float
    """Of the mean; rows are independent of one another, tokens of a row are not."""
    mean_abs: float
    """Mean of |d|."""
    largest: float
    """Of |d|."""
    num_tokens: int


def divergence(trainer_M: torch.Tensor, rollout_M: torch.Tensor, row_M: torch.Tensor) -> Divergence:
    """Over the tokens that both sides have; NaN is none.

    Args:
        row_M: number of the row of each token.
    """
    log_ratio_M = trainer_M.double() - rollout_M.double()
    is_there_M = ~log_ratio_M.isnan()
    d, row = log_ratio_M[is_there_M], row_M[is_there_M]
    if not len(d):
        return Divergence(kl=0.0, std_error=0.0, mean_abs=0.0, largest=0.0, num_tokens=0)
    each = k3(d)
    mean = float(each.mean())
    # The mean is a ratio of two sums over rows: its error is that of the rows' sums about it.
    of_rows = torch.zeros(int(row.max()) + 1, dtype=torch.float64).index_add_(0, row, each - mean)
    return Divergence(
        kl=mean,
        std_error=float(of_rows.square().sum().sqrt()) / len(d),
        mean_abs=float(d.abs().mean()),
        largest=float(d.abs().max()),
        num_tokens=len(d),
    )
