"""Reductions from a value for every token to one number: which tokens count, the mean over tokens, sequences or a
length, and `TokenMeasures`, metrics that nobody waits for.

Invariant: divisors are the counts of the whole global batch (`LossScale`), so the parts of microbatches and ranks add
up to the same number however rows were laid out. Rows without a token that counts add 0 and are in no divisor. Shapes:
N rows, T tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from nemo_rl.config.loss import LossConfig
from nemo_rl.models.policy.interfaces import DeferredMetrics, LossScale
from nemo_rl.utils.metrics import Max, Mean, Min, Reduction, Sum

__all__ = ["TokenMeasures", "constant_length", "normalize", "token_weights", "weighed"]


def valid_token_mask(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return `[N, T]` bool, True on tokens with a weight. Position 0 is never predicted and never counts."""
    mask_NT = batch["token_mask"].bool() & (batch["sample_mask"] > 0)[:, None]
    mask_NT[:, 0] = False
    return mask_NT


def token_weights(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return `[N, T]` float32: the weight of its row for tokens that count, 0 for the others."""
    return torch.where(valid_token_mask(batch), batch["sample_mask"].float()[:, None], 0.0)


def weighed(values_NT: torch.Tensor, weight_NT: torch.Tensor) -> torch.Tensor:
    """Return what each token adds to a sum, 0 where it has no weight; without gradient."""
    return torch.where(weight_NT > 0, values_NT.detach(), 0.0) * weight_NT


def normalize(
    values_NT: torch.Tensor, weight_NT: torch.Tensor, *, scale: LossScale, config: LossConfig
) -> torch.Tensor:
    """Return the mean that the recipe asks for; tokens of weight 0 have no part in it, whatever their value is."""
    weighed_NT = torch.where(weight_NT > 0, values_NT, 0.0) * weight_NT
    if config.constant_length is not None:
        return constant_length(weighed_NT, scale=scale, length=config.constant_length)
    if config.normalization == "token":
        return token_mean(weighed_NT, scale=scale)
    return sequence_mean(weighed_NT, weight_NT, scale=scale)


def token_mean(weighed_NT: torch.Tensor, *, scale: LossScale) -> torch.Tensor:
    """sum w L / sum w over the tokens (DAPO, arXiv 2503.14476)."""
    return weighed_NT.sum() / (scale.valid_tokens or 1.0)


def sequence_mean(weighed_NT: torch.Tensor, weight_NT: torch.Tensor, *, scale: LossScale) -> torch.Tensor:
    """Mean over rows of the mean over a row's T_i tokens (GRPO, arXiv 2402.03300)."""
    means_N = weighed_NT.sum(1) / (weight_NT > 0).sum(1).clamp(min=1)
    return means_N.sum() / (scale.valid_sequences or 1.0)


def constant_length(weighed_NT: torch.Tensor, *, scale: LossScale, length: int) -> torch.Tensor:
    """Mean over rows of sum L / C: no row gains by being longer or shorter (Dr.GRPO, arXiv 2503.20783)."""
    return weighed_NT.sum() / ((scale.valid_sequences or 1.0) * length)


class TokenMeasures:
    """Collects metrics by name; the last one of a name counts."""

    def __init__(self, weight_NT: torch.Tensor) -> None:
        """Args:
        weight_NT: 0 where no token is trained.
        """
        self._weight_NT = weight_NT.detach()
        self._means: dict[str, tuple[type[Reduction], torch.Tensor, torch.Tensor | None]] = {}
        self._extremes: dict[str, torch.Tensor] = {}
        self._numbers: dict[str, torch.Tensor] = {}

    def mean(self, name: str, values_NT: torch.Tensor, *, of_N: torch.Tensor | None = None) -> None:
        """Measure the weighted mean of values, whatever they are where the weight is 0.

        Args:
            of_N: bool, the rows whose tokens count; None: all.
        """
        self._means[name] = Mean, values_NT.detach(), of_N

    def total(self, name: str, values_NT: torch.Tensor, *, of_N: torch.Tensor | None = None) -> None:
        """Measure the weighted sum of values; of a condition it is the weight of the tokens that meet it."""
        self._means[name] = Sum, values_NT.detach(), of_N

    def extremes(self, name: str, values_NT: torch.Tensor) -> None:
        """Measure the smallest and the largest value under `<name>_min` and `<name>_max`."""
        self._extremes[name] = values_NT.detach()

    def number(self, name: str, value: torch.Tensor) -> None:
        """Measure a number of no dimension, such as a part of the loss."""
        self._numbers[name] = value.detach()

    def forget(self, name: str) -> None:
        """Leave a number out again."""
        del self._numbers[name]

    def deferred(self) -> DeferredMetrics:
        kinds: list[tuple[str, type[Reduction]]] = []
        parts: list[torch.Tensor] = []
        is_trained_NT = self._weight_NT > 0
        if self._means:
            values_cNT = _stacked([values for _, values, _ in self._means.values()])
            weighed_cNT = torch.where(is_trained_NT, values_cNT, 0.0).mul_(self._weight_NT)
            total_cN = weighed_cNT.sum(-1, dtype=torch.float64)
            whole_N = self._weight_NT.sum(-1, dtype=torch.float64)
            total_c, whole = total_cN.sum(-1).unbind(), whole_N.sum()
            for place, (name, (kind, _, of_N)) in enumerate(self._means.items()):
                kinds.append((name, kind))
                parts.append(total_c[place] if of_N is None else torch.where(of_N, total_cN[place], 0.0).sum())
                if kind is Mean:
                    parts.append(whole if of_N is None else torch.where(of_N, whole_N, 0.0).sum())
        for name, values_NT in self._extremes.items():
            kinds += [(f"{name}_min", Min), (f"{name}_max", Max)]
            parts.append(torch.where(is_trained_NT, values_NT, torch.inf).amin())
            parts.append(torch.where(is_trained_NT, values_NT, -torch.inf).amax())
        kinds += [(name, Sum) for name in self._numbers]
        parts += self._numbers.values()
        return DeferredMetrics(kinds, torch.stack([part.double() for part in parts]))


def _stacked(values: list[torch.Tensor]) -> torch.Tensor:
    dtype = functools.reduce(torch.promote_types, (each.dtype for each in values))
    dtype = dtype if dtype.is_floating_point else torch.float32
    return torch.stack([each.to(dtype) for each in values])
