"""Programs of others talk to a conversation through an unmodified OpenAI client."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from nemo_rl.data.conversation import Message, ToolCall
from nemo_rl.environments.chat import ChatAnswer, ChatRequest, RefusedRequest
from nemo_rl.environments.conversation import ConversationRow, EnvironmentFailure
from nemo_rl.environments.endpoint import ChatEndpoint
from nemo_rl.environments.programs import ProgramResult, ProgramSpec, run_program
from tests.helpers.processes import MARK, marked

AGENT = (sys.executable, str(Path(__file__).parents[2] / "helpers/agent_program.py"))


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Mark the processes of a test, and give their folders its own place."""
    name = f"programs-{os.getpid()}-{time.monotonic()}"
    monkeypatch.setenv(MARK, name)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return name


def served(use: Callable[[ChatEndpoint], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        endpoint = ChatEndpoint()
        await endpoint.start()
        try:
            return await use(endpoint)
        finally:
            await endpoint.shutdown()

    return asyncio.run(run())


class Doubler:
    """Calls the tool with the prompt's number, then says what the tool has said."""

    def __init__(self) -> None:
        self.requests: list[ChatRequest] = []

    async def __call__(self, request: ChatRequest) -> ChatAnswer:
        self.requests.append(request)
        last = request.messages[-1]
        if last.role == "tool":
            return ChatAnswer(text=last.content, prompt_tokens=5, sampled_tokens=2)
        return ChatAnswer(text="", calls=(ToolCall(name="double", arguments={"x": int(last.content)}),))


async def ask(endpoint: ChatEndpoint, answer: Any, **request: Any) -> Any:
    client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.register(answer), max_retries=0)
    given = {"model": "any", "messages": [{"role": "user", "content": "hello"}], **request}
    async with client:
        return await client.chat.completions.create(**given)


def test_a_program_is_run_with_an_unmodified_client(mark: str, tmp_path: Path) -> None:
    doubler, lines = Doubler(), list[str]()

    async def use(endpoint: ChatEndpoint) -> ProgramResult:
        return await run_program(
            ProgramSpec(command=AGENT, timeout_s=60),
            ConversationRow(prompt="21", answer="42"),
            base_url=endpoint.base_url,
            token=endpoint.register(doubler),
            hear=lines.append,
        )

    result: ProgramResult = served(use)
    assert (result.reward, result.components) == (1.0, {"turns": 2.0})
    first, second = doubler.requests
    assert first.messages == (Message(role="user", content="21"),) and first.max_tokens == 9
    assert first.tools[0]["function"]["name"] == "double"
    assert second.messages[1].calls == (ToolCall(name="double", arguments={"x": 21}),)
    assert second.messages[2] == Message(role="tool", content="42", name="double")
    assert "said 42" in lines
    assert marked(mark) == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "prompt", "cause"),
    [
        (AGENT, "sleep", "has not ended within its limit of 3 s"),
        (AGENT, "exit", "exited with code 3"),
        (("no-such-program",), "", "exited with code 1; .*'no-such-program"),
        ((sys.executable, "-c", "print('{\"reward\": NaN}')"), "", "expected a finite reward"),
    ],
)
def test_a_program_that_fails_is_a_failure_and_leaves_nothing(
    command: tuple[str, ...], prompt: str, cause: str, mark: str, tmp_path: Path
) -> None:
    async def use(endpoint: ChatEndpoint) -> ProgramResult:
        row, lines = ConversationRow(prompt=prompt), list[str]()
        spec = ProgramSpec(command=command, timeout_s=3 if prompt == "sleep" else 60)
        try:
            return await run_program(spec, row, base_url=endpoint.base_url, token="", hear=lines.append)
        except EnvironmentFailure as error:
            raise EnvironmentFailure(f"{error} {lines[-1:]}") from error

    with pytest.raises(EnvironmentFailure, match=cause):
        served(use)
    assert marked(mark) == [] and list(tmp_path.iterdir()) == []


def test_what_a_program_leaves_running_is_ended(mark: str) -> None:
    code = "import os, time\nif os.fork() == 0:\n os.setsid(); os.closerange(0, 9); time.sleep(1000)"

    async def use(endpoint: ChatEndpoint) -> ProgramResult:
        spec = ProgramSpec(command=(sys.executable, "-c", code), timeout_s=30)
        return await run_program(spec, ConversationRow(prompt=""), base_url="", token="", hear=lambda line: None)

    assert served(use).reward is None
    assert marked(mark) == []


