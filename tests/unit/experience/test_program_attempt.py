"""Conversations that a program drives through the endpoint: the tokens stay those of the engine."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from nemo_rl.config.env import ConversationConfig, Ending, ToolsConfig
from nemo_rl.data.conversation import Message
from nemo_rl.data.datasets import Prompt
from nemo_rl.data.tokenizer import CHATML_TEMPLATE, TOOLS_TEMPLATE
from nemo_rl.data.turn_encoder import TurnEncoder
from nemo_rl.environments.call_formats import HermesCalls
from nemo_rl.environments.programs import ProgramHost, ProgramSpec
from nemo_rl.errors import WorkerError
from nemo_rl.experience.conversation_attempt import AttemptParts, ConversationRecord, Hosts, turn_seed
from nemo_rl.experience.conversations import ConversationLoop, GroupTask
from nemo_rl.experience.turn_sampler import SamplesTurns, TurnRequest, TurnSample, TurnSampler
from nemo_rl.models.generation.interfaces import GenerationRequest, SamplingParams
from nemo_rl.models.generation.torch_engine import TorchEngine
from tests.helpers.chat_templates import NOW
from tests.helpers.conversations import engine_of, rescored_error, small_tokenizer
from tests.helpers.processes import MARK, marked
from tests.helpers.tiny_model import tiny_model

PROGRAM = str(Path(__file__).parents[2] / "helpers/chat_program.py")
CALL = '<tool_call>\n{"name": "double", "arguments": {"x": 21}}\n</tool_call>'
TOTAL = 512


class Says:
    """Samples turns whose texts are given, by force, so that log-probabilities are those of the engine."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
        self._tokenizer, self._texts = tokenizer, texts
        self._engine = TorchEngine(tiny_model(), tokenizer=None, max_total_length=TOTAL, weight_version=0)
        self._number = {turn_seed(0, number): number for number in range(len(texts))}
        self.requests: list[TurnRequest] = []

    async def sample(self, request: TurnRequest) -> TurnSample:
        self.requests.append(request)
        text = self._texts[self._number[request.seed]]
        ids = (*self._tokenizer.encode(text, add_special_tokens=False), int(self._tokenizer.eos_token_id))
        sampling = SamplingParams(temperature=1.0, max_new_tokens=len(ids), stop_token_ids=())
        given = GenerationRequest(prompt_ids=(request.prompt_ids,), seeds=(0,), sampling=sampling, forced=(ids,))
        logprobs = self._engine.generate(given).logprobs
        return TurnSample(token_ids=ids, logprobs=logprobs, truncated=False, version_spans=((0, 0),), engine=0)


class Fails:
    """Has no engine."""

    async def sample(self, request: TurnRequest) -> TurnSample:
        raise WorkerError(f"cannot sample {len(request.prompt_ids)} tokens", stage="generation")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    loop: ConversationLoop
    host: ProgramHost
    tokenizer: PreTrainedTokenizerBase
    encoder: TurnEncoder
    heard: list[str]

    def task(self, *, size: int = 1, name: str = "") -> GroupTask:
        """Return a group of conversations."""
        messages = (Message(role="user", content="guess 1 to 9"),)
        prompt = Prompt(index=0, text="guess 1 to 9", answer=4, ids=self.encoder.prompt(messages), messages=messages)
        sampling = SamplingParams(temperature=1.0, max_new_tokens=12, stop_token_ids=(2,))
        return GroupTask(prompt=prompt, seeds=tuple(range(size)), sampling=sampling, name=name)

    def run(self, *, size: int = 1) -> list[ConversationRecord]:
        """Run a group; nothing of it may be left."""
        [group] = self.loop.run([self.task(size=size)])
        assert self.loop.num_open == 0
        for record in group.records:
            for row in record.rows:
                row.check()
                assert not row.turns or rescored_error([row]) < 1e-5
                assert not row.turns or row.ids[-1] == row.turn_ids(-1)[-1]
            assert sum(len(row.turns) for row in record.rows) == len(record.turns)
        return list(group.records)


