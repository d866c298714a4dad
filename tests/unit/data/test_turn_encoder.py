"""Replies become tokens behind what was sampled, as a fresh render of the conversation has them, id by id."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from transformers import PreTrainedTokenizerBase

from nemo_rl.data.conversation import Message, ToolCall
from nemo_rl.data.tokenizer import build_tokenizer
from nemo_rl.data.turn_encoder import TurnEncoder
from nemo_rl.errors import ModelFolderError
from tests.helpers.case_selection import num_examples
from tests.helpers.chat_templates import CASES, CORPUS, NOW, TemplateCase, stop_ids_of, tokenizer_of

NUM_CONVERSATIONS = num_examples()
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("calculator", "lookup")
]
WORDS = [
    "hello",
    "the",
    "result is",
    "42",
    "higher",
    "x=7",
    "2*21",
    "{a}",
    "[b]",
    "caf\u00e9",
    "\u4e16",
    "\U0001f600",
    "it's",
]


@cache
def encoder_of(name: str, history: str = "append") -> TurnEncoder:
    return TurnEncoder(tokenizer_of(name), stop_ids=stop_ids_of(name), tools=TOOLS, now=NOW, history=history)


@cache
def plain() -> PreTrainedTokenizerBase:
    """The same vocabulary without the control tokens of the templates."""
    return build_tokenizer([CORPUS] * 3, max_vocab_size=420)


def rendered(case: TemplateCase, messages: Sequence[Message], *, generation_prompt: bool = True) -> str:
    as_dicts = []
    for message in messages:
        calls = [
            {"type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}} for c in message.calls
        ]
        as_dict = {"role": message.role, "content": message.content, **({"tool_calls": calls} if calls else {})}
        as_dicts.append(as_dict)
    # It would see the clock.
    dated = re.sub(r"strftime_now\('([^']*)'\)", lambda found: f"'{NOW.strftime(found[1])}'", case.template)
    return tokenizer_of(case.name).apply_chat_template(
        as_dicts, tools=TOOLS, add_generation_prompt=generation_prompt, tokenize=False, chat_template=dated
    )


def oracle(case: TemplateCase, messages: Sequence[Message]) -> list[int]:
    """Encode a fresh render: control tokens of the template by their ids, everything between them as text."""
    tokenizer = tokenizer_of(case.name)
    names = sorted((*case.controls, *case.markers), key=len, reverse=True)
    control = re.compile("|".join(map(re.escape, names)))
    hidden = {name: chr(0xE000 + number) for number, name in enumerate(names)}

    def hide(message: Message) -> Message:
        if message.role == "assistant":
            return message
        return replace(message, content=control.sub(lambda found: hidden[found[0]], message.content))

    text = rendered(case, [hide(message) for message in messages])
    ids, place = [], 0
    for found in [*control.finditer(text), None]:
        segment = text[place : found.start() if found else len(text)]
        for name, character in hidden.items():
            segment = segment.replace(character, name)
        if segment:
            ids += plain()(segment, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        if found:
            ids.append(tokenizer.convert_tokens_to_ids(found[0]))
            place = found.end()
    return ids


class Script:
    """Random conversations of one template.

    Args:
        injects: texts of users and tools hold control tokens.
    """

    def __init__(self, case: TemplateCase, seed: int, *, injects: bool) -> None:
        self.rng, self.case, self.injects = random.Random(seed), case, injects

    def text(self) -> str:
        words = [self.rng.choice(WORDS) for _ in range(self.rng.randint(1, 6))]
        if self.injects and self.rng.random() < 0.5:
            control = self.rng.choice([*self.case.controls, *self.case.markers, "<|im_end|>", "<|pad|>"])
            return f"a {' '.join(words)}x{control}y {' '.join(words)} b"
        return self.rng.choice([" ", "\n", "  "]).join(words)

    def answer(self) -> str:
        return " ".join(self.rng.choice(WORDS) for _ in range(self.rng.randint(1, 6)))

    def prompt(self) -> list[Message]:
        system = [Message(role="system", content=self.text())] if self.rng.random() < 0.5 else []
        return [*system, Message(role="user", content=self.text())]

    def turn(self) -> tuple[Message, list[Message]]:
        """A turn of the model, and what it reads next."""
        users = [Message(role="user", content=self.text())]
        if self.rng.random() < 0.4:
            return Message(role="assistant", content=self.answer()), users
        calls = tuple(
            ToolCall(name=self.rng.choice(["calculator", "lookup"]), arguments={"expression": self.answer(), "n": 3})
            for _ in range(self.rng.randint(1, self.case.max_calls))
        )
        results = [Message(role="tool", content=self.text(), name=call.name) for call in calls]
        silent = self.case.name in ("llama3", "gpt_oss") or self.rng.random() < 0.5
        turn = Message(role="assistant", content="" if silent else self.answer(), calls=calls)
        return turn, results + (users if self.rng.random() < 0.3 else [])


def played(case: TemplateCase, seed: int, *, injects: bool) -> None:
    """Play a conversation through the encoder; every row's tokens are those of the oracle."""
    script, encoder, tokenizer = Script(case, seed, injects=injects), encoder_of(case.name), tokenizer_of(case.name)
    to_id = tokenizer.convert_tokens_to_ids
    messages = script.prompt()
    row = list(encoder.prompt(messages))
    assert row == oracle(case, messages)
    inserted = [tuple(row)]
    for _ in range(script.rng.randint(1, 4)):
        turn, new = script.turn()
        expected = oracle(case, [*messages, turn, *new])
        assert expected[: len(row)] == row
        # The turn as the template writes it stands for what a model would have sampled.
        ends = {to_id(name) for name in ("<|im_end|>", "<|eot_id|>", "<|end|>", "<|call|>")}
        end = next(place for place in range(len(row), len(expected)) if expected[place] in ends)
        sampled, stop = expected[len(row) : end], expected[end]
        kind = script.rng.choice(["stop", "stop", "cut" if not turn.calls else "stop", "other stop", "returned"])
        if kind == "stop":
            found = encoder.extend([*messages, turn], new, sampled=[*sampled, stop], is_cut=False)
            row += [*sampled, stop]
        elif kind == "returned" and case.name == "gpt_oss":
            found = encoder.extend([*messages, turn], new, sampled=[*sampled, to_id("<|return|>")], is_cut=False)
            row += [*sampled, stop]
        elif kind == "cut":
            found = encoder.extend([*messages, turn], new, sampled=sampled, is_cut=True)
            row += sampled
        else:
            found = encoder.extend([*messages, turn], new, sampled=[*sampled, to_id(case.other_stop)], is_cut=False)
            row += sampled
        row += found.ids
        messages += [turn, *new]
        inserted.append(found.ids)
        assert not found.starts_row
        assert tokenizer.decode(found.ids[: found.num_seam]) in (case.seam, tokenizer.decode([stop]) + case.seam)
        assert row == expected
    answer = Message(role="assistant", content="x")
    assert encoder.mismatch([*messages, answer], inserted) is None
    starts = [to_id(name) for name in ("<|im_start|>", "<|start|>", "<|start_header_id|>")]
    broken = [*inserted[:-1], [token for token in inserted[-1] if token not in starts]]
    assert encoder.mismatch([*messages, answer], broken) is not None


