"""What of a response reasoning_gym's own scorer sees."""

from __future__ import annotations

import pytest

from nemo_rl.data.reasoning_gym_wrapper import Task, questions
from nemo_rl.environments.rewards import make_reasoning_gym_reward

TASK = Task(name="chain_sum", size=1, seed=1)


@pytest.mark.parametrize(
    ("response", "is_right"),
    [("{}", True), (" {}\n", True), ("<think>1+1=2</think> {}", True), ("<think>{}</think>wrong", False)],
)
def test_what_follows_the_thoughts_is_scored(response: str, is_right: bool) -> None:
    (item,) = questions(TASK, where="test")
    answer = {"task": TASK.to_json(), "index": 0}
    score = make_reasoning_gym_reward()(item.question, response.format(item.answer), answer)
    assert (score == 1.0) is is_right
