"""The policy terms that `loss_fn.loss_type` names: from ratio, advantage and log-probability to a value per token.

    clipped_pg             PPO and GRPO, with DAPO's clip-higher and the dual clip
    reinforce              the policy gradient without a ratio
    gspo, gspo_token       one ratio per sequence, the geometric mean of its tokens' ratios
    luspo                  gspo without its division by the length
    gmpo                   the geometric mean of ratios that were clipped token by token
    cispo                  a clipped ratio as a constant weight, so that no token loses its gradient
    sapo                   a soft gate on the ratio instead of a clip
    dppo_tv, dppo_kl       tokens that have moved too far in the direction of their advantage are left out
    vespo                  a smooth weight of the whole row's ratio on the policy gradient
    dro                    the policy gradient with a square that keeps the policy near the old one

A term is a pure function that gives a value for every token; `PolicyLoss` masks, weighs and averages them, and adds
off-policy correction, KL and entropy, so that no term divides by anything but the length of its own row. Everything is
minimised. Symbols: l = log pi of a token, r = pi / pi_old, w = pi_old / pi_gen, A advantage, T trained tokens of a row,
sg stop-gradient, clip(r) = clip(r, 1 - ratio_clip_min, 1 + ratio_clip_max). Shapes: N rows, T tokens; rows are always
whole, also when their tokens are packed or split over context ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from nemo_rl.config.loss import LossConfig

__all__ = [
    "PolicyInputs",
    "PolicyTerm",
    "TermOutput",
    "cispo",
    "clipped_pg",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "gmpo",
    "gspo",
    "gspo_token",
    "luspo",
    "reinforce",
    "sapo",
    "vespo",
]

EPSILON = 1e-8
"""Keeps the logarithm of 1 - p in `dppo_kl` finite for p = 1."""
LOG_WEIGHT_BOUNDS = (math.log(1e-8), 20.0)
"""Bounds of log W in `vespo`, before it is exponentiated."""


def clipped_pg(inputs: PolicyInputs, config: LossConfig) -> TermOutput:
    """L = -min(r A, clip(r) A); with c = ratio_clip_c and A < 0: min(L, -c A).

    PPO (arXiv 1707.06347), GRPO (arXiv 2402.03300), clip-higher: DAPO (arXiv 2503.14476), dual clip: arXiv 1912.09729.
    """
    values_NT, is_clipped_NT = _clipped_surrogate(inputs.ratio_NT, inputs.advantages_NT, config)
    if config.ratio_clip_c is not None:
        ceiling_NT = -config.ratio_clip_c * inputs.advantages_NT
        is_above_NT = (inputs.advantages_NT < 0) & (values_NT > ceiling_NT)
        values_NT = torch.where(is_above_NT, ceiling_NT, values_NT)
        is_clipped_NT = is_clipped_NT | is_above_NT
    return TermOutput(values_NT=values_NT, is_clipped_NT=is_clipped_NT)


def _clipped_surrogate(
    ratio_NT: torch.Tensor, advantages_NT: torch.Tensor, config: LossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """-min(r A, clip(r) A), and where r is outside the clip range."""
    clipped_NT = ratio_NT.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)
    actor_NT = -torch.minimum(ratio_NT * advantages_NT, clipped_NT * advantages_NT)
    return actor_NT, clipped_NT != ratio_NT


def reinforce(inputs: PolicyInputs, config: LossConfig) -> TermOutput:
    """L = -A l (Williams 1992)."""
    return TermOutput(
        values_NT=-inputs.advantages_NT * inputs.logprobs_NT, is_clipped_NT=torch.zeros_like(inputs.mask_NT)
    )


def gspo(inputs: PolicyInputs, config: LossConfig) -> TermOutput:
    """s = exp(sum log r / T); L = -min(s A, clip(s) A), the same at every token; a mean over rows (arXiv 2507.18071).

    The paper's ranges are 3e-4 and 4e-4: s stays far closer to 1 than r does.
    """
    ratio_N1 = inputs.row_mean(inputs.log_ratio_NT).exp()
    values_NT, is_clipped_NT = _clipped_surrogate(ratio_N1.expand_as(inputs.mask_NT), inputs.advantages_NT, config)
    return TermOutput(values_NT=values_NT, is_clipped_NT=is_clipped_NT)


def gspo_token(inputs: PolicyInputs, config: LossConfig) -> TermOutput:
    """s_t = sg(s) exp(l - sg(l)); L = -min(s_t A_t, clip(s_t) A_t), a mean over rows (arXiv 2507.18071).

    The value of `gspo`, and where all tokens of a row have one advantage its gradient.
    """
    ratio_N1 = inputs.row_mean(inputs.log_ratio_NT).exp().detach()
    own_NT = (inputs.logprobs_NT - inputs.logprobs_NT.detach()).exp()
    values_NT, is_clipped_NT = _clipped_surrogate(ratio_N1 * own_NT, inputs.advantages_NT, config)
    return TermOutput(values_NT=values_NT, is_clipped_NT=is_clipped_NT)


def luspo(inputs: PolicyInputs, config: LossConfig) -> TermOutput:
    """L = T times that of `gspo`, a mean over rows (arXiv 2602.05261)."""
    of_gspo = gspo(inputs, config)
    return TermOutput(values_NT=inputs.row_lengths * of_gspo.values_NT, is_clipped_NT=of_gspo.is_clipped_NT)


def gmpo(inputs: PolicyInputs, config: LossConfig) -> TermOutput:
    """z = sgn(A) min(sgn(A) log r, sgn(A) clamp(log r, -lo, hi)); L = -A exp(sum z / T), a mean over rows.

    lo and hi are ratio_clip_min and ratio_clip_max, here in log space; the paper takes 0.4 (arXiv 2507.20673).
    """
    log_ratio_NT, sign_NT = inputs.log_ratio_NT, inputs.advantages_NT.sign()
    clamped_NT = log_ratio_NT.clamp(-config.ratio_clip_min, config.ratio_clip_max)
    kept_NT = sign_NT * torch.minimum(sign_NT * log_ratio_NT, sign_NT * clamped_NT)
    ratio_N1 = inputs.row_mean(kept_NT).exp()
    return TermOutput(
        values_NT=-inputs.advantages_NT * ratio_N1,
        is_clipped_NT=clamped_NT != log_ratio_NT,
    )


def cispo(inputs: PolicyInputs, config: LossConfig) -> TermOutput:
    """L = -sg(clip(r)) A l (MiniMax-M1, arXiv 2506.13585).

    ratio_clip_min=1 has no lower bound; ratio_clip_max=4 caps at 5. ScaleRL: arXiv 2510.13786.
    """
    ratio_NT = inputs.ratio_NT.detach()
    clipped_NT = ratio_NT.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)
    return TermOutput(
        values_NT=-clipped_NT * inputs.advantages_NT * inputs.logprobs_NT, is_clipped_NT=clipped_NT != ratio_NT
    )


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


def dppo_tv(inputs: PolicyInputs, config: LossConfig) -> TermOutput:
    """L = -r A, without tokens with A > 0 and p - q > delta_high, or A <= 0 and q - p > delta_low (arXiv 2602.04879).

    p = pi and q = pi_old, or the rollout's with `grpo.use_generation_logprobs_as_prev`. Tokens left out stay in the
    divisor. The paper names no bounds; 0.15 and 0.2 are in use.
    """
    p_NT, q_NT = _dppo_probabilities(inputs)
    too_high_NT = p_NT - q_NT > config.dppo.delta_high
    too_low_NT = q_NT - p_NT > config.dppo.delta_low
    return _dppo_without(inputs, too_high_NT, too_low_NT)


def dppo_kl(inputs: PolicyInputs, config: LossConfig) -> TermOutput:
    """L of `dppo_tv`, with the binary KL instead of the gap (arXiv 2602.04879); 0.05 is in use as bound.

    D = q log(q / p) + (1 - q) log((1 - q) / (1 - p)); left out are tokens with A > 0, p > q and D > delta_high, or
    A <= 0, p < q and D > delta_low.
    """
    p_NT, q_NT = _dppo_probabilities(inputs)
    rest_NT = ((1 - q_NT + EPSILON) / (1 - p_NT + EPSILON)).log()
    kl_NT = -q_NT * inputs.log_ratio_NT.detach() + (1 - q_NT) * rest_NT
    too_high_NT = (p_NT > q_NT) & (kl_NT > config.dppo.delta_high)
    too_low_NT = (p_NT < q_NT) & (kl_NT > config.dppo.delta_low)
    return _dppo_without(inputs, too_high_NT, too_low_NT)


def _dppo_probabilities(inputs: PolicyInputs) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs_NT = inputs.logprobs_NT.detach()
    return logprobs_NT.exp(), (logprobs_NT - inputs.log_ratio_NT.detach()).exp()


def _dppo_without(inputs: PolicyInputs, too_high_NT: torch.Tensor, too_low_NT: torch.Tensor) -> TermOutput:
    is_out_NT = torch.where(inputs.advantages_NT > 0, too_high_NT, too_low_NT)
    values_NT = torch.where(is_out_NT, 0.0, -inputs.ratio_NT * inputs.advantages_NT)
    return TermOutput(values_NT=values_NT, is_clipped_NT=torch.zeros_like(inputs.mask_NT), is_masked_NT=is_out_NT)


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
