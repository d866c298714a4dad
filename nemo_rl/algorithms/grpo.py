"""Parts of GRPO that do not depend on the schedule: which rows are trained, and the pack plans of a step.

Pure functions on small per-row vectors; called by the sync trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_rl.algorithms.advantage_estimator import GroupStats, estimate_advantages, group_statistics
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.schema import GRPOConfig
from nemo_rl.distributed.packing import PackPlan, plan_fixed, plan_packs, plan_padded, replan_microbatches, replan_rows
from nemo_rl.errors import ConfigError
from nemo_rl.experience.payload import DriverCarry

__all__ = ["ScoredRows", "TrainRows", "plan_logprobs", "plan_train", "score_rows", "select_train_rows"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredRows:
    """Advantages and weights of all rows of a step."""

    stats: GroupStats
    advantages: torch.Tensor
    """`[N]` float32."""
    sample_mask: torch.Tensor
    """`[N]` float32, 0 for rows that have no weight in the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRows:
    """Rows that go to the workers, optimizer step by optimizer step."""

    rows: tuple[int, ...]
    """Indices into the rows of the step."""
    batch_sizes: tuple[int, ...]
    """Rows of each optimizer step."""


def score_rows(carry: DriverCarry, config: GRPOConfig) -> ScoredRows:
    """Group statistics, advantages, and the weight of each row."""
    rewards = torch.tensor(carry.rewards, dtype=torch.float32)
    stats = group_statistics(rewards, carry.group_ids.tolist())
    advantages = estimate_advantages(
        rewards,
        stats,
        leave_one_out=config.use_leave_one_out_baseline,
        normalize=config.normalize_rewards,
        clip_low=config.advantage_clip_low,
        clip_high=config.advantage_clip_high,
    )
    weight = torch.ones(len(rewards))
    if config.overlong_filtering:
        weight[torch.tensor(carry.truncated)] = 0.0
    if config.drop_zero_advantage_groups:
        weight[stats.row_is_trivial] = 0.0
    return ScoredRows(stats=stats, advantages=advantages, sample_mask=weight)


def select_train_rows(scored: ScoredRows, policy: PolicyConfig, *, dp_world: int) -> TrainRows:
    """Leaves rows without weight out, keeping each row in the optimizer step it belongs to.

    A step that keeps fewer rows than ranks is filled up with rows of weight 0, so that every rank has one; a step
    that keeps none is skipped. Fixed microbatches keep all rows: their number must divide.
    """
    num_rows, size = len(scored.sample_mask), policy.train_global_batch_size
    has_weight = (scored.sample_mask > 0).tolist()
    rows: list[int] = []
    sizes: list[int] = []
    for start in range(0, num_rows, size):
        members = range(start, min(start + size, num_rows))
        kept = [i for i in members if has_weight[i]]
        if not kept:
            continue
        if not _is_capped(policy):
            kept = list(members)
        elif len(kept) < dp_world:
            kept += [i for i in members if not has_weight[i]][: dp_world - len(kept)]
        rows += kept
        sizes.append(len(kept))
    return TrainRows(rows=tuple(rows), batch_sizes=tuple(sizes))


def plan_train(lengths: Sequence[int], batch_sizes: Sequence[int], policy: PolicyConfig, *, dp_world: int) -> PackPlan:
    """Assignment of the chosen rows to ranks and training microbatches."""
    multiple = policy.make_sequence_length_divisible_by
    try:
        if policy.sequence_packing.enabled:
            cap = policy.sequence_packing.train_mb_tokens
            return plan_packs(
                lengths, capacity=cap, dp_world=dp_world, pad_multiple=multiple, global_batch_size=batch_sizes
            )
        if policy.dynamic_batching.enabled:
            cap = policy.dynamic_batching.train_mb_tokens
            return plan_padded(
                lengths, capacity=cap, dp_world=dp_world, pad_multiple=multiple, global_batch_size=batch_sizes
            )
        return plan_fixed(
            lengths,
            rows_per_microbatch=policy.train_micro_batch_size,
            dp_world=dp_world,
            pad_multiple=multiple,
            global_batch_size=batch_sizes,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def plan_logprobs(plan: PackPlan, lengths: Sequence[int], policy: PolicyConfig) -> PackPlan:
    """Log-probability microbatches over the assignment of `plan`."""
    multiple = policy.make_sequence_length_divisible_by
    if policy.sequence_packing.enabled:
        cap = policy.sequence_packing.logprob_mb_tokens
        return replan_microbatches(plan, lengths, capacity=cap, pad_multiple=multiple)
    if policy.dynamic_batching.enabled:
        cap = policy.dynamic_batching.logprob_mb_tokens
        return replan_microbatches(plan, lengths, capacity=cap, pad_multiple=multiple)
    return replan_rows(plan, lengths, rows_per_microbatch=policy.logprob_batch_size or policy.train_micro_batch_size)


def _is_capped(policy: PolicyConfig) -> bool:
    return policy.sequence_packing.enabled or policy.dynamic_batching.enabled
