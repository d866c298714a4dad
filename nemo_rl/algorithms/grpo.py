"""Parts of GRPO that do not depend on the schedule: which rows are trained, and the pack plans of a step.

Pure functions on small per-row vectors; called by the sync trainer.

`ScoredRows`: advantages and weights of all rows of a step, and why a row has none.

Made by `score_rows`, changed by the stage that measures tokens. Invariant: numbers of the same rows in one order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress

import torch

from nemo_rl.algorithms.advantage_estimator import (
    AdvantageEstimator,
    GroupStats,
    UsesRows,
    group_indices,
    group_statistics,
    has_equal_parts,
)
from nemo_rl.config.grpo import GRPOConfig, RewardScalingConfig, RewardShapingConfig
from nemo_rl.config.parts import ADVANTAGE_ESTIMATORS
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.packing import (
    DEFAULT_COST,
    PackPlan,
    StepPlanKeywords,
    microbatches_needed,
    plan_fixed,
    plan_packs,
    plan_padded,
    replan_microbatches,
    replan_rows,
    round_up,
)
from nemo_rl.errors import ConfigError, NonFiniteError
from nemo_rl.experience.payload import SampleStats

__all__ = [
    "CUT",
    "EQUAL",
    "LEFT_OUT",
    "TOO_FAR",
    "VOID",
    "ScoredRows",
    "TrainRows",
    "counted_rows",
    "estimated_advantages",
    "outcome_advantages",
    "overlong_penalty",
    "plan_logprobs",
    "plan_rows",
    "plan_train",
    "rewards_of",
    "score_rows",
    "select_train_rows",
]


LEFT_OUT = "conversation was not scored (experience.conversation.endings, env.judges or env.on_none)"
VOID = "turn without text and without a call (experience.conversation.drop_void_turns)"
EQUAL = "equal rewards in its group"
CUT = "truncated response (grpo.overlong_filtering)"
TOO_FAR = "log-probability error is above grpo.seq_logprob_error_threshold"
"""The reasons why a row has no weight in the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredRows:
    """Advantages and weights of all rows of a step."""

    stats: GroupStats
    advantages: torch.Tensor
    """`[N]` float32."""
    sample_mask: torch.Tensor
    """`[N]` float32, the weight of each row in the loss; 0 leaves it out."""
    is_trained_group: torch.Tensor
    """`[N]` bool: the row's group is not left out for its equal rewards."""
    had_weight: torch.Tensor
    """`[N]` bool: the row had a weight before its log-probabilities were looked at."""
    is_void: torch.Tensor | None = None
    """`[N]` bool: a void turn takes the row's weight; None as below."""
    is_scored: torch.Tensor | None = None
    """`[N]` bool: the row's conversation counts; None where rows are no conversations."""
    conversations: torch.Tensor | None = None
    """`[N]` int64: number of the row's conversation in the step; None as above."""

    def why_no_weight(self, row: int) -> str | None:
        """Return why a row has no part in the loss; None for one that has."""
        if self.sample_mask[row] > 0:
            return None
        if self.is_scored is not None and not self.is_scored[row]:
            return LEFT_OUT
        if not self.is_trained_group[row]:
            return EQUAL
        if self.is_void is not None and self.is_void[row]:
            return VOID
        return TOO_FAR if self.had_weight[row] else CUT

    def why_no_update(self) -> str:
        """Return why a step without a weighted row has no update."""
        reasons = dict.fromkeys(why for row in range(len(self.sample_mask)) if (why := self.why_no_weight(row)))
        return (
            "every group has equal rewards" if set(reasons) == {EQUAL} else f"no row has a weight: {', '.join(reasons)}"
        )

    def select(self, rows: Sequence[int]) -> ScoredRows:
        """The same numbers of `rows`, in that order."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        return ScoredRows(
            stats=self.stats.select(rows),
            advantages=self.advantages[index],
            sample_mask=self.sample_mask[index],
            is_trained_group=self.is_trained_group[index],
            had_weight=self.had_weight[index],
            is_void=None if self.is_void is None else self.is_void[index],
            is_scored=None if self.is_scored is None else self.is_scored[index],
            conversations=None if self.conversations is None else self.conversations[index],
        )

    def concat(self, *others: ScoredRows) -> ScoredRows:
        """Rows of this one, then those of the others, which have other groups; none are conversations."""
        parts = (self, *others)
        return ScoredRows(
            stats=self.stats.concat(*(other.stats for other in others)),
            advantages=torch.cat([part.advantages for part in parts]),
            sample_mask=torch.cat([part.sample_mask for part in parts]),
            is_trained_group=torch.cat([part.is_trained_group for part in parts]),
            had_weight=torch.cat([part.had_weight for part in parts]),
        )

    def with_advantages(self, rows: Sequence[int], advantages: torch.Tensor) -> ScoredRows:
        index = torch.as_tensor(rows, dtype=torch.int64)
        return replace(self, advantages=self.advantages.index_copy(0, index, advantages.float()))

    def with_weights(self, rows: Sequence[int], weights: torch.Tensor) -> ScoredRows:
        index = torch.as_tensor(rows, dtype=torch.int64)
        return replace(self, sample_mask=self.sample_mask.index_copy(0, index, weights))

    def weighed(self, weights: torch.Tensor) -> ScoredRows:
        """Return the rows with their weights multiplied by others, `[N]` float32."""
        return replace(self, sample_mask=self.sample_mask * weights)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRows:
    """Rows that go to the workers, optimizer step by optimizer step."""

    rows: tuple[int, ...]
    """Indices into the rows of the step."""
    batch_sizes: tuple[int, ...]
    """Rows of each optimizer step."""


def score_rows(
    sample_stats: SampleStats,
    group_uids: Sequence[str],
    config: GRPOConfig,
    *,
    per_token: bool = False,
    by_conversation: bool = False,
) -> ScoredRows:
    """Group statistics, advantages, and the weight of each row.

    Statistics count every conversation that was scored once, however many rows it has; its rows share its advantage.

    Args:
        group_uids: of each row; rows of a group need not be neighbours, and may be those of several steps.
        per_token: advantages are not the driver's, and 0 here.
        by_conversation: the rows of a conversation share a weight of 1, where the loss is a mean over rows.
    """
    units = None if sample_stats.conversations is None else ScoredConversations.of(sample_stats, group_uids)
    counted = sample_stats if units is None else units.counted(sample_stats)
    uids = group_uids if units is None else [group_uids[row] for row in units.first_row_U.tolist()]
    rewards = torch.tensor(counted.rewards, dtype=torch.float32)
    # Which groups are trained is decided on rewards as they were scored: a penalty for length makes all groups differ.
    stats = group_statistics(rewards, uids)
    advantages = torch.zeros(len(rewards))
    if not per_token:
        advantages = estimated_advantages(counted, rewards_of(counted, config), stats, config)
    weight = torch.ones(len(rewards))
    if config.overlong_filtering:
        weight[torch.tensor(counted.truncated)] = 0.0
    if counted.conversations is not None:
        weight[torch.tensor(counted.conversations.is_void)] = 0.0
    is_trained_group = torch.ones(len(rewards), dtype=torch.bool)
    if config.leaves_equal_groups_out:
        is_trained_group = ~rows_of_zero_variance_groups(counted, stats, config)
        weight[~is_trained_group] = 0.0
    scored = ScoredRows(
        stats=stats,
        advantages=advantages,
        sample_mask=weight,
        is_trained_group=is_trained_group,
        had_weight=weight > 0,
    )
    return scored if units is None else units.spread(scored, sample_stats, group_uids, by_conversation=by_conversation)


def outcome_advantages(sample_stats: SampleStats, scored: ScoredRows, config: GRPOConfig) -> torch.Tensor:
    """`[N]` float32: advantages of rows by `grpo` and its keys, whichever estimator the recipe names."""
    by_group = config.model_copy(update={"adv_estimator": type(config.adv_estimator)()})
    uids = [str(group) for group in scored.stats.row_group.tolist()]
    return score_rows(sample_stats, uids, by_group).advantages


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredConversations:
    """The conversations that were scored, and the rows that they have. Shapes: N rows, U scored conversations."""

    first_row_U: torch.Tensor
    """`[U]` int64, the first row of each."""
    unit_N: torch.Tensor
    """`[N]` int64, number of the row's conversation; -1 where it was not scored."""
    batch_N: torch.Tensor
    """`[N]` int64, number of the row's conversation among all, scored or not, in order."""

    @classmethod
    def of(cls, sample_stats: SampleStats, group_uids: Sequence[str]) -> ScoredConversations:
        about = sample_stats.conversations
        assert about is not None, "single turns have no conversations"
        names = list(zip(group_uids, about.sample.tolist(), strict=True))
        is_scored, numbers = about.is_scored.tolist(), dict[tuple[str, int], int]()
        first = list[int]()
        unit = list[int]()
        for row, name in enumerate(names):
            if is_scored[row] and name not in numbers:
                numbers[name] = len(first)
                first.append(row)
            unit.append(numbers[name] if is_scored[row] else -1)
        return cls(
            first_row_U=torch.tensor(first, dtype=torch.int64),
            unit_N=torch.tensor(unit, dtype=torch.int64),
            batch_N=group_indices(names),
        )

    def counted(self, sample_stats: SampleStats) -> SampleStats:
        """Return one row for each conversation; its response is that of all its rows together."""
        chosen, is_scored = sample_stats.select(self.first_row_U.tolist()), self.unit_N >= 0
        lengths_N = torch.from_numpy(sample_stats.response_lengths.astype("int64"))
        lengths_U = torch.zeros(len(self.first_row_U), dtype=torch.int64)
        lengths_U.index_add_(0, self.unit_N[is_scored], lengths_N[is_scored])
        return replace(chosen, response_lengths=lengths_U.int().numpy())

    def spread(
        self, scored: ScoredRows, sample_stats: SampleStats, group_uids: Sequence[str], *, by_conversation: bool
    ) -> ScoredRows:
        """Return the numbers of all rows: those of their conversation, and no weight where it was not scored."""
        about = sample_stats.conversations
        assert about is not None, "single turns have no conversations"
        is_scored, weight_U = self.unit_N >= 0, scored.sample_mask
        if by_conversation:
            rows_U = torch.bincount(self.unit_N[is_scored], minlength=len(self.first_row_U))
            weight_U = weight_U / rows_U.clamp(min=1)
        weight_N = self._of_rows(weight_U)
        return ScoredRows(
            stats=self._stats(scored.stats, group_uids),
            advantages=self._of_rows(scored.advantages),
            sample_mask=weight_N,
            is_trained_group=self._of_rows(scored.is_trained_group),
            had_weight=weight_N > 0,
            is_void=torch.tensor(about.is_void),
            is_scored=is_scored,
            conversations=self.batch_N,
        )

    def _of_rows(self, values_U: torch.Tensor) -> torch.Tensor:
        """Return `[N]` values of the rows' conversations, 0 or False where they were not scored."""
        found = values_U.new_zeros(len(self.unit_N))
        is_scored = self.unit_N >= 0
        found[is_scored] = values_U[self.unit_N[is_scored]]
        return found

    def _stats(self, stats: GroupStats, group_uids: Sequence[str]) -> GroupStats:
        """Return the statistics with every row in its group; a group without a scored row has a count of 0."""
        group_N = group_indices(group_uids)
        num_groups = int(group_N.max()) + 1 if len(group_N) else 0
        place = torch.zeros(len(stats.count), dtype=torch.int64)
        place[stats.row_group] = group_N[self.first_row_U]
        zeros = torch.zeros(num_groups, dtype=torch.float64)
        return GroupStats(
            row_group=group_N,
            count=zeros.index_copy(0, place, stats.count),
            mean=zeros.index_copy(0, place, stats.mean),
            std=zeros.index_copy(0, place, stats.std),
            is_zero_variance=torch.ones(num_groups, dtype=torch.bool).index_copy(0, place, stats.is_zero_variance),
        )


