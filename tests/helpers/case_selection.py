"""The part of the cases that a run tests: `make test-full` has all of them.

Of a table of cases `make test` has a part with every pair of values; properties draw a third of their examples.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import combinations
from typing import TypeVar

import pytest

C = TypeVar("C")
"""Type of a case, whose text is its name."""
Axes = Mapping[str, Callable[[C], Hashable]]
"""Name -> the value of a case."""


def pairwise(cases: Iterable[C], axes: Axes[C], *, kept: Iterable[C] = ()) -> list[C]:
    """Return some of the cases, in their order, that have every pair of values of two axes that all of them have.

    The cases in `kept` are among them.

    Example:
        `pairwise(["1a", "1b", "2a", "2b"], {"digit": itemgetter(0), "letter": itemgetter(1)})` has all four; with a
        third axis of two values it has four of eight.
    """
    named = {str(case): case for case in cases}
    pairs = {name: _pairs(case, axes) for name, case in named.items()}
    chosen = {str(case) for case in kept}
    missing = set().union(*pairs.values()).difference(*(pairs[name] for name in chosen))
    while missing:
        # The first of equals, so that the cases are the same every time.
        best = max(pairs, key=lambda name: len(pairs[name] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return [case for name, case in named.items() if name in chosen]


def _pairs(case: C, axes: Axes[C]) -> set[Hashable]:
    return set(combinations([(name, of(case)) for name, of in axes.items()], 2))


def params(cases: Iterable[C], default: Iterable[C]) -> list[object]:
    """Return all cases for `parametrize`; cases that are not among the default ones are marked `full`."""
    kept = {str(case) for case in default}
    return [pytest.param(case, marks=[] if str(case) in kept else [pytest.mark.full]) for case in cases]


def cases_of_this_run(request: pytest.FixtureRequest, cases: Iterable[C], default: Iterable[C]) -> list[C]:
    """Return the cases of a job that runs all at once: the default ones, unless tests marked `full` were chosen."""
    of_module = [item for item in request.session.items if item.path == request.path]
    has_full = any(item.get_closest_marker("full") is not None for item in of_module)
    return list(cases if has_full else default)


FULL = "NEMO_RL_TEST_FULL"
"""Variable that `make test-full` sets."""


def num_examples(count: int = 100) -> int:
    """Return the number of examples that a property draws in this run, given that of `make test-full`."""
    return count if os.environ.get(FULL) else -(-count // 3)
