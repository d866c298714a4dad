"""Which rows form which microbatch on which data-parallel rank: integers in, `PackPlan` out.

The driver plans once per step from row lengths; workers follow the plan and never re-pack, so all ranks meet the
same number of microbatches and no collective is left waiting.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PackPlan"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackPlan:
    """Rows of each microbatch of each rank.

    Example:
        Five rows on two ranks, two microbatches each, one optimizer step:
        >>> plan = PackPlan(microbatches=(((0, 3), (1,)), ((2,), (4,))), steps=(2,), pad_to=8)
        >>> plan.rows_of_rank(1), plan.for_rank(1).microbatches
        ((2, 4), (((0,), (1,)),))
    """

    microbatches: tuple[tuple[tuple[int, ...], ...], ...]
    """`[rank][microbatch]` -> row indices. Every rank has the same number of microbatches."""
    steps: tuple[int, ...]
    """Microbatches per rank of each global batch; an optimizer step follows each."""
    pad_to: int
    """Width in tokens to which every rank pads."""

    @property
    def num_ranks(self) -> int:
        return len(self.microbatches)

    def rows_of_rank(self, rank: int) -> tuple[int, ...]:
        """Global row indices of one rank, in the order in which its microbatches meet them."""
        return tuple(row for microbatch in self.microbatches[rank] for row in microbatch)

    def for_rank(self, rank: int) -> PackPlan:
        """One rank's view, in indices into `rows_of_rank(rank)`."""
        local: list[tuple[int, ...]] = []
        start = 0
        for microbatch in self.microbatches[rank]:
            local.append(tuple(range(start, start + len(microbatch))))
            start += len(microbatch)
        return PackPlan(microbatches=(tuple(local),), steps=self.steps, pad_to=self.pad_to)
