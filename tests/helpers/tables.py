"""Tables of cases: `make test` has a part with every pair of values, and `make test-full` the whole table."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import combinations
from typing import TypeVar

import pytest

C = TypeVar("C")
"""A case; its text is its name."""
Axes = Mapping[str, Callable[[C], Hashable]]
"""Name -> the value of a case."""


def pairwise(cases: Iterable[C], axes: Axes[C], *, kept: Iterable[C] = ()) -> list[C]:
    """Some of the cases, in their order, which have every pair of values of two axes that all of them have.

    Those that are `kept` are among them.

    Example:
        `pairwise(["1a", "1b", "2a", "2b"], {"digit": itemgetter(0), "letter": itemgetter(1)})` has all four; with a
        third axis of two values it has four of eight.
    """
    named = {str(case): case for case in cases}
    pairs = {name: _pairs(case, axes) for name, case in named.items()}
    chosen = {str(case) for case in kept}
    missing = set().union(*pairs.values()).difference(*(pairs[name] for name in chosen))
    while missing:
        # Of equals the first: the same cases every time.
        best = max(pairs, key=lambda name: len(pairs[name] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return [case for name, case in named.items() if name in chosen]


def _pairs(case: C, axes: Axes[C]) -> set[Hashable]:
    return set(combinations([(name, of(case)) for name, of in axes.items()], 2))


def params(cases: Iterable[C], default: Iterable[C]) -> list[object]:
    """All cases for `parametrize`; those that are not among the default ones are marked `full`."""
    kept = {str(case) for case in default}
    return [pytest.param(case, marks=[] if str(case) in kept else [pytest.mark.full]) for case in cases]


def of_this_run(request: pytest.FixtureRequest, cases: Iterable[C], default: Iterable[C]) -> list[C]:
    """What a job that runs them all at once has to run: the default ones, unless tests marked `full` were chosen."""
    of_module = [item for item in request.session.items if item.path == request.path]
    has_full = any(item.get_closest_marker("full") is not None for item in of_module)
    return list(cases if has_full else default)
