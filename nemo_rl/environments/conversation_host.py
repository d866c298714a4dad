"""`EnvironmentHost`: conversations of an environment with turns, a process each.

Used by the rollout worker inside one event loop:

    host = EnvironmentHost("guess.py:Guess", {}, ...)
    await host.start()                        errors of the class are reported here, before a run
    conversation = await host.open(row)       a process forked from one that has loaded the class
    reply = await conversation.reply(turn)
    await conversation.close()                in every path
    await host.shutdown()

Invariant: whatever user code does, a call ends within its deadline with a result or an `EnvironmentFailure`, and no
process or folder of a closed conversation is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, cast

from nemo_rl.environments.conversation import ConversationRow, EnvironmentFailure, Reply, Turn
from nemo_rl.environments.user_process import Form
from nemo_rl.environments.wire import MalformedReply, plain_turn, read_reply
from nemo_rl.environments.zygote import Fork, HostLimits, Zygote, ZygoteFailed
from nemo_rl.errors import RewardError
from nemo_rl.utils.console import printable

__all__ = ["EnvironmentHost", "HostedConversation"]

_ERROR_LIMIT = 4000
"""Characters of an error's text."""


class EnvironmentHost:
    """Opens conversations, each in a process and its own temporary folder.

    The class is made once in a process that is then forked for each conversation, so its `__init__` may load much, but
    may not leave threads or connections behind. A conversation's process and all that it starts are killed at its end.
    With the network off, processes have their own network namespace without any network where the kernel allows
    it (root, or user namespaces); elsewhere Python refuses to connect and bind, other programs do not: `network_state`.

    Args:
        target: `module:Class` or `FILE.py:Class`.
        options: keyword arguments of the class.
        limits: `num_workers` processes fork conversations, each in its turn.
        hear: gets what conversations print, line by line, from other threads.
    """

    def __init__(
        self,
        target: str,
        options: Mapping[str, object],
        *,
        limits: HostLimits,
        hear: Callable[[str], None],
    ) -> None:
        self._target, self._limits, self.hear = target, limits, hear
        self._request = {"service": "environment", "target": target, "options": dict(options)}
        self._zygotes: list[Zygote] = []
        self._num_opened = self._num_open = 0
        self._replacing = asyncio.Lock()
        self._is_closed = False
        self.source = ""
        """Digest of the source of the class."""
        self.network_state = ""
        """`on`, or the means that keep it off: `namespace` or `audit_hook`."""

    @property
    def num_open(self) -> int:
        """Return the number of conversations whose processes have not ended."""
        return self._num_open

    async def start(self) -> None:
        """Load the class.

        Raises:
            RewardError: it cannot be loaded.
        """
        self._zygotes = [self._new_zygote() for _ in range(self._limits.num_workers)]
        try:
            ready = (await asyncio.gather(*(zygote.start() for zygote in self._zygotes)))[0]
        except ZygoteFailed as error:
            await self.shutdown()
            cause = printable(str(error), limit=_ERROR_LIMIT, keep_lines=True)
            raise RewardError(f"environment {self._target!r}: cannot be loaded: {cause}") from error
        self.source, self.network_state = str(ready["source"]), str(ready["network"])

    async def open(self, row: ConversationRow) -> HostedConversation:
        """Return a new conversation about the row, which the caller must close.

        Raises:
            EnvironmentFailure: user code raised, was too late, or its process ended; nothing is left to close.
        """
        zygote = await self._next_zygote()
        self._num_open += 1
        conversation = None
        try:
            fork = await self._named(zygote.fork(timeout_s=self._limits.timeout_s), "open")
            conversation = HostedConversation(self, fork)
            await conversation.begin(row)
        except BaseException:
            if conversation is not None:
                await asyncio.shield(conversation.close())
            else:
                self._num_open -= 1
            raise
        return conversation

    async def shutdown(self) -> None:
        """End every process and remove every folder. Idempotent."""
        self._is_closed = True
        await asyncio.gather(*(zygote.shutdown() for zygote in self._zygotes))

    def kill(self) -> None:
        """End every process and remove every folder, without the event loop. Idempotent."""
        self._is_closed = True
        for zygote in self._zygotes:
            zygote.kill()

    async def ask(
        self, fork: Fork, request: Mapping[str, object], what: str, *, form: Form | None = None
    ) -> Mapping[str, Any]:
        """Return the reply of a conversation's process; used by `HostedConversation`."""
        call = fork.ask(request, form=form, timeout_s=self._limits.timeout_s)
        return cast("Mapping[str, Any]", await self._named(call, what))

    def forget(self) -> None:
        """Count one conversation less; used by `HostedConversation`."""
        self._num_open -= 1

    def failure(self, what: str, cause: str) -> EnvironmentFailure:
        """Return the failure of a call, with the environment's name."""
        text = printable(cause, limit=_ERROR_LIMIT, keep_lines=True)
        return EnvironmentFailure(f"environment {self._target!r}: {what}: {text}")

    def _new_zygote(self) -> Zygote:
        return Zygote(self._request, limits=self._limits, hear=self.hear)

    async def _named(self, call: Any, what: str) -> Any:
        try:
            return await call
        except EnvironmentFailure as error:
            raise self.failure(what, str(error)) from error

    async def _next_zygote(self) -> Zygote:
        """Return the zygote whose turn it is; one that has ended is replaced."""
        if self._is_closed or not self._zygotes:
            raise self.failure("open", "its host is not running")
        place = self._num_opened % len(self._zygotes)
        self._num_opened += 1
        async with self._replacing:
            zygote = self._zygotes[place]
            if zygote.is_alive or self._is_closed:
                return zygote
            await zygote.shutdown()
            self._zygotes[place] = zygote = self._new_zygote()
            try:
                await zygote.start()
            except ZygoteFailed as error:
                raise self.failure("open", f"cannot be loaded again: {error}") from error
            return zygote


class HostedConversation:
    """A conversation of an `EnvironmentHost`."""

    def __init__(self, host: EnvironmentHost, fork: Fork) -> None:
        self._host, self._fork = host, fork
        self._closing: asyncio.Task[None] | None = None
        self._has_close = False

    @property
    def pid(self) -> int | None:
        """Return the number of its process; None once that has ended."""
        return self._fork.pid

    async def begin(self, row: ConversationRow) -> None:
        """Call `open` of the environment; used by the host."""
        reply = await self._host.ask(self._fork, {"open": asdict(row)}, "open", form={"has_close": bool})
        self._has_close = bool(reply["has_close"])

    async def reply(self, turn: Turn) -> Reply:
        """Return the environment's reply to a turn.

        Raises:
            EnvironmentFailure: it raised, was too late, ended, or gave no valid reply.
        """
        what = f"reply to turn {turn.number}"
        answer = await self._host.ask(self._fork, {"reply": plain_turn(turn)}, what, form={"reply": (dict, str)})
        try:
            return read_reply(answer["reply"])
        except MalformedReply as error:
            raise self._host.failure(what, f"gave no valid reply: {error}") from error

    async def close(self) -> None:
        """Call `close` of the conversation, and end its processes whatever comes of it. Idempotent."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            if self._has_close and self._fork.can_answer:
                await self._host.ask(self._fork, {"close": True}, "close")
        except EnvironmentFailure as error:
            self._host.hear(str(error))
        finally:
            try:
                await self._fork.end()
            finally:
                self._host.forget()
