"""Measures of a single prompt with intervals over its samples. Pure functions of small integers.

Called by `measure_set` for a set or category of one prompt, of which the spread over prompts is not known: an interval
holds what this prompt would have with ever more samples. Symbols: n samples, c of them right, p the chance that a
sample is right, k drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from nemo_rl.experience.evaluation.estimates import majority_at_k, pass_at_k
from nemo_rl.experience.evaluation.intervals import Estimate, t_quantile, wilson_interval

__all__ = ["jackknife_error", "majority_of_samples", "mean_of_samples", "pass_of_samples"]

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
