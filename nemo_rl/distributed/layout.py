"""`ParallelLayout`: the pipeline, data, context and tensor parallel coordinates of each rank. Pure integers.

Called by the driver, which sends a data-parallel shard to every rank of its replica group, and by the workers, which
build their meshes and groups from it. Ranks count through the tensor axis first and the pipeline axis last: `rank =
((pp * dp_size + dp) * cp_size + cp) * tp_size + tp`, megatron-core's own order, so that tensor-parallel peers sit next
to one another on a node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from nemo_rl.config.policy import ParallelSizes, PolicyConfig
from nemo_rl.errors import ConfigError

__all__ = ["Coordinates", "ParallelLayout", "engine_places"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Coordinates:
    """The index of one rank on each axis."""

    dp: int
    cp: int
    tp: int
    pp: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """Sizes of the axes.

    Example:
        >>> layout = ParallelLayout.of(8, tp=2, pp=2)
        >>> layout.dp, layout.coordinates(3), layout.replica(1), layout.writer(1)
        (2, Coordinates(dp=1, cp=0, tp=1, pp=0), (2, 3, 6, 7), 6)
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    copies: int = 1
    """Groups of neighbouring data x context ranks, each of which holds all weights in shards; 1 where the Megatron
    worker trains."""
    sequence_parallel: bool = False
    """Activations between the blocks are split over the tensor axis along the sequence."""

    @classmethod
    def of(
        cls,
        world_size: int,
        *,
        tp: int = 1,
        cp: int = 1,
        pp: int = 1,
        copies: int = 1,
        sequence_parallel: bool = False,
        section: str = "policy.dtensor_cfg",
    ) -> ParallelLayout:
        """Return the layout of so many ranks.

        Args:
            section: where the sizes are set, for the error.

        Raises:
            ConfigError: the ranks do not divide by tensor x context x pipeline parallel size, or data x context ranks
                by the copies.
        """
        if world_size % (tp * cp * pp):
            raise ConfigError(
                f"{world_size} ranks do not divide by tensor {tp} x context {cp} x pipeline {pp} parallel size; change "
                f"{section} or cluster.gpus_per_node and cluster.num_nodes"
            )
        dp = world_size // (tp * cp * pp)
        if dp * cp % copies:
            raise ConfigError(
                f"{dp * cp} data x context parallel ranks do not divide into {copies} copies of the weights; change "
                f"{section}.replicate_size"
            )
        return cls(dp=dp, cp=cp, tp=tp, pp=pp, copies=copies, sequence_parallel=sequence_parallel and tp > 1)

    @classmethod
    def of_policy(cls, policy: PolicyConfig, *, world_size: int) -> ParallelLayout:
        """Return the layout of the policy's workers.

        Raises:
            ConfigError: the ranks do not divide.
        """
        sizes = policy.parallel_sizes
        return cls.of(
            world_size,
            tp=sizes.tensor,
            cp=sizes.context,
            pp=sizes.pipeline,
            copies=sizes.copies,
            sequence_parallel=sizes.sequence_parallel,
            section=policy.parallel_section,
        )

    @property
    def sizes(self) -> dict[str, int]:
        return {"dp": self.dp, "cp": self.cp, "tp": self.tp, "pp": self.pp}

    @property
    def world_size(self) -> int:
        return self.dp * self.replica_size

    @property
    def replica_size(self) -> int:
        """Ranks that share one data-parallel shard."""
        return self.pp * self._stage_size

    @property
    def _stage_size(self) -> int:
        """Ranks that share one data-parallel shard in one pipeline stage."""
        return self.cp * self.tp

    @property
    def weight_shards(self) -> int:
        """Data x context ranks over which the DTensor worker shards one copy of the weights."""
        return self.dp * self.cp // self.copies

    @property
    def length_multiple(self) -> int:
        """The number of tokens of which every sequence is padded to a multiple."""
        sizes = ParallelSizes(context=self.cp, tensor=self.tp, sequence_parallel=self.sequence_parallel)
        return sizes.length_multiple

    def coordinates(self, rank: int) -> Coordinates:
        pp, rest = divmod(rank, self.dp * self._stage_size)
        dp, rest = divmod(rest, self._stage_size)
        cp, tp = divmod(rest, self.tp)
        return Coordinates(dp=dp, cp=cp, tp=tp, pp=pp)

    def rank_of(self, at: Coordinates) -> int:
        return ((at.pp * self.dp + at.dp) * self.cp + at.cp) * self.tp + at.tp

    def replica(self, dp: int) -> tuple[int, ...]:
        """Return ranks that share data-parallel shard `dp`, in ascending order; the first, its leader, reads."""
        return tuple(rank for pp in range(self.pp) for rank in self.stage(dp, pp))

    def stage(self, dp: int, pp: int) -> tuple[int, ...]:
        """Return ranks of one pipeline stage that share data-parallel shard `dp`."""
        first = self.rank_of(Coordinates(dp=dp, cp=0, tp=0, pp=pp))
        return tuple(range(first, first + self._stage_size))

    def replicas(self) -> list[list[int]]:
        return [list(self.replica(dp)) for dp in range(self.dp)]

    def writer(self, dp: int) -> int:
        """Return the rank that speaks for shard `dp`: it alone writes results back and reports metrics.

        Results come out of the last pipeline stage.
        """
        return self.stage(dp, self.pp - 1)[0]

    def is_writer(self, rank: int) -> bool:
        return self.writer(self.coordinates(rank).dp) == rank

    def context_groups(self) -> list[list[int]]:
        """Return ranks that differ in the context axis only."""
        return [
            [self.rank_of(Coordinates(dp=dp, cp=cp, tp=tp, pp=pp)) for cp in range(self.cp)]
            for pp in range(self.pp)
            for dp in range(self.dp)
            for tp in range(self.tp)
        ]

    def per_rank(self, per_dp: Sequence[_T]) -> list[_T]:
        return [per_dp[self.coordinates(rank).dp] for rank in range(self.world_size)]

    def one_per_shard(self, per_rank: Sequence[_T]) -> list[_T]:
        """Return the values of the ranks that speak for their shards, in data-parallel order."""
        return [per_rank[self.writer(dp)] for dp in range(self.dp)]

    def round_up_multiple(self, configured: int) -> int:
        """Return the least multiple that suits both this layout and `policy.make_sequence_length_divisible_by`."""
        return math.lcm(self.length_multiple, configured)


def engine_places(num_engines: int, *, ranks: int, gpus_per_node: int) -> list[range]:
    """Return the GPUs of each engine, counted over all nodes: neighbours on one node, or all of several nodes.

    Args:
        ranks: GPUs of an engine.

    Example:
        >>> engine_places(3, ranks=3, gpus_per_node=8)
        [range(0, 3), range(3, 6), range(8, 11)]
    """
    on_a_node = max(1, gpus_per_node // ranks)
    stride = max(ranks, gpus_per_node)
    starts = (number // on_a_node * stride + number % on_a_node * ranks for number in range(num_engines))
    return [range(start, start + ranks) for start in starts]
