"""Conversations from their opening to their ending, with a real engine, real environments and real tools."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from nemo_rl.config.data import DatasetConfig
from nemo_rl.config.env import Ending, ToolsConfig
from nemo_rl.data.datasets import tools_of
from nemo_rl.experience.conversations import ConversationGroup
from nemo_rl.experience.turn_sampler import SamplesTurns, TurnSampler
from tests.helpers.conversations import Scripted, conversations, engine_of, logprobs_of, rescored_error, small_tokenizer

COUNTING = "tests.helpers.failing_environments:Counting"
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
CALCULATOR = "nemo_rl.environments.tools:calculator"


def scripted(script: Sequence[Sequence[str | None]]) -> Callable[[TurnSampler], SamplesTurns]:
    return lambda sampler: Scripted(small_tokenizer(), script, sampler)


def only(groups: list[ConversationGroup]) -> ConversationGroup:
    [group] = groups
    return group


def test_every_sampled_token_was_sampled_under_exactly_the_tokens_before_it():
    with conversations(environment=COUNTING, max_turns=6) as setting:
        groups = list(setting.loop.run([setting.task(size=6, seed=seed) for seed in (1, 100, 200)]))
        assert setting.loop.num_open == 0
    records = [record for group in groups for record in group.records]
    assert len(records) == 18 and {record.ending for record in records} == {Ending.ENVIRONMENT_DONE}
    for record in records:
        [row] = record.rows
        row.check()
        assert len(row.turns) == 3 and rescored_error([row]) < 1e-5
        assert "turn 1" in setting.tokenizer.decode(list(row.ids_behind_prompt))
        assert record.reward == sum(row.rewards) and row.rewards[:2] == (0.5, 0.5)
    # A row that is scored under other tokens is found.
    row.insert((5, 6), num_seam=0)
    row.add_turn((7,), torch.tensor([-1.0]), version_spans=((0, 0),))
    assert rescored_error([row]) > 1e-3


@pytest.mark.parametrize("how", ["raise", "die"])
def test_failures_of_environments_change_no_token_and_no_reward_of_any_row(tmp_path, how):
    options = {"folder": str(tmp_path), "how": how}
    found = []
    for failing in (0, 2):
        engine = engine_of(small_tokenizer(), is_invariant=True)
        with conversations(environment=COUNTING, options={**options, "failing": failing}, engine=engine) as setting:
            found.append(only(list(setting.loop.run([setting.task(size=10, seed=0)]))))
    plain, failed = found
    assert [record.num_attempts for record in failed.records] == [3, 1, 1, 1, 1] * 2
    for one, other in zip(plain.records, failed.records, strict=True):
        assert [row.ids for row in one.rows] == [row.ids for row in other.rows]
        assert torch.equal(logprobs_of(one.rows), logprobs_of(other.rows))
        assert (one.reward, one.ending) == (other.reward, other.ending) and other.is_scored


def test_a_conversation_that_keeps_failing_is_left_out_with_its_cause(tmp_path):
    options = {"folder": str(tmp_path), "failing": 99}
    with conversations(environment=COUNTING, options=options, retries=1) as setting:
        records = only(list(setting.loop.run([setting.task(size=6, seed=0)]))).records
        assert setting.loop.num_open == 0
    assert [record.is_scored for record in records] == [False, True, True, True, True, False]
    assert records[0].ending is Ending.ENV_ERROR and "the backend is away" in records[0].error
    assert records[0].num_attempts == 2 and len(records[0].rows[0].turns) == 2


def test_a_group_with_too_few_scored_rows_is_refilled_with_other_seeds(tmp_path):
    options = {"folder": str(tmp_path), "failing": 99}
    with conversations(environment=COUNTING, options=options, retries=0, too_few="refill") as setting:
        task = setting.task(size=1, seed=0)
        record = only(list(setting.loop.run([task]))).records[0]
        assert record.is_refill
        plain = only(list(setting.loop.run([setting.task(size=1, seed=1)]))).records[0]
        assert not plain.is_refill and plain.is_scored


def test_an_environment_that_hangs_ends_at_the_time_limit(tmp_path):
    with conversations(
        environment=COUNTING, options={"failing": 1, "how": "hang", "folder": str(tmp_path)}, max_seconds=3
    ) as setting:
        began = time.monotonic()
        record = only(list(setting.loop.run([setting.task(size=1, seed=5)]))).records[0]
        assert record.ending is Ending.TIME_LIMIT and time.monotonic() - began < 15
        assert setting.loop.num_open == 0


def test_limits_of_turns_tokens_and_context_have_endings_of_their_own():
    with conversations(environment=COUNTING, options={"turns": 99}, max_turns=3) as setting:
        records = only(list(setting.loop.run([setting.task(size=3)]))).records
        assert [record.ending for record in records] == [Ending.TURN_LIMIT] * 3
        assert all(len(record.turns) == 3 and record.is_scored for record in records)
        assert all(record.rows[0].ids[-1] == record.rows[0].turn_ids(2)[-1] for record in records)
    with conversations(environment=COUNTING, options={"turns": 99}, max_sampled_tokens=14) as setting:
        for record in only(list(setting.loop.run([setting.task(size=3)]))).records:
            assert record.ending is Ending.TOKEN_LIMIT and sum(turn.num_tokens for turn in record.turns) == 14
    with conversations(environment=COUNTING, options={"turns": 99}, max_turns=99) as setting:
        for record in only(list(setting.loop.run([setting.task(size=3)]))).records:
            assert record.ending is Ending.CONTEXT_FULL and len(record.rows[0]) <= 128


def test_calls_of_a_turn_are_made_at_the_same_time_and_their_results_come_in_order():
    both = "\n".join([CALL % ("calculator", '{"expression": "6*7"}'), CALL % ("calculator", '{"expression": "1+1"}')])
    with conversations(environment=None, tools=[CALCULATOR], samples=scripted([[both, "42"]])) as setting:
        record = only(list(setting.loop.run([setting.task(size=1, seed=0)]))).records[0]
    assert record.ending is Ending.ANSWERED and record.reward is None and record.answer.text == "42"
    assert [result.text for result in record.turns[0].results] == ["42", "2"]
    assert [message.content for message in record.turns[0].messages] == ["42", "2"]
    assert record.turns[0].num_valid_calls == 2 and rescored_error(record.rows) < 1e-5


def test_a_call_in_a_turn_that_was_cut_is_not_made():
    cut = (CALL % ("calculator", '{"expression": "6*7"}')) + "..."
    with conversations(
        environment=None, tools=[CALCULATOR], samples=scripted([[cut, "done"], ["an answer..."]])
    ) as setting:
        first, second = only(list(setting.loop.run([setting.task(size=2, seed=0)]))).records
    assert first.turns[0].results == () and "cut after" in first.turns[0].messages[0].content
    assert first.ending is Ending.ANSWERED and rescored_error(first.rows) < 1e-5
    assert second.ending is Ending.TOKEN_LIMIT and second.answer.truncated


def test_calls_that_cannot_be_made_are_told_to_the_model_and_counted():
    unknown, broken = CALL % ("abacus", "{}"), '<tool_call>\n{"name": \n</tool_call>'
    many = "\n".join([CALL % ("calculator", '{"expression": "1"}')] * 3)
    config = ToolsConfig(max_parallel_calls=2, max_invalid_calls=2)
    script = [[unknown, broken, "4"], [unknown, unknown, unknown], [many, "1"]]
    with conversations(environment=None, tools=[CALCULATOR], tools_config=config, samples=scripted(script)) as setting:
        told, ended, cut = only(list(setting.loop.run([setting.task(size=3, seed=0)]))).records
    assert [turn.results[0].error for turn in told.turns[:2]] == ["unknown_tool", "unreadable"]
    assert told.ending is Ending.ANSWERED
    assert ended.ending is Ending.INVALID_CALLS and len(ended.turns) == 3
    assert [result.error for result in cut.turns[0].results] == [None, None, "too_many_calls"]


def test_groups_that_are_aborted_never_come_and_close_their_environments():
    with conversations(environment=COUNTING, options={"turns": 99}, max_turns=99) as setting:
        tasks = [setting.task(size=8, name="0.0"), setting.task(size=8, name="1.0")]
        timer = threading.Timer(0.05, setting.loop.abort, args=(["0.0"],))
        timer.start()
        groups = list(setting.loop.run(tasks))
        timer.join()
        assert [group.number for group in groups] == [1]
        deadline = time.monotonic() + 20
        while setting.loop.num_open and time.monotonic() < deadline:
            time.sleep(0.02)
        assert setting.loop.num_open == 0


def test_a_conversation_says_what_it_waits_for(tmp_path):
    options = {"folder": str(tmp_path), "failing": 1, "how": "hang"}
    with conversations(environment=COUNTING, options=options) as setting:
        task = setting.task(size=1, seed=5, name="7.0")
        runner = threading.Thread(target=lambda: list(setting.loop.run([task])))
        runner.start()
        found, until = list[str](), time.monotonic() + 15
        while not (found and "turn 1 waits for the environment" in found[0]) and time.monotonic() < until:
            found = setting.loop.waiting(["7.0", "8.0"])
            time.sleep(0.02)
        assert found[0].startswith("7.0/0 turn 1 waits for the environment's reply since ")
        assert setting.loop.waiting(["8.0"]) == []
        setting.loop.abort(["7.0"])
        runner.join(20)
        assert setting.loop.waiting(["7.0"]) == []


def test_a_section_has_the_tools_that_it_names_and_calls_of_others_are_told():
    script = [[CALL % ("calculator", '{"expression": "6*7"}'), CALL % ("python", '{"code": "print(1)"}'), "done"]]
    tools = [CALCULATOR, "nemo_rl.environments.tools:python"]
    found = {}
    for names in (["python"], [], None):
        with conversations(environment=None, tools=tools, samples=scripted(script)) as setting:
            parts, section = setting.loop._parts, DatasetConfig(tools=names)
            own = parts.with_tools(tools_of(section, "data.train.a", parts.encoder.tools))
            setting.loop.use(parts, by_section={} if names is None else {"data.train.a": own})
            task = setting.task(size=1, seed=0)
            task = replace(task, prompt=replace(task.prompt, section="data.train.a"))
            found[str(names)] = only(list(setting.loop.run([task]))).records[0].turns
    first, second, last = found["['python']"]
    assert (first.results[0].error, second.results[0].text, last.text) == ("unknown_tool", "1", "done")
    assert first.results[0].text == "error: no tool 'calculator'; there are: python"
    [alone] = found["[]"]
    assert not alone.calls and "<tool_call>" in alone.text
    assert found["None"][0].results[0].text == "42"
