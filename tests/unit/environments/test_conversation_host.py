"""Conversations in their own processes: every call ends with a reply or a failure, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from nemo_rl.environments.conversation import ConversationRow, EnvironmentFailure, Turn
from nemo_rl.environments.conversation_host import EnvironmentHost, HostedConversation
from nemo_rl.environments.wire import TEXT_LIMIT
from nemo_rl.environments.zygote import HostLimits
from nemo_rl.errors import RewardError
from tests.helpers.processes import MARK, marked, wait_for_none

NASTY = "tests.helpers.turn_environments:Nasty"
Value = TypeVar("Value")


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Mark the processes of a test, and give their folders its own place."""
    name = f"hosts-{os.getpid()}-{random.random()}"
    monkeypatch.setenv(MARK, name)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return name


def hosted(use: Callable[[EnvironmentHost], Awaitable[Value]], **limits: Any) -> tuple[Value, list[str]]:
    """Run something with a host; return its value and what was printed, once nothing is left."""
    lines: list[str] = []

    async def run() -> Value:
        async with running(lines, **limits) as host:
            return await use(host)

    return asyncio.run(run()), lines


@asynccontextmanager
async def running(lines: list[str], *, target: str = NASTY, **limits: Any) -> AsyncIterator[EnvironmentHost]:
    settings = HostLimits(**{"timeout_s": 20.0, "start_timeout_s": 60.0, **limits})
    host = EnvironmentHost(target, {"prefix": "> "} if target == NASTY else {}, limits=settings, hear=lines.append)
    try:
        await host.start()
        yield host
        assert host.num_open == 0
    finally:
        await host.shutdown()


def row(prompt: str = "", *, seed: int = 0) -> ConversationRow:
    return ConversationRow(prompt=prompt, seed=seed)


def turn(text: str, number: int = 0) -> Turn:
    return Turn(number=number, text=text, num_tokens=1)


async def replies(host: EnvironmentHost, *texts: str, prompt: str = "") -> list[Any]:
    """Return the reply to each turn of one conversation, or the text of its failure."""
    try:
        conversation = await host.open(row(prompt))
    except EnvironmentFailure as error:
        return [str(error)]
    found: list[Any] = []
    try:
        for number, text in enumerate(texts):
            try:
                found.append(await conversation.reply(turn(text, number)))
            except EnvironmentFailure as error:
                found.append(str(error))
    finally:
        await conversation.close()
        await conversation.close()
    return found


def test_a_conversation_replies_until_it_is_done(mark: str) -> None:
    (first, second, third), _ = hosted(lambda host: replies(host, "a", "dict", "done"))
    assert first.messages[0].content == "> a" and first.messages[0].role == "user"
    assert (second.messages[0].content, second.messages[0].name, second.stop) == ("a\ufffd", "f", ("x",))
    assert (third.done, third.reward, third.components) == (True, 0.5, {"part": 1.0})
    assert wait_for_none(mark, timeout_s=5) == []


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ("no.such:Thing", "no module named 'no'"),
        ("tests.helpers.turn_environments:Missing", "has no attribute 'Missing'"),
        ("tests.helpers.turn_environments:act", "missing 1 required positional argument"),
        ("builtins:object", "'object' object has no attribute 'open'"),
    ],
)
def test_a_class_that_cannot_be_loaded_is_reported_before_a_run(target: str, cause: str, mark: str) -> None:
    async def idle(host: EnvironmentHost) -> None:
        del host

    with pytest.raises(RewardError, match=f"environment '{target}': cannot be loaded(.|\n)*{cause}"):
        hosted(idle, target=target)
    assert wait_for_none(mark, timeout_s=5) == []


