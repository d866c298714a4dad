"""`TokenStatistics`: what the driver must know of the tokens of a row, as one number each, measured by the workers.

The stage `measure_rows` sends it; `nemo-rl compare RUN replay` calls it on kept columns. Invariant: a number of a row
depends on the row's tokens alone, to the last bit: not on padding, on other rows or on which rank measures. Shapes: N
rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from nemo_rl.algorithms.grpo import estimated_advantages, rewards_of
from nemo_rl.algorithms.scored_rows import ScoredRows
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.data_plane.batch_meta import RowMapOutput
from nemo_rl.experience.payload import SampleStats

__all__ = [
    "KL",
    "LOGPROB_ERROR",
    "KlInReward",
    "MeasuredStatistics",
    "TokenStatistics",
    "decide_rows",
    "less_penalties",
    "row_sums",
]

PREV, GENERATION, REFERENCE = "prev_logprobs", "generation_logprobs", "reference_policy_logprobs"
LOGPROB_ERROR, KL = "logprob_error", "kl"
"""Names of the numbers of `TokenStatistics`."""
LOG_BOUND = 20.0
"""Bound of a log-ratio before it is exponentiated, as in the losses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KlInReward:
    """The penalty on rewards for leaving the reference: `weight` times k1 = log(pi_old / pi_ref) of every token."""

    weight: float
    """`loss_fn.reference_policy_kl_penalty`."""
    clamp: float
    """Bound of k1, on both sides."""

    input_fields: ClassVar[tuple[str, ...]] = (PREV, REFERENCE)

    @classmethod
    def of(cls, config: LossConfig) -> KlInReward | None:
        """Return the penalty; None without `use_kl_in_reward`."""
        if not config.use_kl_in_reward:
            return None
        return cls(weight=config.reference_policy_kl_penalty, clamp=config.kl_input_clamp_value)

    def k1(self, batch: Mapping[str, torch.Tensor], mask_NT: torch.Tensor) -> torch.Tensor:
        """`[N, T]` float64, 0 outside the mask; two equal infinities have no difference."""
        prev_NT, reference_NT = batch[PREV].double(), batch[REFERENCE].double()
        is_apart_NT = mask_NT & (prev_NT != reference_NT)
        return torch.where(is_apart_NT, prev_NT - reference_NT, 0.0).clamp(-self.clamp, self.clamp)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenStatistics:
    """`RowFunction`; measures only what the recipe needs."""

    error_threshold: float | None = None
    """`grpo.seq_logprob_error_threshold`."""
    kl: KlInReward | None = None

    @classmethod
    def of(cls, config: GRPOConfig, loss: LossConfig) -> TokenStatistics | None:
        """Return the measurements; None where the recipe needs nothing."""
        threshold, kl = config.seq_logprob_error_threshold, KlInReward.of(loss)
        return None if threshold is None and kl is None else cls(error_threshold=threshold, kl=kl)

    @property
    def input_fields(self) -> tuple[str, ...]:
        of_errors = () if self.error_threshold is None else (PREV, GENERATION)
        of_kl = () if self.kl is None else self.kl.input_fields
        return tuple(dict.fromkeys(("token_mask", *of_errors, *of_kl)))

    def __call__(self, batch: Mapping[str, torch.Tensor]) -> RowMapOutput:
        """`[N]` float64 each."""
        mask_NT = batch["token_mask"].bool()
        numbers = {}
        if self.error_threshold is not None:
            numbers[LOGPROB_ERROR] = logprob_errors(batch[PREV], batch[GENERATION], mask_NT)
        if self.kl is not None:
            numbers[KL] = row_sums(self.kl.k1(batch, mask_NT), mask_NT)
        return RowMapOutput(numbers=numbers)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStatistics:
    """Measurements of the rows that were chosen for training, in their order."""

    had_weight: torch.Tensor
    """`[N]` bool: before anything was measured."""
    errors: torch.Tensor | None = None
    """`[N]` float64; None where no threshold needs them."""
    is_masked: torch.Tensor
    """`[N]` bool: rows that have lost their weight by their errors."""
    kl: torch.Tensor | None = None
    """`[N]` float64, sum of k1; None where it is not in the reward."""

    @classmethod
    def of(
        cls, sample_mask: torch.Tensor, numbers: Mapping[str, torch.Tensor], *, threshold: float | None
    ) -> MeasuredStatistics:
        """
        Args:
            sample_mask: `[N]`, weights before.
            numbers: of `TokenStatistics`, `[N]` each.
        """
        had_weight, errors = sample_mask > 0, numbers.get(LOGPROB_ERROR)
        is_masked = torch.zeros_like(had_weight)
        if errors is not None and threshold is not None:
            is_masked = had_weight & (errors > threshold)
        return cls(had_weight=had_weight, errors=errors, is_masked=is_masked, kl=numbers.get(KL))

    def metrics(self) -> dict[str, float]:
        """Return metrics of the rows that had a weight, as a run logs them under `train/`."""
        found: dict[str, float] = {}
        if self.errors is not None:
            errors, is_masked = self.errors[self.had_weight], self.is_masked[self.had_weight]
            found |= {
                "seq_logprob_error_max": float(errors.max()),
                "seq_logprob_error_mean": float(errors.mean()),
                "seq_logprob_error_masked_rows": float(is_masked.sum()),
                "seq_logprob_error_masked_share": float(is_masked.double().mean()),
            }
        if self.kl is not None:
            found["kl_in_reward"] = float(self.kl[self.had_weight].mean())
        return found


