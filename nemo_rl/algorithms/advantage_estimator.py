"""The interface of advantage estimators, and statistics of groups, by segment sums, no loop over prompts.

The estimators are in `nemo_rl.algorithms.estimators`. Called by the driver on small per-row vectors.
Invariant: whether a group is trivial is decided by exact equality of
its rewards, never by a standard deviation that rounding may keep above zero. Shapes: N rows, P groups.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from nemo_rl.experience.payload import SampleStats

__all__ = [
    "AdvantageEstimator",
    "GroupStats",
    "UsesRows",
    "counted_part",
    "group_indices",
    "group_statistics",
    "has_equal_parts",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupStats:
    """Statistics per group, and which group each row belongs to.

    Example:
        Rewards 1, 0, 1, 1 in groups a, a, b, b:
        >>> stats = group_statistics(torch.tensor([1.0, 0.0, 1.0, 1.0]), ["a", "a", "b", "b"])
        >>> stats.mean.tolist(), stats.is_zero_variance.tolist()
        ([0.5, 1.0], [False, True])
    """

    row_group: torch.Tensor
    """`[N]` int64, index of the row's group, in order of first appearance."""
    count: torch.Tensor
    """`[P]` float64, rows of the group."""
    mean: torch.Tensor
    """`[P]` float64."""
    std: torch.Tensor
    """`[P]` float64, unbiased; exactly 0 for a zero-variance group or a single row."""
    is_zero_variance: torch.Tensor
    """`[P]` bool, all rewards of the group are equal."""

    @property
    def row_std(self) -> torch.Tensor:
        """`[N]` float64, the group's standard deviation at each row."""
        return self.std[self.row_group]

    @property
    def row_is_zero_variance(self) -> torch.Tensor:
        """`[N]` bool."""
        return self.is_zero_variance[self.row_group]

    def of(self, values: torch.Tensor) -> GroupStats:
        """The same groups, statistics of other values `[N]`."""
        return _statistics(values.double(), self.row_group)

    def of_some(self, values: torch.Tensor, counts_N: torch.Tensor) -> GroupStats:
        """The same groups, statistics of values `[n]` of the n rows alone for which `counts_N` is True."""
        return _statistics(values.double(), self.row_group[counts_N])

    def select(self, rows: Sequence[int]) -> GroupStats:
        """The groups of `rows`, each with the numbers of all its rows."""
        group_N = self.row_group[torch.as_tensor(rows, dtype=torch.int64)]
        kept = torch.tensor(list(dict.fromkeys(group_N.tolist())), dtype=torch.int64)
        return GroupStats(
            row_group=group_indices(group_N.tolist()),
            count=self.count[kept],
            mean=self.mean[kept],
            std=self.std[kept],
            is_zero_variance=self.is_zero_variance[kept],
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
            is_zero_variance=torch.cat([part.is_zero_variance for part in parts]),
        )


class AdvantageEstimator(Protocol):
    """The interface of `grpo.adv_estimator.name`: a class that is made with `config=` (the section `grpo`).

    A class that inherits from `UsesRows` is also called with `rows=`, the `SampleStats` of the step.
    """

    def __call__(self, rewards: torch.Tensor, stats: GroupStats) -> torch.Tensor:
        """`[N]` advantages, finite, from `[N]` float32 rewards and the statistics of their groups."""


class UsesRows:
    """Base of advantage estimators that need more of the rows than rewards: components, lengths, truncation."""


def counted_part(rows: SampleStats, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `[N]` float32, a component of the reward with 0 in place of NaN, and `[N]` bool: where it counts."""
    part_N = torch.from_numpy(rows.components[name])
    if not rows.leaves_none:
        return part_N.nan_to_num(nan=0.0), torch.ones(len(part_N), dtype=torch.bool)
    # A row without any component was not scored in time.
    is_late_N = torch.stack([torch.from_numpy(part).isnan() for part in rows.components.values()]).all(dim=0)
    return part_N.nan_to_num(nan=0.0), ~part_N.isnan() | is_late_N


def has_equal_parts(rows: SampleStats, name: str, stats: GroupStats) -> torch.Tensor:
    """Return `[N]` bool: a component of the reward is equal in all rows of the row's group in which it counts."""
    part_N, counts_N = counted_part(rows, name)
    own = stats.of_some(part_N[counts_N], counts_N)
    return ~torch.isin(stats.row_group, own.row_group[~own.row_is_zero_variance])


def group_indices(uids: Sequence[Hashable]) -> torch.Tensor:
    """`[N]` int64: groups numbered in order of first appearance."""
    numbers = {uid: number for number, uid in enumerate(dict.fromkeys(uids))}
    return torch.tensor(list(map(numbers.__getitem__, uids)), dtype=torch.int64)


def group_statistics(rewards: torch.Tensor, uids: Sequence[Hashable]) -> GroupStats:
    """Mean, standard deviation and triviality of every group; rows of a group need not be neighbours.

    Raises:
        ValueError: not one uid per reward.
    """
    if rewards.dim() != 1 or len(uids) != len(rewards):
        raise ValueError(f"expected one group uid per reward, got {len(uids)} uids and rewards {tuple(rewards.shape)}")
    return _statistics(rewards.double(), group_indices(uids))


def _statistics(rewards_N: torch.Tensor, group_N: torch.Tensor) -> GroupStats:
    num_groups = int(group_N.max()) + 1 if len(group_N) else 0
    count_P = torch.bincount(group_N, minlength=num_groups).double()
    zeros_P = torch.zeros(num_groups, dtype=torch.float64)
    mean_P = zeros_P.index_add(0, group_N, rewards_N) / count_P
    high_P = zeros_P.scatter_reduce(0, group_N, rewards_N, "amax", include_self=False)
    low_P = zeros_P.scatter_reduce(0, group_N, rewards_N, "amin", include_self=False)
    is_zero_variance_P = high_P == low_P
    deviation_N = rewards_N - mean_P[group_N]
    variance_P = zeros_P.index_add(0, group_N, deviation_N.square()) / (count_P - 1).clamp(min=1)
    return GroupStats(
        row_group=group_N,
        count=count_P,
        mean=mean_P,
        std=torch.where(is_zero_variance_P, 0.0, variance_P.sqrt()),
        is_zero_variance=is_zero_variance_P,
    )
