"""What samples of held-out prompts are worth: `measure_set` turns rewards and answers into means with intervals.

Called by the evaluator. Names of measures: `reward` (mean of the samples), `pass@k`, `majority@k`, `greedy_reward`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from nemo_rl.config.evaluation import EvaluationConfig
from nemo_rl.experience.evaluation.estimates import majority_at_k, pass_at_k
from nemo_rl.experience.evaluation.intervals import Estimate, mean_with_interval
from nemo_rl.experience.evaluation.one_prompt import majority_of_samples, mean_of_samples, pass_of_samples

__all__ = ["REWARD", "PromptSamples", "SetMeasures", "measure_set"]

REWARD = "reward"
_RIGHT = "\0right"
"""What right responses vote for, whatever they wrote: no text has this character."""
SHARE = (0.0, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSamples:
    """All samples of one prompt.

    Example:
        `PromptSamples(rewards=(1.0, 0.0), answers=("12", "21"), category=None, greedy_reward=None)`
    """

    rewards: tuple[float, ...]
    answers: tuple[str | None, ...]
    """What each sample says; None for nothing."""
    category: str | None
    greedy_reward: float | None
    """None where no greedy response was taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetMeasures:
    """Measures of one set of prompts, or of one category of it."""

    num_prompts: int
    measures: Mapping[str, Estimate]
    categories: Mapping[str, SetMeasures] = field(default_factory=dict)
    """By name, in order; empty where prompts have none."""

    def as_record(self) -> dict[str, object]:
        """For JSON."""
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
    """Of each answer, and how many samples give none."""
    given = [
        _RIGHT if reward >= config.pass_reward else answer
        for reward, answer in zip(prompt.rewards, prompt.answers, strict=True)
    ]
    return Counter(answer for answer in given if answer is not None), given.count(None)
