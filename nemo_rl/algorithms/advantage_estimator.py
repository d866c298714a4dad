"""Advantages from rewards of grouped samples, by segment sums over group ids; no loop over prompts.

Called by the driver on small per-row vectors. Invariant: whether a group is trivial is decided by exact equality of
its rewards, never by a standard deviation that rounding may keep above zero. Shapes: N rows, P groups.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from nemo_rl.config.schema import GRPOConfig

__all__ = [
    "AdvantageEstimator",
    "GroupAdvantages",
    "GroupStats",
    "estimate_advantages",
    "group_indices",
    "group_statistics",
]

# Added to the standard deviation, as in recipe L and GRPO.
STD_EPSILON = 1e-4
# Added to the standard deviation of a row's siblings, as in NeMo-RL.
SIBLING_STD_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupStats:
    """Statistics per group, and which group each row belongs to.

    Example:
        Rewards 1, 0, 1, 1 in groups a, a, b, b:
        >>> stats = group_statistics(torch.tensor([1.0, 0.0, 1.0, 1.0]), ["a", "a", "b", "b"])
        >>> stats.mean.tolist(), stats.is_trivial.tolist()
        ([0.5, 1.0], [False, True])
    """

    row_group: torch.Tensor
    """`[N]` int64, index of the row's group, in order of first appearance."""
    count: torch.Tensor
    """`[P]` float64, rows of the group."""
    mean: torch.Tensor
    """`[P]` float64."""
    std: torch.Tensor
    """`[P]` float64, unbiased; exactly 0 for a trivial group or a single row."""
    is_trivial: torch.Tensor
    """`[P]` bool, all rewards of the group are equal."""

    @property
    def row_std(self) -> torch.Tensor:
        """`[N]` float64, the group's standard deviation at each row."""
        return self.std[self.row_group]

    @property
    def row_is_trivial(self) -> torch.Tensor:
        """`[N]` bool."""
        return self.is_trivial[self.row_group]

    def select(self, rows: Sequence[int]) -> GroupStats:
        """The groups of `rows`, each with the numbers of all its rows."""
        group_N = self.row_group[torch.as_tensor(rows, dtype=torch.int64)]
        kept = torch.tensor(list(dict.fromkeys(group_N.tolist())), dtype=torch.int64)
        return GroupStats(
            row_group=group_indices(group_N.tolist()),
            count=self.count[kept],
            mean=self.mean[kept],
            std=self.std[kept],
            is_trivial=self.is_trivial[kept],
        )

    def concat(self, *others: GroupStats) -> GroupStats:
        """Rows and groups of this one, then those of the others; no group may be in two of them."""
        parts = (self, *others)
        starts = list(accumulate((len(part.count) for part in parts), initial=0))
        return GroupStats(
            row_group=torch.cat([part.row_group + start for part, start in zip(parts, starts, strict=False)]),
            count=torch.cat([part.count for part in parts]),
            mean=torch.cat([part.mean for part in parts]),
            std=torch.cat([part.std for part in parts]),
            is_trivial=torch.cat([part.is_trivial for part in parts]),
        )


class AdvantageEstimator(Protocol):
    """What `grpo.adv_estimator.name` names: a class that is made with `config=` (the section `grpo`)."""

    def __call__(self, rewards: torch.Tensor, stats: GroupStats) -> torch.Tensor:
        """`[N]` advantages, finite, from `[N]` float32 rewards and the statistics of their groups."""


@dataclass(frozen=True, kw_only=True)
class GroupAdvantages:
    """Advantages within the groups of a step, by the keys of the section `grpo`."""

    config: GRPOConfig

    def __call__(self, rewards: torch.Tensor, stats: GroupStats) -> torch.Tensor:
        return estimate_advantages(
            rewards,
            stats,
            leave_one_out=self.config.use_leave_one_out_baseline,
            normalize=self.config.normalize_rewards,
            leave_one_out_std=self.config.use_leave_one_out_std,
            clip_low=self.config.advantage_clip_low,
            clip_high=self.config.advantage_clip_high,
        )


