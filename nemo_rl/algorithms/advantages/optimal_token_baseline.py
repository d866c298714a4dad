"""The optimal token baseline (arXiv 2602.07078): of all baselines the one with the least variance of the gradient."""

from __future__ import annotations

import torch

from nemo_rl.algorithms.token_estimator import TokenEstimator, TokenRows

__all__ = ["OptimalTokenBaseline"]

EPSILON = 1e-8
"""Added to the sum of the weights."""
PREV, SQUARES = "prev_logprobs", "squared_probs"


class OptimalTokenBaseline(TokenEstimator):
    """`optimal_token_baseline`: A_t = G_t - B_t, with G_t the return and B_t its weighted mean over the group.

    The weight of a row at t is W_t, the sum up to t of e = 1 - 2 pi + sum over the vocabulary of pi_v^2: the squared
    norm of the gradient of the logits. B_t = sum of G W / (sum of W + 1e-8) over the rows of the group; where fewer
    than two rows reach t it is 0, so for a row without siblings, and for the end of the longest one.

    Example:
        Two rows of two tokens, vocabulary 2, R = 1 and 0, pi = 0.5, 0.8 and 0.2, 0.5: W = 0.5, 0.58 and 1.28, 1.78;
        B = 0.2808989, 0.2457627.
    """

    reads = (PREV, SQUARES)

    def __call__(self, rows: TokenRows) -> torch.Tensor:
        returns_NT, mask_NT = rows.returns, rows.mask
        # Rounding must not make a sum of squares negative.
        energy_NT = (1 - 2 * rows.columns[PREV].exp() + rows.columns[SQUARES]).clamp(min=0)
        weight_NT = torch.where(mask_NT, energy_NT, 0.0).cumsum(1) * mask_NT
        position_T = torch.arange(1, mask_NT.shape[1] + 1)
        last_N = torch.where(mask_NT, position_T, 0).amax(1)
        reaches_NT = position_T <= last_N[:, None]
        baseline_NT = _of_group(returns_NT * weight_NT, rows.groups) / (_of_group(weight_NT, rows.groups) + EPSILON)
        baseline_NT = torch.where(_of_group(reaches_NT.double(), rows.groups) >= 2, baseline_NT, 0.0)
        return torch.where(mask_NT, returns_NT - baseline_NT, 0.0)


def _of_group(values_NT: torch.Tensor, groups_N: torch.Tensor) -> torch.Tensor:
    """`[N, T]`: of each row the sum over its group."""
    sums_PT = values_NT.new_zeros(int(groups_N.max()) + 1, values_NT.shape[1])
    return sums_PT.index_add(0, groups_N, values_NT)[groups_N]
