"""A loss of your own: the policy gradient without a ratio, -A log pi, for updates that stay on policy."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nemo_rl.algorithms.losses.policy_loss import token_weights
from nemo_rl.config.loss import LossConfig
from nemo_rl.models.policy.interfaces import LossOutput, LossScale
from nemo_rl.utils.metrics import Sum

__all__ = ["PolicyGradientLoss"]


class PolicyGradientLoss:
    """Sent to the workers once, called per microbatch.

    Options: `entropy_bonus`, the weight of the mean of -log pi in the loss; 0 leaves it out.
    """

    input_fields = ("token_mask", "sample_mask", "advantages", "generation_logprobs")

    def __init__(self, *, config: LossConfig, prev_field: str) -> None:
        del prev_field  # nothing is compared with the policy that sampled
        self._bonus = float(config.options.get("entropy_bonus") or 0.0)

    def __call__(
        self, token_logprobs: torch.Tensor, batch: Mapping[str, torch.Tensor], *, scale: LossScale
    ) -> LossOutput:
        # Dividing by the tokens of the whole global batch makes the sum over microbatches and ranks right.
        weight_NT = token_weights(batch) / (scale.valid_tokens or 1.0)
        advantages = batch["advantages"]
        advantages_NT = advantages[:, None] if advantages.dim() == 1 else advantages
        loss = -(weight_NT * token_logprobs * (advantages_NT - self._bonus)).sum()
        return LossOutput(loss=loss, metrics={"loss": Sum(loss.item())})
