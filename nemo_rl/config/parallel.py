"""Sizes of the parallel axes, whichever worker splits the model. Pure integers."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ParallelSizes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSizes:
    """How many workers share one model, and along which axes.

    Example:
        >>> sizes = ParallelSizes(tensor=2, pipeline=2, context=2, sequence_parallel=True)
        >>> sizes.replica_size, sizes.length_multiple
        (8, 8)
    """

    tensor: int = 1
    """Ranks that share every weight matrix."""
    pipeline: int = 1
    """Ranks that share the layers, one run of them each."""
    context: int = 1
    """Ranks that share every sequence."""
    expert: int = 1
    """Ranks that share the experts of a mixture, some whole experts each."""
    expert_tensor: int = 1
    """Ranks that share every weight matrix of an expert."""
    sequence_parallel: bool = False
    """Activations between the blocks are split over the tensor axis along the sequence."""

    @property
    def replica_size(self) -> int:
        """Workers that share one data-parallel shard."""
        return self.tensor * self.pipeline * self.context

    @property
    def length_multiple(self) -> int:
        """What the tokens of every sequence are rounded up to: two chunks per context rank, whole tensor splits."""
        chunks = 2 * self.context if self.context > 1 else 1
        return chunks * (self.tensor if self.sequence_parallel else 1)
