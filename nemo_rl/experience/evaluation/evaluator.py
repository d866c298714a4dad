"""`Evaluator`: samples responses to held-out prompts, scores them and measures what they are worth.

The rollout worker has one for validations during training, `nemo-rl eval` one for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from nemo_rl.config.evaluation import EvaluationConfig
from nemo_rl.config.schema import MAIN_SET
from nemo_rl.data.datasets import PromptSet
from nemo_rl.experience.evaluation.measures import PromptSamples, measure_set, stated_answer
from nemo_rl.experience.evaluation.result import SetResult, ValidationResult
from nemo_rl.experience.payload import mean_of_scored, row_record
from nemo_rl.experience.rollouts import ResponseScorer, ScoredSamples, check_versions, row_seeds
from nemo_rl.models.generation.interfaces import GenerationInterface, GenerationRequest, SamplingParams
from nemo_rl.utils.rollout_file import write_rollouts

__all__ = ["EvaluationSettings", "EvaluationTask", "Evaluator", "SampleFile"]

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


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSettings:
    """The settings by which every set of a run is sampled and measured."""

    config: EvaluationConfig
    sampling: SamplingParams
    seed: int
    """Seed of the run."""
    is_accuracy: bool
    """True where rewards are 1 for right and 0 for wrong."""


class Evaluator:
    """Measures sets of held-out prompts.

    Args:
        generation: engines, shared with the weight sync.
        sets: by name.
    """

    def __init__(
        self,
        settings: EvaluationSettings,
        *,
        generation: GenerationInterface,
        scorer: ResponseScorer,
        tokenizer: PreTrainedTokenizerBase,
        sets: Mapping[str, PromptSet],
    ) -> None:
        self._config, self._sampling = settings.config, settings.sampling
        self._seed, self._is_accuracy = settings.seed, settings.is_accuracy
        self._generation, self._scorer, self._tokenizer, self._sets = generation, scorer, tokenizer, sets
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

    def _measure(self, name: str, task: EvaluationTask) -> tuple[SetResult, list[dict[str, object]]]:
        prompts = PromptSet(prompts=self._sets[name].prompts[: task.max_prompts])
        size = self._config.num_samples
        purpose = PURPOSE if name == MAIN_SET else f"{PURPOSE}:{name}"
        sampled = self._run(prompts, purpose, task, group_size=size)
        greedy = self._run(prompts, f"{purpose}:greedy", task) if self._config.greedy else None
        rewards = sampled.report.rewards
        answers = [stated_answer(text) for text in sampled.texts]
        samples = [
            PromptSamples(
                rewards=rewards[row * size : (row + 1) * size],
                answers=tuple(answers[row * size : (row + 1) * size]),
                category=prompt.category,
                greedy_reward=None if greedy is None else greedy.report.rewards[row],
            )
            for row, prompt in enumerate(prompts.prompts)
        ]
        result = SetResult(
            measures=measure_set(samples, self._config, is_accuracy=self._is_accuracy),
            is_accuracy=self._is_accuracy,
            num_samples=size,
            mean_response_tokens=float(sampled.output.lengths.float().mean()),
            truncated_share=float(sampled.output.truncated.float().mean()),
            components={
                part: mean_of_scored(np.asarray(values, dtype=np.float32))
                for part, values in sampled.report.components.items()
            },
        )
        if task.samples is None:
            return result, []
        records = self._records(name, prompts, sampled, task.samples.max_rows)
        if greedy is not None:
            records += self._records(name, prompts, greedy, task.samples.max_rows, is_greedy=True)
        return result, records

    def _run(
        self, prompts: PromptSet, purpose: str, task: EvaluationTask, *, group_size: int | None = None
    ) -> ScoredSamples:
        """Sampled, or with no size of a group greedily."""
        sampling = self._sampling if group_size is not None else replace(self._sampling, temperature=0.0)
        request = GenerationRequest(
            prompt_ids=tuple(prompt.ids for prompt in prompts.prompts),
            seeds=row_seeds(self._seed, purpose, task.step, count=len(prompts) * (group_size or 1)),
            sampling=sampling,
        )
        output = self._generation.generate(request)
        check_versions(output, task.version)
        scored = self._scorer.score(prompts.prompts, output)
        self._printed += scored.report.printed
        return scored

    def _records(
        self, name: str, prompts: PromptSet, rollouts: ScoredSamples, max_rows: int | None, *, is_greedy: bool = False
    ) -> list[dict[str, object]]:
        """The first rows as people read them."""
        report, output = rollouts.report, rollouts.output
        size = len(report.rewards) // len(prompts)
        responses = output.token_ids.split(output.lengths.tolist())[:max_rows]
        records = []
        for row, response in enumerate(responses):
            prompt = prompts.prompts[row // size]
            about: dict[str, object] = {"set": name, "number": prompt.index, "sample": row % size}
            if prompt.category is not None:
                about["category"] = prompt.category
            record = row_record(
                reward=report.rewards[row],
                components={part: values[row] for part, values in report.components.items()},
                response_tokens=len(response),
                truncated=bool(output.truncated[row]),
            )
            texts = {
                "prompt": self._tokenizer.decode(list(prompt.ids)),
                "response": self._tokenizer.decode(response.tolist()),
            }
            records.append({**texts, **about, "greedy": is_greedy, **record})
        return records
