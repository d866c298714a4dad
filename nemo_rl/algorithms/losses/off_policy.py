"""Off-policy corrections: what rows are worth that another policy has sampled than the one that is trained.

With w = pi_old / pi_gen of a token, over the T trained tokens of a row: product = exp(sum log w), geometric mean =
exp(sum log w / T). All weights are constants. Dropped tokens and rows stay in the divisors. Shapes: N rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nemo_rl.config.loss import CORRECTIONS, LossConfig

__all__ = ["LOG_BOUND", "Correction", "off_policy_weights"]

LOG_BOUND = 20.0
"""|log w| and |log r| are clamped to this before they are exponentiated: float32 overflows at 88, and a weight of 5e8
says no more than one of 1e20."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Factors of the policy loss."""

    weight_NT: torch.Tensor
    """Weights without gradient; 1 where no token is trained."""
    is_masked_NT: torch.Tensor
    """bool: the weight is 0 because a bound was crossed."""
    is_truncated_NT: torch.Tensor
    """bool: the weight is the bound."""


def off_policy_weights(
    log_w_NT: torch.Tensor, mask_NT: torch.Tensor, config: LossConfig, *, is_row_level: bool
) -> Correction:
    """Weights by `truncated_importance_sampling_type`, with bounds [low, high].

    tis: min(max(w, low), high) (Yao et al. 2025). icepop: w inside, else 0 (token-level masked importance sampling).
    seq-tis, seq-mis: the same with the product. seq-mask-tis: w of tokens in rows whose geometric mean is inside, else
    0. geo-mask: 1 and 0 likewise. None: w, or the product for losses with one ratio per row.

    Args:
        log_w_NT: log w, 0 where no token is trained.
        is_row_level: whether the loss has one ratio per row.
    """
    kind = config.truncated_importance_sampling_type
    low = config.truncated_importance_sampling_ratio_min or 0.0
    high = config.truncated_importance_sampling_ratio or float("inf")
    w_NT = log_w_NT.clamp(-LOG_BOUND, LOG_BOUND).exp()
    if kind is None:
        weight_NT = _product(log_w_NT, mask_NT) if is_row_level else w_NT
        return _correction(weight_NT, mask_NT)
    measured_NT = w_NT
    if kind in ("seq-mask-tis", "geo-mask"):
        measured_NT = _geometric_mean(log_w_NT, mask_NT)
    elif CORRECTIONS[kind].is_per_row:
        measured_NT = _product(log_w_NT, mask_NT)
    is_outside_NT = (measured_NT < low) | (measured_NT > high)
    if kind in ("tis", "seq-tis"):
        return _correction(measured_NT.clamp(low, high), mask_NT, is_truncated_NT=is_outside_NT)
    kept_NT = {"seq-mask-tis": w_NT, "geo-mask": torch.ones_like(w_NT)}.get(kind, measured_NT)
    return _correction(torch.where(is_outside_NT, 0.0, kept_NT), mask_NT, is_masked_NT=is_outside_NT)


def _correction(
    weight_NT: torch.Tensor,
    mask_NT: torch.Tensor,
    *,
    is_masked_NT: torch.Tensor | None = None,
    is_truncated_NT: torch.Tensor | None = None,
) -> Correction:
    nowhere_NT = torch.zeros_like(mask_NT)
    return Correction(
        weight_NT=torch.where(mask_NT, weight_NT, 1.0).detach(),
        is_masked_NT=nowhere_NT if is_masked_NT is None else is_masked_NT & mask_NT,
        is_truncated_NT=nowhere_NT if is_truncated_NT is None else is_truncated_NT & mask_NT,
    )


def _product(log_w_NT: torch.Tensor, mask_NT: torch.Tensor) -> torch.Tensor:
    log_N1 = torch.where(mask_NT, log_w_NT, 0.0).sum(1, keepdim=True)
    return log_N1.clamp(-LOG_BOUND, LOG_BOUND).exp().expand_as(mask_NT)


def _geometric_mean(log_w_NT: torch.Tensor, mask_NT: torch.Tensor) -> torch.Tensor:
    log_N1 = torch.where(mask_NT, log_w_NT, 0.0).sum(1, keepdim=True) / mask_NT.sum(1, keepdim=True).clamp(min=1)
    return log_N1.clamp(-LOG_BOUND, LOG_BOUND).exp().expand_as(mask_NT)
