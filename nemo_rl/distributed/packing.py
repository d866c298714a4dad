"""Which rows form which microbatch on which data-parallel rank: integers in, `PackPlan` out.

The driver plans once per step from row lengths; workers follow the plan and never re-pack, so all ranks meet the
same number of microbatches and no collective is left waiting.

Three ways to form microbatches, all with the same number on every rank:
    plan_packs     tokens per microbatch capped, rows laid end to end (sequence packing)
    plan_padded    tokens per microbatch capped, padding counted (dynamic batching)
    plan_fixed     a fixed number of rows
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from nemo_rl.distributed.pack_plan import PackPlan

__all__ = ["PackPlan", "plan_fixed", "plan_packs", "plan_padded", "replan_microbatches", "replan_rows", "round_up"]

Bins = list[list[int]]
BatchSizes = int | Sequence[int] | None
"""Rows per optimizer step: the same for all, one number per step, or all rows in one step."""
Load = Callable[[Sequence[int]], int]
"""Tokens that a microbatch of these row indices takes."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def plan_packs(
    lengths: Sequence[int], *, capacity: int, dp_world: int, pad_multiple: int = 1, global_batch_size: BatchSizes = None
) -> PackPlan:
    """Packs rows end to end, at most `capacity` tokens per microbatch, balanced over ranks by tokens.

    Args:
        lengths: tokens per row.
        capacity: most tokens in a microbatch; each row counts rounded up to `pad_multiple`.
        dp_world: data-parallel ranks.
        global_batch_size: rows per optimizer step, in the order of `lengths`; a sequence gives each step its own
            number; None makes one step of all rows.

    Raises:
        ValueError: a row exceeds the cap, or a global batch has fewer rows than ranks.
    """
    padded = [round_up(n, pad_multiple) for n in lengths]
    return _plan(
        padded,
        load=lambda rows: sum(padded[i] for i in rows),
        capacity=capacity,
        dp_world=dp_world,
        groups=_global_batches(len(padded), global_batch_size),
        packed=True,
    )


def plan_padded(
    lengths: Sequence[int], *, capacity: int, dp_world: int, pad_multiple: int = 1, global_batch_size: BatchSizes = None
) -> PackPlan:
    """As `plan_packs` for padded microbatches: rows x longest row is at most `capacity`."""
    padded = [round_up(n, pad_multiple) for n in lengths]
    return _plan(
        padded,
        load=lambda rows: len(rows) * max((padded[i] for i in rows), default=0),
        capacity=capacity,
        dp_world=dp_world,
        groups=_global_batches(len(padded), global_batch_size),
        packed=False,
    )


