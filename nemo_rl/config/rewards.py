"""What happens to rewards before they become advantages (`grpo.reward_scaling`, `grpo.reward_shaping`)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, FiniteFloat, NonNegativeFloat, PositiveInt

from nemo_rl.config.base import Section

__all__ = ["RewardScalingConfig", "RewardShapingConfig"]


class RewardScalingConfig(Section):
    """Rewards are clamped to one interval and mapped linearly to another."""

    enabled: bool = False
    """Scale rewards before shaping; groups are still chosen by the rewards as they were scored."""
    source_min: FiniteFloat = 0.0
    """Rewards below this count as it."""
    source_max: FiniteFloat = 1.0
    """Rewards above this count as it."""
    target_min: FiniteFloat = 0.0
    """What `source_min` becomes."""
    target_max: FiniteFloat = 1.0
    """What `source_max` becomes."""


class RewardShapingConfig(Section):
    """What long or cut responses lose."""

    enabled: bool = False
    """Shape rewards."""
    overlong_buffer_length: PositiveInt = 128
    """Last tokens before `max_response_length` in which the penalty grows from 0."""
    overlong_buffer_penalty: NonNegativeFloat = 1.0
    """Penalty of a response of `max_response_length` tokens or more."""
    max_response_length: PositiveInt | None = None
    """In tokens, as a rule `${policy.generation.max_new_tokens}`; must be set for the buffer."""
    stop_properly_penalty_coef: Annotated[float, Field(ge=0, le=1)] | None = None
    """Instead of the buffer: rewards of truncated responses are multiplied by this, which raises negative ones; null
    takes the buffer."""
