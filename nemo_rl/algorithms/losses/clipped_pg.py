"""Clipped policy gradient, with DAPO's clip-higher and the dual clip."""

from __future__ import annotations

import torch

from nemo_rl.algorithms.losses.term import PolicyInputs, TermOutput
from nemo_rl.config.loss import LossConfig

__all__ = ["clipped_pg", "clipped_surrogate"]


def clipped_pg(inputs: PolicyInputs, config: LossConfig) -> TermOutput:
    """L = -min(r A, clip(r) A); with c = ratio_clip_c and A < 0: min(L, -c A).

    PPO (arXiv 1707.06347), GRPO (arXiv 2402.03300), clip-higher: DAPO (arXiv 2503.14476), dual clip: arXiv 1912.09729.
    """
    values_NT, is_clipped_NT = clipped_surrogate(inputs.ratio_NT, inputs.advantages_NT, config)
    if config.ratio_clip_c is not None:
        ceiling_NT = -config.ratio_clip_c * inputs.advantages_NT
        is_above_NT = (inputs.advantages_NT < 0) & (values_NT > ceiling_NT)
        values_NT = torch.where(is_above_NT, ceiling_NT, values_NT)
        is_clipped_NT = is_clipped_NT | is_above_NT
    return TermOutput(values_NT=values_NT, is_clipped_NT=is_clipped_NT)


def clipped_surrogate(
    ratio_NT: torch.Tensor, advantages_NT: torch.Tensor, config: LossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """-min(r A, clip(r) A), and where r is outside the clip range."""
    clipped_NT = ratio_NT.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)
    actor_NT = -torch.minimum(ratio_NT * advantages_NT, clipped_NT * advantages_NT)
    return actor_NT, clipped_NT != ratio_NT