@pytest.mark.parametrize("injects", [False, True], ids=["plain texts", "control tokens in texts"])
@pytest.mark.parametrize("name", CASES)
def test_rows_of_random_conversations_are_what_a_fresh_render_has_id_by_id(name: str, injects: bool) -> None:
    for seed in range(NUM_CONVERSATIONS):
        played(CASES[name], seed, injects=injects)


def call(name: str = "calculator") -> ToolCall:
    return ToolCall(name=name, arguments={"expression": "2*21"})


def user(text: str) -> Message:
    return Message(role="user", content=text)


def result(text: str, name: str = "calculator") -> Message:
    return Message(role="tool", content=text, name=name)


def reply(
    name: str, turn: Message, new: list[Message], *, sampled: str, history: str = "append"
) -> tuple[str, int, bool]:
    """Text, seam tokens and whether a row starts, of a reply after one user message."""
    tokenizer, encoder = tokenizer_of(name), encoder_of(name, history)
    ids = tokenizer(sampled, add_special_tokens=False)["input_ids"]
    found = encoder.extend([user("hello"), turn], new, sampled=ids, is_cut=False)
    return tokenizer.decode(found.ids), found.num_seam, found.starts_row


def test_thoughts_that_the_template_strips_start_a_row_or_stay() -> None:
    thought = Message(role="assistant", content="<think>\n2*21\n</think>\n\n42")
    sampled = f"{thought.content}<|im_end|>"
    following = "<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
    assert reply("qwen3", thought, [user("higher")], sampled=sampled) == (f"\n{following}", 1, False)
    opening = tokenizer_of("qwen3").decode(encoder_of("qwen3").prompt([user("hello")]))
    whole = f"{opening}42<|im_end|>\n{following}"
    assert reply("qwen3", thought, [user("higher")], sampled=sampled, history="new_row") == (whole, 0, True)
    # Nothing is stripped before a result, nor without thoughts, nor by a template that keeps them.
    calling = replace(thought, calls=(call(),))
    assert not reply("qwen3", calling, [result("42")], sampled=sampled, history="new_row")[2]
    silent = Message(role="assistant", content="42")
    assert not reply("qwen3", silent, [user("higher")], sampled="42<|im_end|>", history="new_row")[2]
    assert not reply("chatml", thought, [user("higher")], sampled=sampled, history="new_row")[2]


