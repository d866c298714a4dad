"""What `make test` runs of a table: every pair of values, and what is kept by name."""

from __future__ import annotations

from itertools import combinations, product

from tests.helpers.case_selection import pairwise, params

AXES = {name: lambda case, place=place: case[place] for place, name in enumerate(("word", "number", "sign"))}
TABLE = ["".join(values) for values in product("ab", "123", "+-")]


def pairs(cases: list[str]) -> set[tuple[tuple[int, str], ...]]:
    return {pair for case in cases for pair in combinations(enumerate(case), 2)}


def test_a_part_of_a_table_has_every_pair_of_the_whole() -> None:
    part = pairwise(TABLE, AXES)
    assert pairs(part) == pairs(TABLE) and len(part) < len(TABLE)
    assert part == pairwise(TABLE, AXES) == [case for case in TABLE if case in part]


def test_pairs_that_the_table_lacks_are_not_asked_for_and_what_is_kept_is_there() -> None:
    some = [case for case in TABLE if "a1" not in case]
    assert pairs(pairwise(some, AXES)) == pairs(some)
    assert "b3-" in pairwise(TABLE, AXES, kept=["b3-"])
    assert len(pairwise(TABLE, AXES, kept=TABLE)) == len(TABLE)


def test_the_others_are_marked_full() -> None:
    marked = {param.values[0]: [mark.name for mark in param.marks] for param in params(TABLE[:3], TABLE[:1])}
    assert marked == {TABLE[0]: [], TABLE[1]: ["full"], TABLE[2]: ["full"]}
