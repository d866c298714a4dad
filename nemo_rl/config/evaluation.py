"""Settings of the measurement of held-out prompts (`evaluation` section)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, FiniteFloat, PositiveInt

from nemo_rl.config.base import Section

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
