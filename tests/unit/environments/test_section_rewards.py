"""Each row is scored by the environment of the section of `data` that its prompt comes from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_rl.config.env import EnvConfig
from nemo_rl.config.load import load_config
from nemo_rl.data.datasets import Prompt
from nemo_rl.environments.interfaces import Environment, Response
from nemo_rl.environments.section_rewards import SectionRewards, build_rewards
from nemo_rl.errors import RewardError

REWARD = """\
def graded(prompt, response, answer):
    if response == "bad":
        raise ValueError("bad response")
    return {"short": float(len(response) < 3), "right": 0.5 * (response == answer)}
"""


@pytest.fixture
def rewards(tmp_path: Path) -> Iterator[tuple[Environment, str]]:
    (tmp_path / "reward.py").write_text(REWARD)
    graded = EnvConfig(name="custom", reward_function=f"{tmp_path}/reward.py:graded")
    sections = {"env": EnvConfig(name="sort"), "data.train.chat.env": graded}
    found = build_rewards(sections, start_timeout_s=120, log_file=tmp_path / "reward.log")
    yield found
    found[0].shutdown()


def prompt(section: str, answer: object = "12") -> Prompt:
    return Prompt(index=0, text="sort 21", answer=answer, ids=(1,), section=section)


def test_rows_are_scored_by_their_section_and_stay_in_their_order(rewards: tuple[Environment, str]) -> None:
    scorer, identity = rewards
    sections = ["data.train.chat", "data.train.math", "data.train.chat", "data.validation"]
    texts = ["12", "12", "1234", "21"]
    report = scorer.score([prompt(each) for each in sections], [Response(text=text, num_tokens=2) for text in texts])
    assert report.rewards == (1.5, 1.0, 0.0, 0.0)
    short, right = report.components["short"], report.components["right"]
    assert (short[0], short[2], right[0], right[2]) == (1.0, 0.0, 0.5, 0.0)
    assert all(map(math.isnan, (short[1], short[3], right[1], right[3])))
    assert identity.startswith("env=sort;data.train.chat.env=custom:")
    assert isinstance(scorer, SectionRewards)
    assert scorer.of("data.train.math") is scorer.of("data.validation") is not scorer.of("data.train.chat")


def test_what_one_reward_says_of_an_answer_is_of_its_rows_alone(rewards: tuple[Environment, str]) -> None:
    problems = rewards[0].answer_problems([prompt("data.train.math", None), prompt("data.train.chat", None)])  # type: ignore[attr-defined]
    assert problems[0] is not None and "null" in problems[0] and problems[1] is None


def test_a_reward_that_fails_stops_the_call(rewards: tuple[Environment, str]) -> None:
    rows = [prompt("data.train.math"), prompt("data.train.chat")]
    with pytest.raises(RewardError, match="bad response"):
        rewards[0].score(rows, [Response(text=text, num_tokens=1) for text in ("12", "bad")])


def test_one_environment_is_what_it_was() -> None:
    environment, identity = build_rewards({"env": EnvConfig(name="sort")}, start_timeout_s=60)
    assert identity == "sort" and type(environment).__name__ == "SortEnvironment"


def test_the_environments_of_a_recipe_are_those_that_score() -> None:
    own = "data.train.a={dataset_name: sort_digits, size: 50, env: {name: custom, reward_function: 'm:f'}}"
    both = load_config("configs/grpo_sort_cpu.yaml", [own, "data.train.b={dataset_name: sort_digits, size: 9}"])
    assert list(both.envs) == ["env", "data.train.a.env"] and list(both.measuring_envs) == ["env"]
    assert both.is_accuracy, "held-out rows are right or wrong"
    alone = load_config("configs/grpo_sort_cpu.yaml", ["data.train.env={name: custom, reward_function: 'm:f'}"])
    assert list(alone.envs) == ["env", "data.train.env"], "validation keeps the reward of the recipe"
