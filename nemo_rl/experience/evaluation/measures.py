"""Measures of samples of held-out prompts: `measure_set` turns rewards and answers into means with intervals.

Called by the evaluator. Names of measures: `reward` (mean of the samples), `pass@k`, `majority@k`, `greedy_reward`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from nemo_rl.config.evaluation import EvaluationConfig
from nemo_rl.data.thinking import final_answer, last_boxes
from nemo_rl.experience.evaluation.estimates import (
    Estimate,
    majority_at_k,
    mean_with_interval,
    pass_at_k,
    t_quantile,
    wilson_interval,
)

__all__ = [
    "REWARD",
    "PromptSamples",
    "SetMeasures",
    "jackknife_error",
    "majority_of_samples",
    "measure_set",
    "pass_of_samples",
    "stated_answer",
]

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
