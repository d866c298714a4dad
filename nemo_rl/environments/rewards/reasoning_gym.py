"""The task's own score for reasoning_gym prompts. A scoring process calls `make_reasoning_gym_reward`."""

from __future__ import annotations

import json
from typing import Any

from nemo_rl.data.reasoning_gym_wrapper import Task, TaskScorer
from nemo_rl.data.thinking import final_answer

__all__ = ["make_reasoning_gym_reward"]


def make_reasoning_gym_reward() -> ReasoningGymReward:
    """A reward that makes each task once and keeps it."""
    return ReasoningGymReward()


class ReasoningGymReward:
    """Partial credit in 0..1 for what a response says after its thoughts (`</think>`), or for all of it."""

    def __init__(self) -> None:
        self._scorers: dict[str, TaskScorer] = {}

    def __call__(self, prompt: str, response: str, answer: Any) -> float:
        """Args:
        answer: `{"task": Task.to_json(), "index": i}`, as the dataset put it into the prompt's metadata.
        """
        key = json.dumps(answer["task"], sort_keys=True)
        if key not in self._scorers:
            self._scorers[key] = TaskScorer(Task(**answer["task"]))
        return self._scorers[key].score(answer["index"], final_answer(response), question=prompt)
