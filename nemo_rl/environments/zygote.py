"""`Zygote`: the owner's side of a process that has loaded user code and forks a process per conversation or tool.

Used by `EnvironmentHost` and `ToolHost` inside one event loop. Every wait has a deadline. The processes end with the
thread that started the zygote, also when that is killed; see `zygote_child` for the tree of processes.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from nemo_rl.environments.conversation import EnvironmentFailure
from nemo_rl.environments.isolation import CHANNEL_CLOSED_CODE, Lines
from nemo_rl.environments.user_process import (
    LEFTOVER_TIMEOUT_S,
    PART_BYTES,
    Exchange,
    Form,
    PrintedLines,
    UserProcess,
    import_paths,
)

__all__ = ["Fork", "ForkError", "ForkLate", "HostLimits", "Zygote", "ZygoteFailed"]

FORKS_AT_ONCE = 16
"""Forks that a zygote is asked for at one time: others wait here, where no deadline of theirs runs."""
_END_TIMEOUT_S = 10.0
"""Seconds from the request to end a process until its end; then everything of the zygote is ended."""
_REPLY_LIMIT_BYTES = 16 << 20
"""A reply has at most a million characters, six bytes each; more comes from something else that writes there."""


class ZygoteFailed(Exception):
    """User code could not be loaded; the text is its error."""


class ForkError(EnvironmentFailure):
    """User code raised in a fork, which lives on.

    Args:
        kind: name of the exception's class.
        places: where user code raised, for the person who reads the log.
    """

    def __init__(self, text: str, *, kind: str, places: str) -> None:
        super().__init__(f"{text}{places}")
        self.text, self.kind = text, kind


class ForkLate(EnvironmentFailure):
    """A fork gave no reply in time and was ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLimits:
    """Limits of processes that run user code."""

    timeout_s: float
    """Wall-clock limit of a call: opening, replying and closing, or the call of a tool."""
    start_timeout_s: float
    """Wall-clock limit of loading the code."""
    num_workers: int = 1
    """Processes that fork conversations; processes that run calls of tools."""
    memory_mib: int | None = None
    """Most memory of a process; None: no limit."""
    network: bool = False
    """True lets user code use the network."""


