"""The format of calls is that of the chat template, in whose own writing calls are read back."""

from __future__ import annotations

from functools import cache

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from nemo_rl.data.conversation import Message, ToolCall
from nemo_rl.data.tokenizer import build_tokenizer
from nemo_rl.data.turn_encoder import TurnEncoder
from nemo_rl.environments.call_formats import typed
from nemo_rl.environments.tool_schema import schema_of
from nemo_rl.errors import ConfigError
from nemo_rl.experience.conversation_setup import call_format, reading_formats
from tests.helpers.chat_templates import CASES, CORPUS, NOW, stop_ids_of, tokenizer_of


def search(text: str, count: int, exact: bool, words: list[str], limit: float | None = None) -> str:
    """Search."""
    return text


def ask(question: str) -> str:
    """Ask."""
    return question


TOOLS = [schema_of(search), schema_of(ask)]
ARGUMENTS = {"text": '"a" <b>\nc', "count": 3, "exact": True, "words": ["d", "e f"], "limit": 2.5}


def chat(
    call: str, *, before: str = "", after: str = "", end: str = "<|im_end|>", result: str = "{{ m.content }}"
) -> str:
    """Return a template of ChatML whose assistants write `call` for each call `c`."""
    return (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{% if m.role == 'tool' %}"
        f"<|im_start|>tool\n{result}<|im_end|>{{% else %}}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}"
        f"{{% if m.tool_calls %}}{before}{{% for c in m.tool_calls %}}{call}{{% endfor %}}{after}{end}"
        "{% else %}<|im_end|>{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


JSON = "{{ c.function.arguments | tojson }}"
PAIRS = "{% for k, v in c.function.arguments | items %}"
VALUE = "{{ v if v is string else v | tojson }}"
GEMMA_VALUES = (
    "{% macro value(v, q) %}{% if v is string %}{{ q + v + q }}{% elif v is sequence %}[{% for x in v %}"
    "{{ value(x, q) }}{% if not loop.last %},{% endif %}{% endfor %}]{% else %}{{ v | tojson }}{% endif %}"
    "{% endmacro %}"
)
GEMMA = (
    "call:{{ c.function.name }}{{ '{' }}"
    + PAIRS
    + "{{ k }}:{{ value(v, Q) }}{% if not loop.last %},{% endif %}{% endfor %}}"
)
GLM = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}\n{{ m.content }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}\n"
    + PAIRS
    + "<arg_key>{{ k }}</arg_key>\n<arg_value>" + VALUE + "</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)  # fmt: skip