@contextmanager
def program(
    *arguments: str,
    timeout_s: float = 20,
    is_scored: bool = False,
    history: Any = "append",
    chat_template: str = TOOLS_TEMPLATE,
    sampler: SamplesTurns | None = None,
    texts: Sequence[str] = (),
    **config: object,
) -> Iterator[Setting]:
    """Start a loop whose conversations are driven by the program of tests."""
    tokenizer, heard = small_tokenizer(chat_template), list[str]()
    section = ConversationConfig.model_validate({"enabled": True, "retries": 0, **config})
    spec = ProgramSpec(command=[sys.executable, PROGRAM, *arguments])
    host = ProgramHost(spec, timeout_s=timeout_s, is_scored=is_scored, hear=heard.append)
    hosts = Hosts(programs=host)
    loop = ConversationLoop(section, hosts)
    turns = TurnSampler(engine_of(tokenizer), with_routes=False, with_support=False)
    stops = (int(tokenizer.eos_token_id),)
    encoder = TurnEncoder(tokenizer, stop_ids=stops, now=NOW, history=history)
    try:
        loop.start(timeout_s=60)
        loop.use(
            AttemptParts(
                config=section,
                tools_config=ToolsConfig(),
                tokenizer=tokenizer,
                encoder=encoder,
                sampler=sampler or (Says(tokenizer, texts) if texts else turns),
                max_total_length=TOTAL if texts else 128,
                hosts=hosts,
                calls=HermesCalls(tokenizer),
                stop_ids=frozenset(stops),
                history=history,
            )
        )
        yield Setting(loop=loop, host=host, tokenizer=tokenizer, encoder=encoder, heard=heard)
    finally:
        loop.close()
        turns.close()


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """Mark the processes of a test; none may be left."""
    name = f"programs-{os.getpid()}-{time.monotonic()}"
    monkeypatch.setenv(MARK, name)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield name
    assert not marked(name) and not list(tmp_path.glob("nemo-rl-program-*"))


def test_a_program_drives_conversations_whose_tokens_are_those_that_were_sampled() -> None:
    with program("plain") as setting:
        records = setting.run(size=2)
    for seed, record in enumerate(records):
        [row] = record.rows
        assert record.ending is Ending.ENVIRONMENT_DONE and (record.reward, record.is_scored) == (0.25, True)
        assert row.rewards == (0.0, 0.25) and record.components == {"seed": float(seed)}
        assert [message.content for message in record.turns[0].messages] == ["higher 0"]
        assert record.turns[1].messages == () and record.answer is not None
        assert record.answer.text == record.turns[1].text
    assert records[0].rows[0].ids != records[1].rows[0].ids


def test_calls_of_the_programs_own_tools_come_back_as_tool_calls() -> None:
    with program("tool", texts=[CALL, "42"]) as setting:
        [record] = setting.run()
    assert (record.reward, len(record.rows), record.ending) == (42.0, 1, Ending.ENVIRONMENT_DONE)
    assert [call.arguments for call in record.turns[0].calls] == [{"x": 21}]
    assert [result.text for result in record.turns[0].results] == ["42"]
    [row] = record.rows
    prompt = setting.tokenizer.decode(list(row.ids[: row.turns[0].start]))
    assert "double" in prompt
    [line] = [line for line in setting.heard if "no effect" in line]
    assert "temperature" in line and "tools" not in line


def test_tools_that_the_template_cannot_print_are_refused() -> None:
    with program("tool", chat_template=CHATML_TEMPLATE) as setting:
        [record] = setting.run()
    assert record.ending is Ending.ENV_ERROR and "prints no tools" in record.error


def test_a_rewritten_history_begins_a_row_or_is_refused() -> None:
    with program("rewrite", history="new_row") as setting:
        [record] = setting.run()
    assert record.ending is Ending.ENVIRONMENT_DONE and record.num_rewrites == 1
    first, second = record.rows
    assert (len(first.turns), len(second.turns), second.turns[0].number) == (2, 1, 2)
    assert (first.rewards, second.rewards, record.reward) == ((0.0, 0.0), (1.0,), 1.0)
    with program("rewrite") as setting:
        [record] = setting.run()
    assert record.ending is Ending.ENV_ERROR and record.num_rewrites == 1 and not record.is_scored
    assert (
        len(record.turns) == 2
        and "its last request was refused: messages: expected the messages of the conversation" in record.error
    )


