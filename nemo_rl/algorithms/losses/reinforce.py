"""REINFORCE: the policy gradient without a ratio."""

from __future__ import annotations

import torch

from nemo_rl.algorithms.losses.term import PolicyInputs, TermOutput
from nemo_rl.config.loss import LossConfig

__all__ = ["reinforce"]


def reinforce(inputs: PolicyInputs, config: LossConfig) -> TermOutput:
    """L = -A l (Williams 1992)."""
    return TermOutput(
        values_NT=-inputs.advantages_NT * inputs.logprobs_NT, is_clipped_NT=torch.zeros_like(inputs.mask_NT)
    )
