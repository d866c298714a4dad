"""Losses on token log-probabilities: the clipped policy gradient, and negative log-likelihood.

The driver builds one and sends it to the workers, which call it per microbatch. Invariant: a loss divides by the
counts of the whole global batch (`LossScale`), so the sum over microbatches and ranks does not depend on how rows
were laid out. A row of weight w (`sample_mask`) counts as w rows in the loss, in the counts and in every mean; smallest
and largest values are those of all rows with a weight. Symbols: r = pi / pi_old, A advantage, m mask, w weight, x =
log(pi_ref / pi). Shapes: N rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nemo_rl.config.schema import LossConfig
from nemo_rl.models.logprobs import negative_log_likelihood
from nemo_rl.models.policy.interfaces import LossOutput, LossScale
from nemo_rl.utils.metrics import Max, Mean, Min, Reduction, Sum

__all__ = ["ClippedPGLoss", "NLLLoss", "kl_estimate", "token_weights", "valid_token_mask"]


def valid_token_mask(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """`[N, T]` bool: tokens with a weight. Position 0 is never predicted and never counts."""
    mask_NT = batch["token_mask"].bool() & (batch["sample_mask"] > 0)[:, None]
    mask_NT[:, 0] = False
    return mask_NT


def token_weights(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """`[N, T]` float32: the weight of its row for tokens that count, 0 for the others."""
    return torch.where(valid_token_mask(batch), batch["sample_mask"].float()[:, None], 0.0)


def kl_estimate(
    log_ratio: torch.Tensor, *, kind: str, input_clamp: float, output_clamp: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL of one token from x = log(pi_ref / pi), and where a clamp cut its gradient off.

    k3 = e^x - 1 - x, k2 = x^2 / 2 (Schulman).
    """
    x = log_ratio.clamp(-input_clamp, input_clamp)
    estimate = x.exp() - 1 - x if kind == "k3" else x.square() / 2
    is_clamped = (log_ratio.abs() > input_clamp) | (estimate > output_clamp)
    return estimate.clamp(max=output_clamp), is_clamped


