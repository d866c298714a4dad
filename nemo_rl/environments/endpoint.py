"""`ChatEndpoint`: an OpenAI-compatible server on loopback, so that a program somebody else wrote can be trained.

Used by the rollout worker inside one event loop. Each conversation has a bearer token of its own, whose requests go to
the callback of that conversation:

    program --- POST /v1/chat/completions, Authorization: Bearer TOKEN ---> ChatEndpoint ---> answer(ChatRequest)
            <-- chat.completion, or its chunks as server-sent events ------               <--- ChatAnswer

Invariant: an endpoint sees messages and texts alone; which tokens they are is the callback's to know and to keep.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from nemo_rl.environments.chat import Answer, RefusedRequest
from nemo_rl.environments.chat_completions import MODEL, as_error, chunks, completion, parse_request
from nemo_rl.environments.conversation import EnvironmentFailure

__all__ = ["ChatEndpoint"]

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
            _write_json(writer, error.status, as_error(error))
        except Exception:
            _write_json(writer, 500, as_error(RefusedRequest("the run could not answer", code="server_error")))
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
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "nemo_rl"}
        _write_json(writer, 200, {"object": "list", "data": [model]})
        return
    if method != "POST" or path != _PATH:
        raise RefusedRequest(f"expected POST {_PATH}, got {method} {path}", status=404, code="not_found")
    request = replace(parse_request(body), digest=hashlib.blake2b(body, digest_size=16).hexdigest())
    try:
        given = await answer(request)
    except EnvironmentFailure as error:
        raise RefusedRequest(str(error), status=410, code="conversation_ended") from error
    if request.streams:
        _write_events(writer, chunks(given, with_usage=request.wants_usage))
    else:
        _write_json(writer, 200, completion(given))


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
    _write_json(writer, error.status, as_error(error))
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