def counted_rows(sample_stats: SampleStats, group_uids: Sequence[str]) -> SampleStats:
    """Return the rows that statistics count: every row, or one for each conversation that was scored."""
    if sample_stats.conversations is None:
        return sample_stats
    return ScoredConversations.of(sample_stats, group_uids).counted(sample_stats)


def rows_of_zero_variance_groups(sample_stats: SampleStats, stats: GroupStats, config: GRPOConfig) -> torch.Tensor:
    """`[N]` bool: nothing is learned from the row's group, whose rewards, as they were scored, are all equal.

    For gdpo all components that count must be equal, too: those that cancel in the sum still tell its rows apart.
    """
    is_equal_N = stats.row_is_zero_variance
    if config.adv_estimator.name == "gdpo":
        weights = config.adv_estimator.component_weights
        for name in sample_stats.components:
            if weights.get(name, 1.0) != 0:
                is_equal_N = is_equal_N & has_equal_parts(sample_stats, name, stats)
    return is_equal_N


def estimated_advantages(
    sample_stats: SampleStats, rewards: torch.Tensor, stats: GroupStats, config: GRPOConfig
) -> torch.Tensor:
    """`[N]` float32, clipped, whichever estimator the recipe names.

    Args:
        stats: of the same groups, whatever rewards they are of.
    """
    stats = stats.of(rewards)
    key, name = "grpo.adv_estimator.name", config.adv_estimator.name
    estimator: AdvantageEstimator = ADVANTAGE_ESTIMATORS.load(name, key=key)(config=config)
    advantages = estimator(rewards, stats, **({"rows": sample_stats} if isinstance(estimator, UsesRows) else {}))
    if not isinstance(advantages, torch.Tensor) or advantages.shape != rewards.shape:
        got = list(advantages.shape) if isinstance(advantages, torch.Tensor) else type(advantages).__name__
        raise ConfigError(f"{key}: {name!r}: expected one advantage per row, a tensor [{len(rewards)}], got {got}")
    if not bool(advantages.isfinite().all()):
        raise NonFiniteError(f"{key}: {name!r} gave NaN or inf for rewards {rewards.tolist()[:8]}...")
    low, high = config.advantage_clip_low, config.advantage_clip_high
    return (advantages if low is None and high is None else advantages.clamp(min=low, max=high)).float()