@dataclass(frozen=True, kw_only=True)
class ClippedPGLoss:
    """Clipped policy gradient: -min(r A, clip(r, 1 - low, 1 + high) A) + beta KL(pi || pi_ref).

    Example:
        >>> ClippedPGLoss(config=LossConfig(reference_policy_kl_penalty=0.0)).input_fields
        ('token_mask', 'sample_mask', 'advantages', 'prev_logprobs', 'generation_logprobs')
    """

    config: LossConfig
    prev_field: str = "prev_logprobs"
    """Column of pi_old: `prev_logprobs`, or `generation_logprobs` when the sampler's are taken instead."""

    @property
    def input_fields(self) -> tuple[str, ...]:
        fields = ["token_mask", "sample_mask", "advantages", self.prev_field, "generation_logprobs"]
        if self.config.reference_policy_kl_penalty > 0:
            fields.append("reference_policy_logprobs")
        return tuple(dict.fromkeys(fields))

    def __call__(
        self, token_logprobs: torch.Tensor, batch: Mapping[str, torch.Tensor], *, scale: LossScale
    ) -> LossOutput:
        config = self.config
        weight_NT = token_weights(batch)
        mask_NT = weight_NT > 0
        advantages = batch["advantages"]
        # One number per row, or one per token.
        advantages_NT = advantages[:, None] if advantages.dim() == 1 else advantages
        # Masked positions are set to equal values before any exponential, so nothing there can overflow.
        log_ratio_NT = torch.where(mask_NT, token_logprobs - batch[self.prev_field], 0.0)
        ratio_NT = log_ratio_NT.exp()
        clipped_NT = ratio_NT.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)
        actor_NT = -torch.minimum(ratio_NT * advantages_NT, clipped_NT * advantages_NT)
        loss = self._aggregate(actor_NT, weight_NT, scale)
        token_losses_NT = _weighed(actor_NT, weight_NT)
        metrics = self._policy_metrics(token_logprobs, log_ratio_NT, batch, weight_NT)
        metrics["clip_fraction"] = _mean((clipped_NT != ratio_NT).float(), weight_NT)
        metrics["actor_loss"] = Sum(loss.item())
        if config.reference_policy_kl_penalty > 0:
            reference_NT = torch.where(mask_NT, batch["reference_policy_logprobs"] - token_logprobs, 0.0)
            kl_NT, is_clamped_NT = kl_estimate(
                reference_NT,
                kind=config.reference_policy_kl_type,
                input_clamp=config.kl_input_clamp_value,
                output_clamp=config.kl_output_clamp_value,
            )
            kl_loss = config.reference_policy_kl_penalty * self._aggregate(kl_NT, weight_NT, scale)
            loss = loss + kl_loss
            token_losses_NT = token_losses_NT + config.reference_policy_kl_penalty * _weighed(kl_NT, weight_NT)
            metrics["kl_penalty"] = Sum(kl_loss.item())
            metrics["reference_kl"] = _mean(kl_NT, weight_NT)
            metrics["kl_clamped_tokens"] = Sum(_total(weight_NT[is_clamped_NT]))
        metrics["loss"] = Sum(loss.item())
        return LossOutput(loss=loss, metrics=metrics, token_losses=token_losses_NT)

    def _aggregate(self, values_NT: torch.Tensor, weight_NT: torch.Tensor, scale: LossScale) -> torch.Tensor:
        mask_NT = weight_NT > 0
        weighed_NT = torch.where(mask_NT, values_NT, 0.0) * weight_NT
        if self.config.token_level_loss:
            return weighed_NT.sum() / (scale.valid_tokens or 1.0)
        means_N = weighed_NT.sum(1) / mask_NT.sum(1).clamp(min=1)
        return means_N.sum() / (scale.valid_sequences or 1.0)

    def _policy_metrics(
        self,
        token_logprobs: torch.Tensor,
        log_ratio_NT: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
        weight_NT: torch.Tensor,
    ) -> dict[str, Reduction]:
        mask_NT = weight_NT > 0
        with torch.no_grad():
            logprobs_NT, log_ratio_NT = token_logprobs.detach(), log_ratio_NT.detach()
            ratio_M = log_ratio_NT[mask_NT].exp()
            # k3 of KL(pi_old || pi), from samples of pi_old.
            policy_kl_NT = log_ratio_NT.exp() - 1 - log_ratio_NT
            gap_NT = torch.where(mask_NT, batch[self.prev_field] - batch["generation_logprobs"], 0.0)
            if self.prev_field == "generation_logprobs":
                gap_NT = log_ratio_NT
            return {
                "policy_kl": _mean(policy_kl_NT, weight_NT),
                "gen_kl_error": _mean(gap_NT.exp() - 1 - gap_NT, weight_NT),
                "token_mult_prob_error": _mean(gap_NT.abs().exp(), weight_NT),
                "probs_ratio": _mean(log_ratio_NT.exp(), weight_NT),
                **_extremes("probs_ratio", ratio_M),
                "approx_entropy": _mean(-logprobs_NT, weight_NT),
                "valid_tokens": Sum(_total(weight_NT)),
                "valid_sequences": Sum(_total(weight_NT.amax(1))),
            }


@dataclass(frozen=True, kw_only=True)
class NLLLoss:
    """Weighted mean negative log-likelihood over the tokens of the global batch, for supervised fine-tuning."""

    @property
    def input_fields(self) -> tuple[str, ...]:
        return ("token_mask", "sample_mask")

    def __call__(
        self, token_logprobs: torch.Tensor, batch: Mapping[str, torch.Tensor], *, scale: LossScale
    ) -> LossOutput:
        weight_NT = token_weights(batch)
        loss = negative_log_likelihood(token_logprobs, weight_NT, total=scale.valid_tokens or 1.0)
        metrics: dict[str, Reduction] = {"loss": Sum(loss.item()), "valid_tokens": Sum(_total(weight_NT))}
        return LossOutput(loss=loss, metrics=metrics, token_losses=_weighed(-token_logprobs, weight_NT))


def _weighed(values_NT: torch.Tensor, weight_NT: torch.Tensor) -> torch.Tensor:
    """What each token adds to a sum, 0 where it has no weight; without gradient."""
    return torch.where(weight_NT > 0, values_NT.detach(), 0.0) * weight_NT


def _mean(values_NT: torch.Tensor, weight_NT: torch.Tensor) -> Mean:
    mask_NT = weight_NT > 0
    weighed_M = values_NT.detach()[mask_NT] * weight_NT[mask_NT]
    return Mean(total=_total(weighed_M), weight=_total(weight_NT))


def _total(values: torch.Tensor) -> float:
    return values.sum(dtype=torch.float64).item()


def _extremes(name: str, values_M: torch.Tensor) -> dict[str, Reduction]:
    # A microbatch without valid tokens has no extremes; infinities would spoil the merge.
    if not values_M.numel():
        return {}
    return {f"{name}_min": Min(values_M.min().item()), f"{name}_max": Max(values_M.max().item())}
