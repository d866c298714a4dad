"""LUSPO: GSPO without its division by the length, so that long and short rows weigh alike per token."""

from __future__ import annotations

from nemo_rl.algorithms.losses.gspo import gspo
from nemo_rl.algorithms.losses.term import PolicyInputs, TermOutput
from nemo_rl.config.loss import LossConfig

__all__ = ["luspo"]


def luspo(inputs: PolicyInputs, config: LossConfig) -> TermOutput:
    """L = T times that of `gspo`, a mean over rows (arXiv 2602.05261)."""
    of_gspo = gspo(inputs, config)
    return TermOutput(values_NT=inputs.row_lengths * of_gspo.values_NT, is_clipped_NT=of_gspo.is_clipped_NT)
