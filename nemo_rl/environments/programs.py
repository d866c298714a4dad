"""`run_program`: a program that somebody else wrote, run for one conversation against a `ChatEndpoint`.

    stdin      the row as JSON: prompt, answer, metadata, seed
    OPENAI_BASE_URL, OPENAI_API_KEY        of the conversation; every OpenAI client reads them
    stdout     its last line may be {"reward": 0.5, "components": {"tests": 3}}; everything else is only heard

Used by the rollout worker inside one event loop: `ProgramHost` has the one endpoint of all conversations. Invariant:
the program, all that it starts and its folder are gone when `run_program` returns or raises, also when it is cancelled.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nemo_rl.environments.chat import Answer
from nemo_rl.environments.conversation import ConversationRow, EnvironmentFailure
from nemo_rl.environments.endpoint import ChatEndpoint
from nemo_rl.environments.user_process import PART_BYTES, PrintedLines, python_command
from nemo_rl.environments.wire import NUMBER_LIMIT, MalformedReply, finite, plain_parts
from nemo_rl.utils.exits import machine_problem
from nemo_rl.utils.files import open_plain
from nemo_rl.utils.process_guard import kill_marked, remove_folder

__all__ = ["ProgramHost", "ProgramResult", "ProgramSpec", "absolute_command", "run_program"]

_END_TIMEOUT_S = 10.0
"""Seconds from the request to end a program to SIGKILL: its guard first ends what it has started."""
_PREFIX = "nemo-rl-program-"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramSpec:
    """A program and its limits. Its network is that of this machine, since it must reach the endpoint."""

    command: Sequence[str]
    """Program and arguments; it runs in its own empty folder, so paths are absolute."""
    timeout_s: float | None = None
    """Longest time from its start to its end; None: the caller ends it."""
    memory_mib: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramResult:
    """The outcome of a program that exited with code 0."""

    reward: float | None
    """The reward that its last line states; None: it states none."""
    components: Mapping[str, float]
    seconds: float


class ProgramHost:
    """Runs programs, each for one conversation, against one endpoint on loopback.

    Args:
        spec: the program, without a limit of its whole time: a conversation limits what the program takes by itself.
        timeout_s: longest time that a program takes by itself, between two requests.
        is_scored: a reward function scores last turns for which the program states no reward.
        hear: gets what programs print, line by line.
    """

    def __init__(
        self, spec: ProgramSpec, *, timeout_s: float, is_scored: bool = False, hear: Callable[[str], None]
    ) -> None:
        self._spec, self.timeout_s, self.is_scored, self._hear = spec, timeout_s, is_scored, hear
        self._endpoint = ChatEndpoint()
        self._told: set[str] = set()
        self.num_open = 0
        """Programs that have not ended."""

    @property
    def name(self) -> str:
        """Return the program as messages call it."""
        return f"program {self._spec.command[0]!r}"

    @property
    def source(self) -> str:
        """Return a digest of the command and of the files that it names."""
        digest = hashlib.blake2b(digest_size=16)
        for part in self._spec.command:
            digest.update(part.encode() + b"\0")
            if Path(part).is_file() and part != sys.executable:
                with open_plain(Path(part)) as file:
                    while piece := file.read(1 << 20):
                        digest.update(piece)
        return digest.hexdigest()

    async def start(self) -> None:
        """Open the endpoint."""
        await self._endpoint.start()

    async def run(self, row: ConversationRow, answer: Answer) -> ProgramResult:
        """Run the program for one row; `answer` samples the turns that it asks for.

        Raises:
            EnvironmentFailure: see `run_program`.
        """
        token = self._endpoint.register(answer)
        self.num_open += 1
        try:
            return await run_program(self._spec, row, base_url=self._endpoint.base_url, token=token, hear=self._hear)
        finally:
            self.num_open -= 1
            self._endpoint.forget(token)

    def tell_once(self, line: str) -> None:
        """Write a line to the log of programs, unless it is there."""
        if line not in self._told:
            self._told.add(line)
            self._hear(line)

    async def shutdown(self) -> None:
        """Close the endpoint and its connections. Idempotent."""
        await self._endpoint.shutdown()

    def kill(self) -> None:
        """Do nothing: programs end with the conversations that run them, or with this process."""


def absolute_command(command: Sequence[str]) -> tuple[str, ...]:
    """Return the command as it is run in another folder: `python` is the interpreter of this process, and a relative
    path of a file that exists here is made absolute."""
    first, *rest = command
    first = sys.executable if first in ("python", "python3") else first
    return tuple(str(Path(part).resolve()) if _is_own_file(part) else part for part in (first, *rest))


def _is_own_file(part: str) -> bool:
    return not part.startswith("-") and not Path(part).is_absolute() and Path(part).is_file()


async def run_program(
    spec: ProgramSpec, row: ConversationRow, *, base_url: str, token: str, hear: Callable[[str], None]
) -> ProgramResult:
    """Run the program for one row.

    Args:
        hear: gets what it prints, line by line.

    Raises:
        EnvironmentFailure: it cannot be started, is too late, exits with another code than 0, or states a reward that
            is no finite number.
    """
    started, name = time.monotonic(), f"program {spec.command[0]!r}"
    try:
        folder = tempfile.mkdtemp(prefix=_PREFIX)
    except OSError as error:
        raise EnvironmentFailure(f"{name}: has no folder: {machine_problem(error)}") from error
    variables = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": token, "TMPDIR": folder}
    limit = str(spec.memory_mib or 0)
    command = [*python_command("nemo_rl.environments.isolation"), str(os.getpid()), folder, limit, *spec.command]
    last = ""

    def take(line: str) -> None:
        nonlocal last
        last = line.strip() or last
        hear(line)

    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**variables, **spec.environment},
        )
    except BaseException as error:
        await asyncio.to_thread(remove_folder, folder)
        if isinstance(error, OSError):
            raise EnvironmentFailure(f"{name}: cannot be started: {machine_problem(error) or error}") from error
        raise
    try:
        async with asyncio.timeout(spec.timeout_s):
            await _talk(process, json.dumps(asdict(row)).encode() + b"\n", take=take, hear=hear)
            code = await process.wait()
    except TimeoutError:
        seconds = time.monotonic() - started
        raise EnvironmentFailure(
            f"{name}: has not ended within its limit of {spec.timeout_s or 0:g} s (after {seconds:.2f} s)"
        ) from None
    finally:
        await asyncio.shield(_end(process, folder))
    if code != 0:
        raise EnvironmentFailure(f"{name}: exited with code {code}; its last line: {last[:300]!r}")
    reward, components = _stated(last)
    return ProgramResult(reward=reward, components=components, seconds=time.monotonic() - started)


async def _talk(
    process: asyncio.subprocess.Process, row: bytes, *, take: Callable[[str], None], hear: Callable[[str], None]
) -> None:
    """Send the row, and read both outputs until they end."""
    assert process.stdin and process.stdout and process.stderr, "it was asked for pipes"
    readers = [
        asyncio.create_task(_read_lines(process.stdout, take)),
        asyncio.create_task(_read_lines(process.stderr, hear)),
    ]
    try:
        with suppress(OSError):  # a program need not read its row
            process.stdin.write(row)
            await process.stdin.drain()
            process.stdin.close()
        await asyncio.gather(*readers)
    finally:
        for reader in readers:
            reader.cancel()


async def _read_lines(stream: asyncio.StreamReader, hear: Callable[[str], None]) -> None:
    lines = PrintedLines(hear)
    while part := await stream.read(PART_BYTES):
        lines.add(part)
    lines.end()


async def _end(process: asyncio.subprocess.Process, folder: str) -> None:
    """End the program and what it has started, whatever has happened."""
    assert process.stdout and process.stderr, "it was asked for pipes"
    # Its end is seen once its pipes are empty.
    readers = [asyncio.create_task(_read_lines(pipe, lambda line: None)) for pipe in (process.stdout, process.stderr)]
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.send_signal(number)
                process.send_signal(signal.SIGCONT)  # the program may have stopped its guard
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_TIMEOUT_S):
                    await process.wait()
    for reader in readers:
        reader.cancel()
    if process.returncode is None or process.returncode < 0:
        # Its guard was killed: what it was to end carries the folder's name.
        await asyncio.to_thread(kill_marked, "TMPDIR", folder)
    await asyncio.to_thread(remove_folder, folder)


def _stated(line: str) -> tuple[float | None, Mapping[str, float]]:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError):
        return None, {}
    if not isinstance(given, dict) or "reward" not in given:
        return None, {}
    reward, components = finite(given["reward"]), given.get("components", {})
    try:
        if reward is None or not isinstance(components, dict):
            raise MalformedReply(f"expected a finite reward of at most {NUMBER_LIMIT:g} and components by name")
        return reward, plain_parts(components)
    except MalformedReply as error:
        raise EnvironmentFailure(f"{error}, got the line {line[:300]!r}") from error
