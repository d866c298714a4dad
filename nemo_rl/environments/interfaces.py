"""What an environment takes and gives.

Called by the rollout worker, once per step with all rows, and once per validation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nemo_rl.data.datasets import Prompt

__all__ = ["EnvReport", "Environment"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvReport:
    """Rewards of one call, aligned with its rows, and what happened while scoring."""

    rewards: tuple[float, ...]
    num_timeouts: int = 0
    """Rows whose scoring passed `env.timeout_s` and got reward 0."""


class Environment(Protocol):
    """Scores responses. Rewards are finite numbers, one per row."""

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str], truncated: Sequence[bool]) -> EnvReport:
        """Args:
            prompts: one per row; rows of a group repeat their prompt.
            responses: decoded texts without the stop token.
            truncated: True where the length limit ended the response.

        Raises:
            RewardError: scoring failed; the text names prompt, response and cause.
        """

    def shutdown(self) -> None:
        """Ends scoring processes. Idempotent."""
