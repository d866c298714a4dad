"""Rewards that are an `async def`: their responses wait at the same time, one by one or in lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl.config.env import EnvConfig
from nemo_rl.data.datasets import Prompt
from nemo_rl.environments.interfaces import EnvReport, Response, waits_for_others
from nemo_rl.environments.process_environment import build_environment
from nemo_rl.environments.session_rewards import SessionReward
from nemo_rl.errors import RewardError

CODE = """
import asyncio

meeting = None


async def together(prompt, response, answer):
    # Every call waits for all others: one after the other would never end.
    global meeting
    meeting = meeting or asyncio.Barrier(8)
    await meeting.wait()
    return float(len(response))


async def lists(prompts, responses, answers):
    await asyncio.sleep(0)
    return [float(len(response)) for response in responses]


async def fails(prompt, response, answer):
    return 1 / 0


class Object:
    async def __call__(self, prompt, response, answer):
        return 2.0


object_ = Object()


def plain(prompt, response, answer):
    return 1.0
"""


def _score(folder: Path, name: str, **changes: object) -> tuple[EnvReport, bool]:
    file = folder / "waits.py"
    file.write_text(CODE)
    config = EnvConfig.model_validate({"name": "custom", "reward_function": f"{file}:{name}", **changes})
    environment = build_environment(config, start_timeout_s=120)
    prompt = Prompt(index=0, text="q", answer=None, ids=(), metadata={})
    try:
        responses = [Response(text="x" * place, num_tokens=1) for place in range(8)]
        return environment.score([prompt] * 8, responses), waits_for_others(environment)
    finally:
        environment.shutdown()


def test_responses_of_an_async_reward_wait_at_the_same_time(tmp_path: Path) -> None:
    report, waits = _score(tmp_path, "together", timeout_s=60.0)
    assert report.rewards == tuple(map(float, range(8))) and waits


def test_an_async_reward_may_take_lists_or_be_an_object(tmp_path: Path) -> None:
    assert _score(tmp_path, "lists", reward_batch_size=3)[0].rewards == tuple(map(float, range(8)))
    assert _score(tmp_path, "object_")[0].rewards == (2.0,) * 8
    report, waits = _score(tmp_path, "plain")
    assert report.rewards == (1.0,) * 8 and not waits
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        _score(tmp_path, "fails")


def test_functions_of_a_session_may_be_async() -> None:
    async def one(prompt: str, response: str, answer: object) -> float:
        return float(len(response))

    async def trl(completions: list[str], **columns: object) -> list[float]:
        return [2.0] * len(completions)

    reward = SessionReward(functions={"one": one, "trl": trl}, by_name=True, answer_key="answer", is_chat=False)
    found = reward(["q"], ["abc"], [None], row=[{}], prompt_tokens=[1], response_tokens=[1], truncated=[False])
    assert found == [{"one": 3.0, "trl": 2.0}]