def select_train_rows(
    scored: ScoredRows,
    lengths: Sequence[int],
    policy: PolicyConfig,
    *,
    layout: ParallelLayout,
    whole_groups: bool = False,
) -> TrainRows:
    """Leaves rows without weight out, keeping each row in the optimizer step it belongs to.

    With `whole_groups` rows of trained groups stay though they have no weight: the advantages of the others need their
    tokens.

    A step that keeps fewer rows than it needs microbatches is filled up with its shortest rows of weight 0, so that
    every rank has as many; further rows need no fewer microbatches. A step that keeps none is skipped. Fixed
    microbatches keep all rows: their number must divide.
    """
    size = policy.train_global_batch_size
    has_weight = scored.sample_mask > 0
    stays = (scored.is_trained_group if whole_groups and bool(has_weight.any()) else has_weight).tolist()
    rows: list[int] = []
    sizes: list[int] = []
    for members in _optimizer_steps(scored, size):
        kept = list(compress(members, map(stays.__getitem__, members)))
        if not kept:
            continue
        if not (policy.sequence_packing.is_on or policy.dynamic_batching.enabled):
            kept = list(members)
        else:
            fillers = sorted((i for i in members if not stays[i]), key=lambda i: -lengths[i])
            while fillers and (lack := _rows_needed([lengths[i] for i in kept], policy, layout) - len(kept)) > 0:
                kept += [fillers.pop() for _ in range(min(lack, len(fillers)))]
        rows += kept
        sizes.append(len(kept))
    return TrainRows(rows=tuple(rows), batch_sizes=tuple(sizes))