def group_indices(uids: Sequence[Hashable]) -> torch.Tensor:
    """`[N]` int64: groups numbered in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in uids], dtype=torch.int64)


def group_statistics(rewards: torch.Tensor, uids: Sequence[Hashable]) -> GroupStats:
    """Mean, standard deviation and triviality of every group; rows of a group need not be neighbours.

    Raises:
        ValueError: not one uid per reward.
    """
    if rewards.dim() != 1 or len(uids) != len(rewards):
        raise ValueError(f"expected one group uid per reward, got {len(uids)} uids and rewards {tuple(rewards.shape)}")
    rewards_N = rewards.double()
    group_N = group_indices(uids)
    num_groups = int(group_N.max()) + 1 if len(group_N) else 0
    count_P = torch.bincount(group_N, minlength=num_groups).double()
    zeros_P = torch.zeros(num_groups, dtype=torch.float64)
    mean_P = zeros_P.index_add(0, group_N, rewards_N) / count_P
    high_P = zeros_P.scatter_reduce(0, group_N, rewards_N, "amax", include_self=False)
    low_P = zeros_P.scatter_reduce(0, group_N, rewards_N, "amin", include_self=False)
    is_trivial_P = high_P == low_P
    deviation_N = rewards_N - mean_P[group_N]
    variance_P = zeros_P.index_add(0, group_N, deviation_N.square()) / (count_P - 1).clamp(min=1)
    return GroupStats(
        row_group=group_N,
        count=count_P,
        mean=mean_P,
        std=torch.where(is_trivial_P, 0.0, variance_P.sqrt()),
        is_trivial=is_trivial_P,
    )


def estimate_advantages(
    rewards: torch.Tensor,
    stats: GroupStats,
    *,
    leave_one_out: bool,
    normalize: bool,
    leave_one_out_std: bool = False,
    clip_low: float | None = None,
    clip_high: float | None = None,
) -> torch.Tensor:
    """`[N]` float32 advantages, exactly 0 in trivial groups.

    A_i = R_i - b_i, with b_i the mean of the other rows of the group (leave-one-out, arXiv 2402.14740) or of all its
    rows; divided by (std + 1e-4) when `normalize` is set. A group of one row has no siblings and gets 0.

    With `leave_one_out_std` the divisor is (std of the other rows + 1e-6), and a row whose siblings are all equal is
    not divided.
    """
    group_N = stats.row_group
    advantages_N = rewards.double() - stats.mean[group_N]
    if leave_one_out:
        # R_i - (sum - R_i) / (G - 1) equals G / (G - 1) * (R_i - mean).
        advantages_N = advantages_N * (stats.count / (stats.count - 1).clamp(min=1))[group_N]
    if normalize:
        advantages_N = advantages_N / (
            _sibling_divisor(rewards, stats) if leave_one_out_std else stats.row_std + STD_EPSILON
        )
    advantages_N = torch.where(stats.row_is_trivial, 0.0, advantages_N)
    if clip_low is not None or clip_high is not None:
        advantages_N = advantages_N.clamp(min=clip_low, max=clip_high)
    return advantages_N.float()


def _sibling_divisor(rewards: torch.Tensor, stats: GroupStats) -> torch.Tensor:
    """`[N]` float64: unbiased deviation of the other rows of the group, plus epsilon; 1 where they are equal."""
    group_N, rewards_N = stats.row_group, rewards.double()
    count_N = stats.count[group_N]
    # Of G rows with deviations d from their mean, the others' squares sum to sum(d^2) - d_i^2 G / (G - 1).
    squares_N = stats.std[group_N].square() * (count_N - 1)
    deviation_N = rewards_N - stats.mean[group_N]
    squares_N = squares_N - deviation_N.square() * count_N / (count_N - 1).clamp(min=1)
    std_N = (squares_N.clamp(min=0) / (count_N - 2).clamp(min=1)).sqrt()
    return torch.where(_has_equal_siblings(rewards_N, stats), 1.0, std_N + SIBLING_STD_EPSILON)


def _has_equal_siblings(rewards_N: torch.Tensor, stats: GroupStats) -> torch.Tensor:
    """`[N]` bool, by exact equality."""
    group_N, zeros_P = stats.row_group, torch.zeros(len(stats.count), dtype=torch.float64)
    found_N = stats.row_is_trivial
    for which in ("amax", "amin"):
        extreme_N = zeros_P.scatter_reduce(0, group_N, rewards_N, which, include_self=False)[group_N]
        is_extreme_N = rewards_N == extreme_N
        num_extreme_P = zeros_P.index_add(0, group_N, is_extreme_N.double())
        found_N = found_N | (~is_extreme_N & (num_extreme_P == stats.count - 1)[group_N])
    return found_N
