"""GSPO: one ratio per sequence, the geometric mean of its tokens' ratios. Also its token form."""

from __future__ import annotations

from nemo_rl.algorithms.losses.clipped_pg import clipped_surrogate
from nemo_rl.algorithms.losses.term import PolicyInputs, TermOutput
from nemo_rl.config.loss import LossConfig

__all__ = ["gspo", "gspo_token"]


def gspo(inputs: PolicyInputs, config: LossConfig) -> TermOutput:
    """s = exp(sum log r / T); L = -min(s A, clip(s) A), the same at every token; a mean over rows (arXiv 2507.18071).

    The paper's ranges are 3e-4 and 4e-4: s stays far closer to 1 than r does.
    """
    ratio_N1 = inputs.row_mean(inputs.log_ratio_NT).exp()
    values_NT, is_clipped_NT = clipped_surrogate(ratio_N1.expand_as(inputs.mask_NT), inputs.advantages_NT, config)
    return TermOutput(values_NT=values_NT, is_clipped_NT=is_clipped_NT)


def gspo_token(inputs: PolicyInputs, config: LossConfig) -> TermOutput:
    """s_t = sg(s) exp(l - sg(l)); L = -min(s_t A_t, clip(s_t) A_t), a mean over rows (arXiv 2507.18071).

    The value of `gspo`, and where all tokens of a row have one advantage its gradient.
    """
    ratio_N1 = inputs.row_mean(inputs.log_ratio_NT).exp().detach()
    own_NT = (inputs.logprobs_NT - inputs.logprobs_NT.detach()).exp()
    values_NT, is_clipped_NT = clipped_surrogate(ratio_N1 * own_NT, inputs.advantages_NT, config)
    return TermOutput(values_NT=values_NT, is_clipped_NT=is_clipped_NT)