class Zygote:
    """A process that has loaded user code, and everything that it starts.

    Args:
        request: the service and its arguments, see `zygote_child`.
        hear: gets what the processes print, line by line, from another thread.
    """

    def __init__(self, request: Mapping[str, object], *, limits: HostLimits, hear: Callable[[str], None]) -> None:
        self._request, self._limits, self._hear = request, limits, hear
        self._numbers = count()
        self._permits = asyncio.Semaphore(FORKS_AT_ONCE)
        self._forks: dict[int, Fork] = {}
        self._control: socket.socket | None = None
        self._process: UserProcess | None = None
        self._listener: asyncio.Task[None] | None = None
        self._hearing: threading.Thread | None = None
        self._ready: asyncio.Future[Mapping[str, object]] | None = None

    @property
    def num_open(self) -> int:
        """Return the number of forks that have not ended."""
        return len(self._forks)

    @property
    def is_alive(self) -> bool:
        """Return whether it can fork."""
        return self._listener is not None and not self._listener.done()

    async def start(self) -> Mapping[str, object]:
        """Start the process and return what its service says.

        Raises:
            ZygoteFailed: the code cannot be loaded.
        """
        loop = asyncio.get_running_loop()
        try:
            self._process = UserProcess("nemo_rl.environments.zygote_child", name="the process of user code")
        except OSError as error:
            raise ZygoteFailed(f"its process cannot be started: {error}") from error
        self._control = self._process.channel
        printed = self._process.output.fileno()
        self._hearing = threading.Thread(target=_hear_all, args=(printed, self._hear), name="prints", daemon=True)
        self._hearing.start()
        self._control.setblocking(False)
        self._ready = loop.create_future()
        self._listener = loop.create_task(self._listen(self._control))
        limits = self._limits
        request = {
            "paths": import_paths(),
            "memory_mib": limits.memory_mib,
            "network": limits.network,
            **self._request,
        }
        try:
            async with asyncio.timeout(limits.start_timeout_s):
                await loop.sock_sendall(self._control, json.dumps(request).encode() + b"\n")
                return await asyncio.shield(self._ready)
        except TimeoutError:
            raise ZygoteFailed(f"not loaded within {limits.start_timeout_s:.0f} s") from None
        except OSError as error:
            raise ZygoteFailed(f"its process ended while loading it: {error}") from error

    async def fork(self, *, timeout_s: float) -> Fork:
        """Return a new process.

        Raises:
            EnvironmentFailure: there is none within `timeout_s`.
        """
        async with self._permits:
            started = time.monotonic()
            fork = self._request_fork()
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.shield(fork.forked)
            except TimeoutError:
                fork.request_end()
                raise ForkLate(f"was not forked within {time.monotonic() - started:.2f} s") from None
            except asyncio.CancelledError:
                fork.request_end()
                raise
        if fork.pid is None:  # it has ended already
            raise EnvironmentFailure(f"its process {fork.exit_text}")
        return fork

    def _request_fork(self) -> Fork:
        if self._control is None or not self.is_alive:
            raise EnvironmentFailure("the process that starts its process has ended")
        number = next(self._numbers)
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise EnvironmentFailure(f"no socket for its process: {error}; raise `ulimit -n`") from error
        fork = Fork(ours, end=lambda: self._end_fork(number), give_up=self._ask_to_end)
        self._forks[number] = fork
        try:
            socket.send_fds(self._control, [json.dumps({"fork": number}).encode() + b"\n"], [theirs.fileno()])
        except OSError as error:
            del self._forks[number]
            fork.set_ended(None, f"cannot be started: {error}")
            raise EnvironmentFailure(f"its process cannot be started: {error}") from error
        finally:
            theirs.close()
        return fork

    def _end_fork(self, number: int) -> None:
        try:
            if self._control is not None:
                self._control.send(json.dumps({"end": number}).encode() + b"\n")
        except OSError:
            self._ask_to_end()  # the zygote is dead or stuck

    async def shutdown(self) -> None:
        """End every process and remove the folders. Idempotent."""
        await asyncio.to_thread(self.kill)
        if self._listener is not None:
            await asyncio.wait([self._listener], timeout=LEFTOVER_TIMEOUT_S)
            self._listener.cancel()

    def kill(self) -> None:
        """End every process and remove the folders, from any thread; requests that wait fail. Idempotent."""
        if self._process is None or self._hearing is None:
            return
        self._process.kill()
        self._hearing.join(_END_TIMEOUT_S)
        if not self._hearing.is_alive():
            self._process.output.close()

    def _ask_to_end(self) -> None:
        if self._process is not None:
            self._process.ask_to_end()

    async def _listen(self, control: socket.socket) -> None:
        """Take what the zygote says until it ends; then every fork has ended too."""
        loop, lines = asyncio.get_running_loop(), Lines(_REPLY_LIMIT_BYTES)
        try:
            while part := await loop.sock_recv(control, PART_BYTES):
                for line in lines.add(part):
                    self._take(json.loads(line))
        except OSError:
            pass
        finally:
            self._ask_to_end()
            if self._ready is not None and not self._ready.done():
                self._ready.set_exception(ZygoteFailed("its process ended while loading it"))
                self._ready.exception()  # taken, also when nobody waits any more
            for fork in self._forks.values():
                fork.set_ended(None, "ended with the process that started it")
            self._forks.clear()
            control.close()

    def _take(self, message: Mapping[str, object]) -> None:
        if self._ready is not None and not self._ready.done():
            if "ready" in message:
                self._ready.set_result(message["ready"])  # type: ignore[arg-type]
            else:
                self._ready.set_exception(ZygoteFailed(str(message["failed"])))
                self._ready.exception()
        elif "forked" in message:
            self._forks[message["forked"]].set_forked(message["pid"])  # type: ignore[arg-type, index]
        elif "ended" in message:
            fork = self._forks.pop(message["ended"])  # type: ignore[call-overload]
            fork.set_ended(message["code"], message.get("why"))  # type: ignore[arg-type]


