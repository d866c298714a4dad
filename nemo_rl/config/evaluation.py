"""Settings of the measurement of held-out prompts (`evaluation` section), and the rules over validation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, FiniteFloat, PositiveInt

from nemo_rl.config.base import Section
from nemo_rl.config.rule import Ignored, would_be_ignored

if TYPE_CHECKING:
    from nemo_rl.config.schema import MasterConfig

__all__ = ["EvaluationConfig"]


class EvaluationConfig(Section):
    """The measurement of held-out prompts, by validations during training and by `nemo-rl eval`."""

    num_samples: Annotated[int, Field(gt=0, le=1024)] = 1
    """Sampled responses to each held-out prompt."""
    pass_at: tuple[PositiveInt, ...] = (1,)
    """Numbers k of the measure pass@k: the share of prompts of which one of k samples is right, without bias."""
    majority_at: tuple[Annotated[int, Field(gt=0, le=64)], ...] = ()
    """Numbers k of the measure majority@k: the share of prompts whose right answer has most votes of k samples. Right
    responses vote for one answer, wrong ones for what is boxed in them, or else for what follows their thoughts."""
    pass_reward: FiniteFloat = 1.0
    """A response with at least this reward is right."""
    greedy: bool = False
    """Take a greedy response to each prompt, too."""
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Confidence of the intervals around every mean over prompts."""


def rule_validation_needs_prompts(config: MasterConfig) -> Iterator[str]:
    if config.data.validation is not None:
        return
    grpo, switch = config.grpo, "data.validation"
    because = f"there is no {switch} ({switch}=null turns all validation off)"
    asked = {
        "val_period": grpo.val_period > 0,
        "val_at_start": grpo.val_at_start,
        "val_at_end": grpo.val_at_end,
        "stop_at_validation_accuracy": grpo.stop_at_validation_accuracy is not None,
    }
    lines: list[str] = [
        Ignored(f"grpo.{name}", f"{getattr(grpo, name)} ", switch=switch, because=because)
        for name, is_on in asked.items()
        if is_on
    ]
    lines += would_be_ignored(grpo, "grpo", ["max_val_samples"], switch=switch, because=because)
    lines += would_be_ignored(config.data, "data", ["validation_sets"], switch=switch, because=because)
    names = tuple(type(config.evaluation).model_fields)
    yield from lines + would_be_ignored(config.evaluation, "evaluation", names, switch=switch, because=because)


_NO_SET_NAMES = ("validation", "reward", "category")
"""`data.validation` itself, and what follows `val/` in the names of its metrics."""


def rule_validation_set_names_are_unique(config: MasterConfig) -> Iterator[str]:
    yield from (
        f"data.validation_sets.{name}: is no name for a further set; expected another than {', '.join(_NO_SET_NAMES)}"
        for name in config.data.validation_sets
        if name in _NO_SET_NAMES
    )


def rule_evaluation_has_enough_samples(config: MasterConfig) -> Iterator[str]:
    section = config.evaluation
    yield from (
        f"evaluation.{name}: {k} is more than evaluation.num_samples {section.num_samples}; raise num_samples to {k}"
        for name, ks in (("pass_at", section.pass_at), ("majority_at", section.majority_at))
        for k in ks
        if k > section.num_samples
    )
    if config.policy.generation.val_temperature == 0:
        because = "policy.generation.val_temperature is 0: all responses to a prompt are greedy"
        switch, names = "policy.generation.val_temperature", ("num_samples", "greedy")
        yield from would_be_ignored(section, "evaluation", names, switch=switch, because=because)


def rule_validation_prompts_need_a_validation(config: MasterConfig) -> Iterator[str]:
    if config.data.validation is None or config.has_validation:
        return
    lines = [
        "data.validation: is never used, because grpo.val_period is 0 and val_at_start and val_at_end are false; "
        "set it to null, or turn one of them on"
    ]
    if config.grpo.stop_at_validation_accuracy is not None:
        lines.append("grpo.stop_at_validation_accuracy: nothing is ever validated; set grpo.val_period")
    yield from lines
