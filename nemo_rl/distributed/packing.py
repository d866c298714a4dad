"""Plans the microbatches of each data-parallel rank: integers in, `PackPlan` out.

The driver plans once per step from row lengths; workers follow the plan and never re-pack, so all ranks meet the
same number of microbatches and no collective is left waiting.

Three ways to form microbatches, with one interface:
    plan_packs     tokens per microbatch capped, rows laid end to end (sequence packing)
    plan_padded    tokens per microbatch capped, padding counted (dynamic batching)
    plan_fixed     a fixed number of rows

Every plan has each row exactly once, keeps the cap and the members of every global batch, gives all ranks the same
number of microbatches, a multiple of `multiple_of`, and depends on nothing but its input.

`PackPlan`: which rows form which microbatch on which data-parallel rank, and what that costs.

Made by `packing`, sent to the workers, who compare its digests (`check_plans`) and follow it. Invariant: every rank has
the same number of microbatches in every global batch.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack, get_args

from nemo_rl.config.policy import MicrobatchOrder, PackingAlgorithm
from nemo_rl.distributed.packing_bins import Bins
from nemo_rl.distributed.packing_form import (
    BatchRows,
    TooFewRows,
    bins_needed,
    pack_on_rank,
    packed_ranks,
    padded_ranks,
    round_up,
)

__all__ = [
    "DEFAULT_COST",
    "PackLoad",
    "PackPlan",
    "StepPlanKeywords",
    "TooFewRows",
    "microbatches_needed",
    "plan_fixed",
    "plan_packs",
    "plan_padded",
    "replan_microbatches",
    "replan_rows",
    "round_up",
]


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
        return tuple(itertools.chain.from_iterable(self.microbatches[rank]))

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


Cost = tuple[float, float]
"""(a, b): a row of s tokens costs a s + b s^2; only their ratio matters to a plan."""
DEFAULT_COST: Cost = (24576.0, 1.0)
"""A 7B decoder: attention scores cost as much as all else at about 24576 tokens."""
BatchSizes = int | Sequence[int] | None
"""Rows per optimizer step: the same for all, one number per step, or all rows in one step."""
Former = Callable[[BatchRows], list[Bins]]
"""Microbatches of each rank from the rows of one global batch."""


class PlanKeywords(TypedDict, total=False):
    """Keywords that every planner takes; the defaults are those of `_Planner`."""

    cost: Cost
    """(a, b) of the cost a s + b s^2 of a row of s tokens, which the ranks share equally."""
    multiple_of: int
    """Microbatches per rank and global batch are a multiple of it."""
    pad_multiple: int
    """Each row counts rounded up to a multiple of it."""
    microbatch_order: MicrobatchOrder
    """`packer` leaves the order to the algorithm (`balanced`: most expensive first, so that ranks meet in microbatches
    of similar cost), `largest_first` runs those with most tokens first."""


class StepPlanKeywords(PlanKeywords, total=False):
    """Keywords of the planners that deal the rows of a step to the ranks."""

    global_batch_size: BatchSizes
    """Rows per optimizer step, in the order of `lengths`; a sequence gives each step its own number; None makes one
    step of all rows."""
    keys: Sequence[str] | None
    """Unique names of the rows; with them the plan does not depend on the order of rows within a global batch, without
    them rows of the same length are distinguished by their position."""


def plan_packs(
    lengths: Sequence[int],
    *,
    capacity: int,
    dp_world: int,
    algorithm: PackingAlgorithm = "balanced",
    **options: Unpack[StepPlanKeywords],
) -> PackPlan:
    """Pack rows end to end, at most `capacity` tokens per microbatch.

    Args:
        lengths: tokens per row.
        capacity: most tokens in a microbatch; each row counts rounded up to `pad_multiple`.
        dp_world: data-parallel ranks.
        algorithm: `balanced` levels the cost over ranks in as few microbatches as fit; the others form bins as their
            names say, and deal them to the ranks in turn.

    Raises:
        ValueError: a row exceeds the cap, or a number of ranks, a multiple or a size is below 1.
        TooFewRows: a global batch has fewer rows than microbatches are needed.
    """
    if algorithm not in get_args(PackingAlgorithm):
        raise ValueError(f"packing: expected an algorithm of {get_args(PackingAlgorithm)}, got {algorithm!r}")
    planner = _Planner(lengths, capacity=capacity, dp_world=dp_world, packed=True, **options)

    def form(rows: BatchRows) -> list[Bins]:
        return packed_ranks(rows, num_ranks=dp_world, multiple_of=planner.multiple_of, algorithm=algorithm)

    return planner.plan(planner.global_batches(), form)


def plan_padded(
    lengths: Sequence[int], *, capacity: int, dp_world: int, **options: Unpack[StepPlanKeywords]
) -> PackPlan:
    """Plan padded microbatches: rows x longest row is at most `capacity`, and costs count padding. See `plan_packs`."""
    planner = _Planner(lengths, capacity=capacity, dp_world=dp_world, packed=False, **options)

    def form(rows: BatchRows) -> list[Bins]:
        return padded_ranks(rows, num_ranks=dp_world, multiple_of=planner.multiple_of)

    return planner.plan(planner.global_batches(), form)


def plan_fixed(
    lengths: Sequence[int], *, rows_per_microbatch: int, dp_world: int, **options: Unpack[StepPlanKeywords]
) -> PackPlan:
    """Return microbatches of `rows_per_microbatch` rows in the given order (that of `keys`), an equal share per rank.

    Raises:
        ValueError: a global batch does not divide by ranks x rows per microbatch x `multiple_of`, or one of them is
            below 1.
    """
    _check_counts(rows_per_microbatch=rows_per_microbatch)
    planner = _Planner(lengths, capacity=None, dp_world=dp_world, packed=False, **options)
    multiple_of, groups = planner.multiple_of, planner.global_batches()
    for group in groups:
        if len(group) % (rows_per_microbatch * dp_world * multiple_of):
            times = f" x {multiple_of} microbatches" if multiple_of > 1 else ""
            raise ValueError(
                f"fixed microbatches: a global batch of {len(group)} rows does not divide by {dp_world} ranks x "
                f"{rows_per_microbatch} rows{times}; change policy.train_micro_batch_size or "
                "policy.train_global_batch_size, or turn on policy.dynamic_batching"
            )

    def form(rows: BatchRows) -> list[Bins]:
        share = len(rows.sizes) // dp_world
        shares = [list(range(rank * share, (rank + 1) * share)) for rank in range(dp_world)]
        return [_runs_of(mine, rows_per_microbatch) for mine in shares]

    return planner.plan(groups, form)


def replan_microbatches(
    plan: PackPlan,
    lengths: Sequence[int],
    *,
    capacity: int,
    **options: Unpack[PlanKeywords],
) -> PackPlan:
    """Return other microbatches over the same assignment of rows to ranks, as one step (for log-probability stages).

    Falls back to the microbatches of `plan` when a rank has too few rows for as many microbatches as its peers need.

    Args:
        plan: keeps its row -> rank assignment.
        lengths: tokens per row of the whole batch.
        capacity: most tokens in one of the new microbatches; at least the cap of `plan`.

    Raises:
        TooFewRows: a rank has fewer rows than microbatches, and those of `plan` are no multiple of `multiple_of`.
    """
    planner = _Planner(lengths, capacity=capacity, dp_world=plan.num_ranks, packed=plan.packed, **options)
    multiple_of = planner.multiple_of
    shards = [sorted(plan.rows_of_rank(rank)) for rank in range(plan.num_ranks)]
    fewest = [len(pack_on_rank(planner.rows(shard), None, packed=plan.packed)) for shard in shards if shard]
    count = round_up(max(fewest, default=0), multiple_of)
    if (fewest_rows := min(map(len, shards), default=0)) < count:
        if sum(plan.steps) % multiple_of:
            raise TooFewRows(
                f"packing: a rank has {fewest_rows} rows, {count - fewest_rows} too few: another rank needs {count} "
                f"microbatches, a multiple of {multiple_of}, and the plan has {sum(plan.steps)}; raise "
                "*.logprob_mb_tokens or policy.train_global_batch_size"
            )
        return planner.freeze([[list(map(list, mine)) for mine in plan.microbatches]])
    ranks = []
    for shard in shards:
        bins = pack_on_rank(planner.rows(shard), count, packed=plan.packed) if shard else []
        ranks.append([[shard[place] for place in mine] for mine in bins])
    planner.sort(ranks)
    return planner.freeze([ranks])


def replan_rows(
    plan: PackPlan,
    lengths: Sequence[int],
    *,
    rows_per_microbatch: int,
    cost: Cost = DEFAULT_COST,
    pad_multiple: int = 1,
) -> PackPlan:
    """Return microbatches of a fixed number of rows over the same assignment, as one step; every rank needs as many
    rows.
    """
    _check_counts(rows_per_microbatch=rows_per_microbatch)
    counts = {len(plan.rows_of_rank(rank)) for rank in range(plan.num_ranks)}
    if len(counts) > 1:
        raise ValueError(
            f"packing: ranks have {sorted(counts)} rows; fixed rows need equal shards. Change "
            "policy.train_global_batch_size, or set policy.sequence_packing.enabled=true for both stages"
        )
    keywords: PlanKeywords = {"cost": cost, "pad_multiple": pad_multiple}
    planner = _Planner(lengths, capacity=None, dp_world=plan.num_ranks, packed=plan.packed, **keywords)
    return planner.freeze([[_runs_of(plan.rows_of_rank(rank), rows_per_microbatch) for rank in range(plan.num_ranks)]])


def microbatches_needed(
    lengths: Sequence[int],
    *,
    capacity: int,
    dp_world: int,
    packed: bool,
    multiple_of: int = 1,
    pad_multiple: int = 1,
) -> int:
    """Return a number of rows with which one global batch of these lengths can surely be planned; a plan may need
    fewer.
    """
    keywords: PlanKeywords = {"multiple_of": multiple_of, "pad_multiple": pad_multiple}
    planner = _Planner(lengths, capacity=capacity, dp_world=dp_world, packed=packed, **keywords)
    rows = planner.rows(range(len(lengths)))
    return bins_needed(rows, num_ranks=dp_world, multiple_of=multiple_of, packed=packed)


class _Planner:
    """Sizes and costs of the rows of a step.

    Args:
        capacity: most tokens in a microbatch; None for no cap.

    Raises:
        ValueError: a row exceeds the cap, or the cap, the ranks or a multiple is below 1.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        capacity: int | None,
        dp_world: int,
        packed: bool,
        cost: Cost = DEFAULT_COST,
        multiple_of: int = 1,
        pad_multiple: int = 1,
        microbatch_order: MicrobatchOrder = "packer",
        global_batch_size: BatchSizes = None,
        keys: Sequence[str] | None = None,
    ) -> None:
        _check_counts(dp_world=dp_world, multiple_of=multiple_of, pad_multiple=pad_multiple)
        if capacity is not None:
            _check_counts(capacity=capacity)
        self.multiple_of = multiple_of
        self._num_ranks, self._order = dp_world, microbatch_order
        self._bins_unit = dp_world * multiple_of
        self._global_batch_size, self._keys = global_batch_size, keys
        size_of = {length: round_up(max(length, 1), pad_multiple) for length in set(lengths)}
        self._sizes = list(map(size_of.__getitem__, lengths))
        cost_of = {size: cost[0] * size + cost[1] * size * size for size in set(size_of.values())}
        self._costs = list(map(cost_of.__getitem__, self._sizes))
        self._num_tokens = sum(lengths)
        self._capacity = capacity
        self._packed = packed
        if capacity is not None and (longest := max(self._sizes, default=0)) > capacity:
            raise ValueError(
                f"packing: row {self._sizes.index(longest)} has {longest} tokens, the cap of a microbatch is "
                f"{capacity} ({longest - capacity} too many); raise *_mb_tokens or lower "
                "policy.max_total_sequence_length"
            )

    def rows(self, group: Sequence[int]) -> BatchRows:
        sizes = list(map(self._sizes.__getitem__, group))
        return BatchRows(sizes, list(map(self._costs.__getitem__, group)), self._capacity or 0)

    def global_batches(self) -> list[list[int]]:
        """Return row indices of each global batch, in the order of their keys."""
        size, keys, num_rows = self._global_batch_size, self._keys, len(self._sizes)
        if keys is not None and len(set(keys)) != num_rows:
            raise ValueError(f"packing: expected {num_rows} different keys, got {len(set(keys))} among {len(keys)}")
        if not isinstance(size, Sequence):
            step = max(num_rows, 1) if size is None else size
            _check_counts(global_batch_size=step)
            size = [min(step, num_rows - start) for start in range(0, num_rows, step)]
        if sum(size) != num_rows:
            raise ValueError(f"packing: global batches of {list(size)} rows hold {sum(size)} rows, got {num_rows}")
        starts = itertools.accumulate(size, initial=0)
        batches = [list(range(start, start + count)) for start, count in zip(starts, size, strict=False)]
        return batches if keys is None else [sorted(batch, key=keys.__getitem__) for batch in batches]

    def plan(self, groups: Sequence[Sequence[int]], form: Former) -> PackPlan:
        """Form one global batch after the other; `form` sees rows by their place in the group."""
        steps = []
        for group in groups:
            ranks = [[[group[place] for place in sorted(mine)] for mine in bins] for bins in form(self.rows(group))]
            self.sort(ranks)
            steps.append(ranks)
        return self.freeze(steps)

    def sort(self, ranks: list[Bins]) -> None:
        if self._order == "largest_first":
            for bins in ranks:
                bins.sort(key=lambda mine: -self._tokens(mine))

    def freeze(self, steps: Sequence[Sequence[Bins]]) -> PackPlan:
        """Return the plan of `[global batch][rank][microbatch]`, with what it costs."""
        frozen = [tuple(tuple(mine) for ranks in steps for mine in ranks[rank]) for rank in range(self._num_ranks)]
        return PackPlan(
            microbatches=tuple(frozen),
            steps=tuple(len(ranks[0]) for ranks in steps),
            pad_to=max(self._sizes, default=0),
            packed=self._packed,
            load=self._load(steps),
        )

    def _load(self, steps: Sequence[Sequence[Bins]]) -> PackLoad:
        num_ranks = self._num_ranks
        totals = [0.0] * num_ranks
        busiest = synchronised = cost_bound = 0.0
        bins_bound = computed = 0
        for ranks in steps:
            costs = [[self._cost(mine) for mine in bins] for bins in ranks]
            of_rank = [sum(mine) for mine in costs]
            totals = [total + mine for total, mine in zip(totals, of_rank, strict=True)]
            busiest += max(of_rank)
            synchronised += sum(map(max, zip(*costs, strict=True)))
            members = [row for bins in ranks for mine in bins for row in mine]
            row_costs = list(map(self._costs.__getitem__, members))
            cost_bound += max(sum(row_costs) / num_ranks, max(row_costs, default=0.0))
            tokens = sum(map(self._sizes.__getitem__, members))
            fewest = -(-tokens // self._capacity) if self._capacity else sum(map(len, ranks))
            bins_bound += round_up(fewest, self._bins_unit if self._capacity else 1)
            computed += sum(self._tokens(mine) for bins in ranks for mine in bins)
        return PackLoad(
            rank_costs=tuple(totals),
            busiest=busiest,
            synchronised=synchronised,
            cost_bound=cost_bound,
            num_bins=sum(len(bins) for ranks in steps for bins in ranks),
            bins_bound=bins_bound,
            num_tokens=self._num_tokens,
            computed_tokens=computed,
        )

    def _tokens(self, rows: Sequence[int]) -> int:
        if self._packed:
            return sum(map(self._sizes.__getitem__, rows))
        return len(rows) * max(map(self._sizes.__getitem__, rows), default=0)

    def _cost(self, rows: Sequence[int]) -> float:
        if self._packed:
            return sum(map(self._costs.__getitem__, rows))
        return len(rows) * max(map(self._costs.__getitem__, rows), default=0.0)


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"packing: {name}: expected at least 1, got {count}")


def _runs_of(rows: Sequence[int], count: int) -> Bins:
    return [list(rows[start : start + count]) for start in range(0, len(rows), count)]
