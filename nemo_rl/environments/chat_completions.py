"""OpenAI's Chat Completions as JSON: requests are read, answers and errors written.

Called by `ChatEndpoint`. Invariant: a field of a wrong type is refused with its name and what was expected.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

from nemo_rl.data.conversation import Message, Role, ToolCall
from nemo_rl.environments.chat import ChatAnswer, ChatRequest, RefusedRequest
from nemo_rl.environments.wire import read_json, sound_text

__all__ = ["MODEL", "as_error", "chunks", "completion", "parse_request"]

MODEL = "policy"
"""Name of the model; requests may name any."""
_SHOWN = 120
"""Characters of a wrong value in the reason."""
_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "an object": dict,
    "a list": list,
    "a text": str,
    "true or false": bool,
}


def parse_request(body: bytes) -> ChatRequest:
    given = _parse_json(body, "body")
    if not isinstance(given, dict):
        raise _wrong("body", "an object", given)
    messages = given.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", "a list of messages", messages)
    _refuse_unsupported(given)
    _taken(given, "model", "a text")
    streams = bool(_taken(given, "stream", "true or false", pops=True))
    options = _taken(given, "stream_options", "an object", pops=True)
    if options is not None and not streams:
        raise _wrong("stream_options", "it together with stream=true", options)
    limits = [_max_tokens(given, name) for name in ("max_completion_tokens", "max_tokens")]
    tools = tuple(_tools(given))
    choice = given.pop("tool_choice", None)
    if choice not in (None, "auto", "none"):
        raise _wrong("tool_choice", "auto or none (a turn cannot be forced to call)", choice)
    names: dict[str, str] = {}
    return ChatRequest(
        messages=tuple(_message(message, f"messages[{n}]", names) for n, message in enumerate(messages)),
        tools=() if choice == "none" else tools,
        max_tokens=next((limit for limit in limits if limit is not None), None),
        stop=_stop(given.pop("stop", None)),
        streams=streams,
        wants_usage=bool(_taken(options or {}, "include_usage", "true or false", where="stream_options.")),
        settings=given,
    )


def _refuse_unsupported(given: dict[str, Any]) -> None:
    """Take the fields that mean what is done anyway, and refuse their other values."""
    allowed: Mapping[str, tuple[tuple[object, ...], str]] = {
        "n": ((1,), "1 (a conversation has one next turn)"),
        "logprobs": ((False,), "false (they are kept for training, and not sent)"),
        "top_logprobs": ((0,), "none (they are kept for training, and not sent)"),
        "response_format": (({"type": "text"},), 'none or {"type": "text"} (turns are sampled freely)'),
        "seed": ((), "none (turns are sampled with the seeds of the run, so that they can be repeated)"),
        "functions": ((), "none; give them as tools"),
        "function_call": ((), "none; give tools and tool_choice"),
    }
    for name, (values, expected) in allowed.items():
        value = given.pop(name, None)
        if value is not None and not any(value == one and type(value) is type(one) for one in values):
            raise _wrong(name, expected, value)


def _parse_json(text: str | bytes, param: str) -> object:
    try:
        return read_json(text)
    except ValueError as error:
        raise RefusedRequest(f"{param}: expected JSON: {error}", param=param) from error


def _wrong(param: str, expected: str, got: object) -> RefusedRequest:
    """Return the refusal of a field."""
    shown = "none" if got is None else repr(got)
    shown = f"{shown[:_SHOWN]}..." if len(shown) > _SHOWN else shown
    return RefusedRequest(f"{param}: expected {expected}, got {shown}", param=param)


def _taken(given: dict[str, Any], name: str, kind: str, *, where: str = "", pops: bool = False) -> Any:
    """Return a field, which may be missing or null; raise RefusedRequest where it is of another kind."""
    value = given.pop(name, None) if pops else given.get(name)
    if value is not None and not isinstance(value, _KINDS[kind]):
        raise _wrong(f"{where}{name}", kind, value)
    return value


def _max_tokens(given: dict[str, Any], name: str) -> int | None:
    limit = given.pop(name, None)
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise _wrong(name, "a positive integer", limit)
    return limit


def _stop(given: object) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise _wrong("stop", "a text or a list of texts, none of them empty", given)
    return tuple(map(sound_text, stops))


def _tools(given: dict[str, Any]) -> Iterator[Mapping[str, Any]]:
    for number, tool in enumerate(_taken(given, "tools", "a list", pops=True) or ()):
        where = f"tools[{number}]"
        if not isinstance(tool, dict) or tool.get("type", "function") != "function":
            raise _wrong(where, "an object of type function", tool)
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise _wrong(f"{where}.function", "an object with a name", function)
        _taken(function, "description", "a text", where=f"{where}.function.")
        parameters = _taken(function, "parameters", "an object", where=f"{where}.function.") or {}
        properties = _taken(parameters, "properties", "an object", where=f"{where}.function.parameters.") or {}
        for name, form in properties.items():
            if not isinstance(form, dict):
                raise _wrong(f"{where}.function.parameters.properties.{name[:_SHOWN]}", "an object", form)
        yield tool


def _message(given: object, where: str, names: dict[str, str]) -> Message:
    """Return a message; `names` maps ids of calls to the names of their tools."""
    if not isinstance(given, dict):
        raise _wrong(where, "an object", given)
    role = "system" if given.get("role") == "developer" else given.get("role")
    if role not in ("system", "user", "assistant", "tool"):
        raise _wrong(f"{where}.role", "a role of system, developer, user, assistant, tool", role)
    made = _taken(given, "tool_calls", "a list", where=f"{where}.") or []
    if made and role != "assistant":
        raise _wrong(f"{where}.tool_calls", "them on messages of an assistant alone", role)
    calls = tuple(_call(call, f"{where}.tool_calls[{number}]", names) for number, call in enumerate(made))
    answers = _taken(given, "tool_call_id", "a text", where=f"{where}.")
    name = _taken(given, "name", "a text", where=f"{where}.")
    return Message(
        role=cast("Role", role),
        content=_content(given.get("content"), f"{where}.content"),
        calls=calls,
        name=names.get(answers or "", name) if role == "tool" else name,
    )


def _content(given: object, where: str) -> str:
    if given is None:
        return ""
    texts = list[str]()
    for part in given if isinstance(given, list) else [{"type": "text", "text": given}]:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _wrong(where, "content as text, or as parts of type text with a text", given)
        texts.append(str(part["text"]))
    return sound_text("".join(texts))


def _call(given: object, where: str, names: dict[str, str]) -> ToolCall:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _wrong(where, "an object with the function that was answered", given)
    text = _taken(function, "arguments", "a text", where=f"{where}.function.") or "{}"
    arguments = _parse_json(text, f"{where}.function.arguments")
    if not isinstance(arguments, dict):
        raise _wrong(f"{where}.function.arguments", "a JSON object", arguments)
    names[_taken(given, "id", "a text", where=f"{where}.") or ""] = function["name"]
    return ToolCall(name=function["name"], arguments=arguments)


def completion(given: ChatAnswer) -> dict[str, object]:
    message: dict[str, object] = {"role": "assistant", "content": sound_text(given.text)}
    if given.calls:
        message["tool_calls"] = [_as_call(call) for call in given.calls]
    choice = {"index": 0, "message": message, "finish_reason": _finish_reason(given), "logprobs": None}
    return {**_frame("chat.completion"), "choices": [choice], "usage": _usage(given)}


def chunks(given: ChatAnswer, *, with_usage: bool) -> Iterator[Mapping[str, object]]:
    """Yield the answer as chunks: it is whole when it comes, so that its text is one chunk."""
    frame = {**_frame("chat.completion.chunk"), **({"usage": None} if with_usage else {})}

    def chunk(delta: Mapping[str, object], reason: str | None = None) -> dict[str, object]:
        return {**frame, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}

    yield chunk({"role": "assistant", "content": sound_text(given.text)})
    if given.calls:
        yield chunk({"tool_calls": [{"index": index, **_as_call(call)} for index, call in enumerate(given.calls)]})
    yield chunk({}, _finish_reason(given))
    if with_usage:
        yield {**frame, "choices": [], "usage": _usage(given)}


def _frame(kind: str) -> dict[str, object]:
    return {"id": f"chatcmpl-{secrets.token_hex(8)}", "object": kind, "created": 0, "model": MODEL}


def _as_call(call: ToolCall) -> dict[str, object]:
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments))}
    return {"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function}


def _finish_reason(given: ChatAnswer) -> Literal["tool_calls", "length", "stop"]:
    if given.truncated:
        return "length"
    return "tool_calls" if given.calls else "stop"


def _usage(given: ChatAnswer) -> dict[str, int]:
    total = given.prompt_tokens + given.sampled_tokens
    return {"prompt_tokens": given.prompt_tokens, "completion_tokens": given.sampled_tokens, "total_tokens": total}


def as_error(refused: RefusedRequest) -> dict[str, object]:
    said = {"message": sound_text(str(refused)), "type": "invalid_request_error"}
    return {"error": {**said, "param": refused.param and sound_text(refused.param), "code": refused.code}}