class Fork:
    """A process that was forked, and everything that it starts.

    Args:
        channel: the socket to it.
        end: asks its zygote to kill it.
        give_up: ends the zygote, which is stuck, and everything with it.
    """

    def __init__(self, channel: socket.socket, *, end: Callable[[], None], give_up: Callable[[], None]) -> None:
        channel.setblocking(False)
        self._channel, self._end, self._give_up = channel, end, give_up
        self._replies = Exchange(_REPLY_LIMIT_BYTES)
        loop = asyncio.get_running_loop()
        self.forked: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._is_ending = False
        self._is_busy = self._is_exchanging = False
        self.pid: int | None = None
        self.exit_text = "lives"
        """The way in which it ended."""

    @property
    def can_answer(self) -> bool:
        """Return whether it lives and no request is left unanswered."""
        return not (self._is_ending or self._is_busy or self._ended.done())

    def set_forked(self, pid: int) -> None:
        """Take note of its number."""
        self.pid = pid
        if not self.forked.done():
            self.forked.set_result(None)

    def set_ended(self, code: int | None, why: str | None) -> None:
        """Take note of its end: with a code, or without one and why."""
        self.pid, self.exit_text = None, why or _exit_text(code or 0)
        if not self._is_exchanging:
            # Else the end of the channel, which comes now, ends the exchange: a loop must not wait for a closed socket.
            self._channel.close()
        for future in (self.forked, self._ended):
            if not future.done():
                future.set_result(None)

    async def ask(
        self, request: Mapping[str, object], *, form: Form | None = None, timeout_s: float
    ) -> Mapping[str, Any]:
        """Send a request and return its reply, which has the fields of `form`.

        Raises:
            ForkLate: no reply in time. ForkError: user code raised. EnvironmentFailure: the process ended.
        """
        if not self.can_answer:
            raise EnvironmentFailure(f"its process {self._state}")
        started, line = time.monotonic(), self._replies.request(request, form=form)
        self._is_busy = self._is_exchanging = True
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._exchange(line)
        except TimeoutError:
            self.request_end()
            seconds = time.monotonic() - started
            raise ForkLate(f"gave no reply within its limit of {timeout_s:g} s (ended after {seconds:.2f} s)") from None
        except (OSError, EOFError) as error:
            raise await self._failure(error) from error
        finally:
            self._is_exchanging = False
            if self._ended.done():
                self._channel.close()
        self._is_busy = False
        if "error" in reply:
            raise ForkError(
                f"raised {reply['error']}", kind=str(reply.get("kind")), places=str(reply.get("places") or "")
            )
        return reply

    def request_end(self) -> None:
        """Have the process killed, without waiting for its end. Idempotent."""
        if not self._is_ending and not self._ended.done():
            self._is_ending = True
            self._end()

    async def end(self) -> None:
        """Kill the process and what it has started, and wait until they are gone. Idempotent.

        Raises:
            TimeoutError: they are still there, though their zygote was ended too.
        """
        self.request_end()
        await asyncio.wait([self._ended], timeout=_END_TIMEOUT_S)
        if not self._ended.done():
            self._give_up()
            async with asyncio.timeout(2 * _END_TIMEOUT_S):
                await asyncio.shield(self._ended)

    @property
    def _state(self) -> str:
        if self._ended.done():
            return self.exit_text
        return "is being ended" if self._is_ending else "has not answered the request before"

    async def _exchange(self, line: bytes) -> Mapping[str, Any]:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._channel, line)
        while True:
            part = await loop.sock_recv(self._channel, PART_BYTES)
            if not part:
                raise EOFError
            if (reply := self._replies.reply_in(part)) is not None:
                return reply
            await asyncio.sleep(0)  # a socket that always has more to read gives nobody else a turn

    async def _failure(self, error: Exception) -> EnvironmentFailure:
        """Return why there is no reply, once the process has ended."""
        if isinstance(error, OSError) and error.errno in (errno.EMSGSIZE, errno.EBADMSG):
            self.request_end()
            return EnvironmentFailure(f"sent no reply: {error.strerror}")
        await asyncio.wait([self._ended], timeout=LEFTOVER_TIMEOUT_S)
        if self._ended.done():
            return EnvironmentFailure(f"its process {self.exit_text}")
        self.request_end()
        return EnvironmentFailure("has closed the channel to its host")


def _exit_text(code: int) -> str:
    if code == CHANNEL_CLOSED_CODE:
        return f"exited with code {code}: it could not send its reply; user code must not close all descriptors"
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"was killed by signal {-code} ({name})"


def _hear_all(descriptor: int, hear: Callable[[str], None]) -> None:
    """Hand on what is printed until nobody can print any more."""
    lines = PrintedLines(hear)
    while part := os.read(descriptor, PART_BYTES):
        lines.add(part)
    lines.end()
