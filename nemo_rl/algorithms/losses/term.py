"""Inputs and outputs of a policy loss: `PolicyInputs`, `PolicyTerm`, `TermOutput`.

A term is a pure function that gives a value for every token; `PolicyLoss` masks, weighs and averages them, so that no
term divides by anything but the length of its own row. Everything is minimised. Symbols in the terms: l = log pi of a
token, r = pi / pi_old, w = pi_old / pi_gen, A advantage, T trained tokens of a row, sg stop-gradient,
clip(r) = clip(r, 1 - ratio_clip_min, 1 + ratio_clip_max). Shapes: N rows, T tokens; rows are always whole, also when
their tokens are packed or split over context ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from nemo_rl.config.loss import LossConfig

__all__ = ["PolicyInputs", "PolicyTerm", "TermOutput"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyInputs:
    """Whole rows of one microbatch. Only `logprobs_NT` and `log_ratio_NT` carry gradients.

    Example:
        >>> ones = torch.ones(1, 2)
        >>> rows = PolicyInputs(logprobs_NT=-ones, log_ratio_NT=0 * ones, advantages_NT=ones, mask_NT=ones > 0,
        ...                     log_correction_NT=0 * ones)
        >>> rows.row_mean(rows.ratio_NT).tolist()
        [[1.0]]
    """

    logprobs_NT: torch.Tensor
    """l; 0 where no token is trained."""
    log_ratio_NT: torch.Tensor
    """log r; 0 where no token is trained."""
    advantages_NT: torch.Tensor
    """A; 0 where no token is trained."""
    mask_NT: torch.Tensor
    """bool: trained tokens."""
    log_correction_NT: torch.Tensor
    """log w where the loss is corrected, 0 elsewhere."""

    @property
    def ratio_NT(self) -> torch.Tensor:
        return self.log_ratio_NT.exp()

    def row_sum(self, values_NT: torch.Tensor) -> torch.Tensor:
        """`[N, 1]`, over the trained tokens."""
        return torch.where(self.mask_NT, values_NT, 0.0).sum(1, keepdim=True)

    def row_mean(self, values_NT: torch.Tensor) -> torch.Tensor:
        """`[N, 1]`; 0 for a row without a trained token."""
        return self.row_sum(values_NT) / self.row_lengths

    @property
    def row_lengths(self) -> torch.Tensor:
        """`[N, 1]`: T, at least 1."""
        return self.mask_NT.sum(1, keepdim=True).clamp(min=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TermOutput:
    """A value for every token; at tokens that are not trained anything finite."""

    values_NT: torch.Tensor
    is_clipped_NT: torch.Tensor
    """bool: a bound was reached, which may have changed value or gradient."""
    is_masked_NT: torch.Tensor | None = None
    """bool: left out by the loss itself. None: it leaves none out."""


class PolicyTerm(Protocol):
    """A policy loss without masks, weights and means."""

    def __call__(self, inputs: PolicyInputs, config: LossConfig) -> TermOutput: ...
