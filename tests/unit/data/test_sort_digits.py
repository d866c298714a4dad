"""Procedural sort problems."""

from __future__ import annotations

import pytest

from nemo_rl.data.generated import problems
from nemo_rl.errors import DatasetError


def test_answers_are_the_sorted_digits_of_the_prompt() -> None:
    for problem in problems(50, seed=3, min_digits=2, max_digits=5):
        word, digits = problem.prompt.split()
        assert word == "sort"
        assert 2 <= len(digits) <= 5
        assert problem.answer == "".join(sorted(digits))


def test_the_same_seed_gives_the_same_problems_for_ever() -> None:
    assert problems(5, seed=777) == problems(5, seed=777)
    assert problems(5, seed=777) != problems(5, seed=778)
    # Pinned: results of different days are compared on this split.
    assert [p.prompt for p in problems(2, seed=777)] == ["sort 775945", "sort 07986941"]


def test_excluded_prompts_do_not_occur() -> None:
    exclude = {p.prompt for p in problems(40, seed=1, min_digits=2, max_digits=2)}
    assert exclude.isdisjoint(p.prompt for p in problems(200, seed=2, min_digits=2, max_digits=2, exclude=exclude))


def test_an_exclusion_that_leaves_nothing_is_an_error() -> None:
    everything = {f"sort {digit}" for digit in range(10)}
    with pytest.raises(DatasetError, match="only 0 of 3"):
        problems(3, seed=0, min_digits=1, max_digits=1, exclude=everything)


@pytest.mark.parametrize(("low", "high"), [(0, 3), (4, 3)])
def test_impossible_digit_counts_are_an_error(low: int, high: int) -> None:
    with pytest.raises(DatasetError, match="min_digits"):
        problems(1, seed=0, min_digits=low, max_digits=high)