def _optimizer_steps(scored: ScoredRows, size: int) -> list[list[int]]:
    """Return the rows of each optimizer step: `size` rows, or all rows of `size` conversations."""
    if scored.conversations is None:
        rows = range(len(scored.sample_mask))
        return [list(rows[start : start + size]) for start in rows[::size]]
    steps: dict[int, list[int]] = {}
    for row, number in enumerate(scored.conversations.tolist()):
        steps.setdefault(number // size, []).append(row)
    return list(steps.values())


def plan_train(
    lengths: Sequence[int],
    batch_sizes: Sequence[int],
    policy: PolicyConfig,
    *,
    layout: ParallelLayout,
    cost: tuple[float, float] = DEFAULT_COST,
) -> PackPlan:
    """Assignment of the chosen rows to data-parallel ranks and training microbatches.

    Args:
        lengths: tokens of each chosen row.
        batch_sizes: rows of each optimizer step.
        cost: (a, b) of the cost a s + b s^2 of a row of s tokens (`sequence_cost` of the model).
    """
    packing, dynamic = policy.sequence_packing, policy.dynamic_batching
    dp_world = layout.dp
    options = StepPlanKeywords(
        cost=cost,
        pad_multiple=layout.round_up_multiple(policy.make_sequence_length_divisible_by),
        global_batch_size=batch_sizes,
    )
    try:
        if packing.is_on:
            options["microbatch_order"] = packing.microbatch_order
            cap, algorithm = packing.train_mb_tokens, packing.algorithm
            return plan_packs(lengths, capacity=cap, dp_world=dp_world, algorithm=algorithm, **options)
        if dynamic.enabled:
            options["microbatch_order"] = dynamic.microbatch_order
            return plan_padded(lengths, capacity=dynamic.train_mb_tokens, dp_world=dp_world, **options)
        return plan_fixed(lengths, rows_per_microbatch=policy.train_micro_batch_size, dp_world=dp_world, **options)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def plan_rows(lengths: Sequence[int], policy: PolicyConfig, *, layout: ParallelLayout) -> PackPlan:
    """Log-probability microbatches of workers that train nothing, whatever rows the policy's ranks have.

    The longest rows first, each to the rank with the fewest tokens; a rank with fewer microbatches than another one
    ends with empty ones.
    """
    loads, mine = [(0, rank) for rank in range(layout.dp)], [list[int]() for _ in range(layout.dp)]
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + lengths[row], rank))
        mine[rank].append(row)
    ranks = [_filled(rows, lengths, policy, layout=layout) for rows in mine]
    count = max(map(len, ranks))
    multiple = layout.round_up_multiple(policy.make_sequence_length_divisible_by)
    return PackPlan(
        microbatches=tuple((*found, *[()] * (count - len(found))) for found in ranks),
        steps=(count,),
        pad_to=round_up(max(lengths, default=0), multiple),
        packed=policy.sequence_packing.is_on,
    )


