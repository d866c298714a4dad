"""DPPO: tokens whose probability has moved too far in the direction of their advantage are left out."""

from __future__ import annotations

import torch

from nemo_rl.algorithms.losses.term import PolicyInputs, TermOutput
from nemo_rl.config.loss import LossConfig

__all__ = ["dppo_kl", "dppo_tv"]

EPSILON = 1e-8
"""Keeps the logarithm of 1 - p finite for p = 1."""


def dppo_tv(inputs: PolicyInputs, config: LossConfig) -> TermOutput:
    """L = -r A, without tokens with A > 0 and p - q > delta_high, or A <= 0 and q - p > delta_low (arXiv 2602.04879).

    p = pi and q = pi_old, or the rollout's with `grpo.use_generation_logprobs_as_prev`. Tokens left out stay in the
    divisor. The paper names no bounds; 0.15 and 0.2 are in use.
    """
    p_NT, q_NT = _probabilities(inputs)
    too_high_NT = p_NT - q_NT > config.dppo.delta_high
    too_low_NT = q_NT - p_NT > config.dppo.delta_low
    return _without(inputs, too_high_NT, too_low_NT)


def dppo_kl(inputs: PolicyInputs, config: LossConfig) -> TermOutput:
    """As `dppo_tv`, with the binary KL instead of the gap (arXiv 2602.04879); 0.05 is in use as bound.

    D = q log(q / p) + (1 - q) log((1 - q) / (1 - p)); left out are tokens with A > 0, p > q and D > delta_high, or
    A <= 0, p < q and D > delta_low.
    """
    p_NT, q_NT = _probabilities(inputs)
    rest_NT = ((1 - q_NT + EPSILON) / (1 - p_NT + EPSILON)).log()
    kl_NT = -q_NT * inputs.log_ratio_NT.detach() + (1 - q_NT) * rest_NT
    too_high_NT = (p_NT > q_NT) & (kl_NT > config.dppo.delta_high)
    too_low_NT = (p_NT < q_NT) & (kl_NT > config.dppo.delta_low)
    return _without(inputs, too_high_NT, too_low_NT)


def _probabilities(inputs: PolicyInputs) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs_NT = inputs.logprobs_NT.detach()
    return logprobs_NT.exp(), (logprobs_NT - inputs.log_ratio_NT.detach()).exp()


def _without(inputs: PolicyInputs, too_high_NT: torch.Tensor, too_low_NT: torch.Tensor) -> TermOutput:
    is_out_NT = torch.where(inputs.advantages_NT > 0, too_high_NT, too_low_NT)
    values_NT = torch.where(is_out_NT, 0.0, -inputs.ratio_NT * inputs.advantages_NT)
    return TermOutput(values_NT=values_NT, is_clipped_NT=torch.zeros_like(inputs.mask_NT), is_masked_NT=is_out_NT)
