"""Rows of conversations under chat templates of several models: what is trained is what engines sampled, where they
sampled it."""

from __future__ import annotations

import json
import random

import pytest

from nemo_rl.config.env import Ending, ToolsConfig
from nemo_rl.experience.turn_sampler import TurnSampler
from tests.helpers.case_selection import num_examples
from tests.helpers.chat_templates import CASES, tokenizer_of
from tests.helpers.conversations import Scripted, conversations, rescored_error

pytestmark = pytest.mark.slow

COUNTING = "tests.helpers.failing_environments:Counting"
ADD = "tests.helpers.failing_environments:add"
NUM_CONVERSATIONS = 20 * num_examples(10)


def call_text(case: str, rng: random.Random) -> str:
    """Return a turn that makes calls, as a model of the template writes it."""
    count = rng.randint(1, CASES[case].max_calls)
    arguments = [json.dumps({"left": rng.randint(1, 99), "right": rng.randint(1, 99)}) for _ in range(count)]
    if case == "llama3":
        return "; ".join(f'{{"name": "add", "parameters": {each}}}' for each in arguments)
    if case == "gpt_oss":
        return f"<|channel|>commentary to=functions.add json<|message|>{arguments[0]}"
    return "\n".join(f'<tool_call>\n{{"name": "add", "arguments": {each}}}\n</tool_call>' for each in arguments)


OFTEN = ("qwen3", "gpt_oss")


@pytest.mark.parametrize(
    "case", [case if case in OFTEN else pytest.param(case, marks=pytest.mark.full) for case in CASES]
)
def test_every_token_of_random_conversations_was_sampled_under_its_prefix(case: str):
    rng = random.Random(case)
    tokenizer = tokenizer_of(case)
    script = [
        [call_text(case, rng) + rng.choice(["", "", "..."]) if rng.random() < 0.4 else None for _ in range(8)]
        for _ in range(NUM_CONVERSATIONS)
    ]
    made: list[Scripted] = []

    def samples(sampler: TurnSampler) -> Scripted:
        made.append(Scripted(tokenizer, script, sampler, end=CASES[case].end_of_call))
        return made[0]

    config = ToolsConfig(max_invalid_calls=99, max_result_tokens=40)
    with conversations(
        environment=COUNTING, tools=[ADD], tools_config=config, case=case, samples=samples, max_turns=4
    ) as setting:
        tasks = [setting.task("what is it?", size=20, seed=seed) for seed in range(0, NUM_CONVERSATIONS, 20)]
        records = [record for group in setting.loop.run(tasks) for record in group.records]
        assert setting.loop.num_open == 0
    assert len(records) == NUM_CONVERSATIONS
    assert {record.ending for record in records} <= {Ending.ENVIRONMENT_DONE, Ending.TURN_LIMIT}
    prefixes = {request.prompt_ids for request in made[0].requests.values()}
    for record in records:
        [row] = record.rows
        row.check()
        assert all(row.ids[: turn.start] in prefixes for turn in row.turns)
        assert len(row.turns) == len(record.turns)
    made_calls = [result for record in records for turn in record.turns for result in turn.results]
    assert sum(result.error is None for result in made_calls) > NUM_CONVERSATIONS // 4
    assert sum(turn.truncated for record in records for turn in record.turns) > NUM_CONVERSATIONS // 4
    rows = [row for record in records for row in record.rows]
    assert rescored_error(rows, vocab_size=max(320, len(tokenizer))) < 5e-5
