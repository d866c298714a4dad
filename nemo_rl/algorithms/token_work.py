"""`TokenWork`: advantages of each token, computed where the rows are, and whitened over the whole step.

    TokenAdvantages (stage)
      |- plan_groups         groups, never split, to data-parallel ranks by their tokens
      |- TokenWork           with `only_moments`: each rank's count, mean and spread       (Moments)
      |- Moments.merge       on the driver: shift and scale of the step                    (Whitening)
      `- TokenWork           each rank writes `token_advantages` of its rows

Invariant: an advantage depends on its group and on the moments of the step alone, so not on ranks, padding or order.

`TokenStatistics`: what the driver must know of the tokens of a row, as one number each, measured by the workers.

The stage `measure_rows` sends it; `nemo-rl compare RUN replay` calls it on kept columns. Invariant: a number of a row
depends on the row's tokens alone, to the last bit: not on padding, on other rows or on which rank measures. Shapes: N
rows, T tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from nemo_rl.algorithms.grpo import ScoredRows, estimated_advantages, outcome_advantages, rewards_of
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.config.loss import LossConfig, row_loss_problems
from nemo_rl.config.parts import ADVANTAGE_ESTIMATORS, TOKEN_ESTIMATORS
from nemo_rl.data_plane.batch_meta import RowMapOutput
from nemo_rl.data_plane.chunks.wire import Counted
from nemo_rl.data_plane.schema import TOKEN_ALIGNED_FIELDS
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.errors import ConfigError, NonFiniteError
from nemo_rl.experience.payload import SampleStats
from nemo_rl.models.policy.interfaces import TOKEN_ADVANTAGES

__all__ = [
    "ADVANTAGE",
    "KL",
    "LOGPROB_ERROR",
    "VARIANCE_EPSILON",
    "KlInReward",
    "MeasuredStatistics",
    "Moments",
    "TokenEstimator",
    "TokenRows",
    "TokenStatistics",
    "TokenWork",
    "advantages_in_process",
    "decide_rows",
    "less_penalties",
    "plan_groups",
    "return_to_go",
    "row_sums",
    "token_estimator",
    "whitening_of",
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


VARIANCE_EPSILON = 1e-8
"""Added to the variance of whitened advantages."""

ADVANTAGE, MOMENTS = "advantage", "moments"
"""Names of what the driver gets: the mean of each row; five numbers of the shard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Whitening:
    """(value - shift) * scale."""

    shift: float
    scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """Moments of the values of some tokens."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared deviations from the mean."""
    low: float = float("inf")
    high: float = float("-inf")

    @classmethod
    def of(cls, values: torch.Tensor) -> Moments:
        """Return the moments of `[M]` float64."""
        if not len(values):
            return cls()
        mean = values.mean()
        return cls(
            count=float(len(values)),
            mean=float(mean),
            squares=float((values - mean).square().sum()),
            low=float(values.min()),
            high=float(values.max()),
        )

    def merge(self, other: Moments) -> Moments:
        count = self.count + other.count
        if not count:
            return self
        apart, share = other.mean - self.mean, other.count / count
        return Moments(
            count=count,
            mean=self.mean + apart * share,
            squares=self.squares + other.squares + apart * apart * self.count * share,
            low=min(self.low, other.low),
            high=max(self.high, other.high),
        )

    def whitening(self) -> Whitening:
        """Return the whitening to mean 0 and unbiased variance 1; equal values, and a single one, become 0."""
        if self.count < 2 or self.low == self.high:
            return Whitening(shift=0.0, scale=0.0)
        variance = self.squares / (self.count - 1)
        return Whitening(shift=self.mean, scale=(variance + VARIANCE_EPSILON) ** -0.5)

    def to_tensor(self) -> torch.Tensor:
        return torch.tensor([self.count, self.mean, self.squares, self.low, self.high], dtype=torch.float64)

    @classmethod
    def from_tensor(cls, numbers: torch.Tensor) -> Moments:
        """The inverse."""
        count, mean, squares, low, high = numbers.tolist()
        return cls(count=count, mean=mean, squares=squares, low=low, high=high)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenWork(Counted):
    """`RowFunction` on rows of whole groups."""

    estimator: TokenEstimator
    kl: KlInReward | None
    rewards: torch.Tensor
    """`[N]` float32, as in `TokenRows`; so are the next two."""
    scored: torch.Tensor
    groups: torch.Tensor
    is_trained_group: torch.Tensor
    """`[N]` bool: the estimator sees the row; others, of which a group may be there in part, get 0."""
    outcome: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """`[N]`, as in `TokenRows`, and so is the next one; empty for estimators that do not look at them."""
    conversations: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    clip: tuple[float | None, float | None] = (None, None)
    only_moments: bool = False
    """True when nothing is written and the driver gets the moments of the values."""
    whitening: Whitening | None = None

    @classmethod
    def of(
        cls,
        scored: ScoredRows,
        sample_stats: SampleStats,
        config: GRPOConfig,
        *,
        estimator: TokenEstimator,
        kl: KlInReward | None,
        rows: Sequence[int],
    ) -> TokenWork:
        """Return the work on all rows that the workers have: at least every row of a trained group."""
        whole = cls(
            estimator=estimator,
            kl=kl,
            rewards=rewards_of(sample_stats, config),
            scored=torch.tensor(sample_stats.rewards, dtype=torch.float32),
            groups=scored.stats.row_group,
            outcome=outcome_advantages(sample_stats, scored, config),
            conversations=torch.arange(len(sample_stats)) if scored.conversations is None else scored.conversations,
            is_trained_group=scored.is_trained_group,
            clip=(config.advantage_clip_low, config.advantage_clip_high),
        )
        return whole.of_rows(rows)

    def num_bytes(self) -> int:
        parts = (self.rewards, self.scored, self.groups, self.outcome, self.conversations, self.is_trained_group)
        return sum(part.nbytes for part in parts)

    def of_rows(self, rows: Sequence[int]) -> TokenWork:
        index = torch.as_tensor(rows, dtype=torch.int64)
        return replace(
            self,
            rewards=self.rewards[index],
            scored=self.scored[index],
            groups=self.groups[index],
            outcome=_chosen(self.outcome, index),
            conversations=_chosen(self.conversations, index),
            is_trained_group=self.is_trained_group[index],
        )

    @property
    def input_fields(self) -> tuple[str, ...]:
        of_kl = () if self.kl is None else self.kl.input_fields
        return tuple(dict.fromkeys(("token_mask", *self.estimator.reads, *of_kl)))

    def __call__(self, batch: Mapping[str, torch.Tensor]) -> RowMapOutput:
        """
        Raises:
            ConfigError, NonFiniteError: what the estimator gave is no advantages.
        """
        mask_NT = batch["token_mask"].bool() & self.is_trained_group[:, None]
        values_NT = self._estimate(batch, mask_NT)
        if self.only_moments:
            return RowMapOutput(numbers={MOMENTS: Moments.of(values_NT[mask_NT]).to_tensor()})
        if self.whitening is not None:
            values_NT = torch.where(mask_NT, (values_NT - self.whitening.shift) * self.whitening.scale, 0.0)
        low, high = self.clip
        if low is not None or high is not None:
            values_NT = torch.where(mask_NT, values_NT.clamp(min=low, max=high), 0.0)
        means_N = row_sums(values_NT, mask_NT) / mask_NT.sum(1).clamp(min=1)
        return RowMapOutput(numbers={ADVANTAGE: means_N}, columns={TOKEN_ADVANTAGES: values_NT.float()})

    def _estimate(self, batch: Mapping[str, torch.Tensor], mask_NT: torch.Tensor) -> torch.Tensor:
        """`[N, T]` float64, 0 outside the mask."""
        [seen] = self.is_trained_group.nonzero(as_tuple=True)
        values_NT = torch.zeros(mask_NT.shape, dtype=torch.float64)
        if not len(seen):
            return values_NT
        name, mask_nT = type(self.estimator).__name__, mask_NT[seen]
        part = {column: batch[column][seen] for column in self.input_fields}
        found = self.estimator(
            TokenRows(
                groups=self.groups[seen],
                rewards=self.rewards[seen].double(),
                scored=self.scored[seen].double(),
                outcome=_chosen(self.outcome, seen).double(),
                conversations=_chosen(self.conversations, seen),
                mask=mask_nT,
                penalties=self._penalties(part, mask_nT),
                columns={column: _plain(column, part[column], mask_nT) for column in self.estimator.reads},
            )
        )
        if not isinstance(found, torch.Tensor) or found.shape != mask_nT.shape:
            got = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise ConfigError(
                f"grpo.adv_estimator.name: {name}: expected an advantage for each token, a tensor "
                f"{list(mask_nT.shape)}, got {got}"
            )
        found = torch.where(mask_nT, found.double(), 0.0)
        if not bool(found.isfinite().all()):
            raise NonFiniteError(f"grpo.adv_estimator.name: {name} gave NaN or inf")
        return values_NT.index_copy(0, seen, found)

    def _penalties(self, part: Mapping[str, torch.Tensor], mask_nT: torch.Tensor) -> torch.Tensor:
        if self.kl is None:
            return torch.zeros(mask_nT.shape, dtype=torch.float64)
        return self.kl.weight * self.kl.k1(part, mask_nT)


