"""Problems of environments with turns: their bounds, and options that cannot be met."""

from __future__ import annotations

import re

import pytest

from nemo_rl.data.generated import guess_problems, sum_problems
from nemo_rl.errors import DatasetError


def test_products_are_right_and_of_factors_within_the_bounds() -> None:
    drawn = sum_problems(300, seed=3, min_digits=2, max_digits=2, smallest=32)
    factors = [tuple(map(int, re.findall(r"\d+", problem.prompt))) for problem in drawn]
    assert [problem.answer for problem in drawn] == [str(left * right) for left, right in factors]
    assert {min(map(min, factors)), max(map(max, factors))} <= set(range(32, 100))
    assert {len(str(problem.answer)) for problem in drawn} == {4}
    assert min(min(map(int, re.findall(r"\d+", p.prompt))) for p in sum_problems(300, seed=3, min_digits=2)) < 32


def test_a_smallest_factor_of_more_digits_than_the_numbers_is_refused() -> None:
    with pytest.raises(DatasetError, match="expected smallest to have at most min_digits=2 digits, got 100"):
        sum_problems(3, seed=0, min_digits=2, max_digits=3, smallest=100)


def test_a_held_out_game_is_never_drawn_and_too_few_games_are_refused() -> None:
    held_out = {problem.prompt for problem in guess_problems(50, seed=0, numbers=6, games=200)}
    drawn = guess_problems(300, seed=1, numbers=6, games=200, exclude=held_out)
    assert len(drawn) == 300 and not held_out & {problem.prompt for problem in drawn}
    every = {f"game {game}: guess 1 to 6" for game in range(2)}
    with pytest.raises(DatasetError, match="only 0 of 5 problems are left"):
        guess_problems(5, seed=1, numbers=6, games=2, exclude=every)
