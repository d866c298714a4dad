"""Sessions of programs with several histories: rows, tokens that are trained once, retries, limits, side requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.grpo import score_rows
from nemo_rl.config.env import Ending
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.environments.chat import ChatAnswer, RefusedRequest
from nemo_rl.environments.conversation import EnvironmentFailure
from nemo_rl.experience.conversation_attempt import ConversationRecord
from nemo_rl.experience.conversation_rollouts import ScoredGroup
from tests.helpers.callback_programs import USER, Client, drive
from tests.helpers.conversations import rescored_error

TOOL = {
    "type": "function",
    "function": {"name": "double", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}
CALL = '<tool_call>\n{"name": "double", "arguments": {"x": 21}}\n</tool_call>'


def user(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, object]:
    return {"role": "system", "content": text}


def check(record: ConversationRecord) -> None:
    """Every sampled token is in one mask, behind the tokens that the engine saw, with its log-probability."""
    for row in record.rows:
        row.check()
    numbers = [turn.number for row in record.rows for turn in row.turns]
    assert sorted(numbers) == sorted(set(numbers))
    trained = sum(int(row.mask.sum()) for row in record.rows)
    assert trained == sum(turn.num_tokens for turn in record.turns if not turn.is_side)
    assert rescored_error(record.rows) < 5e-5
    assert [row.turns[-1].number for row in record.rows] == sorted(row.turns[-1].number for row in record.rows)


def turns_of(record: ConversationRecord) -> list[list[int]]:
    return [[turn.number for turn in row.turns] for row in record.rows]


def test_a_sub_agent_beside_its_parent_has_a_row_of_its_own() -> None:
    async def program(client: Client) -> float:
        first, second = [user(USER)], [system("be brief"), user("4")]
        for number in range(2):
            await client.say(first)
            await client.say(second)
            first.append(user(f"higher {number}"))
            second.append(user(f"lower {number}"))
        return 0.5

    found = drive(program)
    record = found.record
    check(record)
    assert turns_of(record) == [[0, 2], [1, 3]]
    assert (record.ending, record.reward, record.num_rewrites) == (Ending.ENVIRONMENT_DONE, 0.5, 3 - 2)
    assert [row.rewards for row in record.rows] == [(0.0, 0.0), (0.0, 0.5)]
    # What the engine saw is what the rows hold.
    for row in record.rows:
        for turn in row.turns:
            assert found.requests[0, turn.number].prompt_ids == row.ids[: turn.start]
    assert [turn.follows for turn in record.turns] == [None, -1, 0, 1]
    assert [message.content for message in record.turns[1].opening] == ["be brief", "4"]
    assert [message.content for message in record.turns[0].messages] == ["higher 0"]


def test_a_history_that_leaves_a_row_inside_it_shares_its_tokens_and_trains_them_once() -> None:
    async def program(client: Client) -> float:
        trunk = [user(USER)]
        await client.say(trunk)
        one, other = [*trunk, user("higher")], [*trunk, user("lower")]
        await client.say(one)
        await client.say(other)
        one.append(user("again"))
        await client.say(one)
        return 1.0

    record = drive(program).record
    check(record)
    assert turns_of(record) == [[2], [0, 1, 3]]
    branch, trunk = record.rows
    shared = trunk.turns[0].start + trunk.turns[0].length
    assert branch.ids[:shared] == trunk.ids[:shared]
    assert not branch.mask[:shared].any() and int(branch.mask.sum()) == branch.turns[0].length
    assert record.num_rewrites == 1


def test_a_text_that_repeats_another_history_does_not_join_it() -> None:
    """The messages decide: the same characters in other messages are another history."""

    async def program(client: Client) -> float:
        await client.say([user(USER)])
        await client.say([user(USER), {"role": "assistant", "content": "other"}, user("higher")])
        return 1.0

    record = drive(program, script=["4", None]).record
    check(record)
    assert turns_of(record) == [[0], [1]]


GIVEN_BACK: list[tuple[str, dict[str, Any]]] = [
    ("<think>so</think>4", {"role": "assistant", "content": "4", "tool_calls": None, "reasoning_content": None}),
    ("<think>so</think>4", {"role": "assistant", "content": [{"type": "text", "text": "<think>so</think>4\n"}]}),
    (
        f"so\n{CALL}",
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "double", "arguments": '{ "x" :21}'}, "index": 0}
            ],
        },
    ),
]


@pytest.mark.parametrize(("text", "given"), GIVEN_BACK, ids=["null keys, no thoughts", "parts", "call"])
def test_a_turn_is_known_in_every_form_in_which_clients_give_it_back(text: str, given: dict[str, Any]) -> None:
    follows = {"role": "tool", "tool_call_id": "a", "content": "42"} if given.get("tool_calls") else user("higher")

    async def program(client: Client) -> float:
        await client.ask([user(USER)], tools=[TOOL])
        await client.ask([user(USER), given, follows], tools=[TOOL])
        return 1.0

    record = drive(program, script=[text, None]).record
    check(record)
    assert turns_of(record) == [[0, 1]] and record.num_rewrites == 0


def test_requests_of_several_histories_are_sampled_at_the_same_time() -> None:
    async def program(client: Client) -> float:
        trunk = [user(USER)]
        await asyncio.gather(client.say(trunk), client.say([user("4")]))
        await asyncio.gather(client.ask([*trunk, user("higher")]), client.ask([*trunk, user("lower")]))
        return 1.0

    record = drive(program, together=2).record
    check(record)
    assert sorted(turns_of(record)) == [[0, 2], [1], [3]]


def test_a_repeated_request_gets_the_same_answer_and_no_second_sample() -> None:
    answers = list[ChatAnswer]()

    async def program(client: Client) -> float:
        messages = [user(USER)]
        answers.extend(await asyncio.gather(client.ask(messages), client.ask(messages)))
        answers.append(await client.ask(messages))
        await client.ask([*messages, {"role": "assistant", "content": answers[0].text}, user("higher")])
        # The answer has come: it was continued.
        answers.append(await client.ask(messages))
        return 1.0

    record = drive(program).record
    check(record)
    assert answers[0] == answers[1] == answers[2] and len(record.turns) == 3 and record.num_joined == 2
    assert turns_of(record) == [[0, 1], [2]]
    record = drive(program, equal_requests="sample").record
    assert len(record.turns) == 5 and record.num_joined == 0


def test_a_request_whose_reader_is_gone_is_answered_by_its_retry() -> None:
    async def program(client: Client) -> float:
        lost = asyncio.get_running_loop().create_task(client.ask([user(USER)]))
        await asyncio.sleep(0)
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        assert lost.cancelled()
        await client.ask([user(USER)])
        return 1.0

    record = drive(program).record
    assert (len(record.turns), record.num_joined, record.ending) == (1, 1, Ending.ENVIRONMENT_DONE)


def test_a_full_row_may_be_left_for_a_summary_of_it() -> None:
    seen = list[tuple[int, str]]()

    async def program(client: Client) -> float:
        messages = [user(USER)]
        while not seen:
            try:
                await client.say(messages)
            except RefusedRequest as error:
                assert "maximum context length" in str(error)
                seen.append((error.status, error.code))
            messages.append(user("higher"))
        await client.ask([user("4")])
        return 1.0

    record = drive(program, max_length=64).record
    check(record)
    assert seen == [(400, "context_length_exceeded")]
    assert (record.ending, len(record.rows)) == (Ending.ENVIRONMENT_DONE, 2)
    assert all(len(row) <= 64 for row in record.rows)


@pytest.mark.parametrize(
    ("limits", "ending", "num_turns"),
    [({"max_turns": 3}, Ending.TURN_LIMIT, 3), ({"max_rows": 2}, Ending.TURN_LIMIT, 2)],
    ids=["turns", "rows"],
)
def test_behind_a_limit_requests_are_refused_with_a_code_that_clients_do_not_repeat(
    limits: dict[str, int], ending: Ending, num_turns: int
) -> None:
    seen = list[tuple[int, str]]()

    async def program(client: Client) -> float:
        for number in range(5):
            try:
                await client.ask([user(str(number))])
            except RefusedRequest as error:
                seen.append((error.status, error.code))
        raise EnvironmentFailure("whatever it does behind a limit is no failure")

    record = drive(program, **limits).record
    check(record)
    assert seen == [(400, "context_length_exceeded")] * (5 - num_turns)
    assert (record.ending, record.reward, record.is_scored, len(record.turns)) == (ending, 0.0, True, num_turns)


def titles(*, first: bool) -> Any:
    async def program(client: Client) -> float:
        title = [system("name it"), user(USER)]
        if first:
            await client.ask(title)
        main = [system("play"), user(USER)]
        await client.say(main, tools=[TOOL])
        main.append(user("higher"))
        await client.say(main, tools=[TOOL])
        if not first:
            await client.ask(title)
        return 1.0

    return program


@pytest.mark.parametrize("first", [True, False])
def test_side_requests_are_answered_and_not_trained(first: bool) -> None:
    record = drive(titles(first=first)).record
    check(record)
    [row] = record.rows
    assert [turn.is_side for turn in record.turns] == [True, False, False] and len(row.turns) == 2
    assert row.rewards == (0.0, 1.0) and record.answer is not None and record.answer.text == record.turns[-1].text
    assert len(drive(titles(first=first), side_requests="train").record.rows) == 2


def test_a_history_without_tools_under_the_same_system_prompt_is_no_side_request() -> None:
    async def program(client: Client) -> float:
        await client.ask([system("play"), user(USER)], tools=[TOOL])
        await client.ask([system("play"), user("sum it up")])
        return 1.0

    assert len(drive(program).record.rows) == 2


@pytest.mark.parametrize("history", ["append", "new_row"])
def test_with_one_open_row_another_history_is_refused_or_begins_a_row(history: Any) -> None:
    async def program(client: Client) -> float:
        first = [user(USER)]
        await client.say(first)
        if history == "append":
            with pytest.raises(RefusedRequest, match="history_changed|histories"):
                await client.ask([user("4")])
        else:
            await client.ask([user("4")])
        first.append(user("higher"))
        await client.ask(first)
        return 1.0

    record = drive(program, history=history).record
    check(record)
    # With new_row the first history is no longer open: its turn is a part of a prompt.
    assert turns_of(record) == ([[0, 1]] if history == "append" else [[0], [1], [2]])


def test_a_conversation_counts_once_in_the_baseline_and_weighs_one_however_many_rows_it_has() -> None:
    rewards = iter([1.0, 0.0, 0.0, 1.0])

    async def program(client: Client) -> float:
        reward = next(rewards)
        for number in range(4 if reward else 1):
            await client.ask([user(f"{USER} {number}")])
        return reward

    records = drive(program, size=4).records
    group = ScoredGroup(number=0, records=tuple(records), components={})
    stats = group.stats()
    config = GRPOConfig(normalize_rewards=False, use_leave_one_out_baseline=False)
    scored = score_rows(stats, ["g"] * len(stats), config, by_conversation=True)
    about = stats.conversations
    assert about is not None and len(stats) == sum(len(record.rows) for record in records)
    sample = torch.from_numpy(about.sample).long()
    assert torch.zeros(4).index_add(0, sample, scored.sample_mask).tolist() == pytest.approx([1.0] * 4)
    # Two of four have the reward, whatever their rows: the baseline is a half.
    assert {abs(value) for value in scored.advantages.tolist()} == {0.5}
