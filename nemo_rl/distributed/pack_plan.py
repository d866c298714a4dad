"""`PackPlan`: which rows form which microbatch on which data-parallel rank, and what that costs.

Made by `packing`, sent to the workers, who compare its digests (`check_plans`) and follow it. Invariant: every rank has
the same number of microbatches in every global batch.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace

__all__ = ["PackLoad", "PackPlan"]

DIGEST_BYTES = 16
"""Bytes of the sha256 that a digest keeps: two plans of a run agree by chance once in 2^64 plans."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackLoad:
    """The cost of a plan, in units of the cost model, beside the least cost that any plan could have."""

    rank_costs: tuple[float, ...]
    """Cost of each rank over all global batches."""
    busiest: float
    """Most expensive rank of each global batch, added up: an optimizer step waits for it."""
    synchronised: float
    """Most expensive rank of each microbatch index, added up: what counts where ranks meet in every microbatch."""
    cost_bound: float
    """Lower bound of `busiest`: per global batch the mean over ranks, or the most expensive row if that is more."""
    num_bins: int
    """Microbatches of all ranks."""
    bins_bound: int
    """Lower bound of `num_bins`: tokens over capacity, rounded up to what the ranks divide."""
    num_tokens: int
    computed_tokens: int

    @property
    def imbalance(self) -> float:
        """Busiest rank over its lower bound; 1 is perfect."""
        return self.busiest / self.cost_bound if self.cost_bound else 1.0

    @property
    def synchronised_ratio(self) -> float:
        """The imbalance of ranks that meet in every microbatch; compare `imbalance`."""
        return self.synchronised / self.cost_bound if self.cost_bound else 1.0

    @property
    def pad_share(self) -> float:
        return 1.0 - self.num_tokens / self.computed_tokens if self.computed_tokens else 0.0


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
    packed: bool = False
    """True: the rows of a microbatch are laid end to end in one row."""
    load: PackLoad | None = None
    """Costs and lower bounds of the whole plan; in a rank's view `rank_costs` is that rank's alone. None for a plan
    that no planner made."""
    sealed_digest: str = ""
    """`digest()` when the driver made this view; empty on the driver's own plan."""
    whole_digest: str = ""
    """`digest()` of the plan of all ranks, the same on every rank; empty on the driver's own plan."""

    @property
    def num_ranks(self) -> int:
        return len(self.microbatches)

    def rows_of_rank(self, rank: int) -> tuple[int, ...]:
        """Global row indices of one rank, in the order in which its microbatches meet them."""
        return tuple(row for microbatch in self.microbatches[rank] for row in microbatch)

    def for_rank(self, rank: int) -> PackPlan:
        """Return one rank's view, in indices into `rows_of_rank(rank)`, sealed with the digests of itself and of the
        whole.
        """
        return self._view(rank, self.digest())

    def rank_plans(self) -> list[PackPlan]:
        """`for_rank` of every rank; the whole plan is hashed once."""
        whole = self.digest()
        return [self._view(rank, whole) for rank in range(self.num_ranks)]

    def iter_steps(self, rank: int) -> Iterator[tuple[tuple[int, ...], ...]]:
        start = 0
        for count in self.steps:
            yield self.microbatches[rank][start : start + count]
            start += count

    def digest(self) -> str:
        """Hash of the plan's integers: microbatches, steps, width and layout; costs have no part in it.

        Example:
            >>> PackPlan(microbatches=(((0,),),), steps=(1,), pad_to=8).digest()
            'c9455ae803840f5b95a57abce21905d9'
        """
        numbers = array("q", (self.pad_to, self.packed, len(self.steps), *self.steps, self.num_ranks))
        for rank in self.microbatches:
            numbers.append(len(rank))
            for microbatch in rank:
                numbers.append(len(microbatch))
                numbers.extend(microbatch)
        return hashlib.sha256(numbers.tobytes()).digest()[:DIGEST_BYTES].hex()

    def _view(self, rank: int, whole_digest: str) -> PackPlan:
        local: list[tuple[int, ...]] = []
        start = 0
        for microbatch in self.microbatches[rank]:
            local.append(tuple(range(start, start + len(microbatch))))
            start += len(microbatch)
        load = replace(self.load, rank_costs=(self.load.rank_costs[rank],)) if self.load is not None else None
        view = replace(self, microbatches=(tuple(local),), load=load, whole_digest=whole_digest)
        return replace(view, sealed_digest=view.digest())
