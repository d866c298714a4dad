"""`Evaluator`: samples responses to held-out prompts, scores them and measures what they are worth.

The rollout worker has one for validations during training, `nemo-rl eval` one for a checkpoint.

The result of a validation: per set of held-out prompts its measures, for logs, tables and JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from nemo_rl.config.data import MAIN_SET
from nemo_rl.config.run import EvaluationConfig
from nemo_rl.data.datasets import PromptSet
from nemo_rl.errors import WorkerError, name_some
from nemo_rl.experience.evaluation.measures import REWARD, PromptSamples, SetMeasures, measure_set, stated_answer
from nemo_rl.experience.payload import mean_of_scored, row_record
from nemo_rl.experience.rollouts import MeasuredSamples, SamplesPrompts, row_seeds
from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.utils.logger import VAL_ACCURACY_METRIC, VAL_REWARD_METRIC
from nemo_rl.utils.rollout_file import write_rollouts

__all__ = ["EvaluationTask", "Evaluator", "SampleFile", "SetResult", "ValidationResult", "evaluation_lines"]


AREA, ACCURACY = VAL_ACCURACY_METRIC.split("/")


@dataclass(frozen=True, kw_only=True, slots=True)
class SetResult:
    """The rewards of the responses to one set of prompts."""

    measures: SetMeasures
    is_accuracy: bool
    """True when rewards are 1 for right and 0 for wrong."""
    num_samples: int
    """Sampled responses to each prompt."""
    mean_response_tokens: float
    """Mean of the sampled responses, as the next two."""
    truncated_share: float
    components: Mapping[str, float] = field(default_factory=dict)
    """Means of the parts of the reward."""
    num_left_out: int = 0
    """Prompts that are in no measure because a sample of theirs could not be scored."""

    @property
    def reward(self) -> float:
        return self.measures.measures[REWARD].value

    def metrics(self, area: str) -> dict[str, float]:
        """Return the numbers for a logger.

        Args:
            area: before the names, for example `val`.
        """
        metrics = {f"{area}/{ACCURACY}": self.reward} if self.is_accuracy else {}
        metrics |= _values(self.measures, area) | _ends(self.measures, area)
        for name, part in self.measures.categories.items():
            metrics |= _values(part, f"{area}/category/{name}")
        metrics |= {f"{area}/{REWARD}/{name}": mean for name, mean in self.components.items()}
        return metrics | {
            f"{area}/mean_response_tokens": self.mean_response_tokens,
            f"{area}/truncated_share": self.truncated_share,
            **({f"{area}/left_out_prompts": float(self.num_left_out)} if self.num_left_out else {}),
        }

    def as_record(self) -> dict[str, object]:
        return {
            **self.measures.as_record(),
            "num_samples": self.num_samples,
            "rewards_are_right_or_wrong": self.is_accuracy,
            # Of a component that was scored nowhere there is no mean, and JSON has no word for it.
            "components": {name: None if math.isnan(mean) else mean for name, mean in self.components.items()},
            "mean_response_tokens": self.mean_response_tokens,
            "truncated_share": self.truncated_share,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationResult:
    """All sets of held-out prompts."""

    sets: Mapping[str, SetResult]
    """Results by the name of the set; the main one is `validation`."""
    printed: tuple[str, ...] = ()
    """Lines of the reward for the person at the terminal."""

    @property
    def reward(self) -> float:
        return self.sets[MAIN_SET].reward

    def metrics(self) -> dict[str, float]:
        """Return the numbers for a logger: `val/...` of the main set, `val/NAME/...` of each further one."""
        metrics: dict[str, float] = {}
        for name, found in self.sets.items():
            metrics |= found.metrics(AREA if name == MAIN_SET else f"{AREA}/{name}")
        return metrics


def _values(part: SetMeasures, area: str) -> dict[str, float]:
    values = {f"{area}/{name}": each.value for name, each in part.measures.items()}
    return {f"{area}/num_prompts": float(part.num_prompts), **values}


def _ends(part: SetMeasures, area: str) -> dict[str, float]:
    """Return the ends of the intervals; one that is open has none."""
    ends = {f"{area}/{name}_low": each.low for name, each in part.measures.items()}
    ends |= {f"{area}/{name}_high": each.high for name, each in part.measures.items()}
    return {name: end for name, end in ends.items() if math.isfinite(end)}


assert f"{AREA}/{REWARD}" == VAL_REWARD_METRIC, "curves and checkpoints look for the reward under this name"


def evaluation_lines(sets: Mapping[str, SetResult], *, confidence: float) -> list[str]:
    """Columns are aligned; each measure is followed by its interval.

    Example:
        `validation      256  0.891 [0.846, 0.923]`
    """
    rows: list[tuple[str, SetMeasures]] = []
    for name, found in sets.items():
        rows.append((name, found.measures))
        rows += [(f"  {category}", part) for category, part in found.measures.categories.items()]
    measures = list(dict.fromkeys(measure for _, part in rows for measure in part.measures))
    cells = [["set", "prompts", *measures]]
    for name, part in rows:
        texts = [part.measures[measure].text() if measure in part.measures else "" for measure in measures]
        cells.append([name, str(part.num_prompts), *texts])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    samples = {found.num_samples for found in sets.values()}
    num = ", ".join(map(str, sorted(samples)))
    return [
        *lines,
        f"intervals hold the mean over such prompts with {confidence:.0%} confidence, and where there is one "
        f"prompt its mean over such samples; {num} samples a prompt",
    ]


PURPOSE = "validation"
"""Purpose of the seeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleFile:
    """The file that readable samples go to."""

    path: Path
    max_rows: int | None
    """Most rows of each set and way to sample; None writes all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationTask:
    """The weights that are measured, and how much of the prompts."""

    step: int
    """Decides the seeds."""
    version: int | None
    """Version of the weights, as in `check_versions`."""
    max_prompts: int | None = None
    """Most prompts of each set, from its start; None takes all."""
    samples: SampleFile | None = None


class Evaluator:
    """Measures sets of held-out prompts.

    Args:
        seed: of the run.
        is_accuracy: rewards are 1 for right and 0 for wrong.
        sampler: gives the samples that are measured.
        sets: by name.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        *,
        sampling: SamplingParams,
        seed: int,
        is_accuracy: bool,
        sampler: SamplesPrompts,
        tokenizer: PreTrainedTokenizerBase,
        sets: Mapping[str, PromptSet],
    ) -> None:
        self._config, self._sampling, self._seed, self._is_accuracy = config, sampling, seed, is_accuracy
        self._sampler, self._tokenizer, self._sets = sampler, tokenizer, sets
        self._printed: list[str] = []

    def evaluate(self, task: EvaluationTask) -> ValidationResult:
        """Samples every set and measures it.

        Raises:
            WorkerError: an engine failed, or holds other weights. RewardError: a reward function failed.
            ResourceError: the samples cannot be written.
        """
        self._printed, records, results = [], list[dict[str, object]](), dict[str, SetResult]()
        for name in self._sets:
            results[name], lines = self._measure(name, task)
            records += lines
        if task.samples is not None:
            write_rollouts(task.samples.path, records)
        return ValidationResult(sets=results, printed=tuple(self._printed))

    def texts(self, *, step: int, num_samples: int) -> tuple[str, ...]:
        """Return responses to the main set, prompt by prompt, as a reward is given them; arguments and errors as of
        `evaluate`."""
        task = EvaluationTask(step=step, version=None)
        return self._run(self._sets[MAIN_SET], PURPOSE, task, group_size=num_samples).texts

    def _measure(self, name: str, task: EvaluationTask) -> tuple[SetResult, list[dict[str, object]]]:
        prompts = PromptSet(prompts=self._sets[name].prompts[: task.max_prompts])
        size = self._config.num_samples
        purpose = PURPOSE if name == MAIN_SET else f"{PURPOSE}:{name}"
        sampled = self._run(prompts, purpose, task, group_size=size)
        greedy = self._run(prompts, f"{purpose}:greedy", task) if self._config.greedy else None
        rewards = sampled.rewards
        answers = [stated_answer(text) for text in sampled.texts]
        kept = self._whole(prompts, sampled, greedy, size)
        samples = [
            PromptSamples(
                rewards=rewards[row * size : (row + 1) * size],
                answers=tuple(answers[row * size : (row + 1) * size]),
                category=prompts.prompts[row].category,
                greedy_reward=None if greedy is None else greedy.rewards[row],
            )
            for row in kept
        ]
        result = SetResult(
            measures=measure_set(samples, self._config, is_accuracy=self._is_accuracy),
            is_accuracy=self._is_accuracy,
            num_samples=size,
            mean_response_tokens=float(np.mean(sampled.num_tokens)),
            truncated_share=float(np.mean(sampled.truncated)),
            components={
                part: mean_of_scored(np.asarray(values, dtype=np.float32))
                for part, values in sampled.components.items()
            },
            num_left_out=len(prompts) - len(kept),
        )
        if task.samples is None:
            return result, []
        records = self._records(name, prompts, sampled, task.samples.max_rows)
        if greedy is not None:
            records += self._records(name, prompts, greedy, task.samples.max_rows, is_greedy=True)
        return result, records

    def _whole(
        self, prompts: PromptSet, sampled: MeasuredSamples, greedy: MeasuredSamples | None, size: int
    ) -> list[int]:
        kept = [
            row
            for row in range(len(prompts))
            if all(sampled.is_scored[row * size : (row + 1) * size]) and (greedy is None or greedy.is_scored[row])
        ]
        if not kept:
            raise WorkerError(
                f"no held-out prompt of {len(prompts)} has a reward for every sample: environments or engines failed: "
                f"{name_some(dict.fromkeys(sampled.causes)) or 'see the log of the environment'}",
                stage="validation",
            )
        return kept

    def _run(
        self, prompts: PromptSet, purpose: str, task: EvaluationTask, *, group_size: int | None = None
    ) -> MeasuredSamples:
        """Return samples, of each prompt as many as a group has, or with no size of a group one that is greedy."""
        sampling = self._sampling if group_size is not None else replace(self._sampling, temperature=0.0)
        seeds = row_seeds(self._seed, purpose, task.step, count=len(prompts) * (group_size or 1))
        found = self._sampler.sample(prompts.prompts, seeds, sampling, version=task.version)
        self._printed += found.printed
        return found

    def _records(
        self, name: str, prompts: PromptSet, found: MeasuredSamples, max_rows: int | None, *, is_greedy: bool = False
    ) -> list[dict[str, object]]:
        size = len(found.rewards) // len(prompts)
        records = []
        for row, response in enumerate(found.responses[:max_rows]):
            prompt = prompts.prompts[row // size]
            about: dict[str, object] = {"set": name, "number": prompt.index, "sample": row % size}
            if prompt.category is not None:
                about["category"] = prompt.category
            record = row_record(
                reward=found.rewards[row],
                components={part: values[row] for part, values in found.components.items()},
                response_tokens=found.num_tokens[row],
                truncated=found.truncated[row],
                ending=found.endings[row] if found.endings else None,
            )
            texts = {
                "prompt": self._tokenizer.decode(list(prompt.ids)),
                "response": self._tokenizer.decode(list(response)),
            }
            records.append({**texts, **about, "greedy": is_greedy, **record})
        return records
