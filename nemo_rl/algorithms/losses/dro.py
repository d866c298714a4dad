"""DRO: the policy gradient with a square that keeps the policy near the old one."""

from __future__ import annotations

import torch

from nemo_rl.algorithms.losses.term import PolicyInputs, TermOutput
from nemo_rl.config.loss import LossConfig

__all__ = ["dro"]


def dro(inputs: PolicyInputs, config: LossConfig) -> TermOutput:
    """L = -(A l - beta / 2 (log r)^2); the gradient of log pi has the weight A - beta log r.

    Direct reward optimisation (arXiv 2405.19107) with a group baseline as its value.
    """
    # A rule refuses the loss without its beta.
    beta = config.dro.beta or 0.0
    square_NT = beta / 2 * inputs.log_ratio_NT.square()
    return TermOutput(
        values_NT=-inputs.advantages_NT * inputs.logprobs_NT + square_NT,
        is_clipped_NT=torch.zeros_like(inputs.mask_NT),
    )
