"""Unbiased estimates from n samples of one prompt: pass@k and majority@k. Pure functions of small integers.

Called for each prompt by `measure_set`. Symbols: n samples, c of them right, k of them drawn without
replacement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb
from statistics import NormalDist
from typing import Literal

import numpy as np

__all__ = ["Estimate", "Interval", "majority_at_k", "mean_with_interval", "pass_at_k", "t_quantile", "wilson_interval"]


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


NORMAL_FROM = 1000
"""Degrees of freedom above which t and normal quantiles differ by less than 0.2 %."""
BISECTIONS = 80
Interval = Literal[
    "student_t over prompts",
    "wilson over prompts",
    "student_t over samples",
    "wilson over samples",
    "jackknife over samples",
    "none",
]
"""The way the ends were found, and over what; `none`: they are those of the range."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean, and where the true one lies with the given confidence.

    Example:
        `Estimate(value=0.55, low=0.28, high=0.82, interval="student_t over prompts")`
    """

    value: float
    low: float
    high: float
    interval: Interval

    def as_record(self) -> dict[str, float | str | None]:
        """Return the interval for JSON; an end that is open is None."""
        low, high = (end if math.isfinite(end) else None for end in (self.low, self.high))
        return {"value": self.value, "low": low, "high": high, "interval": self.interval}

    def text(self) -> str:
        """Return a text such as `0.550 [0.280, 0.820]`."""
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_with_interval(values: Sequence[float], *, confidence: float, bounds: tuple[float, float] | None) -> Estimate:
    """Mean over P prompts, with mean +- t s / sqrt(P), s their unbiased deviation and t the quantile for P - 1.

    Prompts are drawn, so their spread holds both that of the prompts and that of their samples. Of shares that are
    0 or 1 (one sample per prompt), or all equal, Wilson's interval is taken: their spread would be too small.
    One value that is neither says nothing of its spread: the interval is `bounds`.

    Args:
        values: one per prompt, at least one.
        bounds: smallest and largest possible value; None for rewards of any size.
    """
    values_P = np.asarray(values, dtype=np.float64)
    if not len(values_P):
        raise ValueError("expected at least one prompt, got none")
    mean, is_share = float(values_P.mean()), bounds == (0.0, 1.0)
    if is_share and (bool(np.isin(values_P, (0.0, 1.0)).all()) or (len(values_P) > 1 and not np.ptp(values_P))):
        low, high = wilson_interval(float(values_P.sum()), len(values_P), confidence=confidence)
        return Estimate(value=mean, low=low, high=high, interval="wilson over prompts")
    lowest, highest = bounds or (-math.inf, math.inf)
    if len(values_P) == 1:
        return Estimate(value=mean, low=lowest, high=highest, interval="none")
    half = t_quantile(len(values_P) - 1, confidence=confidence) * float(values_P.std(ddof=1)) / math.sqrt(len(values_P))
    low, high = max(lowest, mean - half), min(highest, mean + half)
    return Estimate(value=mean, low=low, high=high, interval="student_t over prompts")


def wilson_interval(num_right: float, num_trials: int, *, confidence: float) -> tuple[float, float]:
    """Return the interval of a share of trials that are right or wrong (Wilson 1927).

    Example:
        >>> [round(end, 7) for end in wilson_interval(3, 10, confidence=0.95)]
        [0.1077913, 0.6032219]
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, square = num_right / num_trials, z * z / num_trials
    centre = (share + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(share * (1 - share) / num_trials + square / (4 * num_trials))
    low = 0.0 if num_right == 0 else max(0.0, centre - half)
    return low, 1.0 if num_right == num_trials else min(1.0, centre + half)


def t_quantile(freedom: int, *, confidence: float) -> float:
    """Return how many standard errors to either side hold `confidence` of Student's t with so many degrees of freedom.

    Example:
        >>> round(t_quantile(3, confidence=0.95), 3)
        3.182
    """
    if freedom >= NORMAL_FROM:
        return NormalDist().inv_cdf((1 + confidence) / 2)
    low, high = 0.0, 1.0
    while _inside(high, freedom) < confidence:
        high *= 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < confidence else (low, middle)
    return high


def _inside(t: float, freedom: int) -> float:
    """P(|T| <= t), by the finite series in theta = atan(t / sqrt(v)) (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    theta = math.atan2(t, math.sqrt(freedom))
    cosine, sine = math.cos(theta), math.sin(theta)
    is_odd = freedom % 2 == 1
    term = cosine if is_odd else 1.0
    total = term if freedom > 1 else 0.0
    for number in range(3 if is_odd else 2, freedom - 1, 2):
        term *= cosine * cosine * (number - 1) / number
        total += term
    return 2 / math.pi * (theta + sine * total) if is_odd else sine * total
