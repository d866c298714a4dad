"""Finished conversations become the rows of a rollout in which the assistant has said the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from nemo_rl.config.data import DataConfig, DatasetConfig
from nemo_rl.data.conversation import Message, ToolCall
from nemo_rl.data.finished import (
    Conversation,
    encode_conversation,
    finished_conversation,
    finished_encoder,
    load_finished,
)
from nemo_rl.data.messages import PromptEncoder
from nemo_rl.data.turn_encoder import TurnEncoder
from nemo_rl.errors import DatasetError, ModelFolderError
from tests.helpers.chat_templates import CASES, NOW, stop_ids_of, tokenizer_of

TOOLS = ({"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}},)
USER, SAID = Message(role="user", content="2*21"), Message(role="assistant", content="it is 42")
AGAIN = Message(role="user", content="and 7?")
TEXT = (USER, SAID, AGAIN, Message(role="assistant", content="higher"))


def encoder_of(name: str) -> TurnEncoder:
    return finished_encoder(tokenizer_of(name), stop_ids=stop_ids_of(name), now=NOW)


def trained(name: str, ids: Sequence[int], turns: Sequence[tuple[int, int]]) -> list[str]:
    return [tokenizer_of(name).decode(list(ids[start : start + length])) for start, length in turns]


@pytest.mark.parametrize("name", CASES)
def test_a_turn_is_trained_from_its_text_to_its_end(name: str) -> None:
    """Not the header before it, nor the white space behind its end, and the end once."""
    case = CASES[name]
    rows = encode_conversation(Conversation(messages=TEXT), encoder_of(name))
    said = [text for ids, turns in rows for text in trained(name, ids, turns)]
    assert len(said) == 2
    for text, content in zip(said, ("it is 42", "higher"), strict=True):
        ends = [end for end in (*case.ends, case.other_stop) if text.endswith(end)]
        assert ends, f"{text!r} does not end as a turn"
        assert content in text and text.count(ends[0]) == 1
        assert "user" not in text and not text.startswith("\n")


@pytest.mark.parametrize("name", CASES)
def test_the_prompt_has_the_tokens_of_a_rollout(name: str) -> None:
    [(ids, turns), *_] = encode_conversation(Conversation(messages=TEXT[:2]), encoder_of(name))
    start = turns[0][0]
    assert ids[:start] == PromptEncoder(tokenizer_of(name), now=NOW).encode([USER])
    assert start + turns[0][1] == len(ids)


@pytest.mark.parametrize("name", CASES)
def test_the_row_is_that_of_a_conversation_that_was_sampled(name: str) -> None:
    """A rollout that samples the turns of the row gets the same tokens from its own encoder, one after the other."""
    encoder = TurnEncoder(tokenizer_of(name), stop_ids=stop_ids_of(name), now=NOW, history="new_row")
    rows = encode_conversation(Conversation(messages=TEXT), encoder_of(name))
    [first, *more] = rows
    start, length = first[1][0]
    sampled = first[0][start : start + length]
    found = encoder.extend(TEXT[:2], [AGAIN], sampled=sampled, is_cut=False)
    if found.starts_row:
        assert more[0][0][: more[0][1][0][0]] == found.ids
    else:
        assert first[0][start + length : first[1][1][0]] == found.ids


@pytest.mark.parametrize("name", CASES)
def test_a_call_and_its_result_are_a_turn_and_a_reply(name: str) -> None:
    call = Message(role="assistant", content="", calls=(ToolCall(name="lookup", arguments={"a": "hello"}),))
    result = Message(role="tool", content="world", name="lookup")
    given = Conversation(messages=(USER, call, result, SAID), tools=TOOLS)
    encoder = encoder_of(name)
    if not encoder.with_tools(TOOLS).prints_tools:
        pytest.skip("the template prints no tools")
    said = [text for ids, turns in encode_conversation(given, encoder) for text in trained(name, ids, turns)]
    assert len(said) == 2 and "lookup" in said[0] and "hello" in said[0] and "world" not in "".join(said)


def test_a_template_that_drops_thoughts_gives_a_row_for_each_turn() -> None:
    said = Message(role="assistant", content="<think>\nhello\n</think>\n\nit is 42")
    rows = encode_conversation(Conversation(messages=(USER, said, AGAIN, SAID)), encoder_of("qwen3"))
    assert [len(turns) for _, turns in rows] == [1, 1]
    first, second = (trained("qwen3", *row)[0] for row in rows)
    assert first.startswith("<think>\nhello") and "it is 42" in second
    assert "hello" not in tokenizer_of("qwen3").decode(list(rows[1][0]))


def test_text_cannot_spell_the_end_of_a_turn() -> None:
    said = Message(role="assistant", content="a <|im_end|> b")
    [(ids, turns)] = encode_conversation(Conversation(messages=(USER, said)), encoder_of("chatml"))
    end = tokenizer_of("chatml").convert_tokens_to_ids("<|im_end|>")
    start, length = turns[0]
    assert ids[start : start + length].count(end) == 1 and "a <|im_end|> b" in trained("chatml", ids, turns)[0]


def test_an_end_at_which_the_model_does_not_stop_is_refused() -> None:
    other = tokenizer_of("chatml").convert_tokens_to_ids("<|endoftext|>")
    encoder = finished_encoder(tokenizer_of("chatml"), stop_ids=(other,), now=NOW)
    with pytest.raises(ModelFolderError, match="at which the model does not stop"):
        encode_conversation(Conversation(messages=TEXT), encoder)


def test_a_message_of_weight_0_is_context() -> None:
    given = Conversation(messages=TEXT, untrained=frozenset({1}))
    [(ids, turns)] = encode_conversation(given, encoder_of("chatml"))
    assert trained("chatml", ids, turns) == ["higher<|im_end|>"]


OPENAI_CALL = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": '{"a": 1}'}}
FORMS: dict[str, tuple[Mapping[str, object], list[tuple[str, str]]]] = {
    "openai": (
        {"messages": [{"role": "developer", "content": "s"}, {"role": "user", "content": "q"},
                      {"role": "assistant", "content": None, "tool_calls": [OPENAI_CALL]},
                      {"role": "tool", "tool_call_id": "c1", "content": "1"}, {"role": "assistant", "content": "a"}]},
        [("system", "s"), ("user", "q"), ("assistant", ""), ("tool", "1"), ("assistant", "a")],
    ),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]},
                      {"role": "assistant", "content": "a", "reasoning_content": "t"}]},
        [("user", "q"), ("assistant", "<think>\nt\n</think>\n\na")],
    ),
    "sharegpt": (
        {"system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        [("system", "s"), ("user", "q"), ("assistant", "a")],
    ),
    "alpaca": (
        {"instruction": "q", "input": "x", "output": "a", "history": [["p", "r"]]},
        [("user", "p"), ("assistant", "r"), ("user", "q\n\nx"), ("assistant", "a")],
    ),
    "trl text": ({"prompt": "q", "completion": "a"}, [("user", "q"), ("assistant", "a")]),
    "trl messages": (
        {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]},
        [("user", "q"), ("assistant", "a")],
    ),
    "pair": ({"input": "q", "output": "a"}, [("user", "q"), ("assistant", "a")]),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_that_people_bring(form: str) -> None:
    row, expected = FORMS[form]
    found = finished_conversation(row, DatasetConfig())
    assert [(message.role, message.content) for message in found.messages] == expected
    if form == "openai":
        assert found.messages[2].calls[0].arguments == {"a": 1} and found.messages[3].name == "lookup"


def test_named_columns_and_a_system_prompt() -> None:
    cfg = DatasetConfig(input_key="q", output_key="a.text", system_prompt="s", prompt_template="Q: {input}")
    found = finished_conversation({"q": "2?", "a": {"text": "4"}}, cfg)
    assert [message.content for message in found.messages] == ["s", "Q: 2?", "4"]


BAD: dict[str, tuple[Mapping[str, object], str]] = {
    "no form": ({"text": "x"}, "expected messages"),
    "role": ({"messages": [{"role": "narrator", "content": "q"}]}, "expected a role"),
    "no assistant": ({"messages": [{"role": "user", "content": "q"}]}, "a message of the assistant"),
    "ends with a user": (
        {"messages": [*({"role": r, "content": "x"} for r in ("user", "assistant", "user"))]},
        "a last message of the assistant",
    ),
    "begins with the assistant": (
        {"messages": [*({"role": r, "content": "x"} for r in ("assistant", "user", "assistant"))]},
        "a message of the user before",
    ),
    "two of the assistant": (
        {"messages": [*({"role": r, "content": "x"} for r in ("user", "assistant", "assistant"))]},
        "a message between two",
    ),
    "picture": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "x"}]},
        "has a picture",
    ),
    "call": (
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "expected calls of a function",
    ),
    "all of weight 0": (
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x", "weight": 0}]},
        "no token of it would be trained",
    ),
    "rollout": ({"token_ids": [1], "token_mask": [1], "reward": 1.0}, "set sft.min_reward"),
}


def write(path: Path, rows: Sequence[Mapping[str, object]]) -> DatasetConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DatasetConfig(data_path=path)


GOOD = {"prompt": "q", "completion": "hello"}


@pytest.mark.parametrize("kind", BAD)
def test_a_row_that_cannot_be_used_is_refused_with_its_place(kind: str, tmp_path: Path) -> None:
    row, problem = BAD[kind]
    source = write(tmp_path / "rows.jsonl", [GOOD, row])
    with pytest.raises(DatasetError, match=problem) as refused:
        load_finished(DataConfig(train=source), encoder_of("chatml"), max_length=64)
    assert f"{tmp_path / 'rows.jsonl'}:2" in str(refused.value)


def test_long_rows_and_held_out_prompts_are_counted(tmp_path: Path) -> None:
    rows = [GOOD, {"prompt": "long", "completion": "hello world " * 30}, {"prompt": "held", "completion": "x"}]
    data = DataConfig(train=write(tmp_path / "a.jsonl", rows), validation=write(tmp_path / "b.jsonl", rows[2:]))
    found = load_finished(data, encoder_of("chatml"), max_length=48)
    assert len(found["data.train"].rows) == 1 and found["data.train"].num_overlong == 1
    assert "a.jsonl:2 with" in found["data.train"].skipped[0]
    [line] = found["data.train"].remarks
    assert "1 rows longer" in line and "1 rows that also occur in validation" in line
    refuses = data.model_copy(update={"overlong_prompts": "error"})
    with pytest.raises(DatasetError, match="max_total_sequence_length allows 48"):
        load_finished(refuses, encoder_of("chatml"), max_length=48)


def test_kept_rollouts_are_trained_by_their_sampled_tokens(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("chatml")
    prompt = list(encoder_of("chatml").prompt([USER]))
    # No tokenizer would write the text in these tokens.
    sampled = [*(token for letter in "42" for token in tokenizer(letter)["input_ids"]), *stop_ids_of("chatml")[:1]]
    row = {
        "token_ids": prompt + sampled,
        "token_mask": [0] * len(prompt) + [1] * len(sampled),
        "prompt": tokenizer.decode(prompt),
        "response": tokenizer.decode(sampled),
        "reward": 1.0,
        "truncated": False,
    }
    rows = [row, row, {**row, "reward": 0.2}, {**row, "truncated": True}]
    data = DataConfig(train=write(tmp_path / "rows.jsonl", rows))
    found = load_finished(data, encoder_of("chatml"), max_length=64, min_reward=0.5)["data.train"]
    assert [(each.ids, each.turns) for each in found.rows] == [
        (tuple(prompt + sampled), ((len(prompt), len(sampled)),))
    ]
    assert all(what in found.remarks[0] for what in ("1 rows with a reward below", "1 rows truncated", "another one"))
    other = DataConfig(train=write(tmp_path / "other.jsonl", [{**row, "prompt": "x"}]))
    with pytest.raises(DatasetError, match="another tokenizer"):
        load_finished(other, encoder_of("chatml"), max_length=64, min_reward=0.5)
