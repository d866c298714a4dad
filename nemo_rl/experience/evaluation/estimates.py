"""Unbiased estimates from n samples of one prompt: pass@k and majority@k. Pure functions of small integers.

Called for each prompt by `measure_set`. Symbols: n samples, c of them right, k of them drawn without
replacement.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import comb

__all__ = ["majority_at_k", "pass_at_k"]


def pass_at_k(*, num_samples: int, num_right: int, k: int) -> float:
    """Probability that k of the n samples, drawn without replacement, hold a right one: 1 - C(n - c, k) / C(n, k).

    Unbiased for the probability that k new samples hold one (arXiv 2107.03374). Exact integers, so no rounding before
    the last division.

    Example:
        >>> pass_at_k(num_samples=10, num_right=3, k=4)
        0.8333333333333334

    Raises:
        ValueError: k is not between 1 and n, or c not between 0 and n.
    """
    _check(num_samples, k)
    if not 0 <= num_right <= num_samples:
        raise ValueError(f"expected 0 to {num_samples} right samples, got {num_right}")
    return float(1 - Fraction(comb(num_samples - num_right, k), comb(num_samples, k)))


def majority_at_k(votes: Mapping[str, int], *, right: str, num_silent: int = 0, k: int) -> float:
    """Mean over all subsets of k samples of [the right answer has most votes]; a tie of m answers counts 1/m.

    Unlike a tie that the answer seen first wins, this does not depend on the order of the samples. Counted without
    listing the subsets: for each number t of votes of the right answer, a table over the other answers holds in how
    many ways s samples are drawn of which none has more than t votes and m have exactly t.

    Args:
        votes: answer -> samples that give it.
        right: the right answer; it need not be among the votes.
        num_silent: samples that give no answer: they are drawn, and vote for nothing.

    Example:
        >>> round(majority_at_k({"A": 2, "B": 2, "C": 1}, right="A", k=3), 6)
        0.433333

    Raises:
        ValueError: k is not between 1 and the number of samples.
    """
    num_samples = sum(votes.values()) + num_silent
    _check(num_samples, k)
    of_right = votes.get(right, 0)
    others = [count for answer, count in votes.items() if answer != right]
    won = sum(
        (comb(of_right, t) * _shares(others, num_silent, most=t, drawn=k - t) for t in range(1, min(of_right, k) + 1)),
        Fraction(0),
    )
    return float(won / comb(num_samples, k))


def _shares(others: list[int], num_silent: int, *, most: int, drawn: int) -> Fraction:
    """Ways to draw so many samples beside `most` votes for the right answer, each worth 1 / (answers that tie)."""
    ways: dict[tuple[int, int], int] = {(0, 0): 1}
    # Answers with fewer votes than that can neither win nor tie: it does not matter which of them is drawn.
    num_silent += sum(count for count in others if count < most)
    for count in others:
        if count < most:
            continue
        ways = _drawn_from(ways, count, most=most, drawn=drawn)
    return sum(
        (Fraction(number * comb(num_silent, drawn - size), ties + 1) for (size, ties), number in ways.items()),
        Fraction(0),
    )


def _drawn_from(
    ways: Mapping[tuple[int, int], int], count: int, *, most: int, drawn: int
) -> dict[tuple[int, int], int]:
    """(samples drawn, answers with `most` votes) -> ways, with one answer more."""
    after: dict[tuple[int, int], int] = {}
    for (size, ties), number in ways.items():
        for taken in range(min(count, most, drawn - size) + 1):
            place = (size + taken, ties + (taken == most))
            after[place] = after.get(place, 0) + number * comb(count, taken)
    return after


def _check(num_samples: int, k: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(f"expected k from 1 to the {num_samples} samples of a prompt, got {k}")