def test_limits_answer_with_a_cut_turn_and_are_the_ending() -> None:
    with program("long", max_turns=3, limit_answer="empty_turn") as setting:
        [record] = setting.run()
    assert (record.ending, len(record.turns), record.reward) == (Ending.TURN_LIMIT, 3, 0.25)
    with program("long", max_sampled_tokens=14, limit_answer="empty_turn") as setting:
        [record] = setting.run()
    assert record.ending is Ending.TOKEN_LIMIT and sum(turn.num_tokens for turn in record.turns) == 14
    with program("long", max_turns=99) as setting:
        [record] = setting.run()
    assert record.ending is Ending.CONTEXT_FULL and len(record.rows[0]) <= 128 and record.is_scored


@pytest.mark.slow
def test_a_program_that_goes_on_behind_a_limit_is_ended_and_scored() -> None:
    with program("insist", max_turns=2, timeout_s=4, limit_answer="empty_turn") as setting:
        began = time.monotonic()
        [record] = setting.run()
    assert (record.ending, record.reward, record.is_scored) == (Ending.TURN_LIMIT, 0.0, True)
    assert time.monotonic() - began < 20


def test_the_limit_of_a_request_is_kept_below_that_of_the_recipe() -> None:
    with program("short") as setting:
        [record] = setting.run()
    assert [turn.num_tokens for turn in record.turns] == [3, 3] and record.turns[0].truncated


@pytest.mark.parametrize(
    ("mode", "cause"),
    [("crash", "exited with code 3"), ("no_reward", "expected a last line"), ("silent", "without a request")],
)
def test_failures_of_a_program_are_no_reward(mode: str, cause: str) -> None:
    with program(mode) as setting:
        [record] = setting.run()
    assert record.ending is Ending.ENV_ERROR and cause in record.error and not record.is_scored


@pytest.mark.slow
def test_a_program_that_repeats_a_refused_request_for_ever_is_late() -> None:
    with program("stubborn", timeout_s=4) as setting:
        [record] = setting.run()
    assert record.ending is Ending.ENV_ERROR and record.seconds < 15 and "its last request was refused" in record.error


@pytest.mark.slow
def test_a_program_that_hangs_ends_at_its_limit_or_at_that_of_the_conversation() -> None:
    with program("hang", timeout_s=4) as setting:
        [record] = setting.run()
    assert record.ending is Ending.ENV_ERROR and "within env.timeout_s 4 s (after 2 turns)" in record.error
    with program("hang", max_seconds=4) as setting:
        [record] = setting.run()
    assert record.ending is Ending.TIME_LIMIT and record.is_scored and record.seconds < 15


def test_a_program_that_fails_once_is_run_again_with_the_same_seeds(tmp_path: Path) -> None:
    with program("plain") as setting:
        [plain] = setting.run()
    with program("flaky", str(tmp_path / "failed"), retries=1) as setting:
        [again] = setting.run()
    assert again.num_attempts == 2 and again.is_scored and again.rows[0].ids == plain.rows[0].ids


def test_an_answer_without_a_stated_reward_is_left_to_the_scorer() -> None:
    with program("no_reward", is_scored=True) as setting:
        [record] = setting.run()
    assert record.ending is Ending.ANSWERED and record.reward is None and record.answer is not None


def test_an_engine_that_fails_ends_the_program_and_is_no_failure_of_it() -> None:
    with program("plain", sampler=Fails()) as setting:
        [record] = setting.run()
    assert record.ending is Ending.ENGINE_ERROR and "cannot sample" in record.error and record.turns == ()


def test_programs_of_groups_that_are_aborted_are_ended() -> None:
    with program("hang") as setting:
        timer = threading.Timer(1.0, setting.loop.abort, args=(["0.0"],))
        timer.start()
        assert list(setting.loop.run([setting.task(size=2, name="0.0")])) == []
        timer.join()
        deadline = time.monotonic() + 15
        while setting.loop.num_open and time.monotonic() < deadline:
            time.sleep(0.05)
        assert setting.loop.num_open == 0
