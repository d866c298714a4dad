"""The microbatches of one global batch, assigned to the ranks: packed rows by named algorithm, padded rows.

Called by `packing` with rows numbered 0..n-1 in an order the caller made stable. Invariant: `[rank][microbatch]` with
as many microbatches on every rank, a multiple of `multiple_of`, each under the cap and none empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl.distributed.packing_balance import (
    deal_heaviest_to_lightest,
    deal_in_turn,
    karmarkar_karp,
    level_ranks,
    split_to,
)
from nemo_rl.distributed.packing_bins import (
    BIN_ALGORITHMS,
    Bins,
    best_fit_decreasing,
    bins_bound,
    longest_first,
    spread,
)
from nemo_rl.distributed.packing_padded import level_runs, runs_under_cap
from nemo_rl.distributed.packing_tight import exact_bins, repair, tight_bins

__all__ = ["Rows", "TooFewRows", "bins_needed", "pack_on_rank", "packed_ranks", "padded_ranks", "round_up"]

EXACT_ROWS = 24
"""Up to so many rows the number of bins is the least there is, by exact search."""
EXCHANGES = 400
"""Most exchanges of `repair`, about 10 ms; past that the bins of best fit decreasing are balanced instead."""


class TooFewRows(ValueError):
    """A global batch has fewer rows than the microbatches that it needs."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one global batch."""

    sizes: Sequence[int]
    """Tokens of each row, padding to the multiple included, at least 1."""
    costs: Sequence[float]
    capacity: int


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def packed_ranks(rows: Rows, *, num_ranks: int, multiple_of: int, algorithm: str) -> list[Bins]:
    """Rows laid end to end.

    Raises:
        TooFewRows: no packing under the cap has as few microbatches as there are rows.
    """
    _check_enough(len(rows.sizes), 1, num_ranks, multiple_of)
    if algorithm == "karmarkar_karp":
        ranks = _differencing_ranks(rows, num_ranks, multiple_of)
        if ranks is not None:
            return ranks
    elif algorithm != "balanced":
        bins = BIN_ALGORITHMS[algorithm](rows.sizes, rows.capacity)
        count = round_up(len(bins), num_ranks * multiple_of)
        if count > len(rows.sizes):
            bins = _fewest_bins(rows, num_ranks, multiple_of)
            count = round_up(len(bins), num_ranks * multiple_of)
        split_to(bins, count, rows.sizes)
        return deal_in_turn(bins, num_ranks)
    bins = _balanced_bins(rows, num_ranks, multiple_of)
    ranks = deal_heaviest_to_lightest(bins, _sums(bins, rows.costs), num_ranks)
    bound = max(sum(rows.costs) / num_ranks, *rows.costs)
    level_ranks(ranks, rows.costs, rows.sizes, capacity=rows.capacity, bound=bound)
    return [_most_expensive_first(mine, _sums(mine, rows.costs)) for mine in ranks]


def padded_ranks(rows: Rows, *, num_ranks: int, multiple_of: int) -> list[Bins]:
    """Rows of similar length padded to the longest of their microbatch.

    Raises:
        TooFewRows: fewer rows than the fewest microbatches under the cap, rounded up to what the ranks divide.
    """
    order = longest_first(rows.sizes)
    fewest = runs_under_cap(order, rows.sizes, rows.capacity)
    count = round_up(len(fewest), num_ranks * multiple_of)
    _check_enough(len(rows.sizes), len(fewest), num_ranks, multiple_of)
    bins = level_runs(order, rows.sizes, rows.costs, count=count, capacity=rows.capacity)
    split_to(bins, count, rows.costs)
    ranks = deal_heaviest_to_lightest(bins, padded_costs(bins, rows.costs), num_ranks)
    return [_most_expensive_first(mine, padded_costs(mine, rows.costs)) for mine in ranks]


def padded_costs(bins: Bins, costs: Sequence[float]) -> list[float]:
    """Cost of microbatches in which every row costs as much as the most expensive."""
    return [len(mine) * max((costs[row] for row in mine), default=0.0) for mine in bins]


def bins_needed(rows: Rows, *, num_ranks: int, multiple_of: int, packed: bool) -> int:
    """Microbatches, and so rows, with which a plan can surely be made; a plan may need a round fewer."""
    order = longest_first(rows.sizes)
    fill = best_fit_decreasing if packed else runs_under_cap
    return round_up(len(fill(order, rows.sizes, rows.capacity)), num_ranks * multiple_of)