def _chosen(column: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return column[rows] if len(column) else column


def _plain(name: str, column: torch.Tensor, mask_nT: torch.Tensor) -> torch.Tensor:
    values = column.double() if column.is_floating_point() else column
    return torch.where(mask_nT, values, torch.zeros_like(values)) if name in TOKEN_ALIGNED_FIELDS else values


def advantages_in_process(
    work: TokenWork, columns: Mapping[str, torch.Tensor], lengths: Sequence[int], *, dp_world: int
) -> torch.Tensor:
    """`[N, T]` float32, to the last bit what so many data-parallel shards write.

    Args:
        columns: `input_fields` of all rows, `[N, T]` with padding on the right.
    """
    plan = plan_groups(work.groups.tolist(), lengths, dp_world=dp_world)
    shards = [plan.rows_of_rank(rank) for rank in range(dp_world)]
    parts = [
        (work.of_rows(rows), {name: column[list(rows)] for name, column in columns.items()}) for rows in shards if rows
    ]
    whitening = None
    if work.estimator.whitens:
        whitening = whitening_of([replace(part, only_moments=True)(batch).numbers for part, batch in parts])
    found = [replace(part, whitening=whitening)(batch).columns[TOKEN_ADVANTAGES] for part, batch in parts]
    index = torch.tensor([row for rows in shards for row in rows], dtype=torch.int64)
    joined = torch.cat(found)
    return torch.empty_like(joined).index_copy_(0, index, joined)


def plan_groups(groups: Sequence[int], lengths: Sequence[int], *, dp_world: int) -> PackPlan:
    """Whole groups to ranks: the largest first, each to the rank with the fewest tokens; a rank may get none."""
    rows_of: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        rows_of.setdefault(group, []).append(row)
    tokens = {group: sum(lengths[row] for row in rows) for group, rows in rows_of.items()}
    loads, mine = [0] * dp_world, [list[int]() for _ in range(dp_world)]
    for group in sorted(rows_of, key=lambda group: (-tokens[group], rows_of[group][0])):
        rank = loads.index(min(loads))
        loads[rank] += tokens[group]
        mine[rank] += rows_of[group]
    return PackPlan(microbatches=tuple((tuple(rows),) for rows in mine), steps=(1,), pad_to=max(lengths, default=0))


def whitening_of(shards: Sequence[Mapping[str, torch.Tensor]]) -> Whitening:
    """Return the whitening of the step, from the moments of its shards, always in their order."""
    merged = Moments()
    for numbers in shards:
        if numbers:
            merged = merged.merge(Moments.from_tensor(numbers[MOMENTS]))
    return merged.whitening()


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRows:
    """Rows of whole groups, in any order; everything is on the CPU, floating point is float64.

    Example:
        >>> rows = TokenRows(groups=torch.tensor([0]), rewards=torch.tensor([1.0]), scored=torch.tensor([1.0]),
        ...                  mask=torch.tensor([[False, True, True]]), penalties=torch.tensor([[0.0, 0.5, 0.25]]),
        ...                  columns={})
        >>> rows.returns.tolist()
        [[0.0, 0.25, 0.75]]
    """

    groups: torch.Tensor
    """`[N]` int64, numbers of the groups."""
    rewards: torch.Tensor
    """`[N]`, scaled and shaped as the recipe says, without a KL."""
    scored: torch.Tensor
    """`[N]`, rewards as they were scored."""
    mask: torch.Tensor
    """`[N, T]` bool, response tokens; a row may have none."""
    penalties: torch.Tensor
    """`[N, T]`, what each token costs: the KL with `loss_fn.use_kl_in_reward`, else 0; 0 outside the mask."""
    columns: Mapping[str, torch.Tensor]
    """The columns that the estimator `reads`, `[N, T]` or `[N]`; of per-token ones 0 outside the mask."""
    outcome: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """`[N]`, advantages of rows within their groups, by `grpo` and its keys."""
    conversations: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """`[N]` int64, numbers of the conversations that the rows are of; of single turns those of the rows."""

    @property
    def returns(self) -> torch.Tensor:
        """`[N, T]`: the row's reward less the penalties from the token on; 0 outside the mask."""
        return torch.where(self.mask, self.rewards[:, None] - return_to_go(self.penalties), 0.0)


class TokenEstimator(ABC):
    """Made with `config=` (the section `grpo`); must be picklable and depend on nothing but its rows.

    It is called twice with the same rows where it whitens.
    """

    reads: ClassVar[tuple[str, ...]] = ()
    """Columns that it needs besides the mask, such as `prev_logprobs`."""
    whitens: ClassVar[bool] = False
    """True when its advantages are whitened over all response tokens of the step afterwards."""

    def __init__(self, *, config: GRPOConfig) -> None:
        self.config = config

    @abstractmethod
    def __call__(self, rows: TokenRows) -> torch.Tensor:
        """`[N, T]`, finite at the tokens of the mask; what is elsewhere does not matter."""


def return_to_go(values: torch.Tensor) -> torch.Tensor:
    """`[N, T]`: sums of the values from each position on; padding on the right changes no bit of them."""
    return values.flip(1).cumsum(1).flip(1)


def token_estimator(config: GRPOConfig, loss: LossConfig) -> TokenEstimator | None:
    """The estimator of the recipe if it gives one advantage for each token; None for one that gives one per row.

    Raises:
        ConfigError: it cannot be imported, or its advantages do not fit the loss.
    """
    key, name = "grpo.adv_estimator.name", config.adv_estimator.name
    if ADVANTAGE_ESTIMATORS.is_builtin(name):
        if not config.adv_estimator.is_builtin_per_token(kl_in_reward=loss.use_kl_in_reward):
            return None
        made: TokenEstimator = TOKEN_ESTIMATORS.load(name, key=key)(config=config)
        return made
    own = ADVANTAGE_ESTIMATORS.load(name, key=key)
    if not (isinstance(own, type) and issubclass(own, TokenEstimator)):
        return None
    problems = row_loss_problems(loss, estimator=name)
    if problems:
        raise ConfigError(problems)
    return own(config=config)
