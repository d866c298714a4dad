"""KL of a token to the reference policy as a term of the loss, with the gradient that is asked for.

With x = log(pi_ref / pi): k1 = -x, k2 = x^2 / 2, k3 = exp(x) - 1 - x (Schulman 2020). Over samples of pi the means
of k1 and k3 are KL(pi, pi_ref); what an estimator pulls at is another matter (arXiv 2506.09477, arXiv 2512.21852):

    gradient             of log pi          in expectation
    k1                   1                  0: no regularisation at all
    k2                   -x                 that of KL(pi, pi_ref)
    k3                   1 - exp(x)         that of KL(pi_ref, pi)
    straight_through     -x                 that of KL(pi, pi_ref), whatever the value
    u k1, u k3           u (1 - x), -u x    that of KL(pi, pi_ref), with u = pi / sg(pi), or pi / pi_gen off policy
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nemo_rl.algorithms.losses.off_policy import LOG_BOUND
from nemo_rl.config.loss import LossConfig
from nemo_rl.models.logprobs import k3

__all__ = ["KlTerm", "kl_term"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KlTerm:
    """Values of each token."""

    values: torch.Tensor
    is_clamped: torch.Tensor
    """bool: a clamp has cut the gradient off."""


def kl_term(log_ratio: torch.Tensor, log_importance: torch.Tensor, config: LossConfig) -> KlTerm:
    """Return the term that `reference_policy_kl_type` and `reference_policy_kl_gradient` name; tokens that a clamp
    changes have no gradient.

    Args:
        log_ratio: x.
        log_importance: log u with its gradient: log pi - sg(log pi), or log(pi / pi_gen).
    """
    x = log_ratio.clamp(-config.kl_input_clamp_value, config.kl_input_clamp_value)
    estimate = {"k1": _k1, "k2": _k2, "k3": k3}[config.reference_policy_kl_type](x)
    is_clamped = (log_ratio.abs() > config.kl_input_clamp_value) | (estimate > config.kl_output_clamp_value)
    values = estimate.clamp(max=config.kl_output_clamp_value)
    way = config.reference_policy_kl_gradient
    if way == "straight_through":
        pull = torch.where(is_clamped, 0.0, _k2(x))
        # The bracket is exactly zero: the value is that of the estimator.
        values = values.detach() + (pull - pull.detach())
    if way == "importance_weighted" or config.use_on_policy_kl_approximation:
        importance = log_importance.clamp(-LOG_BOUND, LOG_BOUND).exp()
        is_constant = is_clamped if way == "importance_weighted" else torch.ones_like(is_clamped)
        values = values * torch.where(is_constant, importance.detach(), importance)
    return KlTerm(values=values, is_clamped=is_clamped)


def _k1(x: torch.Tensor) -> torch.Tensor:
    return -x


def _k2(x: torch.Tensor) -> torch.Tensor:
    return x.square() / 2
