"""GMPO: the geometric mean of ratios that were clipped token by token."""

from __future__ import annotations

import torch

from nemo_rl.algorithms.losses.term import PolicyInputs, TermOutput
from nemo_rl.config.loss import LossConfig

__all__ = ["gmpo"]


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
