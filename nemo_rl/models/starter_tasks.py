"""The tasks a starter checkpoint can be made for: where their problems come from, and how long the warm start takes.

Read by `starter.make_starter` and the command line. A new task is one entry in `STARTER_TASKS`. Invariant: the
validation split is the one that the task's recipe validates on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from nemo_rl.config.schema import DatasetConfig
from nemo_rl.data.datasets import RawPrompt, raw_prompts
from nemo_rl.data.thinking import with_thinking

__all__ = ["STARTER_TASKS", "StarterConfig", "StarterTask"]

VALIDATION_SEED, VALIDATION_SIZE = 777, 256
CALIBRATION_SIZE = 512
CORPUS_SEED, CORPUS_SIZE = 5, 2000
# Training problems of seed s are drawn with this plus s, far from the seeds of the other splits and of the recipes.
TRAINING_SEED = 10_000_000
# The model with experts is half as wide as the dense one; at the dense one's 2e-3 it takes a quarter more steps.
EXPERTS_LEARNING_RATE = 4e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class StarterConfig:
    """Recipe of the warm start (supervised fine-tuning, AdamW, response tokens only)."""

    seed: int = 0
    num_experts: int = 0
    """Experts of every layer, of which each token uses two; 0 is a dense model."""
    stop_accuracy: float = 0.25
    """Stop at the first evaluation that reaches this sampled accuracy on the calibration split."""
    target_accuracy: float = 0.30
    """Of the last evaluations, the weights nearest to this accuracy are kept."""
    num_problems: int = 8000
    batch_size: int = 64
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    max_steps: int = 600
    first_evaluation: int = 40
    evaluate_every: int = 5
    max_grad_norm: float = 1.0

    def with_experts(self, num_experts: int) -> StarterConfig:
        """The same recipe for a model with so many experts in every layer."""
        return replace(self, num_experts=num_experts, learning_rate=EXPERTS_LEARNING_RATE)


@dataclass(frozen=True, kw_only=True, slots=True)
class StarterTask:
    """One task.

    Example:
        >>> task = STARTER_TASKS["sort"]
        >>> task.validation()[0].answer == "".join(sorted(task.validation()[0].answer))
        True
    """

    dataset: DatasetConfig
    """Source and its options, as in the recipe; size and seed are set per split."""
    config: StarterConfig
    """Settings of the warm start; the seed is set by the caller."""
    demonstrate: Callable[[RawPrompt], str]
    """The response that the warm start teaches; it ends with the answer."""
    max_new_tokens: int
    """Longest sampled answer; a right one, its end-of-turn token included, is shorter."""
    max_length: int
    """Prompt and answer together, in tokens."""
    calibration_seed: int = 778
    """For reasoning_gym far from the other seeds: its item i is drawn with seed + i, so near seeds share items."""

    @property
    def validation_dataset(self) -> DatasetConfig:
        """What the recipe names as `data.validation`."""
        return self.dataset.model_copy(update={"size": VALIDATION_SIZE, "seed": VALIDATION_SEED})

    def validation(self) -> list[RawPrompt]:
        """The split that the recipe validates on."""
        return self._draw(size=VALIDATION_SIZE, seed=VALIDATION_SEED)

    def calibration(self) -> list[RawPrompt]:
        """The split that ends the warm start; shares no text with validation."""
        return self._draw(size=CALIBRATION_SIZE, seed=self.calibration_seed, exclude=_texts(self.validation()))

    def corpus(self) -> list[RawPrompt]:
        """What the tokenizer is built from."""
        return self._draw(size=CORPUS_SIZE, seed=CORPUS_SEED, exclude=self.held_out())

    def training(self, *, size: int, seed: int) -> list[RawPrompt]:
        """Problems of the warm start; shares no text with validation and calibration."""
        return self._draw(size=size, seed=TRAINING_SEED + seed, exclude=self.held_out())

    def held_out(self) -> frozenset[str]:
        """Texts of validation and calibration."""
        return _texts([*self.validation(), *self.calibration()])

    def _draw(self, *, size: int, seed: int, exclude: Collection[str] = frozenset()) -> list[RawPrompt]:
        cfg = self.dataset.model_copy(update={"size": size, "seed": seed})
        drawn = raw_prompts(cfg, "starter", exclude)
        # Not every source leaves the excluded texts out by itself; then fewer than `size` come back.
        return [problem for problem in drawn if problem.text not in exclude]


def _texts(problems: Collection[RawPrompt]) -> frozenset[str]:
    return frozenset(problem.text for problem in problems)


def _answer_alone(problem: RawPrompt) -> str:
    return str(problem.answer)


def _running_sums(problem: RawPrompt) -> str:
    """For `... problem: 4 + 3 - 9 =`: `<think>4+3=7 7-9=-2</think>-2`."""
    terms = [int(term.replace(" ", "")) for term in re.findall(r"[-+]? ?\d+", problem.text.rpartition(":")[2])]
    total, lines = terms[0], []
    for term in terms[1:]:
        lines.append(f"{total}{term:+d}={total + term}")
        total += term
    assert str(total) == problem.answer, f"{problem.text!r}: expected {problem.answer!r}, got {total}"
    return with_thinking(" ".join(lines), str(total))


STARTER_TASKS: Mapping[str, StarterTask] = {
    "sort": StarterTask(
        dataset=DatasetConfig(dataset_name="sort_digits", options={"min_digits": 6, "max_digits": 8}),
        config=StarterConfig(),
        demonstrate=_answer_alone,
        # 8 digits and the end-of-turn token; one more lets a wrong answer run over.
        max_new_tokens=10,
        max_length=64,
    ),
    "chain_sum": StarterTask(
        dataset=DatasetConfig(
            dataset_name="reasoning_gym",
            task="chain_sum",
            options={"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
        ),
        config=StarterConfig(stop_accuracy=0.30, target_accuracy=0.35, first_evaluation=120, evaluate_every=10),
        demonstrate=_running_sums,
        # Two sums, the answer and the control tokens; some more let a wrong answer run over.
        max_new_tokens=24,
        max_length=64,
        calibration_seed=1_000_000,
    ),
}