def decide_rows(
    scored: ScoredRows,
    sample_stats: SampleStats,
    config: GRPOConfig,
    *,
    measures: TokenStatistics,
    numbers: Mapping[str, torch.Tensor],
    rows: Sequence[int],
    per_token: bool,
) -> tuple[ScoredRows, MeasuredStatistics]:
    """Weights and advantages after what was measured.

    Args:
        numbers: of `measures`, of the chosen rows.
        rows: those that were chosen: indices into all rows.
        per_token: each token gets its own advantage later, from its own KL.
    """
    weights = scored.sample_mask[torch.as_tensor(rows, dtype=torch.int64)]
    measured = MeasuredStatistics.of(weights, numbers, threshold=measures.error_threshold)
    scored = scored.with_weights(rows, weights.masked_fill(measured.is_masked, 0.0))
    if measured.kl is not None and measures.kl is not None and not per_token:
        penalties = measures.kl.weight * measured.kl
        scored = less_penalties(scored, sample_stats, config, rows=rows, penalties=penalties)
    return scored, measured


def less_penalties(
    scored: ScoredRows, sample_stats: SampleStats, config: GRPOConfig, *, rows: Sequence[int], penalties: torch.Tensor
) -> ScoredRows:
    """Advantages again, of rewards less a penalty of each row of a trained group; the others keep theirs.

    Args:
        rows: those that have a penalty: at least every row of a trained group.
        penalties: `[n]` float64.
    """
    index = torch.as_tensor(rows, dtype=torch.int64)
    is_known_N = torch.zeros(len(sample_stats), dtype=torch.bool).index_fill(0, index, True)
    assert bool((is_known_N | ~scored.is_trained_group).all()), "a group without the penalties of all its rows"
    penalty_N = torch.zeros(len(sample_stats), dtype=torch.float64).index_copy(0, index, penalties)
    # Which of the other rows the workers have seen depends on the layout.
    penalty_N = torch.where(scored.is_trained_group, penalty_N, 0.0)
    rewards = (rewards_of(sample_stats, config).double() - penalty_N).float()
    return replace(scored, advantages=estimated_advantages(sample_stats, rewards, scored.stats, config))


def logprob_errors(prev_NT: torch.Tensor, generation_NT: torch.Tensor, mask_NT: torch.Tensor) -> torch.Tensor:
    """`[N]` float64: mean over response tokens of exp(|log pi_old - log pi_gen|); 1 for a row without any.

    A log-probability that the sampler does not know (NaN) counts as equal, as in the losses; a gap above 20 as 20.

    Example:
        >>> logprob_errors(torch.tensor([[0.0, -1.0, -2.0]]), torch.tensor([[0.0, -1.0, -3.0]]),
        ...                torch.tensor([[False, True, True]]))
        tensor([1.8591], dtype=torch.float64)
    """
    gen_log_ratio_NT = torch.where(mask_NT & ~generation_NT.isnan(), prev_NT.double() - generation_NT.double(), 0.0)
    # Two equal infinities have no difference.
    gen_log_ratio_NT = torch.where(prev_NT == generation_NT, 0.0, gen_log_ratio_NT)
    ratios_NT = gen_log_ratio_NT.abs().clamp(max=LOG_BOUND).exp()
    counts_N = mask_NT.sum(1)
    return torch.where(counts_N > 0, row_sums(ratios_NT, mask_NT) / counts_N.clamp(min=1), 1.0)


def row_sums(values_NT: torch.Tensor, mask_NT: torch.Tensor) -> torch.Tensor:
    """`[N]` float64 sums over the tokens of the mask, added one after another, so that padding changes no bit."""
    row_M, _ = mask_NT.nonzero(as_tuple=True)
    zeros_N = torch.zeros(len(mask_NT), dtype=torch.float64)
    return zeros_N.index_add(0, row_M, values_NT[mask_NT].double())
