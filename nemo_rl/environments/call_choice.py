"""The format of calls of a run: `env.tools.format`, checked against what the chat template writes.

Called by the preflight, by the setup of conversations and by replays. Invariant: `auto` takes a format that gives a
call of every tool back exactly, from what the template writes for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl.config.parts import AUTO, CALL_FORMATS
from nemo_rl.data.conversation import ToolCall
from nemo_rl.data.turn_encoder import TurnEncoder
from nemo_rl.environments.call_formats import CallFormat, typed
from nemo_rl.environments.tool_schema import schema_of
from nemo_rl.environments.tools import calculator
from nemo_rl.errors import ConfigError, ModelFolderError, shorten

__all__ = ["EXAMPLE_TOOLS", "FormatCheck", "call_format", "check_format", "reading_formats"]

KEY = "env.tools.format"
EXAMPLE_TOOLS: tuple[Mapping[str, Any], ...] = (schema_of(calculator),)
"""Stands for the tools of a program, which are not known before its first request."""
_TEXT = 'a < b: "c" {d}\n3'
_SAMPLES: Mapping[str, object] = {"string": _TEXT, "integer": 3, "number": 2.5, "boolean": True, "null": None}


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatCheck:
    """The finding on a format: the one that is used, and what is said about it."""

    name: str
    line: str
    is_refused: bool = False


def call_format(name: str, encoder: TurnEncoder) -> CallFormat:
    """Return the format of a name; for `auto` the first built-in one that reads the calls of the chat template.

    Args:
        encoder: of conversations with the tools.

    Raises:
        ConfigError: `auto`, and no format reads them.
    """
    if name == AUTO:
        found = check_format(name, encoder)
        if found.is_refused:
            raise ConfigError(found.line)
        name = found.name
    made: CallFormat = CALL_FORMATS.load(name, key=KEY)(encoder.tokenizer)
    return made


def check_format(name: str, encoder: TurnEncoder) -> FormatCheck:
    """Return what becomes of `env.tools.format` with the calls that the chat template writes."""
    readers = reading_formats(encoder)
    if name in readers:
        return FormatCheck(name=name, line=f"{KEY}: {name} reads the calls of the chat template")
    if name == AUTO and readers:
        return FormatCheck(
            name=readers[0], line=f"{KEY}: auto takes {readers[0]}, which reads the chat template's calls"
        )
    try:
        written = encoder.written(_sample_call(encoder.tools[0]))
        writes = f"it writes {shorten(repr(encoder.tokenizer.decode(list(written))))}"
    except ModelFolderError as error:
        writes = shorten(str(error))
    if name == AUTO:
        line = (
            f"{KEY}: no format reads the calls of the chat template: {writes}; set policy.tokenizer.chat_template to "
            "one that prints tools and calls, or name the format that the model is told of: "
            f"{', '.join(word for word in CALL_FORMATS.builtin if word != AUTO)}, or module:Class"
        )
        return FormatCheck(name=name, line=line, is_refused=True)
    line = f"{KEY}: {name} does not read the calls of the chat template: {writes}"
    if readers:
        line += f"; set it to auto, or to {' or '.join(readers)}"
    return FormatCheck(name=name, line=line, is_refused=bool(readers) and CALL_FORMATS.is_builtin(name))


def reading_formats(encoder: TurnEncoder) -> tuple[str, ...]:
    """Return the built-in formats that read a call of every tool as the chat template writes it; none where it has no
    form for calls."""
    calls = [_sample_call(schema) for schema in encoder.tools]
    try:
        written = [encoder.written(call) for call in calls]
    except ModelFolderError:
        return ()

    def reads(name: str) -> bool:
        form: CallFormat = CALL_FORMATS.load(name, key=KEY)(encoder.tokenizer)
        turns = [typed(form.parse(ids), encoder.tools) for ids in written]
        return all(turn.calls == (call,) and not turn.invalid for turn, call in zip(turns, calls, strict=True))

    return tuple(name for name in CALL_FORMATS.builtin if name != AUTO and reads(name))


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
