"""Plans the microbatches of each data-parallel rank: integers in, `PackPlan` out.

The driver plans once per step from row lengths; workers follow the plan and never re-pack, so all ranks meet the
same number of microbatches and no collective is left waiting.

Three ways to form microbatches, with one interface:
    plan_packs     tokens per microbatch capped, rows laid end to end (sequence packing)
    plan_padded    tokens per microbatch capped, padding counted (dynamic batching)
    plan_fixed     a fixed number of rows

Every plan has each row exactly once, keeps the cap and the members of every global batch, gives all ranks the same
number of microbatches, a multiple of `multiple_of`, and depends on nothing but its input.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypedDict, Unpack, get_args

from nemo_rl.config.policy import MicrobatchOrder, PackingAlgorithm
from nemo_rl.distributed.pack_plan import PackLoad, PackPlan
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
        self._sizes = [round_up(max(length, 1), pad_multiple) for length in lengths]
        self._costs = [cost[0] * size + cost[1] * size * size for size in self._sizes]
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
        return BatchRows([self._sizes[i] for i in group], [self._costs[i] for i in group], self._capacity or 0)

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
        return len(rows) * max((self._sizes[row] for row in rows), default=0)

    def _cost(self, rows: Sequence[int]) -> float:
        if self._packed:
            return sum(map(self._costs.__getitem__, rows))
        return len(rows) * max((self._costs[row] for row in rows), default=0.0)


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"packing: {name}: expected at least 1, got {count}")


def _runs_of(rows: Sequence[int], count: int) -> Bins:
    return [list(rows[start : start + count]) for start in range(0, len(rows), count)]