def test_answers_have_the_form_that_the_client_reads() -> None:
    async def answer(request: ChatRequest) -> ChatAnswer:
        return ChatAnswer(text="a\ud800b", truncated=True, prompt_tokens=3, sampled_tokens=4)

    async def use(endpoint: ChatEndpoint) -> None:
        whole = await ask(endpoint, answer, stop="x", temperature=0.5)
        assert whole.choices[0].message.content == "a\ufffdb" and whole.choices[0].finish_reason == "length"
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 4)
        chunks = [chunk async for chunk in await ask(endpoint, answer, stream=True)]
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices] == [None, "length"]

    served(use)


async def says_hi(request: ChatRequest) -> ChatAnswer:
    if request.messages[-1].content == "break":
        raise ArithmeticError("a fault of ours")
    calls = (ToolCall(name="f", arguments={"x": 1}),) if request.tools else ()
    return ChatAnswer(text="hi", calls=calls, prompt_tokens=1, sampled_tokens=1)


async def sent_raw(endpoint: ChatEndpoint, body: bytes, *, token: str = "", length: int | None = None) -> bytes:
    """Send a request as bytes; return the whole answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.base_url.split(":")[2].split("/")[0]))
    size = len(body) if length is None else length
    head = f"POST /v1/chat/completions HTTP/1.1\r\nauthorization: Bearer {token}\r\ncontent-length: {size}\r\n"
    writer.write(head.encode() + b"connection: close\r\n\r\n" + body)
    if len(body) < size < 1000:
        writer.write_eof()  # half a body
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()


USER = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALLED = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def calling(**function: object) -> dict[str, object]:
    return {"role": "assistant", "tool_calls": [{**CALLED, "function": {"name": "f", **function}}]}


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("body", [1]),
        ("messages", {"messages": "x"}),
        ("messages", {"messages": []}),
        ("messages[0]", {"messages": [5]}),
        ("messages[0].role", {"messages": [{"role": ["user"], "content": "x"}]}),
        ("messages[1].content", {"messages": [USER, {"role": "user", "content": [{"type": "text"}]}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
        ("messages[0].name", {"messages": [{**USER, "name": 5}]}),
        ("messages[0].tool_call_id", {"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]}),
        ("messages[0].tool_calls", {"messages": [{"role": "assistant", "tool_calls": 5}]}),
        ("messages[0].tool_calls", {"messages": [{**USER, "tool_calls": [CALLED]}]}),
        ("messages[0].tool_calls[0]", {"messages": [{"role": "assistant", "tool_calls": [5]}]}),
        ("messages[0].tool_calls[0].id", {"messages": [{"role": "assistant", "tool_calls": [{**CALLED, "id": 5}]}]}),
        ("messages[0].tool_calls[0].function.arguments", {"messages": [calling(arguments="[" * 100_000)]}),
        ("messages[0].tool_calls[0].function.arguments", {"messages": [calling(arguments='{"x": NaN}')]}),
        ("messages[0].tool_calls[0].function.arguments", {"messages": [calling(arguments={})]}),
        ("model", {"model": 5}),
        ("stop", {"stop": 5}),
        ("stop", {"stop": ["a", ""]}),
        ("tools", {"tools": 5}),
        ("tools[0]", {"tools": [5]}),
        ("tools[0].function", {"tools": [{"type": "function", "function": {"name": 5}}]}),
        ("tools[0].function.parameters", {"tools": [{"function": {"name": "f", "parameters": [1]}}]}),
        ("tool_choice", {"tool_choice": "required", "tools": [TOOL]}),
        ("max_tokens", {"max_tokens": True}),
        ("max_completion_tokens", {"max_completion_tokens": "5"}),
        ("stream", {"stream": "yes"}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": 1}}),
        ("n", {"n": 2}),
        ("n", {"n": True}),
        ("logprobs", {"logprobs": True}),
        ("top_logprobs", {"top_logprobs": 5}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("seed", {"seed": 1}),
        ("functions", {"functions": []}),
    ],
)
def test_every_malformed_field_is_refused_by_its_name(field: str, given: Any) -> None:
    async def use(endpoint: ChatEndpoint) -> bytes:
        request = {"messages": [USER], **given} if isinstance(given, dict) else given
        return await sent_raw(endpoint, json.dumps(request).encode(), token=endpoint.register(says_hi))

    head, _, body = served(use).partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert head.startswith(b"HTTP/1.1 400") and error["param"] == field
    assert error["message"].startswith(f"{field}: expected ") and set(error) == {"message", "type", "param", "code"}


def test_every_request_is_answered_and_its_key_looked_at_before_its_body() -> None:
    async def use(endpoint: ChatEndpoint) -> list[bytes]:
        token = endpoint.register(says_hi)
        broken = json.dumps({"messages": [{"role": "user", "content": "break"}]}).encode()
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        return [
            await sent_raw(endpoint, b"", token="wrong", length=10_000_000),
            await sent_raw(endpoint, b"{", token=token, length=100),
            await sent_raw(endpoint, b"{", token=token),
            await sent_raw(endpoint, b"", token=token, length=1 << 40),
            await sent_raw(endpoint, broken, token=token),
        ]

    answers = served(use)
    assert [answer[9:12] for answer in answers] == [b"401", b"400", b"400", b"400", b"500"]
    assert all("message" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"] for answer in answers)


@pytest.mark.parametrize("tools", [(), (TOOL,)], ids=["text", "calls"])
def test_the_types_of_the_client_parse_every_answer(tools: tuple[object, ...]) -> None:
    async def use(endpoint: ChatEndpoint) -> list[bytes]:
        token = endpoint.register(says_hi)
        more = [{}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}]
        requests = [json.dumps({"messages": [USER], "tools": tools, **each}).encode() for each in more]
        return [(await sent_raw(endpoint, each, token=token)).partition(b"\r\n\r\n")[2] for each in requests]

    whole, *streams = served(use)
    answer = ChatCompletion.model_validate_json(whole, strict=True)
    assert bool(answer.choices[0].message.tool_calls) == bool(tools)
    for number, stream in enumerate(streams):
        lines = [line.removeprefix(b"data: ") for line in stream.splitlines() if line.startswith(b"data: {")]
        chunks = [ChatCompletionChunk.model_validate_json(line, strict=True) for line in lines]
        assert [bool(chunk.choices) for chunk in chunks] == [True] * (2 + len(tools)) + [False] * number
        assert (chunks[-1].usage is not None) == bool(number)


def test_no_tools_are_offered_where_none_is_to_be_called() -> None:
    async def use(endpoint: ChatEndpoint) -> Any:
        return await ask(endpoint, says_hi, tools=[TOOL], tool_choice="none")

    assert served(use).choices[0].message.tool_calls is None


def test_wrong_requests_are_refused_with_their_reason() -> None:
    async def full(request: ChatRequest) -> ChatAnswer:
        raise RefusedRequest("the context is full", code="context_length_exceeded")

    async def gone(request: ChatRequest) -> ChatAnswer:
        raise EnvironmentFailure("cancelled")

    async def use(endpoint: ChatEndpoint) -> None:
        with pytest.raises(openai.BadRequestError, match="the context is full") as refused:
            await ask(endpoint, full)
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="n: expected 1 .*, got 2") as refused:
            await ask(endpoint, full, n=2)
        assert (refused.value.param, refused.value.type) == ("n", "invalid_request_error")
        with pytest.raises(openai.BadRequestError, match="expected content as text"):
            await ask(endpoint, full, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
        with pytest.raises(openai.APIStatusError, match="410 - cancelled"):
            await ask(endpoint, gone)
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()

    served(use)


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff\x00\r\n\r\n",
        b"GET\r\n\r\n",
        b"x" * 200_000,
        b"POST / HTTP/1.1\r\nauthorization: Bearer TOKEN\r\ncontent-length: -1\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused(sent: bytes) -> None:
    async def use(endpoint: ChatEndpoint) -> bytes:
        port = int(endpoint.base_url.split(":")[2].split("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent.replace(b"TOKEN", endpoint.register(says_hi).encode()))
        try:
            async with asyncio.timeout(10):
                return await reader.read()
        finally:
            writer.close()

    assert served(use).startswith(b"HTTP/1.1 400")


def test_a_program_with_many_connections_hinders_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_rl.environments.endpoint._MOST_CONNECTIONS", 20)

    async def use(endpoint: ChatEndpoint) -> int:
        port = int(endpoint.base_url.split(":")[2].split("/")[0])
        open_ones = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
        completion = await ask(endpoint, Doubler(), messages=[{"role": "user", "content": "4"}])
        assert completion.choices[0].message.tool_calls[0].function.arguments == '{"x": 4}'
        closed = [await asyncio.wait_for(reader.read(1), 10) for reader, _ in open_ones[:50]]
        for _, writer in open_ones:
            writer.close()
        return closed.count(b"")

    assert served(use) == 50