def _filled(
    rows: Sequence[int], lengths: Sequence[int], policy: PolicyConfig, *, layout: ParallelLayout
) -> list[tuple[int, ...]]:
    """Return microbatches of rows, given the longest first: each is filled up to the cap, in this order."""
    section = policy.sequence_packing if policy.sequence_packing.is_on else policy.dynamic_batching
    found: list[list[int]] = []
    used = 0
    for row in rows:
        size = round_up(lengths[row], layout.length_multiple)
        if found and section.is_on:
            used = used + size if policy.sequence_packing.is_on else (len(found[-1]) + 1) * lengths[found[-1][0]]
            is_full = used > section.logprob_mb_tokens
        else:
            is_full = bool(found) and len(found[-1]) >= (policy.logprob_batch_size or policy.train_micro_batch_size)
        if not found or is_full:
            found.append([])
            used = size
        found[-1].append(row)
    return [tuple(part) for part in found]


def plan_logprobs(
    plan: PackPlan,
    lengths: Sequence[int],
    policy: PolicyConfig,
    *,
    layout: ParallelLayout,
    cost: tuple[float, float] = DEFAULT_COST,
) -> PackPlan:
    """Log-probability microbatches over the assignment of `plan`."""
    multiple = layout.round_up_multiple(policy.make_sequence_length_divisible_by)
    for section in (policy.sequence_packing, policy.dynamic_batching):
        if section.is_on:
            return replan_microbatches(
                plan,
                lengths,
                capacity=section.logprob_mb_tokens,
                cost=cost,
                pad_multiple=multiple,
                microbatch_order=section.microbatch_order,
            )
    count = policy.logprob_batch_size or policy.train_micro_batch_size
    return replan_rows(plan, lengths, rows_per_microbatch=count, cost=cost, pad_multiple=multiple)


