"""Settings of rollout workers (`experience`) and of conversations of several turns (`experience.conversation`)."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from nemo_rl.config.base import Section

__all__ = ["ConversationConfig", "Ending", "EndingPolicy", "ExperienceConfig"]


class Ending(StrEnum):
    """The reason why a conversation ended; each has exactly one."""

    ANSWERED = "answered"
    """The model gave its answer: a turn without a call, to an environment that only scores."""
    ENVIRONMENT_DONE = "environment_done"
    """The environment said that it is done."""
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    """`max_sampled_tokens` are used up, or the turn that should have been the answer was cut."""
    TIME_LIMIT = "time_limit"
    INVALID_CALLS = "invalid_calls"
    """More than `max_invalid_calls` calls could not be read, or named no tool."""
    CONTEXT_FULL = "context_full"
    """`policy.max_total_sequence_length` leaves no room for another turn."""
    ENV_ERROR = "env_error"
    """The process of the environment or of a tool failed."""
    ENGINE_ERROR = "engine_error"
    """No engine could sample a turn."""
    CANCELLED = "cancelled"
    """The group was given up, or the run ended."""


EndingPolicy = Literal["score", "leave_out", "retry"]


class EndingPolicies(Section):
    """The treatment of a row by its ending. `score`: its reward counts; `leave_out`: the row is in no statistic and not
    trained; `retry`: the conversation is sampled again from its start with the same seeds, at most `retries` times, and
    left out when it fails again."""

    answered: EndingPolicy = "score"
    """The model gave its answer: a turn without a call, to an environment that only scores."""
    environment_done: EndingPolicy = "score"
    """The environment, or the program, said that it is done."""
    turn_limit: EndingPolicy = "score"
    """`max_turns` turns, and no end."""
    token_limit: EndingPolicy = "score"
    """`max_sampled_tokens` are used up, or the turn that should have been the answer was cut."""
    time_limit: EndingPolicy = "score"
    """`max_seconds` have passed."""
    invalid_calls: EndingPolicy = "score"
    """More than `env.tools.max_invalid_calls` calls could not be read, or named no tool."""
    context_full: EndingPolicy = "score"
    """`policy.max_total_sequence_length` leaves no room for another turn."""
    env_error: Literal["leave_out", "retry"] = "retry"
    """The process of the environment, of a tool or of a program failed; this is never a reward."""
    engine_error: Literal["leave_out", "retry"] = "retry"
    """No engine could sample a turn; this is never a reward."""
    cancelled: Literal["leave_out"] = "leave_out"
    """The group was given up, or the run ended."""

    @property
    def by_ending(self) -> dict[Ending, EndingPolicy]:
        """Return the policy of each ending."""
        return {
            Ending.ANSWERED: self.answered,
            Ending.ENVIRONMENT_DONE: self.environment_done,
            Ending.TURN_LIMIT: self.turn_limit,
            Ending.TOKEN_LIMIT: self.token_limit,
            Ending.TIME_LIMIT: self.time_limit,
            Ending.INVALID_CALLS: self.invalid_calls,
            Ending.CONTEXT_FULL: self.context_full,
            Ending.ENV_ERROR: self.env_error,
            Ending.ENGINE_ERROR: self.engine_error,
            Ending.CANCELLED: self.cancelled,
        }


class ConversationConfig(Section):
    """Rollouts of several turns: the model and an environment, tools or a program take turns."""

    enabled: bool = False
    """True: every row is a conversation; an environment that only scores then scores the last turn. False: every row is
    one response to one prompt."""
    max_turns: PositiveInt = 16
    """Most turns of the model in a conversation."""
    max_sampled_tokens: PositiveInt | None = None
    """Most tokens that the model samples in a conversation; null: what `policy.max_total_sequence_length` leaves. A
    turn alone has at most `policy.generation.max_new_tokens`."""
    max_seconds: PositiveFloat | None = None
    """Most seconds of a conversation, without the time that it waits for a place in an engine; null: no limit."""
    max_open: PositiveInt = 1024
    """Most conversations that a rollout worker has open at one time; others wait."""
    endings: EndingPolicies = Field(default_factory=EndingPolicies)
    retries: NonNegativeInt = 2
    """Most further attempts of a conversation whose ending is `retry`."""
    min_scored: PositiveInt = 2
    """Fewest scored conversations of a group; a group with fewer is treated as `too_few` says."""
    too_few: Literal["leave_out", "refill"] = "leave_out"
    """A group with too few scored conversations: train none of its rows, or sample those that are missing once more
    with other seeds."""
    drop_void_turns: bool = False
    """Leave a row out of the loss that has a turn without text and without a call (SimpleTIR); it counts for the
    baseline."""
    keep_replies: bool = True
    """Write the replies of environments and tools with `diagnostics.keep_steps`, so that conversations can be
    replayed."""


class ExperienceConfig(Section):
    """The workers that turn prompts into scored rows, and the conversations in which they do it."""

    num_workers: PositiveInt = 1
    """Rollout workers, each with reward processes of its own; more than one only with `grpo.async.enabled`."""
    conversation: ConversationConfig = Field(default_factory=ConversationConfig)
