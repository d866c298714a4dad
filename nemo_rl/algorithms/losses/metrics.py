"""Metrics of a policy loss: mismatch of rollout and trainer, ratios, what was left out.

They are there in every step and for every loss; means are weighted means over the trained tokens. Shapes: N rows, T
tokens, M trained ones.
"""

from __future__ import annotations

import torch

from nemo_rl.models.logprobs import js, k3
from nemo_rl.utils.metrics import Max, Mean, Min, Reduction, Sum

__all__ = ["extremes", "metrics_by_staleness", "mismatch_metrics", "policy_metrics", "total", "weighted_mean"]


def policy_metrics(
    *, logprobs_NT: torch.Tensor, log_ratio_NT: torch.Tensor, weight_NT: torch.Tensor
) -> dict[str, Reduction]:
    """Args: without regard to gradients.

    logprobs_NT: log pi.
    log_ratio_NT: log(pi / pi_old).
    """
    mask_NT = weight_NT > 0
    with torch.no_grad():
        ratio_M = log_ratio_NT[mask_NT].exp()
        return {
            # From samples of pi_old.
            "policy_kl": weighted_mean(k3(log_ratio_NT), weight_NT),
            "probs_ratio": weighted_mean(log_ratio_NT.exp(), weight_NT),
            **extremes("probs_ratio", ratio_M),
            "approx_entropy": weighted_mean(-logprobs_NT, weight_NT),
            "valid_tokens": Sum(total(weight_NT)),
            "valid_sequences": Sum(total(weight_NT.amax(1))),
        }


def mismatch_metrics(gen_log_ratio_NT: torch.Tensor, weight_NT: torch.Tensor) -> dict[str, Reduction]:
    """Return how far trainer and sampler are apart on what was sampled.

    Args:
        gen_log_ratio_NT: log(pi_old / pi_gen); log(pi / pi_gen) of the first update where pi_gen stands for pi_old.
    """
    with torch.no_grad():
        return {
            # From samples of pi_gen.
            "gen_kl_error": weighted_mean(k3(gen_log_ratio_NT), weight_NT),
            "js_divergence_error": weighted_mean(js(gen_log_ratio_NT), weight_NT),
            # Its mean is 1 where both are one distribution, or cover the same tokens.
            "gen_probs_ratio": weighted_mean(gen_log_ratio_NT.exp(), weight_NT),
            "token_mult_prob_error": weighted_mean(gen_log_ratio_NT.abs().exp(), weight_NT),
        }


def metrics_by_staleness(
    staleness_N: torch.Tensor,
    *,
    gen_log_ratio_NT: torch.Tensor,
    is_clipped_NT: torch.Tensor,
    weight_NT: torch.Tensor,
) -> dict[str, Reduction]:
    """Return, for the rows of each staleness s, under `staleness_s/`: the mean of w = pi_old / pi_gen and of w^2, from
    which the effective sample size follows, the share of clipped tokens, and the tokens.

    Args:
        staleness_N: integers.
        gen_log_ratio_NT: log w, as in `mismatch_metrics`.
    """
    found: dict[str, Reduction] = {}
    with torch.no_grad():
        for staleness in sorted(set(staleness_N.tolist())):
            weight_of = weight_NT * (staleness_N == staleness)[:, None]
            name = f"staleness_{int(staleness)}"
            found |= {
                f"{name}/importance_ratio": weighted_mean(gen_log_ratio_NT.exp(), weight_of),
                f"{name}/importance_ratio_squared": weighted_mean((2 * gen_log_ratio_NT).exp(), weight_of),
                f"{name}/clip_fraction": weighted_mean(is_clipped_NT.float(), weight_of),
                f"{name}/tokens": Sum(total(weight_of)),
            }
    return found


def weighted_mean(values_NT: torch.Tensor, weight_NT: torch.Tensor) -> Mean:
    mask_NT = weight_NT > 0
    weighed_M = values_NT.detach()[mask_NT] * weight_NT[mask_NT]
    return Mean(total=total(weighed_M), weight=total(weight_NT))


def total(values: torch.Tensor) -> float:
    return values.sum(dtype=torch.float64).item()


def extremes(name: str, values_M: torch.Tensor) -> dict[str, Reduction]:
    """Smallest and largest."""
    # A microbatch without valid tokens has no extremes; infinities would spoil the merge.
    if not values_M.numel():
        return {}
    return {f"{name}_min": Min(values_M.min().item()), f"{name}_max": Max(values_M.max().item())}