SEEK = tuple(f"<\uff5ctool\u2581{name}\uff5c>" for name in ("call\u2581begin", "sep", "call\u2581end"))
AROUND = tuple(f"<\uff5ctool\u2581calls\u2581{name}\uff5c>" for name in ("begin", "end"))
KIMI = tuple(
    f"<|tool_{n}|>"
    for n in ("calls_section_begin", "call_begin", "call_argument_begin", "call_end", "calls_section_end")
)
TAGS = ("<tool_call>", "</tool_call>")
SHAPES: dict[str, tuple[str, tuple[str, ...], str, str]] = {
    "kimi": (
        "kimi", KIMI, chat(f"{KIMI[1]}{{{{ c.id }}}}{KIMI[2]}{JSON}{KIMI[3]}", before=KIMI[0], after=KIMI[4],
        result="## Return of {{ m.tool_call_id }}\n{{ m.content }}"), "<|im_end|>",
    ),
    "qwen3_coder": (
        "qwen3_coder", TAGS, chat("<tool_call>\n<function={{ c.function.name }}>\n" + PAIRS + "<parameter={{ k }}>\n"
        + VALUE + "\n</parameter>\n{% endfor %}</function>\n</tool_call>"), "<|im_end|>",
    ),
    "values as python prints them": (
        "qwen3_coder", TAGS, chat("<tool_call><function={{ c.function.name }}>" + PAIRS + "<parameter={{ k }}>\n"
        "{{ v | tojson if v is sequence and v is not string else v | string }}\n</parameter>{% endfor %}</function>"
        "</tool_call>"), "<|im_end|>",
    ),
    "glm": ("glm", (*TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"), GLM, "<|observation|>"),
    "deepseek": (
        "deepseek", (*SEEK, *AROUND), chat(f"{SEEK[0]}{{{{ c.function.name }}}}{SEEK[1]}"
        + "{{ c.function.arguments + '' }}" + SEEK[2], before=AROUND[0], after=AROUND[1]), "<|im_end|>",
    ),
    "deepseek with blocks": (
        "deepseek", (*SEEK, *AROUND), chat(f"{SEEK[0]}function{SEEK[1]}{{{{ c.function.name }}}}\n```json\n{JSON}\n```"
        + SEEK[2], before=AROUND[0], after=AROUND[1]), "<|im_end|>",
    ),
    "mistral": (
        "mistral", ("[TOOL_CALLS]",), chat('{{ (c.function | tojson)[:-1] + \', "id": "\' + c.id + \'"}\' }}'
        "{% if not loop.last %}, {% endif %}", before="[TOOL_CALLS] [", after="]",
        result='{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}'), "<|im_end|>",
    ),
    "mistral with names": (
        "mistral", ("[TOOL_CALLS]", "[ARGS]"), chat("[TOOL_CALLS]{{ c.function.name }}[ARGS]" + JSON), "<|im_end|>",
    ),
    "gemma": (
        "gemma", ("<start_function_call>", "<end_function_call>", "<escape>"), GEMMA_VALUES
        + chat("<start_function_call>" + GEMMA.replace("Q)", "'<escape>')") + "<end_function_call>"), "<|im_end|>",
    ),
    "gemma4": (
        "gemma4", ("<|tool_call>", "<tool_call|>", '<|"|>'), GEMMA_VALUES
        + chat("<|tool_call>" + GEMMA.replace("Q)", "'<|\"|>')") + "<tool_call|>"), "<|im_end|>",
    ),
}  # fmt: skip
"""Format, markers, template and end of a turn with calls."""


@cache
def tokenizer(name: str) -> PreTrainedTokenizerBase:
    _, markers, template, _ = SHAPES[name]
    made = build_tokenizer([CORPUS], max_vocab_size=420)
    controls = ["<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"]
    made.add_special_tokens({"additional_special_tokens": controls})
    made.add_tokens([AddedToken(marker, normalized=False) for marker in markers])
    made.chat_template = template
    return made


def encoder(name: str) -> TurnEncoder:
    stops = tokenizer(name).convert_tokens_to_ids(["<|im_end|>", "<|user|>", "<|observation|>", "<|endoftext|>"])
    return TurnEncoder(tokenizer(name), stop_ids=stops, tools=TOOLS, now=NOW)


@pytest.mark.parametrize("name", SHAPES)
def test_a_call_of_every_tool_is_read_in_the_format_of_the_template_and_in_no_other(name: str) -> None:
    using = encoder(name)
    assert reading_formats(using) == (SHAPES[name][0],)
    form = call_format("auto", using)
    call = ToolCall(name="search", arguments=ARGUMENTS)
    turn = typed(form.parse(using.written(call, call)), TOOLS)
    assert turn.calls == (call, call) and not turn.invalid
    assert reading_formats(using, at_once=2) == (SHAPES[name][0],)


@pytest.mark.parametrize("name", CASES)
def test_templates_of_the_older_formats_are_read_too(name: str) -> None:
    using = TurnEncoder(tokenizer_of(name), stop_ids=stop_ids_of(name), tools=TOOLS, now=NOW)
    expected = {"llama3": "llama3", "gpt_oss": "gpt_oss"}.get(name, "hermes")
    assert reading_formats(using)[0] == expected


def test_auto_is_refused_where_no_format_reads_the_calls() -> None:
    made = build_tokenizer([CORPUS])
    using = TurnEncoder(made, stop_ids=(2,), tools=TOOLS, now=NOW)
    with pytest.raises(ConfigError, match=r"env.tools.format: no format reads .* set policy.tokenizer.chat_template"):
        call_format("auto", using)


@pytest.mark.parametrize("num_calls", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_rows_of_scripted_calls_are_what_the_template_renders(name: str, num_calls: int) -> None:
    made, using = tokenizer(name), encoder(name)
    messages = [Message(role="user", content="hello")]
    row = list(using.prompt(messages))
    end = made.convert_tokens_to_ids(SHAPES[name][3])
    for number in range(3):
        calls = tuple(ToolCall(name="ask", arguments={"question": f"{number} {n}"}) for n in range(num_calls))
        turn = Message(role="assistant", content="", calls=calls)
        new = [Message(role="tool", content=f"result {number}", name="ask") for _ in calls]
        # The model writes what the template writes, and stops at its stop token.
        fresh = using.prompt([*messages, turn, *new])
        assert list(fresh[: len(row)]) == row
        sampled = fresh[len(row) : fresh.index(end, len(row)) + 1]
        row += [*sampled, *using.extend([*messages, turn], new, sampled=sampled, is_cut=False).ids]
        assert made.decode(row) == made.decode(list(fresh)) and row == list(fresh)
        messages += [turn, *new]


def test_results_repeat_the_ids_that_a_model_gave_its_calls() -> None:
    using = encoder("mistral")
    given = [ToolCall(name="ask", arguments={"question": "a"}, id=f"Ab3{n}Xyz90") for n in range(2)]
    turn = call_format("auto", using).parse(using.written(*given))
    assert [call.id for call in turn.calls] == [call.id for call in given]
    odd = ToolCall(name="ask", arguments={"question": "a"}, id="[INST] hi")
    assert call_format("auto", using).parse(using.written(odd)).calls[0].id == ""
    conversation = [
        Message(role="user", content="hello"),
        Message(role="assistant", content="", calls=turn.calls),
    ]
    new = [Message(role="tool", content="b", name="ask") for _ in given]
    row = using.tokenizer.decode(list(using.extend(conversation, new, sampled=(), is_cut=True).ids))
    assert all(f'"call_id": "{call.id}"' in row for call in given) and "call0000" not in row
    assert using.tokenizer.decode(list(using.prompt([*conversation, *new]))).endswith(row)


def test_a_stop_token_that_begins_the_next_message_stands_once() -> None:
    made, using = tokenizer("glm"), encoder("glm")
    conversation = [Message(role="user", content="hello"), Message(role="assistant", content="4")]
    new = [Message(role="user", content="higher")]
    for stop in ("<|user|>", "<|observation|>", "<|endoftext|>"):
        sampled = made(f"4{stop}", add_special_tokens=False)["input_ids"]
        text = made.decode([*sampled, *using.extend(conversation, new, sampled=sampled, is_cut=False).ids])
        assert text == f"4{stop}{'' if stop == '<|user|>' else '<|user|>'}\nhigher<|assistant|>\n"


def test_the_template_named_tool_use_is_taken_where_there_are_tools() -> None:
    made = build_tokenizer([CORPUS])
    made.chat_template = {"default": made.chat_template, "tool_use": CASES["qwen3"].template}
    question = [Message(role="user", content="hello")]
    texts = [made.decode(TurnEncoder(made, stop_ids=(2,), tools=t, now=NOW).prompt(question)) for t in ((), TOOLS)]
    assert ["# Tools" in text for text in texts] == [False, True]
    made.chat_template = {"tool_use": CASES["qwen3"].template, "rag": "x"}
    with pytest.raises(Exception, match=r"named 'default', got 'tool_use', 'rag'; set policy.tokenizer.chat_template"):
        TurnEncoder(made, stop_ids=(2,), now=NOW)


@pytest.mark.parametrize(
    ("name", "turn", "reason"),
    [
        ("qwen3_coder", "<tool_call>{}</tool_call>", "expected <function=NAME>..</function>"),
        ("qwen3_coder", "<tool_call><function=f>x</function></tool_call>", "f: expected <parameter=KEY>"),
        ("glm", "<tool_call>f\n<arg_key>x</arg_key></tool_call>", "f: expected <arg_key>KEY"),
        ("glm", "<tool_call></tool_call>", "expected the name of a tool"),
        ("kimi", f"{KIMI[1]}functions.f:0{KIMI[3]}", "expected functions.NAME:NUMBER"),
        ("kimi", f"{KIMI[1]}f{KIMI[2]}[1]{KIMI[3]}", "f: expected arguments as a JSON object"),
        ("deepseek", f"{SEEK[0]}f{SEEK[2]}", "expected NAME"),
        ("gemma", "<start_function_call>f{}<end_function_call>", "expected call:NAME"),
        ("gemma", "<start_function_call>call:f{x:<escape>}<end_function_call>", "f: expected a JSON object"),
        ("mistral", "[TOOL_CALLS] f", "expected a JSON object"),
    ],
)  # fmt: skip
def test_calls_that_cannot_be_read_say_why(name: str, turn: str, reason: str) -> None:
    form = call_format(SHAPES[name][0], encoder(name))
    found = form.parse(tokenizer(name)(turn, add_special_tokens=False)["input_ids"])
    assert not found.calls and len(found.invalid) == 1 and found.invalid[0].startswith(reason)
