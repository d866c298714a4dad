"""Seams between the driver, the policy workers and the loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from nemo_rl.utils.metrics import Mean, Reduction, Sum

__all__ = [
    "ADVANTAGES",
    "COMPUTED_FIELDS",
    "ENTROPY",
    "HOST_COLUMNS",
    "POLICY_TOPK",
    "SQUARED_PROBS",
    "STALENESS",
    "TOKEN_ADVANTAGES",
    "TOPK_IDS",
    "TOPK_LOGPROBS",
    "UNFILTERED_LOGPROBS",
    "DeferredMetrics",
    "LossFunction",
    "LossOutput",
    "LossScale",
    "TensorInfo",
    "TrainResult",
]


ADVANTAGES, TOKEN_ADVANTAGES = "advantages", "token_advantages"
"""Name of the advantages in the `input_fields` of a loss; name of their column where each token has its own."""
ENTROPY = "entropy"
"""Column that no stage writes: the workers compute it for a loss that names it in `input_fields`. `[N, T]` float32 with
gradient: entropy of the distribution that each token was drawn from, 0 at tokens that are not trained."""
UNFILTERED_LOGPROBS = "unfiltered_logprobs"
"""Name of a computed column, like `ENTROPY`: log-probabilities under the whole vocabulary, with temperature. Only
where top-k or top-p has left a set of it: elsewhere the log-probabilities that the loss gets are these, and there is
no such column."""
SQUARED_PROBS = "squared_probs"
"""Column that the pass `prev_logprobs` writes where it is asked for: `[N, T]` float32, sum over the vocabulary of p^2
of the distribution that each token was drawn from; 0 outside the responses."""
STALENESS = "staleness"
"""Column that the driver writes for a loss that names it in `input_fields`: `[N]` int32, updates between the weights
that drew a row's oldest token and the weights that the step updates."""
TOPK_IDS, TOPK_LOGPROBS = "topk_ids", "topk_logprobs"
"""Columns that the pass `topk_logits` writes: `[N, T, K]`, the most likely tokens of the distribution that each token
was drawn from, largest first, and `[N, T, K + 1]`, their log-probabilities under the whole vocabulary, with
temperature, and that of all other tokens together (-inf where there are none); 0 outside the responses."""
POLICY_TOPK = "policy_topk_logprobs"
"""Name of a computed column, like `ENTROPY`: `[N, T, K + 1]` float32 with gradient, the trained policy's own
log-probabilities of the tokens `topk_ids`, and last of all other tokens together (-inf where there are none)."""
COMPUTED_FIELDS = (ENTROPY, UNFILTERED_LOGPROBS, POLICY_TOPK)
HOST_COLUMNS = frozenset({STALENESS})
"""Columns that stay on the CPU: a loss reads their numbers one by one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """Counts over the whole global batch (all ranks, all microbatches of one optimizer step)."""

    valid_tokens: float
    """Sum of token_mask * sample_mask over the tokens that are predicted (position 0 never is)."""
    valid_sequences: float
    """Sum of sample_mask over rows with at least one valid token."""
    is_first_update: bool = True
    """True in the first update of the step: the policy is still the one that sampled its rows, but for rows of
    earlier steps."""


class DeferredMetrics(Mapping[str, Reduction]):
    """Metrics of a microbatch whose numbers are still on the device, in one tensor.

    A worker reads those of all microbatches together; looking a metric up here waits for the device.

    Example:
        >>> metrics = DeferredMetrics([("loss", Sum), ("ratio", Mean)], torch.tensor([2.0, 6.0, 4.0]))
        >>> metrics["loss"].value, metrics["ratio"].value
        (2.0, 1.5)
    """

    def __init__(self, kinds: Sequence[tuple[str, type[Reduction]]], numbers: torch.Tensor) -> None:
        """Args:
        numbers: float64, total and weight of a `Mean` and one number of the others, in the order of `kinds`.
        """
        self._kinds, self.numbers = tuple(kinds), numbers
        self._read: dict[str, Reduction] | None = None

    def of_numbers(self, numbers: Iterable[float]) -> dict[str, Reduction]:
        """Return the metrics with the numbers on the host; without smallest and largest values of no token."""
        found: dict[str, Reduction] = {}
        remaining = iter(numbers)
        for name, kind in self._kinds:
            if kind is Mean:
                found[name] = Mean(total=next(remaining), weight=next(remaining))
                continue
            value = next(remaining)
            # An infinity would spoil the merge with other microbatches.
            if kind is Sum or not math.isinf(value):
                found[name] = kind(value)
        return found

    def _on_host(self) -> dict[str, Reduction]:
        if self._read is None:
            self._read = self.of_numbers(self.numbers.tolist())
        return self._read

    def __getitem__(self, name: str) -> Reduction:
        return self._on_host()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._on_host())

    def __len__(self) -> int:
        return len(self._on_host())


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """One microbatch's part of the global loss."""

    loss: torch.Tensor
    """Scalar, already divided by the global count: the sum over microbatches and ranks is the loss."""
    metrics: Mapping[str, Reduction] = field(default_factory=dict)
    token_losses: torch.Tensor | None = None
    """`[N, T]` without gradient: what each token adds to the sum that is divided, 0 where none is trained; for those
    who look on. None: this loss does not say."""


class LossFunction(Protocol):
    """Sent by the driver to the workers; must be picklable. Workers never import a loss."""

    @property
    def input_fields(self) -> tuple[str, ...]:
        """Return columns read from the batch; those of `COMPUTED_FIELDS` are computed when they are among them."""

    def __call__(
        self, token_logprobs: torch.Tensor, batch: Mapping[str, torch.Tensor], *, scale: LossScale
    ) -> LossOutput:
        """Return this microbatch's part of the loss.

        Args:
            token_logprobs: `[N, T]` float32, log pi(token t | tokens < t) at position t, position 0 is 0.
            batch: columns of the same rows, `[N, T]` or `[N]`; `advantages` are `[N]`, or `[N, T]` with an estimator
                that gives each token its own.
            scale: counts of the whole global batch to divide by.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """The result of `train` on one rank."""

    loss: tuple[float, ...]
    """Global loss of each optimizer step (the same on every rank)."""
    grad_norm: tuple[float, ...]
    """Global gradient norm before clipping, one per optimizer step (the same on every rank)."""
    rank: int
    metrics: tuple[dict[str, Reduction], ...]
    """This rank's metrics, one dict per microbatch; merge them over ranks and microbatches."""
    microbatch_losses: tuple[float, ...] = ()
    """This rank's part of the loss, one per microbatch; empty for a loss that does not report it as metric `loss`."""
    total_flops: float
    """Floating-point operations of this rank's forward and backward passes."""
    theoretical_tflops: float
    """Peak TFLOP/s of this rank's device; 0 when it is not known."""
    learning_rate: float
    num_tokens: int
    """Tokens this rank trained on, padding excluded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """Shape and dtype of an exported weight."""

    shape: tuple[int, ...]
    dtype: str
