"""`Viewer`: one that looks on: a bounded queue of messages, sent as fast as it takes them.

Invariant: no more than `viewer_bytes` of frames wait, whatever the viewer does; the newest of each place survives, and
what was left out is counted. Nothing here ever waits for a viewer but its own task.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from contextlib import suppress

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from nemo_rl.tracer.protocol import BadMessage, ErrorCode, HubLimits, Role, dump, error_text
from nemo_rl_tools.tracer.hub.history import Kept, Place

__all__ = ["Viewer"]

MAX_TEXT_WAITING = 4 << 20
"""Characters of JSON that may wait: a viewer that leaves more is as good as gone."""
MAX_REPLAYS = 4
"""Spans of history that may wait."""
TABLES_REMEMBERED = 4096
"""Tables that a viewer is known to have; older ones are sent again."""
MOMENT_S = 1.0
"""A viewer that has taken nothing for so long is not waited for."""
CLOSING_S = 1.0
"""Seconds to send the last messages to a viewer that takes nothing."""
TRY_LATER = 1013
"""WebSocket close code `try again later`."""


class Viewer:
    """A viewer or the controller."""

    def __init__(self, connection: ServerConnection, role: Role, limits: HubLimits) -> None:
        self.connection, self.role = connection, role
        self.is_paused = False
        self.num_sent = self.num_dropped = 0
        self._limits, self._told_dropped = limits, 0
        self._queue: OrderedDict[int, str | Kept] = OrderedDict()
        self._of_place: dict[Place, deque[int]] = {}
        self._next = self._text_size = 0
        self.num_bytes = 0
        """Size of the frames and tables that wait."""
        self._waiting_tables: Counter[tuple[str, str]] = Counter()
        self._sent_tables: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._replays: deque[tuple[str, Iterator[Kept]]] = deque()
        self._replayed_tables: set[tuple[str, str]] = set()
        self._wake = asyncio.Event()
        self._is_stalled = False
        self._last_s = time.monotonic()
        """Time at which the viewer last took a message."""

    @property
    def is_behind(self) -> bool:
        """Return whether much waits for a viewer that took a message a moment ago."""
        return self.num_bytes > self._limits.viewer_bytes // 2 and time.monotonic() - self._last_s < MOMENT_S

    @property
    def has_waiting(self) -> bool:
        """Return whether a message waits to be sent."""
        return bool(self._queue or self._replays)

    def message(self, text: str) -> None:
        """Send a JSON message, after what already waits."""
        self._text_size += len(text)
        self._is_stalled |= self._text_size > MAX_TEXT_WAITING
        if not self._is_stalled:
            self._put(text)
        self._wake.set()

    def refused(self, error: BadMessage) -> None:
        self.message(error_text(error.code, str(error)))

    def frame(self, kept: Kept) -> None:
        """Send a frame; older ones give way where too much waits."""
        if self.is_paused or self._is_stalled:
            return
        size = len(kept.message) + (len(kept.table.message) if kept.table is not None else 0)
        if size > self._limits.viewer_bytes:
            self.num_dropped += 1
            self._wake.set()
            return
        places = self._of_place.get(kept.place)
        while places and self.num_bytes + size > self._limits.viewer_bytes:
            self._drop(places[0])
        while self._of_place and self.num_bytes + size > self._limits.viewer_bytes:
            self._drop(self._oldest())
        self._of_place.setdefault(kept.place, deque()).append(self._put(kept))
        self.num_bytes += self._cost(kept, is_added=True)

    def replay(self, name: str, frames: Iterator[Kept]) -> bool:
        """Send these, as fast as the viewer takes them, then `done`; False: too many wait already."""
        if len(self._replays) >= MAX_REPLAYS:
            return False
        self._replays.append((name, frames))
        self._wake.set()
        return True

    async def write(self) -> None:
        """Send what waits, until the connection is closed or the viewer takes nothing for `slow_viewer_s`."""
        with suppress(ConnectionClosed):
            while not self._is_stalled:
                if not self.has_waiting and self._told_dropped == self.num_dropped:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                if self._told_dropped != self.num_dropped:
                    self._told_dropped = self.num_dropped
                    await self._send_stats()
                if self._queue:
                    await self._send_next()
                if self._replays and not self._is_stalled:
                    await self._replay_next()
        if self._is_stalled:
            await self._close_slow()

    def _put(self, item: str | Kept) -> int:
        self._next += 1
        self._queue[self._next] = item
        self._wake.set()
        return self._next

    def _cost(self, kept: Kept, *, is_added: bool) -> int:
        """Return bytes that a frame adds to the queue, or takes with it: a table counts once."""
        size = len(kept.message)
        if kept.table is None:
            return size
        name = (kept.table.run, kept.table.name)
        self._waiting_tables[name] += 1 if is_added else -1
        if self._waiting_tables[name] == (1 if is_added else 0):
            size += len(kept.table.message)
        if not self._waiting_tables[name]:
            del self._waiting_tables[name]
        return size

    def _take(self, at: int) -> str | Kept:
        item = self._queue.pop(at)
        if isinstance(item, str):
            self._text_size -= len(item)
            return item
        places = self._of_place[item.place]
        places.remove(at)
        if not places:
            del self._of_place[item.place]
        self.num_bytes -= self._cost(item, is_added=False)
        return item

    def _drop(self, at: int) -> None:
        self._take(at)
        self.num_dropped += 1

    def _oldest(self) -> int:
        """Return the oldest frame of a place that has several waiting, else the oldest of all."""
        several = [held[0] for held in self._of_place.values() if len(held) > 1]
        return min(several or [held[0] for held in self._of_place.values()])

    async def _send_stats(self) -> None:
        counts = {"sent": self.num_sent, "dropped": self.num_dropped, "queued": len(self._queue)}
        await self._send(dump({"type": "stats", **counts}))

    async def _send_next(self) -> None:
        item = self._take(next(iter(self._queue)))
        if isinstance(item, str):
            await self._send(item)
        else:
            await self._send_frame(item, self._sent_tables)

    async def _replay_next(self) -> None:
        name, frames = self._replays[0]
        kept = next(frames, None)
        if kept is None:
            self._replays.popleft()
            self._replayed_tables.clear()
            await self._send(dump({"type": "done", "id": name}))
            return
        table = kept.table
        if table is not None and (table.run, table.name) not in self._replayed_tables:
            # The page may have let it go since.
            self._replayed_tables.add((table.run, table.name))
            self._sent_tables.pop((table.run, table.name), None)
        await self._send_frame(kept, self._sent_tables)

    async def _send_frame(self, kept: Kept, has: OrderedDict[tuple[str, str], None]) -> None:
        if kept.table is not None and (kept.table.run, kept.table.name) not in has:
            await self._send(kept.table.message)
            has[kept.table.run, kept.table.name] = None
            if len(has) > TABLES_REMEMBERED:
                has.popitem(last=False)
        await self._send(kept.message)
        self.num_sent += 1

    async def _send(self, message: str | bytes) -> None:
        """Set `_is_stalled` where the viewer takes not a byte for `slow_viewer_s`."""
        if self._is_stalled:
            return
        sending = asyncio.ensure_future(self.connection.send(message))
        try:
            # The first bytes are written before the task waits for the first time.
            await asyncio.sleep(0)
            waiting = self._unsent_bytes()
            while not (await asyncio.wait({sending}, timeout=self._limits.slow_viewer_s))[0]:
                now = self._unsent_bytes()
                if now >= waiting:
                    self._is_stalled = True
                    return
                waiting = now
            sending.result()
            self._last_s = time.monotonic()
        finally:
            if not sending.done():
                sending.cancel()
                with suppress(asyncio.CancelledError, ConnectionClosed):
                    await sending
            elif not sending.cancelled():
                # A viewer may leave in mid-send; unless its error is read, asyncio prints it.
                sending.exception()

    def _unsent_bytes(self) -> int:
        return self.connection.transport.get_write_buffer_size()

    async def _close_slow(self) -> None:
        text = f"read nothing for {self._limits.slow_viewer_s:g} s, or fell too far behind; connect again"
        with suppress(TimeoutError, ConnectionClosed):
            async with asyncio.timeout(CLOSING_S):
                await self.connection.send(error_text(ErrorCode.SLOW, text))
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSING_S):
                await self.connection.close(TRY_LATER, "slow")
        self.connection.transport.abort()