def test_thoughts_of_an_earlier_turn_that_are_stripped_now_start_a_row() -> None:
    called = Message(role="assistant", content="<think>\nhm\n</think>\n\n", calls=(call(),))
    conversation = [user("a"), called, result("42"), Message(role="assistant", content="b")]
    encoder = encoder_of("qwen3", "new_row")
    end = tokenizer_of("qwen3").convert_tokens_to_ids("<|im_end|>")
    assert not encoder.extend(conversation[:2], [result("42")], sampled=[5, end], is_cut=False).starts_row
    assert encoder.extend(conversation, [user("c")], sampled=[5, end], is_cut=False).starts_row


def test_a_new_row_keeps_the_thoughts_that_the_template_keeps_as_control_tokens() -> None:
    tokenizer, encoder = tokenizer_of("qwen3"), encoder_of("qwen3", "new_row")
    first = Message(role="assistant", content="<think>\na\n</think>\n\nb <|im_end|> c")
    found = encoder.extend([user("x"), first], [user("y </think> <|im_start|>")], sampled=[1], is_cut=True)
    assert found.starts_row and tokenizer.decode(found.ids).count("b <|im_end|> c") == 1
    ends = [tokenizer.convert_tokens_to_ids(name) for name in ("<|im_start|>", "<|im_end|>", "</think>")]
    assert [found.ids.count(token) for token in ends] == [5, 4, 0]


def test_channels_of_thoughts_start_a_row_where_an_answer_follows_them() -> None:
    answer = Message(role="assistant", content="42")
    sampled = "<|channel|>analysis<|message|>2*21<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>"
    following = "<|start|>user<|message|>higher<|end|><|start|>assistant"
    assert reply("gpt_oss", answer, [user("higher")], sampled=sampled) == (following, 0, False)
    text, num_seam, starts_row = reply("gpt_oss", answer, [user("higher")], sampled=sampled, history="new_row")
    assert starts_row and num_seam == 0
    assert text.endswith(f"<|start|>assistant<|channel|>final<|message|>42<|end|>{following}")
    calling = Message(role="assistant", content="", calls=(call(),))
    sampled = "<|channel|>analysis<|message|>x<|end|><|start|>assistant to=functions.calculator<|message|>{}<|call|>"
    assert not reply("gpt_oss", calling, [result("42")], sampled=sampled, history="new_row")[2]


@pytest.mark.parametrize(
    ("name", "stop", "inserted", "num_seam"),
    [
        ("chatml", "<|im_end|>", "\n", 1),
        ("chatml", "<|endoftext|>", "<|im_end|>\n", 2),
        ("chatml", "", "<|im_end|>\n", 2),
        ("llama3", "<|eot_id|>", "", 0),
        ("llama3", "<|eom_id|>", "", 0),
        ("llama3", "<|end_of_text|>", "<|eot_id|>", 1),
        ("gpt_oss", "<|return|>", "", 0),
        ("gpt_oss", "<|end|>", "", 0),
        ("gpt_oss", "<|call|>", "", 0),
        ("gpt_oss", "<|endoftext|>", "<|end|>", 1),
    ],
)
def test_an_end_token_is_inserted_where_the_turn_ended_otherwise(name, stop, inserted, num_seam):
    answer = Message(role="assistant", content="42")
    text, found, _ = reply(name, answer, [user("so")], sampled=f"42{stop}")
    start = "<|start_header_id|>user" if name == "llama3" else "<|start|>" if name == "gpt_oss" else "<|im_start|>"
    assert text.startswith(f"{inserted}{start}") and found == num_seam


