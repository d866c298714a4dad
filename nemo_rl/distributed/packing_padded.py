"""Microbatches of padded rows: rows times longest row is at most the cap. Plain integers and floats.

Called by `packing`. Rows of similar length belong together, so every function cuts the rows, longest first, into runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rl.distributed.packing_bins import Bins

__all__ = ["level_runs", "runs_under_cap"]

HALVINGS = 14
"""Of the search for the least cost: exact to 1 in 2^14."""


def runs_under_cap(order: Sequence[int], sizes: Sequence[int], capacity: int) -> Bins:
    """The fewest microbatches there are: each takes as many of the next rows as the cap allows."""
    return _runs(order, sizes, capacity, sizes, float(capacity))


def level_runs(
    order: Sequence[int], sizes: Sequence[int], costs: Sequence[float], *, count: int, capacity: int
) -> Bins:
    """At most `count` microbatches under the cap, the most expensive as cheap as can be.

    Args:
        order: rows by falling size.
        costs: of each row, falling as the sizes do; a row of a microbatch costs what its longest row costs.
        count: at least the microbatches of `runs_under_cap`.
    """
    best = runs_under_cap(order, sizes, capacity)
    low, high = costs[order[0]], max(len(rows) * costs[rows[0]] for rows in best)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        found = _runs(order, sizes, capacity, costs, middle)
        if len(found) <= count:
            best, high = found, middle
        else:
            low = middle
    return best


def _runs(order: Sequence[int], sizes: Sequence[int], capacity: int, costs: Sequence[float], most_cost: float) -> Bins:
    """Consecutive rows per microbatch, as many as stay under both limits; at least one."""
    runs: Bins = []
    at = 0
    while at < len(order):
        first = order[at]
        take = max(1, min(capacity // sizes[first], int(most_cost / costs[first])))
        runs.append(list(order[at : at + take]))
        at += take
    return runs