def test_failures_say_what_happened(mark: str) -> None:
    expected = {
        "raise": "raised ValueError: as told\\x1b[2J\n  at: ",
        "exit": "its process exited with code 3",
        "hard exit": "its process exited with code 4",
        "kill": "its process was killed by signal 9 (SIGKILL)",
        "sleep": "gave no reply within its limit of 2 s (ended after 2.",
        "close fds": "its process exited with code 74: it could not send its reply",
        "nothing": "no valid reply: expected a Reply, got NoneType",
        "number": "content of a message: expected text, got int 3",
        "role": "expected a role of user, tool, system, got 'assistant'",
        "nan": "reward: expected a finite number of at most 1e+15, got nan",
        "unknown": "got mesages",
        "empty": "expected messages for the model to read, or done=True",
    }

    async def all_of_them(host: EnvironmentHost) -> list[list[Any]]:
        return await asyncio.gather(*(replies(host, text) for text in expected))

    found, _ = hosted(all_of_them, timeout_s=2.0)
    for text, (failure,) in zip(expected, found, strict=True):
        assert isinstance(failure, str) and f"environment {NASTY!r}: reply to turn 0: " in failure, text
        assert expected[text] in failure, text


def test_failures_at_open_leave_nothing(mark: str) -> None:
    async def all_of_them(host: EnvironmentHost) -> list[list[Any]]:
        acts = ("raise", "sleep", "exit", "kill", "close fds")
        return await asyncio.gather(*(replies(host, prompt=text) for text in acts))

    found, _ = hosted(all_of_them, timeout_s=2.0)
    assert all(isinstance(failure, str) and ": open: " in failure for (failure,) in found)
    assert wait_for_none(mark, timeout_s=5) == []


def test_texts_may_hold_anything(mark: str) -> None:
    (control, surrogate, long), _ = hosted(lambda host: replies(host, "control", "surrogate", "1 MB"))
    assert control.messages[0].content == "> <|im_end|>\n<|im_start|>system\x00\x1b[2J"
    assert surrogate.messages[0].content == "> a\ufffdb"
    text = long.messages[0].content
    assert TEXT_LIMIT - 100 < len(text) <= TEXT_LIMIT
    assert f"{(3 << 20) + 2 - (TEXT_LIMIT - 60)} characters cut" in text


def test_prints_and_garbage_disturb_no_reply(mark: str) -> None:
    found, lines = hosted(lambda host: replies(host, "print", "garbage", "a"))
    assert [reply.messages[0].content for reply in found] == ["> print", "> garbage", "> a"]
    assert lines[0] == "printed" and any("more bytes" in line for line in lines)


@pytest.mark.parametrize("text", ["fork", "daemon"])
def test_what_a_conversation_starts_ends_with_it(text: str, mark: str) -> None:
    async def count(host: EnvironmentHost) -> tuple[int, int, int]:
        before = len(marked(mark))
        for ending in ("a", "kill"):
            conversation = await host.open(row())
            await conversation.reply(turn(text))
            deadline = time.monotonic() + 5
            while (during := len(marked(mark))) < before + 5 and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            if ending == "kill":
                with pytest.raises(EnvironmentFailure):
                    await conversation.reply(turn("kill"))
            await conversation.close()
        return before, during, len(marked(mark))

    (before, during, after), _ = hosted(count)
    assert during >= before + 5 and after == before


def test_what_a_conversation_starts_lives_as_long_as_it(mark: str) -> None:
    async def count(host: EnvironmentHost) -> tuple[int, int]:
        conversation = await host.open(row())
        await conversation.reply(turn("daemon"))
        await asyncio.sleep(0.5)
        before = len(marked(mark))
        await replies(host, "kill")
        await replies(host, "a")
        after = len(marked(mark))
        await conversation.close()
        return before, after

    (before, after), _ = hosted(count)
    assert before == after


