"""Measures of samples of held-out prompts: `measure_set` turns rewards and answers into means with intervals.

Called by the evaluator. Names of measures: `reward` (mean of the samples), `pass@k`, `majority@k`, `greedy_reward`.

Unbiased estimates from n samples of one prompt: pass@k and majority@k. Pure functions of small integers.

Called for each prompt by `measure_set`. Symbols: n samples, c of them right, k of them drawn without
replacement.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from math import comb
from statistics import NormalDist
from typing import Literal

import numpy as np

from nemo_rl.config.run import EvaluationConfig
from nemo_rl.data.thinking import final_answer, last_boxes

__all__ = [
    "REWARD",
    "Estimate",
    "Interval",
    "PromptSamples",
    "SetMeasures",
    "jackknife_error",
    "majority_at_k",
    "majority_of_samples",
    "mean_with_interval",
    "measure_set",
    "pass_at_k",
    "pass_of_samples",
    "stated_answer",
    "t_quantile",
    "wilson_interval",
]


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


REWARD = "reward"
_RIGHT = "\0right"
"""The vote of right responses, whatever they wrote: no text has this character."""
SHARE = (0.0, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSamples:
    """All samples of one prompt.

    Example:
        `PromptSamples(rewards=(1.0, 0.0), answers=("12", "21"), category=None, greedy_reward=None)`
    """

    rewards: tuple[float, ...]
    answers: tuple[str | None, ...]
    """The answer of each sample; None for no answer."""
    category: str | None
    greedy_reward: float | None
    """Reward of the greedy response; None where none was taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetMeasures:
    """Measures of one set of prompts, or of one category of it."""

    num_prompts: int
    measures: Mapping[str, Estimate]
    categories: Mapping[str, SetMeasures] = field(default_factory=dict)
    """Measures of each category by name, in order; empty where prompts have none."""

    def as_record(self) -> dict[str, object]:
        record: dict[str, object] = {"num_prompts": self.num_prompts}
        record |= {name: each.as_record() for name, each in self.measures.items()}
        if self.categories:
            record["categories"] = {name: part.as_record() for name, part in self.categories.items()}
        return record


def measure_set(
    prompts: Sequence[PromptSamples], config: EvaluationConfig, *, is_accuracy: bool, with_categories: bool = True
) -> SetMeasures:
    """Means over at least one prompt; of a single one with several samples the intervals are over these.

    Args:
        is_accuracy: rewards are 1 or 0, so that their mean is a share.
    """
    bounds = SHARE if is_accuracy else None

    def mean(values: Sequence[float], bounds: tuple[float, float] | None = SHARE) -> Estimate:
        return mean_with_interval(values, confidence=config.confidence, bounds=bounds)

    if len(prompts) == 1 and len(prompts[0].rewards) > 1:
        measures = _of_one(prompts[0], config, is_accuracy=is_accuracy)
    else:
        measures = {REWARD: mean([sum(each.rewards) / len(each.rewards) for each in prompts], bounds)}
        measures |= {f"pass@{k}": mean([_passes(each, config, k) for each in prompts]) for k in config.pass_at}
        measures |= {f"majority@{k}": mean([_wins(each, config, k) for each in prompts]) for k in config.majority_at}
    greedy = [each.greedy_reward for each in prompts if each.greedy_reward is not None]
    if greedy:
        measures["greedy_reward"] = mean(greedy, bounds)
    groups: dict[str, list[PromptSamples]] = {}
    for each in prompts:
        if with_categories and each.category is not None:
            groups.setdefault(each.category, []).append(each)
    return SetMeasures(
        num_prompts=len(prompts),
        measures=measures,
        categories={
            name: measure_set(group, config, is_accuracy=is_accuracy, with_categories=False)
            for name, group in sorted(groups.items())
        },
    )


def _of_one(prompt: PromptSamples, config: EvaluationConfig, *, is_accuracy: bool) -> dict[str, Estimate]:
    """All measures of one prompt with at least two samples, but for the greedy one."""
    passed = partial(pass_of_samples, num_samples=len(prompt.rewards), confidence=config.confidence)
    if is_accuracy:
        measures = {REWARD: passed(num_right=round(sum(prompt.rewards)), k=1)}
    else:
        measures = {REWARD: mean_of_samples(prompt.rewards, confidence=config.confidence)}
    num_right = _num_right(prompt, config)
    measures |= {f"pass@{k}": passed(num_right=num_right, k=k) for k in config.pass_at}
    votes, silent = _votes(prompt, config)
    won = partial(majority_of_samples, votes, right=_RIGHT, num_silent=silent, confidence=config.confidence)
    return measures | {f"majority@{k}": won(k=k) for k in config.majority_at}


def _num_right(prompt: PromptSamples, config: EvaluationConfig) -> int:
    return sum(reward >= config.pass_reward for reward in prompt.rewards)


def _passes(prompt: PromptSamples, config: EvaluationConfig, k: int) -> float:
    return pass_at_k(num_samples=len(prompt.rewards), num_right=_num_right(prompt, config), k=k)


