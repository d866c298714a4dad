"""`Sessions`: what is said on one connection after another: hello, then the words of its role.

    unknown     hello within HANDSHAKE_S       -> rank | driver | viewer | controller, or error and the end
    rank        parts and tables, begin, end   -> `Ranks`
    driver      run, step, metrics, finish, applied, problem
    viewer      history, pause, resume; a controller also watch, mark

Invariant: nothing that a viewer says can end anything but its own connection.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from nemo_rl.errors import UserError
from nemo_rl.tracer.frame import BadFrame, Frame, decode
from nemo_rl.tracer.protocol import (
    PROTOCOL_VERSION,
    BadMessage,
    ErrorCode,
    HubTokens,
    RankGroup,
    Role,
    RunState,
    dump,
    error_text,
    number,
    parse,
    text_field,
    texts_field,
)
from nemo_rl_tools.tracer.hub.hub import Hub
from nemo_rl_tools.tracer.hub.ranks import Peer, Ranks
from nemo_rl_tools.tracer.hub.viewer import Viewer

__all__ = ["Sessions"]

MAX_BAD_MESSAGES = 16
"""A viewer that says more of what is not allowed is closed."""
MAX_RANKS = 1 << 16
REFUSE_S = 5.0
"""Seconds to send an error to a peer that may no longer read."""
MAX_LABEL = 200
LAST_WORDS_S, QUIET_S = 5.0, 0.2
"""Seconds that ranks may stay connected after their job has finished, and seconds of silence that end it earlier."""
MAX_KIND, MAX_KINDS = 64, 64
"""Characters and number of the sites that a rank may say it cannot show."""
MAX_PROBLEM = 2000
NUMBERS = (int, float, type(None))
POLICY_VIOLATION = 1008
"""WebSocket close code."""
AGAIN = "connected again"
REPLACED = 1012
"""WebSocket close code, `service restart`: the same rank or driver has connected again."""
CONTROLLER_WORDS = frozenset({"watch", "mark"})
FOREIGN_WORDS = frozenset({"hello", "begin", "end", "run", "step", "metrics", "finish", "applied"})
"""Types of messages that other roles send, or that are due at another time."""


class Sessions:
    """All connections of a hub."""

    def __init__(self, hub: Hub, ranks: Ranks, tokens: HubTokens) -> None:
        self._hub, self._ranks, self._tokens = hub, ranks, tokens
        self.viewers: list[Viewer] = []
        self.controller: Viewer | None = None
        self.run: str | None = None
        self.has_finished = self._is_lost = False
        self._rank_connections: dict[Peer, ServerConnection] = {}
        self._rank_spoke_s = -math.inf
        """Time of the last message of a rank, by the monotonic clock."""
        self._driver: Viewer | None = None

    async def welcome(
        self, connection: ServerConnection, *, frame_bytes: int, handshake_s: float
    ) -> tuple[Role, dict[str, Any]] | None:
        """Return the peer, or None after it was refused and closed.

        Args:
            frame_bytes: that messages of ranks and the driver may have from now on.
            handshake_s: for hello.
        """
        try:
            async with asyncio.timeout(handshake_s):
                text = await connection.recv()
            if not isinstance(text, str):
                raise BadMessage("expected hello as a text")
            role, hello = self._read_hello(text)
        except TimeoutError:
            await refuse(connection, ErrorCode.UNAUTHORIZED, f"expected hello within {handshake_s:g} s")
        except BadMessage as error:
            await refuse(connection, error.code, str(error))
        else:
            if role in (Role.RANK, Role.DRIVER):
                connection.protocol.max_message_size = frame_bytes
            return role, hello
        return None

    async def serve(self, connection: ServerConnection, role: Role, hello: Mapping[str, Any]) -> None:
        with suppress(ConnectionClosed):
            try:
                if role is Role.RANK:
                    await self._serve_rank(connection, hello)
                elif role is Role.DRIVER:
                    await self._serve_driver(connection)
                else:
                    viewer = Viewer(connection, role, self._hub.limits)
                    hear = partial(self.hear_viewer, viewer)
                    await self.serve_viewer(viewer, hear, is_taking_over=hello.get("takeover") is True)
            except BadMessage as error:
                await refuse(connection, error.code, str(error))

    def _read_hello(self, text: str) -> tuple[Role, dict[str, Any]]:
        hello = parse(text)
        if hello["type"] != "hello":
            raise BadMessage("expected hello as the first message")
        if hello.get("v") != PROTOCOL_VERSION:
            raise BadMessage(f"v: expected {PROTOCOL_VERSION}, got {str(hello.get('v'))[:40]}", ErrorCode.VERSION)
        if hello.get("role") not in list(Role):
            raise BadMessage(f"role: expected one of {', '.join(Role)}, got {str(hello.get('role'))[:40]!r}")
        role = Role(hello["role"])
        if not self._tokens.allow(role, text_field(hello, "token")):
            raise BadMessage(f"the token does not grant the role {role.value}", ErrorCode.UNAUTHORIZED)
        return role, hello

    async def _serve_rank(self, connection: ServerConnection, hello: Mapping[str, Any]) -> None:
        run, world = text_field(hello, "run"), number(hello, "world", limit=MAX_RANKS)
        if not world:
            raise BadMessage("world: expected at least 1")
        peer = Peer(run, _group(hello), number(hello, "rank", limit=world - 1))
        if (before := self._rank_connections.get(peer)) is not None:
            await before.close(REPLACED, AGAIN)
        self._rank_connections[peer] = connection
        self._ranks.connect(peer, world)
        given = hello.get("unobserved")
        if isinstance(given, Mapping):
            where = "" if peer.group is RankGroup.POLICY else f" ({peer.group.value})"
            texts = {str(kind)[:MAX_KIND]: str(why)[:MAX_PROBLEM] for kind, why in islice(given.items(), MAX_KINDS)}
            known = self._hub.runs[peer.run].unobserved if peer.run in self._hub.runs else {}
            found = {f"{kind}{where}": why for kind, why in texts.items()}
            self._hub.set_run({"run": peer.run, "unobserved": {**known, **found}})
        has_said_goodbye = False
        try:
            await connection.send(self._hub.welcome(Role.RANK))
            async for message in connection:
                self._hear_rank(peer, message)
            has_said_goodbye = True
        finally:
            if self._rank_connections.get(peer) is connection:
                del self._rank_connections[peer]
                self._ranks.disconnect(peer)
                if not self.has_finished and not has_said_goodbye:
                    self._hub.problem(f"{peer.text}: its connection closed; pictures lack its part")

    async def _last_words(self) -> None:
        """Wait until ranks are gone, or quiet: what they have sent comes by other connections than the driver's."""
        until_s = time.monotonic() + LAST_WORDS_S
        while self._rank_connections and time.monotonic() < until_s:
            if time.monotonic() - self._rank_spoke_s > QUIET_S:
                # A message may lie in a socket that has not been read yet: all are read before this goes on.
                await asyncio.sleep(QUIET_S)
                if time.monotonic() - self._rank_spoke_s > QUIET_S:
                    return
            await asyncio.sleep(QUIET_S / 10)

    def _hear_rank(self, peer: Peer, message: str | bytes) -> None:
        self._rank_spoke_s = time.monotonic()
        try:
            if isinstance(message, bytes):
                sent = decode(message)
                if isinstance(sent, Frame):
                    raise BadFrame("expected parts and tables of a rank, got a frame")
                self._ranks.add(peer, sent)
                return
            said = parse(message)
            if said["type"] == "begin":
                self._ranks.begin(peer, number(said, "step"), text_field(said, "phase"))
            elif said["type"] == "end":
                dropped = number(said, "dropped")
                self._ranks.end(peer, number(said, "step"), text_field(said, "phase"), dropped)
            elif said["type"] == "problem":
                text = text_field(said, "text", limit=MAX_PROBLEM)
                self._ranks.tell(peer, text, text)
            else:
                raise BadMessage(f"type: expected begin, end or problem, got {said['type'][:40]!r}")
        except (BadMessage, BadFrame) as error:
            self._ranks.tell(peer, "bad", str(error))

    async def _serve_driver(self, connection: ServerConnection) -> None:
        link = Viewer(connection, Role.DRIVER, self._hub.limits)
        if self._driver is not None:
            await self._driver.connection.close(REPLACED, AGAIN)
        self._driver = self._hub.driver = link
        writing = asyncio.create_task(link.write())
        link.message(self._hub.welcome(Role.DRIVER))
        link.message(self._hub.driver_plan())
        try:
            async for message in connection:
                try:
                    if isinstance(message, bytes):
                        raise BadMessage("expected texts of the driver")
                    await self._hear_driver(parse(message))
                except BadMessage as error:
                    link.message(error_text(error.code, str(error)))
        finally:
            writing.cancel()
            if self._driver is link:
                self._driver = self._hub.driver = None
                await self.driver_gone()

    async def end_is_known(self) -> None:
        """Wait until all is read that the driver has sent, and what it said of its end is told; within a deadline."""
        with suppress(TimeoutError):
            async with asyncio.timeout(2 * LAST_WORDS_S):
                while self._driver is not None:
                    await asyncio.sleep(QUIET_S / 10)

    async def driver_gone(self) -> None:
        """Mark the run of a driver that is gone as lost, unless it has finished."""
        if self.run is None or self.has_finished or self._is_lost:
            return
        self._is_lost = True
        await self._ranks.flush()
        self._hub.end_run(self.run, RunState.LOST, "the connection to the job closed before the end of the run")
        self._hub.problem("the connection to the job closed before the end of the run")

    async def _hear_driver(self, said: dict[str, Any]) -> None:
        kind = said["type"]
        if kind == "run":
            self.run, self.has_finished, self._is_lost = text_field(said, "run"), False, False
            if isinstance(folder := said.get("tokenizer"), str) and folder:
                self._ranks.set_tokenizer(Path(folder))
            facts = {name: said.get(name) for name in ("run", "name", "model", "layout", "unobserved")}
            self._hub.set_run({**facts, "state": RunState.RUNNING, "text": ""})
            return
        if self.run is None:
            raise BadMessage(f"expected 'run' before {kind[:40]!r}")
        if self._is_lost:
            # The connection was lost, not the driver.
            self._is_lost = False
            self._hub.set_run({"run": self.run, "state": RunState.RUNNING, "text": ""})
        if kind == "step":
            step = number(said, "step")
            self._ranks.set_keys(self.run, _group(said), step, texts_field(said, "keys"))
            self._hub.set_run({"run": self.run, "step": step})
        elif kind == "metrics":
            given = said.get("metrics")
            if not isinstance(given, Mapping):
                raise BadMessage(f"metrics: expected numbers by name, got {str(given)[:100]}")
            metrics = {name: value for name, value in given.items() if type(value) in NUMBERS}
            step = number(said, "step")
            self._hub.publish_message({"type": "metrics", "run": self.run, "step": step, "metrics": metrics})
        elif kind == "finish":
            reason = text_field(said, "reason")
            text = text_field(said, "text", limit=1 << 16, default="")
            self.has_finished = True
            await self._last_words()
            await self._ranks.flush()
            self._hub.end_run(self.run, RunState.ENDED, f"{reason}: {text}" if text else reason)
        elif kind == "applied":
            self._hub.applied(number(said, "step"), text_field(said, "digest"))
        elif kind == "problem":
            self._hub.problem(text_field(said, "text", limit=MAX_PROBLEM))
        else:
            raise BadMessage(f"type: expected run, step, metrics, finish, applied or problem, got {kind[:40]!r}")

    async def serve_viewer(
        self, viewer: Viewer, hear: Callable[[Mapping[str, Any]], None], *, is_taking_over: bool = False
    ) -> None:
        """Serve a viewer until its connection ends; `hear` takes its messages, or raises `BadMessage`."""
        self.enter(viewer, is_taking_over=is_taking_over)
        writing, num_bad = asyncio.create_task(viewer.write()), 0
        try:
            async for message in viewer.connection:
                try:
                    if isinstance(message, bytes):
                        raise BadMessage("expected texts of a viewer", ErrorCode.FORBIDDEN)
                    hear(parse(message))
                except BadMessage as error:
                    num_bad += 1
                    if num_bad > MAX_BAD_MESSAGES:
                        await refuse(viewer.connection, error.code, f"too many invalid messages: {error}")
                        return
                    viewer.refused(error)
        finally:
            writing.cancel()
            self.leave(viewer)

    def enter(self, viewer: Viewer, *, is_taking_over: bool) -> None:
        """Get what it has missed, and what is published from now on.

        Raises:
            BadMessage: too many are here, or another one is the controller.
        """
        if len(self.viewers) >= self._hub.limits.max_viewers:
            raise BadMessage(f"{len(self.viewers)} viewers are connected, which is the limit", ErrorCode.TOO_MANY)
        if viewer.role is Role.CONTROLLER:
            if self.controller is not None:
                if not is_taking_over:
                    raise BadMessage("another controller is connected; take over, or view only", ErrorCode.BUSY)
                self.controller.role = Role.VIEWER
                self.controller.message(dump({"type": "demoted"}))
            self.controller = viewer
        self.viewers.append(viewer)
        viewer.message(self._hub.welcome(viewer.role))
        self._hub.greet(viewer)
        self._hub.subscribers.append(viewer)

    def leave(self, viewer: Viewer) -> None:
        self._hub.subscribers.remove(viewer)
        self.viewers.remove(viewer)
        # Another one may have taken over since.
        self.controller = None if self.controller is viewer else self.controller

    def hear_viewer(self, viewer: Viewer, said: Mapping[str, Any]) -> None:
        """Raises:
        BadMessage: it is not allowed, or cannot be read.
        """
        kind = said["type"]
        if kind in FOREIGN_WORDS or (kind in CONTROLLER_WORDS and viewer is not self.controller):
            raise BadMessage(f"{kind} is not for the role {viewer.role.value}", ErrorCode.FORBIDDEN)
        if kind == "history":
            run, first, last = text_field(said, "run"), number(said, "first"), number(said, "last")
            name = text_field(said, "id", limit=MAX_LABEL)
            if not viewer.replay(name, self._hub.history.of_steps(run, first, last)):
                raise BadMessage("too many spans of steps wait to be sent", ErrorCode.TOO_MANY)
        elif kind == "pause":
            viewer.is_paused = True
        elif kind == "resume" and viewer.is_paused:
            viewer.is_paused = False
            for kept in self._hub.history.latest():
                viewer.frame(kept)
        elif kind == "watch":
            self.watch(texts_field(said, "watches"))
        elif kind == "mark":
            self._hub.mark(text_field(said, "label", limit=MAX_LABEL))
        elif kind != "resume":
            raise BadMessage(f"type: expected history, pause, resume, watch or mark, got {kind[:40]!r}")

    def watch(self, texts: list[str]) -> None:
        """Raises:
        BadMessage: with the text of the parser.
        """
        try:
            plan = self._hub.read_plan(texts)
        except UserError as error:
            raise BadMessage(str(error), ErrorCode.BAD_WATCH) from error
        self._hub.set_plan(plan)


async def refuse(connection: ServerConnection, code: ErrorCode, text: str) -> None:
    with suppress(ConnectionClosed):
        async with asyncio.timeout(REFUSE_S):
            await connection.send(error_text(code, text))
    await connection.close(POLICY_VIOLATION, code.value)


def _group(message: Mapping[str, Any]) -> RankGroup:
    """Raises:
    BadMessage: there is no such group.
    """
    group = message.get("group", RankGroup.POLICY)
    if group not in list(RankGroup):
        raise BadMessage(f"group: expected one of {', '.join(RankGroup)}, got {str(group)[:40]!r}")
    return RankGroup(group)
