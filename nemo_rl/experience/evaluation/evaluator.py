"""`Evaluator`: samples responses to held-out prompts, scores them and measures what they are worth.

The rollout worker has one for validations during training, `nemo-rl eval` one for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from nemo_rl.config.data import MAIN_SET
from nemo_rl.config.evaluation import EvaluationConfig
from nemo_rl.data.datasets import PromptSet
from nemo_rl.errors import WorkerError, name_some
from nemo_rl.experience.evaluation.measures import PromptSamples, measure_set, stated_answer
from nemo_rl.experience.evaluation.result import SetResult, ValidationResult
from nemo_rl.experience.payload import mean_of_scored, row_record
from nemo_rl.experience.rollouts import MeasuredSamples, SamplesPrompts, row_seeds
from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.utils.rollout_file import write_rollouts

__all__ = ["EvaluationTask", "Evaluator", "SampleFile"]

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