def _wins(prompt: PromptSamples, config: EvaluationConfig, k: int) -> float:
    votes, silent = _votes(prompt, config)
    return majority_at_k(votes, right=_RIGHT, num_silent=silent, k=k)


def _votes(prompt: PromptSamples, config: EvaluationConfig) -> tuple[Counter[str], int]:
    """Return the votes of each answer, and how many samples give none."""
    given = [
        _RIGHT if reward >= config.pass_reward else answer
        for reward, answer in zip(prompt.rewards, prompt.answers, strict=True)
    ]
    return Counter(answer for answer in given if answer is not None), given.count(None)


def stated_answer(response: str) -> str | None:
    """Return what is in the last boxes, or else what follows the thoughts, runs of white space taken as one; None for
    nothing.

    The mathematical reward reads the same. Two ways to write one number are two answers here; only the reward knows
    better, and it has said which responses are right.

    Example:
        >>> stated_answer("<think>4+3=7</think> \\\\boxed{7}."), stated_answer("7 ")
        ('7', '7')
    """
    answer = final_answer(response)
    boxed = last_boxes(answer)
    return " ".join((answer if boxed is None else ", ".join(boxed)).split()) or None


SILENT = ""
"""Stands for no answer among those that one sample less is taken of; `stated_answer` gives no empty text."""


def mean_of_samples(rewards: Sequence[float], *, confidence: float) -> Estimate:
    """Mean of at least two samples, by Student's t with n - 1."""
    rewards_n = np.asarray(rewards, dtype=np.float64)
    error = float(rewards_n.std(ddof=1)) / math.sqrt(len(rewards_n))
    half, mean = t_quantile(len(rewards_n) - 1, confidence=confidence) * error, float(rewards_n.mean())
    return Estimate(value=mean, low=mean - half, high=mean + half, interval="student_t over samples")


def pass_of_samples(*, num_samples: int, num_right: int, k: int, confidence: float) -> Estimate:
    """pass@k with the ends of Wilson's interval of p, as 1 - (1 - p)^k: what rises with p takes its interval along.

    Example:
        >>> pass_of_samples(num_samples=10, num_right=3, k=4, confidence=0.95).text()
        '0.833 [0.366, 0.975]'
    """
    value = pass_at_k(num_samples=num_samples, num_right=num_right, k=k)
    low, high = (1 - (1 - end) ** k for end in wilson_interval(num_right, num_samples, confidence=confidence))
    # Without bias the estimate of a large k may lie beyond what any p gives.
    return Estimate(value=value, low=min(low, value), high=max(high, value), interval="wilson over samples")


def majority_of_samples(
    votes: Mapping[str, int], *, right: str, num_silent: int, k: int, confidence: float
) -> Estimate:
    """majority@k by the jackknife: its error is that of n estimates from n - 1 samples each.

    A single sample has the majority where it is right. Where the jackknife sees no spread, or all samples are drawn, p
    is between the ends of Wilson's interval, at the lower one with all wrong samples for one answer, at the upper one
    with none of them for any: no wrong answers are worse or better for the right one.
    """
    num_samples, num_right = sum(votes.values()) + num_silent, votes.get(right, 0)
    value = majority_at_k(votes, right=right, num_silent=num_silent, k=k)
    if k == 1:
        return pass_of_samples(num_samples=num_samples, num_right=num_right, k=1, confidence=confidence)
    error = jackknife_error(votes, right=right, num_silent=num_silent, k=k) if k < num_samples else 0.0
    if error:
        half = t_quantile(num_samples - 1, confidence=confidence) * error
        ends = max(0.0, value - half), min(1.0, value + half)
        return Estimate(value=value, low=ends[0], high=ends[1], interval="jackknife over samples")
    low, high = wilson_interval(num_right, num_samples, confidence=confidence)
    low, high = _against_one(low, k), 1 - (1 - high) ** k
    return Estimate(value=value, low=min(low, value), high=max(high, value), interval="wilson over samples")


def jackknife_error(votes: Mapping[str, int], *, right: str, num_silent: int, k: int) -> float:
    """sqrt((n - 1) / n x the sum over samples of (estimate without it - their mean)^2), for k below n."""
    counts = {**votes, SILENT: num_silent}
    estimates, weights = [], []
    for answer, count in counts.items():
        if not count:
            continue
        fewer = {**counts, answer: count - 1}
        silent = fewer.pop(SILENT)
        estimates.append(majority_at_k(fewer, right=right, num_silent=silent, k=k))
        weights.append(count)
    num_samples, mean = sum(weights), float(np.average(estimates, weights=weights))
    squares = float(np.dot(weights, np.square(np.subtract(estimates, mean))))
    return math.sqrt((num_samples - 1) / num_samples * squares)


def _against_one(p: float, k: int) -> float:
    """Chance of more than half of k votes, each right with chance p, half of a tie."""
    return sum(
        (0.5 if 2 * t == k else 1.0) * math.comb(k, t) * p**t * (1 - p) ** (k - t) for t in range((k + 1) // 2, k + 1)
    )
