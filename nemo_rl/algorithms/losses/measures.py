"""`TokenMeasures`: metrics over the trained tokens of a microbatch, as one tensor that nobody waits for.

The losses fill one per call. Values are weighed in their own dtype and summed in float64. Shapes: N rows, T tokens.
"""

from __future__ import annotations

import functools

import torch

from nemo_rl.models.policy.interfaces import DeferredMetrics
from nemo_rl.utils.metrics import Max, Mean, Min, Reduction, Sum

__all__ = ["TokenMeasures"]


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
        """Return all of them."""
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
