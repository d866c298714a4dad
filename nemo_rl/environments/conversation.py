"""An environment with turns: `open` gives a conversation for each row, whose `reply` answers every turn of the model.

    environment = Guess(options)                  once per process
      `- conversation = environment.open(row)     once per row of a group
           |- conversation.reply(turn) -> Reply   after each turn of the model that calls no tool
           `- conversation.close()                always, also after an error; called by the loop, never by the user

Standard library only: the processes in which environments run import this file. Invariant: an environment sees text and
seeds, never tokens, so that the tokens of a row are those that the engine has sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from nemo_rl.data.conversation import Message, ToolCall

__all__ = [
    "Conversation",
    "ConversationRow",
    "EnvironmentFailure",
    "Reply",
    "ToolError",
    "ToolResult",
    "Turn",
    "TurnEnvironment",
]

ToolError = Literal["unknown_tool", "bad_arguments", "raised", "timeout", "died", "too_many_calls", "unreadable"]
"""Failures of a call that the model is told of: they are results of what it has written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationRow:
    """The row of the data that a conversation is about."""

    prompt: str
    """Text of the prompt, without the chat template."""
    answer: object = None
    """JSON-like: the gold answer of the row."""
    metadata: Mapping[str, object] = field(default_factory=dict)
    """JSON-like: the other columns of the row."""
    seed: int = 0
    """Seed of the row; random choices of the environment must come from it alone, so that they can be replayed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn of the model, as the environment sees it."""

    number: int
    """Counted from 0."""
    text: str
    """Decoded text without the stop token and without calls of tools."""
    num_tokens: int
    """Sampled tokens, the stop token included."""
    truncated: bool = False
    """True when a limit of tokens ended the turn."""
    calls: tuple[ToolCall, ...] = ()
    """Calls of tools that the turn asks for; empty in turns that reach `reply` unless no tool is configured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """The answer of an environment to one turn.

    Example:
        `Reply(messages=(Message(role="user", content="higher"),))`, and at last `Reply(done=True, reward=1.0)`
    """

    messages: tuple[Message, ...] = ()
    """Messages that the model reads next; empty only when `done`."""
    done: bool = False
    """True ends the conversation."""
    reward: float = 0.0
    """Reward of the turn; the reward of the row is the sum over its turns."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Parts of the reward by name, for curves alone; summed over turns."""
    stop: tuple[str, ...] | None = None
    """Strings that end the next turn; None: those of the recipe."""
    columns: Mapping[str, object] = field(default_factory=dict)
    """Values of `data.extra_columns` whose source is the environment: numbers, nested lists of them, or JSON-like for a
    column of objects. A later turn's value of the same name takes the place of an earlier one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
    """The outcome of one call of a tool, as the model reads it."""

    text: str
    error: ToolError | None = None
    """Kind of the failure that `text` tells the model; None for a result."""
    seconds: float = 0.0


class Conversation(Protocol):
    """The state of one row."""

    def reply(self, turn: Turn) -> Reply:
        """Return what the model reads next, or the end. An exception is a failure of the infrastructure, never a
        reward."""

    def close(self) -> None:
        """Free what the conversation holds. A class without it holds nothing."""


class TurnEnvironment(Protocol):
    """A class that is made with `env.options` as keyword arguments, in its own process."""

    def open(self, row: ConversationRow) -> Conversation:
        """Return a new conversation about the row."""


class EnvironmentFailure(Exception):
    """The infrastructure of a conversation failed: its process died, was too late, raised, or gave no reply.

    Raised by the hosts of environments and tools on the side of the rollout worker; ends the conversation as
    `env_error`.
    """
