"""VESPO: a smooth weight of the whole row's ratio on the policy gradient."""

from __future__ import annotations

import math

import torch

from nemo_rl.algorithms.losses.term import PolicyInputs, TermOutput
from nemo_rl.config.loss import LossConfig

__all__ = ["vespo"]

LOG_WEIGHT_BOUNDS = (math.log(1e-8), 20.0)
"""Of log W, before it is exponentiated."""


def vespo(inputs: PolicyInputs, config: LossConfig) -> TermOutput:
    """W = product of r over the row; phi = W^k exp(lambda (1 - W)); L = -sg(phi) A l (arXiv 2602.10693).

    k and lambda by the sign of A; phi(1) = 1. Where the loss is corrected, W has the factor w of every token, too.
    """
    section = config.vespo
    low, high = LOG_WEIGHT_BOUNDS
    raw_N1 = inputs.row_sum(inputs.log_ratio_NT + inputs.log_correction_NT).detach()
    log_weight_N1 = raw_N1.clamp(low, high)
    k_NT = torch.full_like(inputs.advantages_NT, section.k_negative)
    decay_NT = torch.full_like(inputs.advantages_NT, section.lambda_negative)
    is_positive_NT = inputs.advantages_NT >= 0
    k_NT[is_positive_NT], decay_NT[is_positive_NT] = section.k_positive, section.lambda_positive
    phi_NT = (k_NT * log_weight_N1 + decay_NT * (1 - log_weight_N1.exp())).exp()
    return TermOutput(
        values_NT=-phi_NT * inputs.advantages_NT * inputs.logprobs_NT,
        is_clipped_NT=(log_weight_N1 != raw_N1).expand_as(inputs.mask_NT),
    )