def test_a_turn_that_was_cut_behind_its_end_gets_no_second_one() -> None:
    tokenizer, encoder = tokenizer_of("chatml"), encoder_of("chatml")
    conversation = [user("a"), Message(role="assistant", content="b")]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    found = encoder.extend(conversation, [user("c")], sampled=[5, end], is_cut=True)
    assert found.num_seam == 1 and end not in found.ids[:2]


def test_results_of_parallel_calls_are_appended_one_by_one_where_a_template_has_no_form_for_them() -> None:
    turn = Message(role="assistant", content="", calls=(call("calculator"), call("lookup")))
    new = [result("42"), result("none <|end|>", "lookup"), user("so?")]
    three = replace(turn, calls=(*turn.calls, call()))
    text = reply("gpt_oss", three, [*new[:2], result("43")], sampled="<|call|>")[0]
    assert re.findall(r"functions\.(\w+)", text) == ["calculator", "lookup", "calculator"]
    assert reply("gpt_oss", turn, new, sampled="<|call|>")[0] == (
        '<|start|>functions.calculator to=assistant<|channel|>commentary<|message|>"42"<|end|>'
        '<|start|>functions.lookup to=assistant<|channel|>commentary<|message|>"none <|end|>"<|end|>'
        "<|start|>user<|message|>so?<|end|><|start|>assistant"
    )
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert reply("llama3", turn, new[:2], sampled="<|eot_id|>")[0] == (
        f"{head.format('ipython')}42<|eot_id|>{head.format('ipython')}none <|end|><|eot_id|>{head.format('assistant')}"
    )
    assert reply("qwen3", turn, new[:2], sampled="<|im_end|>")[0] == (
        "\n<|im_start|>user\n<tool_response>\n42\n</tool_response>\n<tool_response>\nnone <|end|>\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_templates_that_cannot_append_are_refused_with_what_they_write() -> None:
    made = build_tokenizer([CORPUS])
    made.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    encoder = TurnEncoder(made, stop_ids=(2,), now=NOW)
    conversation = [user("a"), Message(role="assistant", content="b")]
    with pytest.raises(ModelFolderError, match="ends no assistant turn with a control token"):
        encoder.extend(conversation, [user("c")], sampled=[2], is_cut=False)
    refusal = "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endfor %}"
    made.chat_template = refusal + CASES["chatml"].template
    encoder = TurnEncoder(made, stop_ids=(2,), now=NOW)
    with pytest.raises(ModelFolderError, match="no tools"):
        encoder.extend(conversation, [result("c")], sampled=[2], is_cut=False)
    made.chat_template = None
    with pytest.raises(ModelFolderError, match="expected a chat template"):
        TurnEncoder(made, stop_ids=(2,), now=NOW)


@pytest.mark.parametrize(
    "text", ["ab " * 40, "x" * 3000, "1\n\x00" * 500, "\ud800 7" * 90, "<|im_end|>" * 50, "word " * 100_000]
)
@pytest.mark.parametrize("limit", [32, 40, 200])
def test_a_long_result_loses_its_middle_and_says_so(text: str, limit: int) -> None:
    encoder, tokenizer = encoder_of("chatml"), tokenizer_of("chatml")
    cut, was_cut = encoder.cut_text(text, limit)

    def count(part: str) -> int:
        return len(tokenizer(part, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    sane = text.encode("utf-8", "replace").decode()
    assert was_cut == (count(sane) > limit) and count(cut) <= limit
    if was_cut:
        [out] = [int(number) for number in re.findall(r"\[\.\.\. (\d+) tokens left out \.\.\.\]", cut)]
        head, _, tail = cut.partition(f"\n[... {out} tokens left out ...]\n")
        assert sane.startswith(head) and sane.endswith(tail)
        assert abs(count(head) + count(tail) + out - count(sane)) <= 2 + len(text) // 4096
    else:
        assert cut == sane


def test_a_limit_below_the_mark_leaves_the_mark_alone() -> None:
    cut, was_cut = encoder_of("chatml").cut_text("ab " * 40, 1)
    assert was_cut and cut.startswith("[... ") and cut.endswith(" tokens left out ...]")
    assert encoder_of("chatml").cut_text("a", 1) == ("a", False) and encoder_of("chatml").cut_text("", 1) == ("", False)
