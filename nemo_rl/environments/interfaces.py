"""The interface of an environment: what it is given and what it returns.

Called by the rollout worker: with the rows of whole groups as soon as they are sampled, and once per validation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from nemo_rl.config.env import Ending
from nemo_rl.data.datasets import Prompt
from nemo_rl.utils.metrics import Reduction

__all__ = [
    "NO_REWARD",
    "ChecksAnswers",
    "EnvReport",
    "Environment",
    "HasSource",
    "IsProbed",
    "Response",
    "WaitsForOthers",
    "ending_of",
    "waits_for_others",
]


NO_REWARD = "the reward is None (env.on_none)"
"""Reason in `EnvReport.unscored` of a row that the reward says nothing of."""


def ending_of(unscored: str) -> Ending:
    """Return the ending of a row that has no reward for this reason of `EnvReport.unscored`."""
    return Ending.NO_REWARD if unscored == NO_REWARD else Ending.JUDGE_ERROR


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """The answer of a model to one prompt.

    Example:
        `Response(text="1345", num_tokens=5, truncated=False)`
    """

    text: str
    """Decoded, without the stop token."""
    num_tokens: int
    """The stop token included."""
    truncated: bool = False
    """True where the length limit ended the response."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvReport:
    """Rewards of one call, aligned with its rows, and what happened while scoring."""

    rewards: tuple[float, ...]
    components: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Parts of the rewards by name, before their weights; a row that was not scored has NaN. Empty where rewards have
    no parts."""
    num_timeouts: int = 0
    """Rows whose scoring passed `env.timeout_s` and got reward 0."""
    columns: Mapping[str, Sequence[object]] = field(default_factory=dict)
    """Values of `data.extra_columns` whose source is the environment: one per row, a tensor, an array, nested lists of
    numbers, or JSON-like for a column of objects."""
    unscored: tuple[str, ...] = ()
    """Reason of each row that has no reward, and counts nowhere; empty for a row that has one, and where all have."""
    metrics: Mapping[str, Reduction] = field(default_factory=dict)
    """The run logs these numbers of the call under `rollout/`."""
    printed: tuple[str, ...] = ()
    """Lines for the person at the terminal: what the reward printed, cut to a few."""


class Environment(Protocol):
    """Scores responses. Rewards are finite numbers, one per row."""

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> EnvReport:
        """Args:
            prompts: one per row; rows of a group repeat their prompt.
            responses: one per row.

        Raises:
            RewardError: scoring failed; the text names prompt, response and cause.
        """

    def shutdown(self) -> None:
        """End scoring processes. Idempotent."""


@runtime_checkable
class ChecksAnswers(Protocol):
    """An environment that can say before a response is there which gold answers it cannot compare with."""

    def answer_problems(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """Return why the gold answer of each prompt cannot be read; None where it can."""


@runtime_checkable
class WaitsForOthers(Protocol):
    """An environment that may wait for others, such as judges."""

    @property
    def overlaps(self) -> bool:
        """Return whether it does: its `score` is then called from several threads, and goes on beside the sampling of
        further groups; rows may be `unscored` for any reason."""


def waits_for_others(environment: Environment) -> bool:
    """Return whether an environment `overlaps`."""
    return isinstance(environment, WaitsForOthers) and environment.overlaps


@runtime_checkable
class IsProbed(Protocol):
    """An environment that can be tried before a run."""

    def probe(self, prompt: Prompt, *, where: str) -> None:
        """Score responses to a prompt of the section `where`; raise RewardError where that gives nothing."""


@runtime_checkable
class HasSource(Protocol):
    """An environment whose rewards have an identity: runs of another one are not resumed."""

    @property
    def source(self) -> str:
        """Return a text, or a digest, that changes with the rewards."""
