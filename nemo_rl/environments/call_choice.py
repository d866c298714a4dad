"""The format of calls of a run: `env.tools.format`, checked against what the chat template writes.

Called by the preflight, by the setup of conversations and by replays. Invariant: `auto` takes a format that gives a
call of every tool back exactly, from what the template writes for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.config.parts import AUTO, CALL_FORMATS
from nemo_rl.data.conversation import ToolCall
from nemo_rl.data.turn_encoder import TurnEncoder
from nemo_rl.environments.call_formats import CallFormat, typed
from nemo_rl.errors import ConfigError, ModelFolderError, shorten

__all__ = ["EXAMPLE_TOOL", "KEY", "call_format", "reading_formats", "written_calls"]

KEY = "env.tools.format"
EXAMPLE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "example_tool",
        "description": "An example.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "number": {"type": "integer"}},
            "required": ["text", "number"],
        },
    },
}
"""Stands for the tools of a program, which are not known before its first request."""
_TEXT = 'a < b: "c" {d}\n3'
_SAMPLES: Mapping[str, object] = {"string": _TEXT, "integer": 3, "number": 2.5, "boolean": True, "null": None}


def call_format(
    name: str,
    *,
    tokenizer: PreTrainedTokenizerBase,
    encoder: TurnEncoder,
    schemas: Sequence[Mapping[str, Any]],
) -> CallFormat:
    """Return the format of a name; for `auto` the first built-in one that reads the calls of the chat template.

    Args:
        encoder: of conversations with the tools of `schemas`.

    Raises:
        ConfigError: `auto`, and no format reads them.
    """
    if name == AUTO:
        found = reading_formats(tokenizer, encoder, schemas)
        if not found:
            raise ConfigError(
                f"{KEY}: no format reads the calls of the chat template: {written_calls(tokenizer, encoder, schemas)}; "
                "set policy.tokenizer.chat_template to one that prints tools and calls, or name the format that the "
                f"model is told of: {', '.join(word for word in CALL_FORMATS.builtin if word != AUTO)}, or module:Class"
            )
        name = found[0]
    made: CallFormat = CALL_FORMATS.load(name, key=KEY)(tokenizer)
    return made


def reading_formats(
    tokenizer: PreTrainedTokenizerBase, encoder: TurnEncoder, schemas: Sequence[Mapping[str, Any]]
) -> tuple[str, ...]:
    """Return the built-in formats that read a call of every tool as the chat template writes it; none where it has no
    form for calls."""
    calls = [_sample_call(schema) for schema in schemas]
    try:
        written = [encoder.written(call) for call in calls]
    except ModelFolderError:
        return ()

    def reads(name: str) -> bool:
        form: CallFormat = CALL_FORMATS.load(name, key=KEY)(tokenizer)
        turns = [typed(form.parse(ids), schemas) for ids in written]
        return all(turn.calls == (call,) and not turn.invalid for turn, call in zip(turns, calls, strict=True))

    return tuple(name for name in CALL_FORMATS.builtin if name != AUTO and reads(name))


def written_calls(
    tokenizer: PreTrainedTokenizerBase, encoder: TurnEncoder, schemas: Sequence[Mapping[str, Any]]
) -> str:
    """Return what the chat template writes for a call of the first tool, or why it writes none, for people."""
    try:
        return f"it writes {shorten(repr(tokenizer.decode(list(encoder.written(_sample_call(schemas[0]))))))}"
    except ModelFolderError as error:
        return shorten(str(error))


def _sample_call(schema: Mapping[str, Any]) -> ToolCall:
    """Return a call with a value for each parameter."""
    function = schema["function"]
    properties = function["parameters"].get("properties", {})
    return ToolCall(name=function["name"], arguments={name: _sample(form) for name, form in properties.items()})


def _sample(form: Mapping[str, Any]) -> object:
    if "anyOf" in form:
        return _sample(form["anyOf"][0])
    if "enum" in form:
        return form["enum"][0]
    kind = form.get("type", "string")
    if kind == "array":
        return [_sample(form.get("items", {}))]
    return {"key": _sample(form.get("additionalProperties") or {})} if kind == "object" else _SAMPLES[kind]
