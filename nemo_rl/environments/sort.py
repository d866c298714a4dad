"""Exact match with the answer; a truncated response gets 0. Serves the sort demo and any task with one right text."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rl.data.datasets import Prompt
from nemo_rl.environments.interfaces import EnvReport, Response
from nemo_rl.environments.rewards.exact import exact_match
from nemo_rl.environments.rewards.math import answer_problem

__all__ = ["SortEnvironment"]


class SortEnvironment:
    """Scores in this process: a comparison of two short texts."""

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> EnvReport:
        """1 for the right text that ended by itself, else 0."""
        rows = zip(prompts, responses, strict=True)
        return EnvReport(
            rewards=tuple(
                0.0 if response.truncated else exact_match(response.text, prompt.answer) for prompt, response in rows
            )
        )

    def answer_problems(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """See `ChecksAnswers`."""
        return [answer_problem(prompt.answer) for prompt in prompts]

    def shutdown(self) -> None:
        """Nothing to end."""
