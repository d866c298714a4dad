"""Which rank of the policy holds which part: data, context and tensor parallel coordinates. Pure integers.

Called by the driver, which sends a data-parallel shard to every rank of its replica group, and by the workers, which
build their meshes and groups from it. Ranks count through the tensor axis first: `rank = (dp * cp_size + cp) * tp_size
+ tp`, so tensor-parallel peers sit next to one another on a node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from nemo_rl.config.policy import DTensorConfig, PolicyConfig
from nemo_rl.errors import ConfigError

__all__ = ["Coordinates", "ParallelLayout"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Place of one rank."""

    dp: int
    cp: int
    tp: int

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks for its replica group: it alone writes results back and reports metrics."""
        return self.cp == 0 and self.tp == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """Sizes of the axes.

    Example:
        >>> layout = ParallelLayout.of(8, tp=2, cp=2)
        >>> layout.dp, layout.coordinates(5), layout.replica(1)
        (2, Coordinates(dp=1, cp=0, tp=1), (4, 5, 6, 7))
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    """Activations between the blocks are split over the tensor axis along the sequence."""

    @classmethod
    def of(cls, world_size: int, *, tp: int = 1, cp: int = 1, sequence_parallel: bool = False) -> ParallelLayout:
        """The layout of so many ranks.

        Raises:
            ConfigError: the ranks do not divide by tensor x context parallel size.
        """
        if world_size % (tp * cp):
            raise ConfigError(
                f"{world_size} ranks do not divide by tensor_parallel_size {tp} x context_parallel_size {cp}; change "
                "policy.dtensor_cfg or cluster.gpus_per_node and cluster.num_nodes"
            )
        return cls(dp=world_size // (tp * cp), cp=cp, tp=tp, sequence_parallel=sequence_parallel and tp > 1)

    @classmethod
    def of_policy(cls, policy: PolicyConfig, *, world_size: int) -> ParallelLayout:
        """The layout of the policy's workers.

        Raises:
            ConfigError: the ranks do not divide.
        """
        sizes = policy.dtensor_cfg
        return cls.of(
            world_size,
            tp=sizes.tensor_parallel_size,
            cp=sizes.context_parallel_size,
            sequence_parallel=sizes.sequence_parallel,
        )

    @property
    def world_size(self) -> int:
        return self.dp * self.replica_size

    @property
    def replica_size(self) -> int:
        """Ranks that share one data-parallel shard."""
        return self.cp * self.tp

    @property
    def length_multiple(self) -> int:
        """What the tokens of every sequence are rounded up to."""
        sizes = DTensorConfig(
            context_parallel_size=self.cp, tensor_parallel_size=self.tp, sequence_parallel=self.sequence_parallel
        )
        return sizes.length_multiple

    def coordinates(self, rank: int) -> Coordinates:
        """Place of a rank."""
        dp, rest = divmod(rank, self.replica_size)
        return Coordinates(dp, *divmod(rest, self.tp))

    def replica(self, dp: int) -> tuple[int, ...]:
        """Ranks that share data-parallel shard `dp`; the first is its leader."""
        return tuple(range(dp * self.replica_size, (dp + 1) * self.replica_size))

    def replicas(self) -> list[list[int]]:
        """All replica groups."""
        return [list(self.replica(dp)) for dp in range(self.dp)]

    def context_groups(self) -> list[list[int]]:
        """Ranks that differ in the context axis only."""
        return [
            [(dp * self.cp + cp) * self.tp + tp for cp in range(self.cp)]
            for dp in range(self.dp)
            for tp in range(self.tp)
        ]

    def data_groups(self) -> list[list[int]]:
        """Ranks that differ in the data axis only."""
        return [list(range(place, self.world_size, self.replica_size)) for place in range(self.replica_size)]

    def spread(self, per_dp: Sequence[_T]) -> list[_T]:
        """One value per rank from one per data-parallel shard."""
        return [per_dp[self.coordinates(rank).dp] for rank in range(self.world_size)]

    def leaders(self, per_rank: Sequence[_T]) -> list[_T]:
        """The values of the leaders, in data-parallel order."""
        return [per_rank[self.replica(dp)[0]] for dp in range(self.dp)]

    def round_up_multiple(self, configured: int) -> int:
        """The least multiple that suits both this layout and `policy.make_sequence_length_divisible_by`."""
        return math.lcm(self.length_multiple, configured)