def _rows_needed(lengths: Sequence[int], policy: PolicyConfig, layout: ParallelLayout) -> int:
    packed = policy.sequence_packing.is_on
    section = policy.sequence_packing if packed else policy.dynamic_batching
    multiple = layout.round_up_multiple(policy.make_sequence_length_divisible_by)
    try:
        return microbatches_needed(
            lengths, capacity=section.train_mb_tokens, dp_world=layout.dp, packed=packed, pad_multiple=multiple
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def rewards_of(sample_stats: SampleStats, config: GRPOConfig) -> torch.Tensor:
    """`[N]` float32: what becomes advantages, scaled and shaped as the recipe says."""
    if config.reward_scaling.enabled or config.reward_shaping.enabled:
        return shaped_rewards(sample_stats, config.reward_scaling, config.reward_shaping)
    return torch.tensor(sample_stats.rewards, dtype=torch.float32)


def shaped_rewards(rows: SampleStats, scaling: RewardScalingConfig, shaping: RewardShapingConfig) -> torch.Tensor:
    """`[N]` float32: rewards scaled, then less what the length costs."""
    rewards = torch.tensor(rows.rewards, dtype=torch.float32)
    if scaling.enabled:
        rewards = scale_rewards(rewards, scaling)
    if not shaping.enabled:
        return rewards
    if shaping.stop_properly_penalty_coef is not None:
        return torch.where(torch.from_numpy(rows.truncated), rewards * shaping.stop_properly_penalty_coef, rewards)
    assert shaping.max_response_length is not None, "rule_reward_shaping_is_complete lets no other pass"
    return rewards + overlong_penalty(
        torch.from_numpy(rows.response_lengths),
        longest=shaping.max_response_length,
        buffer=shaping.overlong_buffer_length,
        most=shaping.overlong_buffer_penalty,
    )


def scale_rewards(rewards: torch.Tensor, config: RewardScalingConfig) -> torch.Tensor:
    """`[N]` float32: clamped to [source_min, source_max], mapped linearly to [target_min, target_max]."""
    share = (rewards.clamp(config.source_min, config.source_max) - config.source_min) / (
        config.source_max - config.source_min
    )
    return config.target_min + share * (config.target_max - config.target_min)


def overlong_penalty(lengths: torch.Tensor, *, longest: int, buffer: int, most: float) -> torch.Tensor:
    """`[N]` float32, at most 0: falls linearly from 0 at `longest` - `buffer` tokens to -`most` at `longest`, and no
    further (DAPO, arXiv 2503.14476).

    Example:
        >>> overlong_penalty(torch.tensor([16384, 18432, 24576]), longest=20480, buffer=4096, most=1.0).tolist()
        [-0.0, -0.5, -1.0]
    """
    into_buffer = (lengths.float() - (longest - buffer)) / buffer
    return -most * into_buffer.clamp(0.0, 1.0)
