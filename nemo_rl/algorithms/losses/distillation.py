"""The distillation term: the KL between a teacher's and the policy's distributions, from the teacher's top-k tokens.

The teacher gives the log-probabilities q of its K most likely tokens and of all others together, the policy its own p
of the same events; both under the whole vocabulary. Of what is outside the K tokens `tail` makes

    bucket        one more event with the rest of each side: the KL of K + 1 events, a lower bound of the full one
    renormalize   nothing: q and p are divided by their sums over the K tokens

so that with the whole vocabulary as K both are the full KL. Then, summed over the events,

    forward       sum q log(q / p)       the policy covers what the teacher does
    reverse       sum p log(p / q)       the policy leaves out what the teacher does not do
    mixed         w forward + (1 - w) reverse

Only p carries a gradient; the tokens that were sampled are held still. Shapes: N rows, T tokens, K tokens of a set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nemo_rl.config.distillation import DistillationConfig
from nemo_rl.errors import SchemaMismatch
from nemo_rl.models.policy.interfaces import TOPK_LOGPROBS

__all__ = ["distillation_term"]

LEAST_REST = 1e-6
"""Probability of all tokens outside a teacher's top-k where its vocabulary has none and the policy's has: the reverse
KL stays finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationTerm:
    """The term at each token, and numbers about both distributions; `[N, T]` each, only `values_NT` with gradient."""

    values_NT: torch.Tensor
    measured: Mapping[str, torch.Tensor]
    """Values by the name of their metric: both KLs, the probability that each side gives to the teacher's top-k tokens,
    and the entropies of the events that are compared, in nats."""


def distillation_term(
    policy_NTk: torch.Tensor, teacher_NTk: torch.Tensor, mask_NT: torch.Tensor, config: DistillationConfig
) -> DistillationTerm:
    """Return the term; at tokens that are not trained anything finite.

    Args:
        policy_NTk: `[N, T, K + 1]` log p of the tokens, and last of all others together; -inf where there are none.
        teacher_NTk: log q of the same, as far as the teacher knows tokens.
        mask_NT: bool, trained tokens.

    Raises:
        SchemaMismatch: the teacher has not as many events as the policy.
    """
    if teacher_NTk.shape != policy_NTk.shape:
        raise SchemaMismatch(
            f"{TOPK_LOGPROBS}: expected the log-probabilities of {policy_NTk.shape[-1] - 1} tokens and of all others, "
            f"got {teacher_NTk.shape[-1]} numbers a token; they were kept by another release, run the step anew"
        )
    # Elsewhere nothing was computed; equal values have a KL of 0 and no gradient.
    policy_NTk = torch.where(mask_NT[..., None], policy_NTk, 0.0)
    teacher_NTk = torch.where(mask_NT[..., None], teacher_NTk, 0.0)
    log_q, log_p = _events(policy_NTk, teacher_NTk, config)
    # An event that cannot happen under the policy has no part; its logarithm is kept finite for the gradient.
    is_event = ~log_p.detach().isneginf()
    log_p = torch.where(is_event, log_p, 0.0)
    log_q = torch.where(is_event, log_q, 0.0)
    p = torch.where(is_event, log_p.exp(), 0.0)
    q = torch.where(is_event, log_q.exp(), 0.0)
    forward_NT = (q * (log_q - log_p)).sum(-1)
    reverse_NT = (p * (log_p - log_q)).sum(-1)
    if config.kl == "mixed":
        values_NT = config.mixed_weight * forward_NT + (1 - config.mixed_weight) * reverse_NT
    else:
        values_NT = forward_NT if config.kl == "forward" else reverse_NT
    with torch.no_grad():
        return DistillationTerm(
            values_NT=values_NT,
            measured={
                "kl": values_NT.detach(),
                "forward_kl": forward_NT.detach(),
                "reverse_kl": reverse_NT.detach(),
                "teacher_top_k_mass": teacher_NTk[..., :-1].exp().sum(-1),
                "policy_top_k_mass": policy_NTk[..., :-1].exp().sum(-1),
                "teacher_entropy": -(q * log_q).sum(-1),
                "policy_entropy": -(p * log_p).sum(-1),
            },
        )


def _events(
    policy_NTk: torch.Tensor, teacher_NTk: torch.Tensor, config: DistillationConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log q and log p of the events that are compared."""
    if config.tail == "renormalize":
        return teacher_NTk[..., :-1].log_softmax(-1), policy_NTk[..., :-1].log_softmax(-1)
    return torch.where(teacher_NTk.isneginf(), math.log(LEAST_REST), teacher_NTk), policy_NTk