def plan_fixed(
    lengths: Sequence[int],
    *,
    rows_per_microbatch: int,
    dp_world: int,
    pad_multiple: int = 1,
    global_batch_size: BatchSizes = None,
) -> PackPlan:
    """Microbatches of `rows_per_microbatch` rows in the given order, dealt to the ranks in turn.

    Raises:
        ValueError: a global batch does not divide by ranks x rows per microbatch.
    """
    per_rank: list[Bins] = [[] for _ in range(dp_world)]
    steps: list[int] = []
    unit = rows_per_microbatch * dp_world
    for group in _global_batches(len(lengths), global_batch_size):
        if len(group) % unit:
            raise ValueError(
                f"fixed microbatches: a global batch of {len(group)} rows does not divide by {dp_world} ranks x "
                f"{rows_per_microbatch} rows; change policy.train_micro_batch_size or policy.train_global_batch_size, "
                "or turn on policy.dynamic_batching"
            )
        share = len(group) // dp_world
        for rank in range(dp_world):
            mine = group[rank * share : (rank + 1) * share]
            per_rank[rank] += [mine[i : i + rows_per_microbatch] for i in range(0, share, rows_per_microbatch)]
        steps.append(share // rows_per_microbatch)
    width = max((round_up(n, pad_multiple) for n in lengths), default=0)
    return _freeze(per_rank, steps, width, packed=False)


def replan_microbatches(plan: PackPlan, lengths: Sequence[int], *, capacity: int, pad_multiple: int = 1) -> PackPlan:
    """Other microbatches over the same assignment of rows to ranks, as one step (for log-probability stages).

    Falls back to the microbatches of `plan` when a rank has too few rows for as many microbatches as its peers need.

    Args:
        plan: keeps its row -> rank assignment.
        lengths: tokens per row of the whole batch.
        capacity: most tokens in one of the new microbatches; at least the cap of `plan`.
    """
    padded = [round_up(n, pad_multiple) for n in lengths]
    load = _load_function(padded, packed=plan.packed)
    bins = [
        _fill(sorted(plan.rows_of_rank(rank), key=lambda i: (-padded[i], i)), load, capacity)
        for rank in range(plan.num_ranks)
    ]
    count = max((len(rank_bins) for rank_bins in bins), default=0)
    if any(len(plan.rows_of_rank(rank)) < count for rank in range(plan.num_ranks)):
        return replace(plan, steps=(sum(plan.steps),))
    for rank_bins in bins:
        _split_to(rank_bins, count, load)
    return _freeze(bins, [count], plan.pad_to, packed=plan.packed)


def replan_rows(plan: PackPlan, *, rows_per_microbatch: int) -> PackPlan:
    """Microbatches of a fixed number of rows over the same assignment, as one step; every rank needs as many rows."""
    bins: list[Bins] = []
    for rank in range(plan.num_ranks):
        rows = list(plan.rows_of_rank(rank))
        bins.append([rows[i : i + rows_per_microbatch] for i in range(0, len(rows), rows_per_microbatch)])
    counts = {len(rank_bins) for rank_bins in bins}
    if len(counts) > 1:
        raise ValueError(f"packing: ranks have {sorted(counts)} microbatches; fixed rows need equal shards")
    return _freeze(bins, sorted(counts), plan.pad_to, packed=plan.packed)


def _load_function(padded: Sequence[int], *, packed: bool) -> Load:
    if packed:
        return lambda rows: sum(padded[i] for i in rows)
    return lambda rows: len(rows) * max((padded[i] for i in rows), default=0)


def _global_batches(num_rows: int, size: BatchSizes) -> Bins:
    if not isinstance(size, Sequence):
        step = size or max(num_rows, 1)
        size = [min(step, num_rows - start) for start in range(0, num_rows, step)]
    if sum(size) != num_rows:
        raise ValueError(f"packing: global batches of {list(size)} rows hold {sum(size)} rows, got {num_rows}")
    starts = itertools.accumulate(size, initial=0)
    return [list(range(start, start + count)) for start, count in zip(starts, size, strict=False)]


def _plan(padded: Sequence[int], *, load: Load, capacity: int, dp_world: int, groups: Bins, packed: bool) -> PackPlan:
    over = [i for i, n in enumerate(padded) if n > capacity]
    if over:
        worst = max(over, key=lambda i: padded[i])
        raise ValueError(
            f"packing: row {worst} has {padded[worst]} tokens, the cap of a microbatch is {capacity} "
            f"({padded[worst] - capacity} too many); raise *_mb_tokens or lower policy.max_total_sequence_length"
        )
    per_rank: list[Bins] = [[] for _ in range(dp_world)]
    steps: list[int] = []
    for group in groups:
        bins = _bins_for(group, padded, load, capacity, dp_world, packed=packed)
        for rank, mine in enumerate(_deal(bins, padded, dp_world)):
            per_rank[rank] += mine
        steps.append(len(bins) // dp_world)
    return _freeze(per_rank, steps, max(padded, default=0), packed=packed)


def _bins_for(
    group: Sequence[int], padded: Sequence[int], load: Load, capacity: int, dp_world: int, *, packed: bool
) -> Bins:
    """Capped bins of about the same load, whose number is a multiple of the ranks."""
    if len(group) < dp_world:
        raise ValueError(
            f"packing: {len(group)} rows for {dp_world} ranks, {dp_world - len(group)} too few; "
            "every rank needs at least one row per optimizer step"
        )
    order = sorted(group, key=lambda i: (-padded[i], i))
    bins = _fill(order, load, capacity)
    count = round_up(len(bins), dp_world)
    level = _level_packed if packed else _level_padded
    bins = level(order, padded, count, capacity) or bins
    _split_to(bins, count, load)
    return bins


def _level_packed(order: Sequence[int], padded: Sequence[int], count: int, capacity: int) -> Bins | None:
    """Each row, longest first, to the bin with the fewest tokens; None when a row fits nowhere."""
    bins: Bins = [[] for _ in range(count)]
    heap = [(0, index) for index in range(count)]
    for row in order:
        tokens, index = heap[0]
        if tokens + padded[row] > capacity:
            return None
        bins[index].append(row)
        heapq.heapreplace(heap, (tokens + padded[row], index))
    return [rows for rows in bins if rows]


def _level_padded(order: Sequence[int], padded: Sequence[int], count: int, capacity: int) -> Bins | None:
    """Runs of rows of like length, cut so that the largest is as small as it can be; None when the cap is too low."""
    low, high = padded[order[0]], capacity
    if len(_sweep(order, padded, high)) > count:
        return None
    while low < high:
        middle = (low + high) // 2
        if len(_sweep(order, padded, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    return _sweep(order, padded, high)


def _sweep(order: Sequence[int], padded: Sequence[int], limit: int) -> Bins:
    """Consecutive rows per bin, as many as stay under `limit` with padding."""
    bins: Bins = []
    for row in order:
        if bins and (len(bins[-1]) + 1) * padded[bins[-1][0]] <= limit:
            bins[-1].append(row)
        else:
            bins.append([row])
    return bins


def _fill(order: Sequence[int], load: Load, capacity: int) -> Bins:
    """First fit over rows in falling length. Bins that a shortest row cannot enter any more are left behind."""
    bins: Bins = []
    open_from = 0
    shortest = [order[-1]] if order else []
    for row in order:
        for candidate in bins[open_from:]:
            if load([*candidate, row]) <= capacity:
                candidate.append(row)
                break
        else:
            bins.append([row])
        while open_from < len(bins) and load([*bins[open_from], *shortest]) > capacity:
            open_from += 1
    return bins


def _split_to(bins: Bins, count: int, load: Load) -> None:
    """Halves the bin with the largest load that still has two rows, until there are `count` bins."""
    heap = [(-load(rows), index) for index, rows in enumerate(bins) if len(rows) > 1]
    heapq.heapify(heap)
    while len(bins) < count:
        if not heap:
            raise ValueError(f"packing: {len(bins)} rows cannot form {count} microbatches")
        _, index = heapq.heappop(heap)
        rows = bins[index]
        # Alternate rows so that both halves have about the same length profile.
        bins[index], other = rows[0::2], rows[1::2]
        bins.append(other)
        for i in (index, len(bins) - 1):
            if len(bins[i]) > 1:
                heapq.heappush(heap, (-load(bins[i]), i))


def _deal(bins: Bins, padded: Sequence[int], dp_world: int) -> list[Bins]:
    """The same number of bins to every rank: each round hands the heaviest bin to the lightest rank."""
    cost = {id(rows): sum(padded[i] for i in rows) for rows in bins}
    order = sorted(bins, key=lambda rows: (-cost[id(rows)], rows[0]))
    ranks: list[Bins] = [[] for _ in range(dp_world)]
    totals = [0] * dp_world
    for start in range(0, len(order), dp_world):
        lightest_first = sorted(range(dp_world), key=lambda r: (totals[r], r))
        for rank, rows in zip(lightest_first, order[start : start + dp_world], strict=True):
            ranks[rank].append(rows)
            totals[rank] += cost[id(rows)]
    return ranks


def _freeze(per_rank: Sequence[Bins], steps: Sequence[int], pad_to: int, *, packed: bool) -> PackPlan:
    frozen = tuple(tuple(tuple(rows) for rows in rank) for rank in per_rank)
    return PackPlan(microbatches=frozen, steps=tuple(steps), pad_to=pad_to, packed=packed)
