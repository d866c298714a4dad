"""Divergences of two policies from one sampled token: the estimators that losses, metrics and diagnostics share.

All take d = log p_other - log p_sampler of a token that was sampled from p_sampler.
"""

from __future__ import annotations

import torch

__all__ = ["js", "k3"]


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """KL(sampler || other) of each token: exp(d) - 1 - d.

    Unbiased, for exp(d) has expectation 1 under the sampler; never negative, so tokens do not hide one another; of far
    less variance than -d (http://joschu.net/blog/kl-approx.html).
    """
    return log_ratio.exp() - 1 - log_ratio


def js(log_ratio: torch.Tensor) -> torch.Tensor:
    """Jensen-Shannon divergence of each token, in expectation at most log 2.

    With m = (p_sampler + p_other) / 2: half of k3 of KL(sampler || m), and half of k3 of KL(other || m), whose samples
    are weighed by exp(d).
    """
    to_middle = torch.logaddexp(torch.zeros_like(log_ratio), log_ratio) - torch.log(torch.full_like(log_ratio, 2.0))
    return 0.5 * (k3(to_middle) + log_ratio.exp() * k3(to_middle - log_ratio))
