"""Negative log-likelihood, for supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nemo_rl.algorithms.losses.policy_loss import TokenMeasures, token_weights, weighed
from nemo_rl.config.loss import LossConfig
from nemo_rl.models.head.logprobs import negative_log_likelihood
from nemo_rl.models.policy.interfaces import LossOutput, LossScale

__all__ = ["NLLLoss", "supervised_loss"]


@dataclass(frozen=True, kw_only=True)
class NLLLoss:
    """Weighted mean negative log-likelihood over the tokens of the global batch."""

    @property
    def input_fields(self) -> tuple[str, ...]:
        return ("token_mask", "sample_mask")

    def __call__(
        self, token_logprobs: torch.Tensor, batch: Mapping[str, torch.Tensor], *, scale: LossScale
    ) -> LossOutput:
        weight_NT = token_weights(batch)
        loss = negative_log_likelihood(token_logprobs, weight_NT, total=scale.valid_tokens or 1.0)
        measures = TokenMeasures(weight_NT)
        measures.number("loss", loss)
        measures.number("valid_tokens", weight_NT.sum(dtype=torch.float64))
        metrics = measures.deferred()
        return LossOutput(loss=loss, metrics=metrics, token_losses=weighed(-token_logprobs, weight_NT))


def supervised_loss(*, config: LossConfig, prev_field: str) -> NLLLoss:
    """Return the loss of supervised training, which reads neither."""
    del config, prev_field
    return NLLLoss()
