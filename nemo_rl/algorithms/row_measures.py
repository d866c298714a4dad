"""`RowMeasures`: what the driver must know of the tokens of a row, as one number each, measured by the workers.

The stage `measure_rows` sends it; `nemo-rl replay` calls it on kept columns. Invariant: a number of a row depends on
the row's tokens alone, to the last bit: not on padding, on other rows or on which rank measures. Shapes: N rows, T
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nemo_rl.config.schema import MasterConfig
from nemo_rl.data_plane.row_work import RowWorkOutput

__all__ = ["LOGPROB_ERROR", "MeasuredRows", "RowMeasures", "row_sums"]

PREV, GENERATION = "prev_logprobs", "generation_logprobs"
LOGPROB_ERROR = "logprob_error"
"""Name of a number of `RowMeasures`."""
LOG_BOUND = 20.0
"""Of a log-ratio before it is exponentiated, as in the losses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowMeasures:
    """`RowWork`; measures only what the recipe needs."""

    error_threshold: float | None = None
    """`grpo.seq_logprob_error_threshold`."""

    @classmethod
    def of(cls, config: MasterConfig) -> RowMeasures | None:
        """None where the recipe needs nothing."""
        threshold = config.grpo.seq_logprob_error_threshold
        return None if threshold is None else cls(error_threshold=threshold)

    @property
    def input_fields(self) -> tuple[str, ...]:
        """Columns that it reads."""
        return ("token_mask", PREV, GENERATION)

    def __call__(self, batch: Mapping[str, torch.Tensor]) -> RowWorkOutput:
        """`[N]` float64 each."""
        mask_NT = batch["token_mask"].bool()
        numbers = {}
        if self.error_threshold is not None:
            numbers[LOGPROB_ERROR] = logprob_errors(batch[PREV], batch[GENERATION], mask_NT)
        return RowWorkOutput(numbers=numbers)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRows:
    """What was measured of the rows that were chosen for training, in their order."""

    had_weight: torch.Tensor
    """`[N]` bool: before anything was measured."""
    errors: torch.Tensor | None = None
    """`[N]` float64; None where no threshold needs them."""
    is_masked: torch.Tensor
    """`[N]` bool: rows that have lost their weight by their errors."""

    @classmethod
    def of(cls, sample_mask: torch.Tensor, errors: torch.Tensor | None, *, threshold: float | None) -> MeasuredRows:
        """
        Args:
            sample_mask: `[N]`, weights before.
        """
        had_weight = sample_mask > 0
        if errors is None or threshold is None:
            return cls(had_weight=had_weight, is_masked=torch.zeros_like(had_weight))
        return cls(had_weight=had_weight, errors=errors, is_masked=had_weight & (errors > threshold))

    def metrics(self) -> dict[str, float]:
        """Of the rows that had a weight, as a run logs them under `train/`."""
        if self.errors is None:
            return {}
        errors, is_masked = self.errors[self.had_weight], self.is_masked[self.had_weight]
        return {
            "seq_logprob_error_max": float(errors.max()),
            "seq_logprob_error_mean": float(errors.mean()),
            "seq_logprob_error_masked_rows": float(is_masked.sum()),
            "seq_logprob_error_masked_share": float(is_masked.double().mean()),
        }


def logprob_errors(prev_NT: torch.Tensor, generation_NT: torch.Tensor, mask_NT: torch.Tensor) -> torch.Tensor:
    """`[N]` float64: mean over response tokens of exp(|log pi_old - log pi_gen|); 1 for a row without any.

    A log-probability that the sampler does not know (NaN) counts as equal, as in the losses; a gap above 20 as 20.

    Example:
        >>> logprob_errors(torch.tensor([[0.0, -1.0, -2.0]]), torch.tensor([[0.0, -1.0, -3.0]]),
        ...                torch.tensor([[False, True, True]]))
        tensor([1.8591], dtype=torch.float64)
    """
    gap_NT = torch.where(mask_NT & ~generation_NT.isnan(), prev_NT.double() - generation_NT.double(), 0.0)
    # Two equal infinities have no difference.
    gap_NT = torch.where(prev_NT == generation_NT, 0.0, gap_NT)
    ratios_NT = gap_NT.abs().clamp(max=LOG_BOUND).exp()
    counts_N = mask_NT.sum(1)
    return torch.where(counts_N > 0, row_sums(ratios_NT, mask_NT) / counts_N.clamp(min=1), 1.0)


def row_sums(values_NT: torch.Tensor, mask_NT: torch.Tensor) -> torch.Tensor:
    """`[N]` float64 sums over the tokens of the mask, added one after another, so that padding changes no bit."""
    row_M, _ = mask_NT.nonzero(as_tuple=True)
    zeros_N = torch.zeros(len(mask_NT), dtype=torch.float64)
    return zeros_N.index_add(0, row_M, values_NT[mask_NT].double())
