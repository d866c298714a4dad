"""`ChatEndpoint`: an OpenAI-compatible server on loopback, so that a program somebody else wrote can be trained.

Used by the rollout worker inside one event loop. Each conversation has a bearer token of its own, whose requests go to
the callback of that conversation:

    program --- POST /v1/chat/completions, Authorization: Bearer TOKEN ---> ChatEndpoint ---> answer(ChatRequest)
            <-- chat.completion, or its chunks as server-sent events ------               <--- ChatAnswer

Invariant: an endpoint sees messages and texts alone; which tokens they are is the callback's to know and to keep.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from nemo_rl.data.conversation import Message, Role, ToolCall
from nemo_rl.environments.conversation import EnvironmentFailure
from nemo_rl.environments.wire import read_json, sound_text

__all__ = ["Answer", "ChatAnswer", "ChatEndpoint", "ChatRequest", "RefusedRequest"]

_HEAD_LIMIT_BYTES = 1 << 16
_BODY_LIMIT_BYTES = 16 << 20
_READ_TIMEOUT_S = 60.0
"""Longest time in which a program sends one request, or waits between two on one connection."""
_MOST_CONNECTIONS = 512
"""Open connections; with one more the one that has waited longest for a request is closed, as clients expect."""
_LINGER_S = 1.0
"""Longest time in which the rest of a refused request is taken."""
_PATH = "/v1/chat/completions"
_MODELS_PATH = "/v1/models"
_MODEL = "policy"
"""Name of the model; requests may name any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """One request of a program: sample the next turn of an assistant."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas of the program's own tools, which the program runs itself."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    streams: bool = False
    """True: the answer comes as chunks."""
    wants_usage: bool = False
    """True: a last chunk without choices counts the tokens."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Other fields of the request, such as `temperature`: the recipe's are used, so that training knows them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatAnswer:
    """A sampled turn."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    truncated: bool = False
    prompt_tokens: int = 0
    sampled_tokens: int = 0


Answer = Callable[[ChatRequest], Awaitable[ChatAnswer]]
"""The callback of a conversation. The program is told of a `RefusedRequest` and of an `EnvironmentFailure`; any other
exception is an error of status 500 and closes its connection."""


class RefusedRequest(Exception):
    """A request that cannot be answered, for a reason that the program is told.

    Args:
        status: HTTP status; not 408, 409, 429 or 500 and above, after which clients try again.
        code: the `code` of the error, such as `context_length_exceeded`.
        param: the field of the request that is wrong.
    """

    def __init__(
        self, text: str, *, status: int = 400, code: str = "invalid_request_error", param: str | None = None
    ) -> None:
        super().__init__(text)
        self.status, self.code, self.param = status, code, param


class ChatEndpoint:
    """Serves the programs of any number of conversations."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._answers: dict[str, Answer] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._idle: dict[asyncio.Task[None], None] = {}
        """Connections that have no request, the one that has waited longest first."""
        self.base_url = ""
        """`http://127.0.0.1:PORT/v1`, once it is started."""

    async def start(self) -> None:
        """Listen on a free port of loopback."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_HEAD_LIMIT_BYTES)
        port = self._server.sockets[0].getsockname()[1]
        self.base_url = f"http://127.0.0.1:{port}/v1"

    def register(self, answer: Answer) -> str:
        """Return the token of a new conversation, whose requests `answer` gets."""
        token = secrets.token_urlsafe(24)
        self._answers[token] = answer
        return token

    def forget(self, token: str) -> None:
        """Refuse further requests of a conversation. Idempotent."""
        self._answers.pop(token, None)

    async def shutdown(self) -> None:
        """Stop listening and end every connection. Idempotent."""
        if self._server is not None:
            self._server.close()
        self._answers.clear()
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a server runs its callback in a task"
        self._connections.add(task)
        if len(self._connections) > _MOST_CONNECTIONS and self._idle:
            next(iter(self._idle)).cancel()
        try:
            while await self._serve_one(reader, writer, task):
                pass
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass  # the program is gone, or the endpoint ends
        finally:
            self._connections.discard(task)
            self._idle.pop(task, None)
            writer.close()

    async def _serve_one(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: asyncio.Task[None]
    ) -> bool:
        """Answer one request; return whether the connection stays."""
        self._idle[task] = None
        async with asyncio.timeout(_READ_TIMEOUT_S):
            first = await reader.readexactly(1)
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                method, target, headers = _parse_head(first + await reader.readuntil(b"\r\n\r\n"))
                # Before its body is read, which only a conversation may send.
                answer, path = self._answer_of(headers), target.partition("?")[0]
                body = await _read_body(reader, headers)
                self._idle.pop(task, None)
        except RefusedRequest as error:
            return await _refuse_rest(reader, writer, error)
        except (asyncio.LimitOverrunError, ValueError) as error:
            return await _refuse_rest(reader, writer, RefusedRequest(f"expected an HTTP request: {error}"))
        except (asyncio.IncompleteReadError, TimeoutError):
            text = f"expected a whole HTTP request within {_READ_TIMEOUT_S:g} s, got a part of one"
            return await _refuse_rest(reader, writer, RefusedRequest(text))
        try:
            await _route(method, path, body, answer=answer, writer=writer)
        except RefusedRequest as error:
            _write_json(writer, error.status, _error(error))
        except Exception:
            _write_json(writer, 500, _error(RefusedRequest("the run could not answer", code="server_error")))
            await writer.drain()
            raise
        await writer.drain()
        return headers.get("connection", "").lower() != "close"

    def _answer_of(self, headers: Mapping[str, str]) -> Answer:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        answer = self._answers.get(token.strip()) if scheme.lower() == "bearer" else None
        if answer is None:
            raise RefusedRequest("no conversation has this key", status=401, code="invalid_api_key")
        return answer


async def _route(method: str, path: str, body: bytes, *, answer: Answer, writer: asyncio.StreamWriter) -> None:
    if method == "GET" and path == _MODELS_PATH:
        model = {"id": _MODEL, "object": "model", "created": 0, "owned_by": "nemo_rl"}
        _write_json(writer, 200, {"object": "list", "data": [model]})
        return
    if method != "POST" or path != _PATH:
        raise RefusedRequest(f"expected POST {_PATH}, got {method} {path}", status=404, code="not_found")
    request = _parse_request(body)
    try:
        given = await answer(request)
    except EnvironmentFailure as error:
        raise RefusedRequest(str(error), status=410, code="conversation_ended") from error
    if request.streams:
        _write_events(writer, _chunks(given, with_usage=request.wants_usage))
    else:
        _write_json(writer, 200, _completion(given))


# ---- HTTP


def _parse_head(head: bytes) -> tuple[str, str, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ", 2)
    pairs = [line.partition(":") for line in lines if line]
    return method, path, {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _read_body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return await _read_chunks(reader)
    length = int(headers.get("content-length", "0"))
    if not 0 <= length <= _BODY_LIMIT_BYTES:
        raise ValueError(f"a body of {length} bytes; at most {_BODY_LIMIT_BYTES} are read")
    return await reader.readexactly(length)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        if not 0 <= size <= _BODY_LIMIT_BYTES - len(body):
            raise ValueError(f"a body of more than {_BODY_LIMIT_BYTES} bytes")
        body += (await reader.readexactly(size + 2))[:-2]
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass
    return bytes(body)


async def _refuse_rest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, error: RefusedRequest) -> bool:
    """Refuse a request that was not read to its end; return False, since the connection cannot stay."""
    _write_json(writer, error.status, _error(error))
    await writer.drain()
    # A connection that is closed before all is taken that was sent loses the answer.
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while await reader.read(_HEAD_LIMIT_BYTES):
                pass
    return False


def _write_json(writer: asyncio.StreamWriter, status: int, value: object) -> None:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status} -\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


def _write_events(writer: asyncio.StreamWriter, events: Iterator[Mapping[str, object]]) -> None:
    lines = [json.dumps(event) for event in events] + ["[DONE]"]
    body = "".join(f"data: {line}\n\n" for line in lines).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


# ---- OpenAI's form


_SHOWN = 120
"""Characters of a wrong value in the reason."""
_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "an object": dict,
    "a list": list,
    "a text": str,
    "true or false": bool,
}


def _parse_request(body: bytes) -> ChatRequest:
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


def _completion(given: ChatAnswer) -> dict[str, object]:
    message: dict[str, object] = {"role": "assistant", "content": sound_text(given.text)}
    if given.calls:
        message["tool_calls"] = [_as_call(call) for call in given.calls]
    choice = {"index": 0, "message": message, "finish_reason": _finish_reason(given), "logprobs": None}
    return {**_frame("chat.completion"), "choices": [choice], "usage": _usage(given)}


def _chunks(given: ChatAnswer, *, with_usage: bool) -> Iterator[Mapping[str, object]]:
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
    return {"id": f"chatcmpl-{secrets.token_hex(8)}", "object": kind, "created": 0, "model": _MODEL}


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


def _error(refused: RefusedRequest) -> dict[str, object]:
    said = {"message": sound_text(str(refused)), "type": "invalid_request_error"}
    return {"error": {**said, "param": refused.param and sound_text(refused.param), "code": refused.code}}
