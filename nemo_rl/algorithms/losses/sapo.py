"""SAPO: a soft gate on the ratio instead of a clip."""

from __future__ import annotations

import torch

from nemo_rl.algorithms.losses.term import PolicyInputs, TermOutput
from nemo_rl.config.loss import LossConfig

__all__ = ["sapo"]


def sapo(inputs: PolicyInputs, config: LossConfig) -> TermOutput:
    """L = -(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A (arXiv 2511.20347).

    With q the sigmoid the gradient of log pi has the weight 4 q (1 - q) r A: A at r = 1, fading on both sides.
    """
    tau_NT = torch.full_like(inputs.advantages_NT, config.sapo.tau_negative)
    tau_NT[inputs.advantages_NT > 0] = config.sapo.tau_positive
    gate_NT = (tau_NT * (inputs.ratio_NT - 1)).sigmoid()
    return TermOutput(
        values_NT=-4 / tau_NT * gate_NT * inputs.advantages_NT, is_clipped_NT=torch.zeros_like(inputs.mask_NT)
    )
