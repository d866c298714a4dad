"""Recorded results of tools and recorded replies give the tokens of the conversation; differences are named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from nemo_rl.config.env import ConversationConfig, Ending, ToolsConfig
from nemo_rl.data.conversation import ToolCall
from nemo_rl.environments.call_formats import HermesCalls
from nemo_rl.environments.conversation import EnvironmentFailure
from nemo_rl.experience.conversation_attempt import (
    Attempt,
    AttemptParts,
    ConversationRecord,
    ConversationTask,
    Hosts,
    turn_seed,
)
from nemo_rl.experience.conversation_log import ConversationLog
from nemo_rl.experience.turn_sampler import SamplesTurns, TurnRequest, TurnSample, TurnSampler
from nemo_rl_tools.conversation_replay import (
    ComparedTurns,
    KeptConversation,
    KeptTurn,
    RecordedReplies,
    RecordedResults,
    _only_version,
)
from tests.helpers.conversations import WITH_TOOLS, Scripted, Setting, conversations, small_tokenizer

CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
SCRIPT = [
    [
        CALL % ("calculator", '{"expression": "6*7"}') + CALL % ("calculator", '{"expression": "1+1"}'),
        CALL % ("nobody", "{}"),
        CALL % ("calculator", '{"expression": "2*...'),
        "42",
    ]
]


class Unasked:
    """Samples nothing: all texts are given."""

    async def sample(self, request: TurnRequest) -> TurnSample:
        raise AssertionError("a text is missing in the script")


def scripted(script: Sequence[Sequence[str | None]]) -> Callable[[TurnSampler], SamplesTurns]:
    return lambda sampler: Scripted(small_tokenizer(), script, sampler)


def kept_of(record: ConversationRecord, setting: Setting) -> KeptConversation:
    """Return a conversation as a kept step has it."""
    messages = setting.task().prompt.messages
    log = ConversationLog.of(record, prompt=0, opening=messages)
    [row] = record.rows
    turns = {}
    for number, turn in enumerate(row.turns):
        first = sum(each.length for each in row.turns[:number])
        turns[number] = KeptTurn(
            ids=row.turn_ids(number),
            logprobs=row.sampled_logprobs[first : first + turn.length],
            before=row.ids[: turn.start],
            version=0,
        )
    return KeptConversation(key="a_g0", log=log, opening=log, turns=turns)


def replayed(kept: KeptConversation, setting: Setting, *, tools: ToolsConfig) -> ComparedTurns:
    """Run the conversation again with what was recorded."""
    sampler = Scripted(setting.tokenizer, SCRIPT, Unasked())
    compared = ComparedTurns(
        kept=kept, samplers={0: sampler}, text_of=lambda token: str(setting.tokenizer.decode([token]))
    )
    parts = AttemptParts(
        config=ConversationConfig(enabled=True),
        tools_config=tools,
        tokenizer=setting.tokenizer,
        encoder=setting.encoder,
        sampler=compared,
        max_total_length=WITH_TOOLS,
        hosts=Hosts(environment=RecordedReplies(kept.log, None), tools=RecordedResults(kept.log, (), None)),
        calls=HermesCalls(setting.tokenizer),
        stop_ids=frozenset({int(setting.tokenizer.eos_token_id)}),
    )
    task = setting.task()
    asyncio.run(Attempt(ConversationTask(prompt=task.prompt, seed=0, sampling=task.sampling), parts).run())
    return compared


def test_calls_get_the_results_that_were_recorded_and_results_that_were_changed_are_named() -> None:
    tools = ToolsConfig(max_result_tokens=12)
    calculator = "nemo_rl.environments.tools:calculator"
    with conversations(environment=None, tools=[calculator], tools_config=tools, samples=scripted(SCRIPT)) as setting:
        [group] = setting.loop.run([setting.task(size=1, seed=0)])
        [record] = group.records
        assert record.ending is Ending.ANSWERED and len(record.turns) == 4
        kept = kept_of(record, setting)
        found = replayed(kept, setting, tools=tools)
        assert found.num_compared == 4 and found.largest == 0.0 and found.check(exact=True).agrees
        text = kept.log.turns[0].results[1].text
        object.__setattr__(kept.log.turns[0].results[1], "text", text.replace("2", "3"))
        other = replayed(kept, setting, tools=tools)
        check = other.check(exact=False)
        assert check.agrees is False and check.difference.startswith("turn 1: ")
        assert "which it read" in check.difference and "'2' as kept, got" in check.difference
        assert other.num_compared == 1


def test_a_result_that_was_not_recorded_is_a_failure() -> None:
    with conversations(environment=None, samples=scripted([["x"]])) as setting:
        [group] = setting.loop.run([setting.task(size=1, seed=0)])
        log = kept_of(group.records[0], setting).log
    results = RecordedResults(log, (), None)
    with pytest.raises(EnvironmentFailure, match="no result of call 0 of 'add'"):
        asyncio.run(results.call(ToolCall(name="add"), seed=turn_seed(0, 0)))
    with pytest.raises(EnvironmentFailure, match="no result of call 0 of 'add'"):
        asyncio.run(results.call(ToolCall(name="add"), seed=12345))


@pytest.mark.parametrize(
    ("spans", "start", "end", "version"),
    [
        ([(0, 5)], 0, 3, 5),
        ([(0, 5)], 4, 9, 5),
        ([(0, 5), (3, 6)], 0, 3, 5),
        ([(0, 5), (3, 6)], 3, 8, 6),
        ([(0, 5), (3, 6)], 2, 4, None),
        ([(0, 5), (3, 6), (7, 5)], 7, 9, 5),
        ([(0, 5), (3, 6), (7, 5)], 4, 7, 6),
    ],
)
def test_a_turn_has_the_version_of_its_tokens(spans, start, end, version):
    assert _only_version(spans, start, end) == version


class Shifted:
    """Samples what was kept, with log-probabilities that are apart by so much."""

    def __init__(self, kept: KeptTurn, apart: float) -> None:
        self._kept, self._apart = kept, apart

    async def sample(self, request: TurnRequest) -> TurnSample:
        return TurnSample(
            token_ids=self._kept.ids,
            logprobs=self._kept.logprobs + self._apart,
            truncated=False,
            version_spans=((0, 0),),
            engine=0,
        )


@pytest.mark.parametrize(("apart", "is_rounding"), [(1e-6, True), (1e-2, False), (float("nan"), False)])
def test_bits_are_compared_where_they_must_be_equal_and_values_elsewhere(apart: float, is_rounding: bool) -> None:
    with conversations(environment=None, samples=scripted([["x"]])) as setting:
        [group] = setting.loop.run([setting.task(size=1, seed=0)])
        kept = kept_of(group.records[0], setting)
    turn = kept.turns[0]
    compared = ComparedTurns(kept=kept, samplers={0: Shifted(turn, apart)}, text_of=str)
    sampling = setting.task().sampling
    asyncio.run(compared.sample(TurnRequest(prompt_ids=turn.before, seed=0, sampling=sampling)))
    exact, close = compared.check(exact=True), compared.check(exact=False)
    assert exact.agrees is False and "log-probability of token 0" in exact.difference
    assert close.agrees == is_rounding
    same = ComparedTurns(kept=kept, samplers={0: Shifted(turn, 0.0)}, text_of=str)
    asyncio.run(same.sample(TurnRequest(prompt_ids=turn.before, seed=0, sampling=sampling)))
    assert same.check(exact=True).agrees
