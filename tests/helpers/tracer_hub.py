"""A hub on this event loop and peers of every role, over real sockets."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
from websockets.asyncio.client import ClientConnection, connect

from nemo_rl.records.sites import SiteKind
from nemo_rl.tracer.frame import Frame, FramePart, FrameSite, FrameTable, Where, decode
from nemo_rl.tracer.protocol import PROTOCOL_VERSION, HubLimits, HubTokens
from nemo_rl.tracer.reducer import Span, parse_reducer
from nemo_rl.tracer.watch import WatchPlan
from nemo_rl_tools.tracer.hub.hub import Hub
from nemo_rl_tools.tracer.hub.server import HubEndpoint, HubServer

RUN, PHASE = "run", "train"
SITE = FrameSite(SiteKind.LAYER_OUT, 0)
WAIT_S = 30.0
"""Longest wait for a message; the machine may be busy."""


class Peer:
    """One end of a connection."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def send(self, kind: str, **fields: object) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def receive(self) -> dict | FrameTable | Frame:
        async with asyncio.timeout(WAIT_S):
            message = await self.socket.recv()
        return json.loads(message) if isinstance(message, str) else decode(message)

    async def receive_until(self, until) -> list[dict | FrameTable | Frame]:
        """Return all messages up to the first that `until` accepts."""
        heard = []
        while not heard or not until(heard[-1]):
            heard.append(await self.receive())
        return heard

    async def messages_until(self, kind: str, **fields: object) -> list[dict]:
        """Return the JSON messages up to the first of this kind with these fields."""

        def is_it(message):
            return isinstance(message, dict) and all(message.get(name) == value for name, value in wanted.items())

        wanted = {"type": kind, **fields}
        return [message for message in await self.receive_until(is_it) if isinstance(message, dict)]

    async def wait_for(self, kind: str, **fields: object) -> dict:
        return (await self.messages_until(kind, **fields))[-1]

    async def frame(self) -> Frame:
        return (await self.receive_until(lambda message: isinstance(message, Frame)))[-1]

    async def closed(self) -> int:
        """Return the close code, once the hub has closed."""
        async with asyncio.timeout(WAIT_S):
            await self.socket.wait_closed()
        return self.socket.close_code


class HubUnderTest:
    """A hub and its address."""

    def __init__(self, hub: Hub, server: HubServer, tokens: HubTokens) -> None:
        self.hub, self.server, self.tokens = hub, server, tokens

    @property
    def uri(self) -> str:
        return f"ws://127.0.0.1:{self.server.port}/live"

    @asynccontextmanager
    async def socket(self, **more) -> AsyncIterator[Peer]:
        """Open a connection that has sent nothing yet."""
        options = {"max_size": None, "compression": None, "proxy": None, "close_timeout": 1, **more}
        async with connect(options.pop("uri", self.uri), **options) as socket:
            yield Peer(socket)

    @asynccontextmanager
    async def peer(self, role: str, *, token: str | None = None, v: object = PROTOCOL_VERSION, options=None, **hello):
        """Says hello and has heard the answer, which is `first`."""
        own = {"viewer": self.tokens.viewer, "controller": self.tokens.controller}.get(role, self.tokens.job)
        async with self.socket(**(options or {})) as peer:
            await peer.send("hello", v=v, role=role, token=own if token is None else token, **hello)
            peer.first = await peer.receive()
            yield peer

    def rank(self, rank: int = 0, world: int = 1, **more):
        return self.peer("rank", run=RUN, rank=rank, world=world, **more)

    @asynccontextmanager
    async def driver(self, **facts):
        async with self.peer("driver") as driver:
            await driver.send("run", run=RUN, name="test", model={}, layout={}, unobserved={}, **facts)
            yield driver


@asynccontextmanager
async def open_hub(
    *, watches=("layer.out | stats",), artifacts=None, tokenizer=None, server=None, **limits
) -> AsyncIterator[HubUnderTest]:
    hub = Hub(limits=HubLimits(**limits), plan=WatchPlan.parse(watches), artifacts=artifacts)
    tokens = HubTokens.draw()
    async with HubServer(hub, tokens=tokens, endpoint=HubEndpoint(**(server or {})), tokenizer=tokenizer) as listening:
        yield HubUnderTest(hub, listening, tokens)


def in_hub(*, limit_s=4 * WAIT_S, at_end=None, **options):
    """Runs an async test with a hub, then `at_end` if it is given."""

    def wrap(test):
        # It has no parameters but those of parametrize, which pytest sees.
        @functools.wraps(test)
        def run(**given):
            async def go():
                async with asyncio.timeout(limit_s), open_hub(**options) as hub:
                    await test(hub, **given)
                    if at_end is not None:
                        await at_end(hub)

            asyncio.run(go())

        own = inspect.signature(test)
        run.__signature__ = own.replace(parameters=list(own.parameters.values())[1:])
        return run

    return wrap


def where(step=1, *, site=SITE, reducer="norm", phase=PHASE):
    return Where(RUN, step, phase, site, parse_reducer(reducer))


def frame(step=1, *, num_bytes=80, site=SITE, **more):
    return Frame(where=where(step, site=site), payload=np.zeros(num_bytes // 8), **more)


async def send_phase(rank, step=1, *, value=9.0, number=0, ends=True, phase=PHASE, **more):
    """Send one norm, from begin to end."""
    await rank.send("begin", step=step, phase=phase)
    part = FramePart(where=where(step, phase=phase), payload=np.array([value]), span=Span(0, 4, 4), rank=number, **more)
    await rank.socket.send(part.encode())
    if ends:
        await rank.send("end", step=step, phase=phase, sent=1, dropped=0)