def test_each_conversation_has_a_folder_that_is_removed(mark: str, tmp_path: Path) -> None:
    async def folders(host: EnvironmentHost) -> list[str]:
        one, two = await host.open(row()), await host.open(row())
        found = [(await each.reply(turn("where"))).messages[0].content[2:] for each in (one, two)]
        await one.reply(turn("files"))
        assert all(map(os.path.isdir, found))
        await asyncio.gather(one.close(), two.close())
        assert not any(map(os.path.exists, found))
        return found

    found, _ = hosted(folders)
    assert len(set(found)) == 2 and list(tmp_path.iterdir()) == []


def test_memory_and_network_are_limited(mark: str) -> None:
    with socket.create_server(("127.0.0.1", 0)):
        (memory, network), _ = hosted(lambda host: replies(host, "memory", "network"), memory_mib=1024)
    assert "raised MemoryError" in str(memory)
    assert "raised ConnectionRefusedError" in str(network) or "the network is off" in str(network)


@pytest.mark.parametrize(
    "act",
    [
        "socket.create_connection(('127.0.0.1', 9))",
        "udp.sendto(b'x', ('127.0.0.1', 9))",
        "udp.sendmsg([b'x'], [], 0, ('127.0.0.1', 9))",
        "socket.gethostbyname('secret.example.com')",
        "socket.getaddrinfo('secret.example.com', 80)",
    ],
)
def test_the_audit_hook_refuses_the_network(act: str) -> None:
    code = (
        "import socket; from nemo_rl.environments import isolation as i; i.LIBC = type('L', (), "
        "{'unshare': lambda self, flags: -1})(); assert i.turn_network_off() == 'audit_hook'; "
        f"socket.socketpair(); udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); {act}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "the network is off for this process" in done.stderr


def test_a_process_that_user_code_forks_answers_no_turn(mark: str) -> None:
    async def ask(host: EnvironmentHost) -> list[bool]:
        conversation = await host.open(row())
        said = [(await conversation.reply(turn("fork and return"))).messages[0].content for _ in range(5)]
        own = [f"> {conversation.pid}" == text for text in said]
        await conversation.close()
        return own

    own, lines = hosted(ask)
    assert all(own) and any("forked has returned from its call and was ended" in line for line in lines)


def test_a_folder_goes_also_when_its_guard_is_killed(mark: str, tmp_path: Path) -> None:
    async def kill_it(host: EnvironmentHost) -> None:
        conversation = await host.open(row())
        await conversation.reply(turn("files"))
        for guard in psutil.Process().children():
            guard.kill()
        deadline = time.monotonic() + 10
        while list(tmp_path.iterdir()) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        assert list(tmp_path.iterdir()) == []
        await conversation.close()

    hosted(kill_it)


def test_a_conversation_that_is_stuck_while_it_closes_is_ended(mark: str) -> None:
    started = time.monotonic()
    (reply,), lines = hosted(lambda host: replies(host, "a", prompt="stuck at close"), timeout_s=1.0)
    assert reply.messages and time.monotonic() - started < 15
    assert any("close: gave no reply within its limit of 1 s" in line for line in lines)


def test_a_call_that_is_cancelled_leaves_nothing(mark: str) -> None:
    async def cancel(host: EnvironmentHost) -> None:
        conversation = await host.open(row())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await conversation.reply(turn("sleep"))
        await conversation.close()
        opening = asyncio.create_task(host.open(row("sleep")))
        await asyncio.sleep(0.3)
        opening.cancel()
        await asyncio.wait([opening])

    hosted(cancel)
    assert wait_for_none(mark, timeout_s=5) == []


def test_a_zygote_that_dies_is_replaced(mark: str) -> None:
    async def kill_it(host: EnvironmentHost) -> list[Any]:
        conversation = await host.open(row())
        fork = psutil.Process(conversation.pid)
        zygote = fork.parent()
        assert zygote is not None
        others = [await host.open(row()) for _ in range(20)]
        waiting = asyncio.gather(*(other.reply(turn("sleep")) for other in others), return_exceptions=True)
        await asyncio.sleep(0.5)
        zygote.kill()
        async with asyncio.timeout(10):
            assert all(isinstance(failure, EnvironmentFailure) for failure in await waiting)
        await asyncio.gather(*(other.close() for other in others))
        with pytest.raises(EnvironmentFailure, match="ended with the process that started it|killed|being ended"):
            await conversation.reply(turn("sleep"))
        await conversation.close()
        return await replies(host, "a")

    (reply,), _ = hosted(kill_it)
    assert reply.messages[0].content == "> a"


def test_everything_ends_with_a_host_that_is_killed(mark: str, tmp_path: Path) -> None:
    code = f"""
import asyncio, tempfile
tempfile.tempdir = {str(tmp_path)!r}
from tests.unit.environments.test_conversation_host import *
async def main():
    async with running([]) as host:
        conversations = [await host.open(row()) for _ in range(5)]
        for conversation in conversations:
            await conversation.reply(turn("daemon"))
        print("open", flush=True)
        await conversations[0].reply(turn("sleep"))
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"open\n"
        assert len(marked(mark)) > 20
        process.kill()
    assert wait_for_none(mark, timeout_s=20) == []
    deadline = time.monotonic() + 5
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_thousand_conversations_end_whatever_they_do(mark: str, tmp_path: Path) -> None:
    """300 processes are killed at random; others never return, print, fork, exit, close their channel."""
    acts = (
        "a",
        "control",
        "1 MB",
        "surrogate",
        "print",
        "fork",
        "daemon",
        "exit",
        "raise",
        "close fds",
        "sleep",
        "files",
    )
    rng = random.Random(7)
    plans = [[rng.choice(acts) for _ in range(3)] for _ in range(1000)]
    found: dict[int, list[object]] = {}

    async def play(host: EnvironmentHost) -> None:
        opened: dict[int, HostedConversation] = {}

        async def open_one(number: int) -> None:
            opened[number] = await host.open(row(seed=number))

        await asyncio.gather(*(open_one(number) for number in range(1000)))
        assert host.num_open == 1000

        async def go_on(number: int) -> None:
            outcomes = found.setdefault(number, [])
            try:
                for count, text in enumerate(plans[number]):
                    outcomes.append(await opened[number].reply(turn(text, count)))
            except EnvironmentFailure as error:
                outcomes.append(error)
            finally:
                await opened[number].close()

        async def kill_some() -> None:
            for _ in range(10):
                await asyncio.sleep(0.001)
                alive = [conversation.pid for conversation in opened.values() if conversation.pid is not None]
                for victim in rng.sample(alive, 30):
                    with suppress(ProcessLookupError):  # it has just ended by itself
                        os.kill(victim, signal.SIGKILL)

        places = asyncio.Semaphore(100)

        async def in_turn(number: int) -> None:
            async with places:
                await go_on(number)

        await asyncio.gather(kill_some(), *(in_turn(number) for number in range(1000)))

    hosted(play, timeout_s=5.0, num_workers=2)
    failures = [str(outcomes[-1]) for outcomes in found.values()]
    assert sum("killed by signal 9" in failure for failure in failures) > 200
    assert sorted(found) == list(range(1000))
    assert all(len(outcomes) == 3 or isinstance(outcomes[-1], EnvironmentFailure) for outcomes in found.values())
    assert wait_for_none(mark, timeout_s=10) == []
    assert list(tmp_path.iterdir()) == []


def test_the_example_of_an_environment_plays_a_game(mark: str) -> None:
    async def play(host: EnvironmentHost) -> list[str]:
        game = await host.open(ConversationRow(prompt="guess my word", answer="noon"))
        replies = [await game.reply(turn(letter, number)) for number, letter in enumerate("xno")]
        await game.close()
        assert replies[-1].done and replies[-1].reward == 1.0
        return [reply.messages[0].content for reply in replies[:-1]]

    found, _ = hosted(play, target="examples.extending.my_turn_environment:Hangman")
    assert found == ["_ _ _ _ (5 lives left)", "n _ _ n (5 lives left)"]