def pack_on_rank(rows: Rows, count: int | None, *, packed: bool) -> Bins:
    """Microbatches of one rank's rows: as few as can be quickly found, or `count` of about the same cost."""
    order = longest_first(rows.sizes)
    bins = (best_fit_decreasing if packed else runs_under_cap)(order, rows.sizes, rows.capacity)
    if count is None:
        return bins
    if packed:
        even = _even_bins(rows, order, count)
        if even is None:
            split_to(bins, count, rows.costs)
        bins = even or bins
        return _most_expensive_first(bins, _sums(bins, rows.costs))
    bins = level_runs(order, rows.sizes, rows.costs, count=count, capacity=rows.capacity)
    split_to(bins, count, rows.costs)
    return _most_expensive_first(bins, padded_costs(bins, rows.costs))


def _balanced_bins(rows: Rows, num_ranks: int, multiple_of: int) -> Bins:
    """As few bins as we can find, of about the same cost where the cap leaves a choice."""
    unit, num_rows = num_ranks * multiple_of, len(rows.sizes)
    order = longest_first(rows.sizes)
    least = round_up(-(-sum(rows.sizes) // rows.capacity), unit)
    even = _even_bins(rows, order, least) if least <= num_rows else None
    if even is not None:
        return even
    bins = _fewest_bins(rows, num_ranks, multiple_of)
    count = round_up(len(bins), unit)
    even = _even_bins(rows, order, count) if count > least else None
    if even is None:
        split_to(bins, count, rows.costs)
    return even or bins


def _fewest_bins(rows: Rows, num_ranks: int, multiple_of: int) -> Bins:
    """Bins under the cap that, rounded up to a multiple of the ranks, are as few as we can find."""
    unit, num_rows = num_ranks * multiple_of, len(rows.sizes)
    order = longest_first(rows.sizes)
    greedy = best_fit_decreasing(order, rows.sizes, rows.capacity)
    enough = round_up(len(greedy), unit)
    least = round_up(-(-sum(rows.sizes) // rows.capacity), unit)
    if least < enough:
        least = round_up(bins_bound(rows.sizes, rows.capacity), unit)
    for count in range(least, enough, unit):
        found = tight_bins(order, rows.sizes, count, rows.capacity)
        # Where one round more is more than there are rows, searching is better than giving up.
        if found is None and (num_rows <= EXACT_ROWS or count <= num_rows < count + unit):
            found = exact_bins(order, rows.sizes, count, rows.capacity)
        if found is not None:
            return [mine for mine in found if mine]
    _check_enough(num_rows, len(greedy), num_ranks, multiple_of)
    return greedy


def _check_enough(num_rows: int, num_bins: int, num_ranks: int, multiple_of: int) -> None:
    needed = round_up(max(num_bins, 1), num_ranks * multiple_of)
    if num_rows >= needed:
        return
    each = f"{needed // num_ranks} per rank" if needed > num_ranks else "one per rank"
    raise TooFewRows(
        f"packing: {num_rows} rows for {num_ranks} ranks, {needed - num_rows} too few: an optimizer step needs "
        f"{needed} microbatches of at least one row, {each} ({num_bins} under the token cap, rounded up to a multiple "
        f"of {num_ranks * multiple_of}); raise *_mb_tokens or policy.train_global_batch_size, or use fewer ranks"
    )


def _even_bins(rows: Rows, order: Sequence[int], count: int) -> Bins | None:
    """`count` bins of about the same cost; None where the cap does not let it."""
    bins = spread(order, rows.costs, count)
    return bins if repair(bins, rows.sizes, rows.capacity, most_exchanges=EXCHANGES) else None


def _differencing_ranks(rows: Rows, num_ranks: int, multiple_of: int) -> list[Bins] | None:
    """Karmarkar and Karp's sets of equal cost, one per rank, each packed on its own; None when a rank has fewer rows
    than microbatches."""
    sets = karmarkar_karp(rows.costs, num_ranks)
    ranks = []
    for mine in sets:
        sizes = [rows.sizes[row] for row in mine]
        bins = best_fit_decreasing(longest_first(sizes), sizes, rows.capacity)
        ranks.append([[mine[place] for place in places] for places in bins])
    count = round_up(max(1, *map(len, ranks)), multiple_of)
    if min(map(len, sets)) < count:
        return None
    for bins in ranks:
        split_to(bins, count, rows.costs)
    return ranks


def _sums(bins: Bins, costs: Sequence[float]) -> list[float]:
    return [sum(map(costs.__getitem__, mine)) for mine in bins]


def _most_expensive_first(bins: Bins, bin_costs: Sequence[float]) -> Bins:
    """So that microbatches that meet on all ranks cost about the same."""
    return [bins[place] for place in sorted(range(len(bins)), key=lambda place: -bin_costs[place])]
