"""Calls are read from token ids: markers are tokens, thoughts call nothing, and what cannot be read says why."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from nemo_rl.data.conversation import ToolCall
from nemo_rl.data.tokenizer import build_tokenizer
from nemo_rl.environments.call_formats import CallFormat, GptOssCalls, HermesCalls, Llama3Calls, ParsedTurn

ADD = ToolCall(name="add", arguments={"a": 1, "b": [2, "x"]})
ADD_JSON = '{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}'
LLAMA_JSON = ADD_JSON.replace("arguments", "parameters")
STOP = "<|im_end|>"
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")


def tokenizer(*added: str, special: bool = False) -> PreTrainedTokenizerBase:
    made = build_tokenizer(["sort 123 hello"])
    made.add_tokens(list(added), special_tokens=special)
    return made


HERMES = tokenizer("<tool_call>", "</tool_call>", "<think>", "</think>")
PLAIN = tokenizer()
LLAMA = tokenizer("<|python_tag|>", special=True)
GPT_OSS = tokenizer(*HARMONY, special=True)


def parsed(form: type, using: PreTrainedTokenizerBase, text: str) -> ParsedTurn:
    made: CallFormat = form(using)
    return made.parse(using.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("using", [HERMES, PLAIN], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("turn", "text", "calls"),
    [
        ("hello", "hello", ()),
        (f" hello\n{STOP}", " hello\n", ()),
        (f"Let me see.\n<tool_call>\n{ADD_JSON}\n</tool_call>{STOP}", "Let me see.", (ADD,)),
        (f"<tool_call>{ADD_JSON}</tool_call>\n<tool_call>{ADD_JSON}</tool_call>", "", (ADD, ADD)),
        (f"<tool_call>{LLAMA_JSON}</tool_call>", "", (ADD,)),
        ('<tool_call>{"name": "f"}</tool_call>', "", (ToolCall(name="f"),)),
        (
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
            "",
            (ToolCall(name="f", arguments={"a": 1}),),
        ),
        (
            f"<think>is it <tool_call>{ADD_JSON}</tool_call>?</think>no",
            f"<think>is it <tool_call>{ADD_JSON}</tool_call>?</think>no",
            (),
        ),
        (f"so <tool_call>{ADD_JSON}</tool_call></think>no", f"so <tool_call>{ADD_JSON}</tool_call></think>no", ()),
        (
            f"<think>never ends <tool_call>{ADD_JSON}</tool_call>",
            f"<think>never ends <tool_call>{ADD_JSON}</tool_call>",
            (),
        ),
        (f"<think>4</think>\n<tool_call>{ADD_JSON}</tool_call>", "<think>4</think>", (ADD,)),
    ],
)
def test_hermes_calls_are_read(
    turn: str, text: str, calls: tuple[ToolCall, ...], using: PreTrainedTokenizerBase
) -> None:
    assert parsed(HermesCalls, using, turn) == ParsedTurn(text=text, calls=calls)


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ("<tool_call>{'name': 1}</tool_call>", "expected a JSON object, Expecting property name"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'expected a JSON object with a "name"'),
        ("<tool_call>[1]</tool_call>", 'expected a JSON object with a "name"'),
        ('<tool_call>{"name": ""}</tool_call>', 'expected a JSON object with a "name"'),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "f: expected arguments as a JSON object, got list"),
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "f: expected arguments as a JSON object, Expecting"),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN is no JSON"),
        ("<tool_call>" + "[" * 5000 + "</tool_call>", "nested too deeply"),
        (f"<tool_call>{'[' * 300}{']' * 300}</tool_call>", "nested more than 200 deep"),
        ('<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "Exceeds the limit"),
        (f"<tool_call>{ADD_JSON}", "no </tool_call>"),
        (f"<tool_call>{ADD_JSON}{STOP}", "no </tool_call>"),
        ("hello</tool_call>", "</tool_call> without <tool_call>"),
        ("<tool_call></tool_call>", "expected a JSON object, Expecting value"),
    ],
)
def test_hermes_calls_that_cannot_be_read_say_why(turn: str, reason: str) -> None:
    found = parsed(HermesCalls, HERMES, turn)
    assert found.calls == () and len(found.invalid) == 1
    assert reason in found.invalid[0] and len(found.invalid[0]) < 400


def test_one_bad_call_leaves_the_others() -> None:
    found = parsed(HermesCalls, HERMES, f"<tool_call>x<tool_call>{ADD_JSON}</tool_call>")
    assert found.calls == (ADD,) and "no </tool_call> before the next" in found.invalid[0]


def test_a_spelt_marker_calls_nothing_where_it_is_a_token() -> None:
    ids = PLAIN.encode(f"<tool_call>{ADD_JSON}</tool_call>", add_special_tokens=False)
    assert max(ids) < min(HERMES.convert_tokens_to_ids(["<tool_call>", "</tool_call>"]))
    found = HermesCalls(HERMES).parse(ids)
    assert found == ParsedTurn(text=f"<tool_call>{ADD_JSON}</tool_call>")


@pytest.mark.parametrize(
    ("turn", "text", "calls", "reason"),
    [
        (LLAMA_JSON, "", (ADD,), None),
        (f"<|python_tag|>{LLAMA_JSON}; {LLAMA_JSON};", "", (ADD, ADD), None),
        (f"<think>{LLAMA_JSON}</think>{LLAMA_JSON}{STOP}", f"<think>{LLAMA_JSON}</think>", (ADD,), None),
        (f"see: {LLAMA_JSON}", f"see: {LLAMA_JSON}", (), None),
        (f"see: <|python_tag|>{LLAMA_JSON}", "see:", (ADD,), None),
        ('{"answer": 3}', '{"answer": 3}', (), None),
        ("{1, 2}", "{1, 2}", (), None),
        ('<|python_tag|>{"answer": 3}', "", (), 'with a "name"'),
        ("<|python_tag|>print(1)", "", (), "expected a JSON object"),
        ('{"name": "f", "parameters": {', "", (), "expected a JSON object"),
        (f"{LLAMA_JSON} and more", "", (ADD,), "expected a JSON object"),
    ],
)
def test_llama3_calls_are_whole_turns(turn: str, text: str, calls: tuple[ToolCall, ...], reason: str | None) -> None:
    found = parsed(Llama3Calls, LLAMA, turn)
    assert (found.text, found.calls, len(found.invalid)) == (text, calls, int(reason is not None))
    assert reason is None or reason in found.invalid[0]


F = ToolCall(name="f", arguments={"a": 1})
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
ANALYSIS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("turn", "text", "calls", "reason"),
    [
        ("<|channel|>final<|message|>42<|return|>", "42", (), None),
        (f"{ANALYSIS}<|channel|>final<|message|>42", "<think>hm</think>42", (), None),
        (f"{CALL}<|call|>", "", (F,), None),
        (f"{ANALYSIS}{CALL}<|call|>", "<think>hm</think>", (F,), None),
        (f"{CALL}<|call|><|start|>assistant{CALL}<|call|>", "", (F, F), None),
        ('<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', "", (F,), None),
        (
            f"{ANALYSIS}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}<|call|>",
            "<think>hm</think>I look.",
            (F,),
            None,
        ),
        (CALL.replace("commentary", "analysis") + "<|call|>", '<think>{"a": 1}</think>', (), None),
        (CALL, "", (), "no <|call|> at its end"),
        (f"{CALL}<|end|>", "", (), "no <|call|> at its end"),
        (
            CALL.replace("functions.f", "browser") + "<|call|>",
            "",
            (),
            "expected a recipient functions.NAME, got browser",
        ),
        (CALL.replace('{"a": 1}', "{") + "<|call|>", "", (), "f: expected a JSON object of arguments"),
        ("hello", "hello", (), None),
    ],
)
def test_gpt_oss_calls_are_messages(turn: str, text: str, calls: tuple[ToolCall, ...], reason: str | None) -> None:
    found = parsed(GptOssCalls, GPT_OSS, turn)
    assert (found.text, found.calls, len(found.invalid)) == (text, calls, int(reason is not None))
    assert reason is None or reason in found.invalid[0]


@pytest.mark.parametrize(("form", "using"), [(HermesCalls, HERMES), (Llama3Calls, LLAMA), (GptOssCalls, GPT_OSS)])
def test_a_turn_of_one_stop_token_is_empty(form: type, using: PreTrainedTokenizerBase) -> None:
    assert form(using).parse([]) == ParsedTurn(text="")
    if form is not GptOssCalls:
        assert parsed(form, using, STOP) == ParsedTurn(text="")
