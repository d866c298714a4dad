"""CISPO: a clipped ratio as a constant weight, so that no token loses its gradient."""

from __future__ import annotations

from nemo_rl.algorithms.losses.term import PolicyInputs, TermOutput
from nemo_rl.config.loss import LossConfig

__all__ = ["cispo"]


def cispo(inputs: PolicyInputs, config: LossConfig) -> TermOutput:
    """L = -sg(clip(r)) A l (MiniMax-M1, arXiv 2506.13585).

    ratio_clip_min=1 has no lower bound; ratio_clip_max=4 caps at 5. ScaleRL: arXiv 2510.13786.
    """
    ratio_NT = inputs.ratio_NT.detach()
    clipped_NT = ratio_NT.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)
    return TermOutput(
        values_NT=-clipped_NT * inputs.advantages_NT * inputs.logprobs_NT, is_clipped_NT=clipped_NT != ratio_NT
    )
