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
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from nemo_rl.data.conversation import Message, Role, ToolCall
from nemo_rl.environments.conversation import EnvironmentFailure
from nemo_rl.environments.wire import sound_text

__all__ = ["Answer", "ChatAnswer", "ChatEndpoint", "ChatRequest", "RefusedRequest"]

_HEAD_LIMIT_BYTES = 1 << 16
_BODY_LIMIT_BYTES = 16 << 20
_READ_TIMEOUT_S = 60.0
"""Longest time in which a program sends one request, or waits between two on one connection."""
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
exception closes its connection."""


class RefusedRequest(Exception):
    """A request that cannot be answered, for a reason that the program is told.

    Args:
        status: HTTP status; not 408, 409, 429 or 500 and above, after which clients try again.
        code: the `code` of the error, such as `context_length_exceeded`.
    """

    def __init__(self, text: str, *, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(text)
        self.status, self.code = status, code


class ChatEndpoint:
    """Serves the programs of any number of conversations."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._answers: dict[str, Answer] = {}
        self._connections: set[asyncio.Task[None]] = set()
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
        try:
            while await self._serve_one(reader, writer):
                pass
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass  # the program is gone, or the endpoint ends
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return whether the connection stays."""
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                method, path, headers = _parse_head(head)
                body = await _read_body(reader, headers)
        except (asyncio.LimitOverrunError, ValueError) as error:
            _write_json(writer, 400, _error(f"expected an HTTP request: {error}", "invalid_request_error"))
            await writer.drain()
            await _discard(reader)
            return False
        try:
            await self._route(method, path.partition("?")[0], headers, body, writer=writer)
        except RefusedRequest as error:
            _write_json(writer, error.status, _error(str(error), error.code))
        await writer.drain()
        return headers.get("connection", "").lower() != "close"

    async def _route(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, *, writer: asyncio.StreamWriter
    ) -> None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        answer = self._answers.get(token.strip()) if scheme.lower() == "bearer" else None
        if answer is None:
            raise RefusedRequest("no conversation has this key", status=401, code="invalid_api_key")
        if method == "GET" and path == _MODELS_PATH:
            _write_json(writer, 200, {"object": "list", "data": [{"id": _MODEL, "object": "model"}]})
            return
        if method != "POST" or path != _PATH:
            raise RefusedRequest(f"expected POST {_PATH}, got {method} {path}", status=404, code="not_found")
        request, streams = _parse_request(body)
        try:
            given = await answer(request)
        except EnvironmentFailure as error:
            raise RefusedRequest(str(error), status=410, code="conversation_ended") from error
        if streams:
            _write_events(writer, _chunks(given))
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


async def _discard(reader: asyncio.StreamReader) -> None:
    """Take what is still sent: a connection that is closed before that loses the answer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while await reader.read(_HEAD_LIMIT_BYTES):
                pass


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


def _parse_request(body: bytes) -> tuple[ChatRequest, bool]:
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedRequest(f"expected JSON: {error}") from error
    if not isinstance(given, dict) or not isinstance(given.get("messages"), list):
        raise RefusedRequest("expected an object with a list of messages")
    if given.get("n") not in (None, 1):
        raise RefusedRequest(f"n: expected 1, got {given['n']!r}; a conversation has one next turn")
    streams = bool(given.pop("stream", False))
    stop = given.pop("stop", None) or ()
    limits = [given.pop(name, None) for name in ("max_completion_tokens", "max_tokens")]
    max_tokens = next((limit for limit in limits if limit is not None), None)
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
        raise RefusedRequest(f"max_tokens: expected a positive integer, got {max_tokens!r}")
    names: dict[str, str] = {}
    request = ChatRequest(
        messages=tuple(_message(message, names) for message in given.pop("messages")),
        tools=tuple(given.pop("tools", None) or ()),
        max_tokens=max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(map(str, stop)),
        settings=given,
    )
    return request, streams


def _message(given: object, names: dict[str, str]) -> Message:
    """Return a message; `names` maps ids of calls to the names of their tools."""
    if not isinstance(given, dict):
        raise RefusedRequest(f"messages: expected objects, got {type(given).__name__}")
    role = "system" if given.get("role") == "developer" else given.get("role")
    if role not in ("system", "user", "assistant", "tool"):
        raise RefusedRequest(f"messages: expected a role of system, user, assistant, tool, got {role!r}")
    calls = tuple(_call(call, names) for call in given.get("tool_calls") or ())
    name = names.get(str(given.get("tool_call_id"))) if role == "tool" else given.get("name")
    return Message(role=cast("Role", role), content=_content(given.get("content")), calls=calls, name=name)


def _content(given: object) -> str:
    if given is None:
        return ""
    if isinstance(given, str):
        return sound_text(given)
    if isinstance(given, Sequence) and all(isinstance(part, dict) and part.get("type") == "text" for part in given):
        return sound_text("".join(str(part["text"]) for part in given))
    raise RefusedRequest("messages: expected content as text, or as parts of type text")


def _call(given: Any, names: dict[str, str]) -> ToolCall:
    try:
        name, text = str(given["function"]["name"]), given["function"]["arguments"] or "{}"
        arguments = json.loads(text)
    except (KeyError, TypeError, ValueError) as error:
        raise RefusedRequest(f"messages: expected tool_calls as they were answered: {error}") from error
    if not isinstance(arguments, dict):
        raise RefusedRequest("messages: expected arguments of tool_calls as a JSON object")
    names[str(given.get("id"))] = name
    return ToolCall(name=name, arguments=arguments)


def _completion(given: ChatAnswer) -> dict[str, object]:
    message: dict[str, object] = {"role": "assistant", "content": sound_text(given.text)}
    if given.calls:
        message["tool_calls"] = [_as_call(call) for call in given.calls]
    choice = {"index": 0, "message": message, "finish_reason": _finish_reason(given), "logprobs": None}
    return {**_frame("chat.completion"), "choices": [choice], "usage": _usage(given)}


def _chunks(given: ChatAnswer) -> Iterator[Mapping[str, object]]:
    """Yield the answer as chunks: it is whole when it comes, so that its text is one chunk."""
    frame = _frame("chat.completion.chunk")

    def chunk(delta: Mapping[str, object], reason: str | None = None) -> dict[str, object]:
        return {**frame, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}

    yield chunk({"role": "assistant", "content": sound_text(given.text)})
    if given.calls:
        yield chunk({"tool_calls": [{"index": index, **_as_call(call)} for index, call in enumerate(given.calls)]})
    yield chunk({}, _finish_reason(given))
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


def _error(text: str, code: str) -> dict[str, object]:
    return {"error": {"message": sound_text(text), "type": "invalid_request_error", "param": None, "code": code}}
