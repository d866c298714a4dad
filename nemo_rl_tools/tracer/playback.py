"""Playback: recordings published by a hub, all at once or at the speed at which they were made.

    entries of a folder -> paced (play)  -> Feed, a thread each -> Feed.publish, on the hub's loop -> Hub

Called by `nemo-rl trace serve`, `nemo-rl inspect RUN play` and the page of `nemo-rl view`. Invariant: what viewers get
of a recording is what was recorded: frames and tables byte for byte, but for the name of a run that another folder has,
too.
"""

from __future__ import annotations

import asyncio
import logging
import math
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import BoundedSemaphore, Event, Thread
from typing import Any

from nemo_rl.errors import NemoRLError, UserError
from nemo_rl.tracer.frame import BadFrame, FrameTable, header_of
from nemo_rl.tracer.protocol import HubLimits, HubTokens, RunState, token_path
from nemo_rl.tracer.watch import WatchPlan
from nemo_rl_tools.tracer.entry import EntryKind, StreamEntry
from nemo_rl_tools.tracer.hub.hub import Hub
from nemo_rl_tools.tracer.hub.server import HubEndpoint, HubServer
from nemo_rl_tools.tracer.store import quiet_s
from nemo_rl_tools.tracer.stream_reader import Follow, StreamReader

__all__ = ["Feed", "Serving", "paced", "serving"]

logger = logging.getLogger(__name__)

HISTORY_BYTES = 4 << 30
"""Most bytes of frames that the page can step through; a longer recording shows its newest."""
LIVE_S = 600.0
"""A run without an end that has written within this time is taken to be on."""
FOLLOW_S = 7 * 24 * 3600.0
"""A recording that does not grow for so long is not followed any longer."""
POLL_S = 0.5
MAX_GAP_S = 600.0
"""Longest pause between two frames, in seconds; longer ones, such as while no job ran, are shortened to it."""
WAITING = 256
"""Entries on their way to the hub."""
TURN_S = 0.2
"""Seconds between checks that the playback is over."""
JOIN_S = 5.0


def paced(entries: Iterator[StreamEntry], *, speed: float, stop: Event) -> Iterator[StreamEntry]:
    """Yield each frame when it is due, as its `wall_s` says; what is not dated comes with what follows it.

    Args:
        speed: 2.0 takes half the time.

    Raises:
        UserError: no such speed.
    """
    if not 0 < speed < float("inf"):
        raise UserError(f"--speed: expected a positive number such as 2.0, got {speed}")
    before: float | None = None
    due = time.monotonic()
    for entry in entries:
        wall_s = _wall_s(entry)
        if wall_s is not None:
            due += 0.0 if before is None else min(max(0.0, wall_s - before), MAX_GAP_S) / speed
            before = wall_s
            if stop.wait(max(0.0, due - time.monotonic())):
                return
        yield entry


class Feed:
    """Publishes the entries of one folder, read by its own thread, on the hub's loop."""

    def __init__(
        self,
        hub: Hub,
        folder: Path,
        entries: Iterator[StreamEntry],
        *,
        follow: Follow,
        taken: set[str],
        is_live: bool | None = None,
    ) -> None:
        """Args:
        follow: whose `stop` ends it, and whose `caught_up` is set at the end, too.
        taken: names of runs that other folders have; those of this one are added.
        is_live: runs without an end are shown as running; None: where the folder was written lately.
        """
        self.problem: NemoRLError | None = None
        self.num_unreadable = 0
        """Entries that hold nothing this version knows."""
        self._hub, self._folder, self._entries, self._follow, self._taken = hub, folder, entries, follow, taken
        self._is_live = quiet_s(folder) < LIVE_S if is_live is None else is_live
        self._names: dict[str, str] = {}
        self._loop = asyncio.get_running_loop()
        self._room = BoundedSemaphore(WAITING)
        self._thread = Thread(target=self._run, name="playback", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Return whether no frame follows."""
        return not self._thread.is_alive()

    async def caught_up(self) -> None:
        """Wait until all frames that the recording had are published."""
        while not await asyncio.to_thread(self._follow.caught_up.wait, TURN_S):
            pass
        # What the thread has handed over before is published before this.
        await asyncio.sleep(0)

    async def close(self) -> None:
        """End the thread."""
        self._follow.stop.set()
        await asyncio.to_thread(self._thread.join, JOIN_S)

    def _run(self) -> None:
        try:
            for entry in self._entries:
                while not self._room.acquire(timeout=TURN_S):
                    if self._follow.stop.is_set():
                        return
                self._loop.call_soon_threadsafe(self._publish, entry)
                if self._follow.stop.is_set():
                    return
        except NemoRLError as error:
            self.problem = error
        except RuntimeError:
            # The loop has been closed meanwhile.
            logger.debug("playback ended", exc_info=True)
        finally:
            self._follow.caught_up.set()

    def _publish(self, entry: StreamEntry) -> None:
        try:
            self.publish(entry)
        finally:
            self._room.release()

    def publish(self, entry: StreamEntry) -> None:
        """Publish frames, tables and messages; what this version does not know is counted."""
        try:
            if entry.kind is EntryKind.MESSAGE:
                self._publish_message(entry.message())
                return
            found = entry.frame()
        except BadFrame:
            self.num_unreadable += 1
            return
        if isinstance(found, FrameTable):
            self._hub.publish_table(replace(found, run=self._name(found.run)))
        else:
            self._hub.publish_frame(replace(found, where=replace(found.where, run=self._name(found.where.run))))

    def _publish_message(self, said: Mapping[str, Any]) -> None:
        kind = said.get("type")
        message = {**said, "run": self._name(str(said["run"]))} if "run" in said else dict(said)
        if kind == "run":
            self._hub.set_run(self._as_recorded(message))
        elif kind == "plan":
            # Watches of another version may be unknown here; what they gave is shown all the same.
            with suppress(UserError):
                self._hub.plan = WatchPlan.parse(map(str, said.get("watches") or ()))
                self._hub.publish_message(self._hub.plan_record())
        elif kind in ("metrics", "mark", "problem"):
            self._hub.publish_message(message)

    def _as_recorded(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if message.get("state") == RunState.RUNNING and self._is_live:
            return dict(message)
        how = "no end is recorded" if message.get("state") == RunState.RUNNING else str(message.get("state"))
        how += f": {message['text']}" if message.get("text") else ""
        return {**message, "state": RunState.RECORDED.value, "text": f"{how}; {self._folder}"}

    def _name(self, run: str) -> str:
        if run not in self._names:
            name, number = run, 1
            while name in self._taken:
                number += 1
                name = f"{run} ({number})"
            self._taken.add(name)
            self._names[run] = name
        return self._names[run]


@dataclass(slots=True)
class Serving:
    """A hub that shows recordings."""

    server: HubServer
    token_file: Path
    feeds: list[Feed] = field(default_factory=list)

    @property
    def address(self) -> str:
        host = f"[{self.server.host}]" if ":" in self.server.host else self.server.host
        return f"http://{host}:{self.server.port}/"

    @property
    def has_viewer(self) -> bool:
        """Return whether a viewer is connected."""
        return bool(self.server.sessions.viewers)

    @property
    def is_over(self) -> bool:
        """Return whether all frames that will ever come are published."""
        return all(feed.is_over for feed in self.feeds)

    async def show(self, folders: Sequence[Path]) -> None:
        """Publish all of these, and what is added to them from now on.

        Raises:
            UserError: one of them cannot be read.
        """
        taken: set[str] = set()
        for folder in folders:
            follow = Follow(idle_s=FOLLOW_S, poll_s=POLL_S)
            entries = StreamReader(folder).entries(follow)
            feed = Feed(self.server.hub, folder, entries, follow=follow, taken=taken)
            self.feeds.append(feed)
            await feed.caught_up()
            self.raise_problem()

    def raise_problem(self) -> None:
        """Raises:
        NemoRLError: a recording could not be read further.
        """
        for feed in self.feeds:
            if feed.problem is not None:
                raise feed.problem

    def play(self, folder: Path, *, speed: float) -> None:
        """Publish a recording frame by frame, each at its time."""
        follow = Follow(idle_s=0.0)
        entries = paced(StreamReader(folder).entries(), speed=speed, stop=follow.stop)
        self.feeds.append(Feed(self.server.hub, folder, entries, follow=follow, taken=set(), is_live=True))

    async def close(self) -> None:
        for feed in self.feeds:
            await feed.close()


@asynccontextmanager
async def serving(*, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Serving]:
    """Run a hub in this process; its tokens lie in their own new folder, which goes with it.

    Raises:
        UserError: the address cannot be had.
    """
    tokens = HubTokens.draw()
    with tempfile.TemporaryDirectory(prefix="nemo_rl_tracer_") as folder:
        tokens.write(Path(folder))
        hub = Hub(limits=HubLimits(history_bytes=HISTORY_BYTES))
        server = HubServer(hub, tokens=tokens, endpoint=HubEndpoint(host=host, port=port))
        async with AsyncExitStack() as opened:
            try:
                await opened.enter_async_context(server)
            except OSError as error:
                raise UserError(f"{host}:{port}: expected an address of this machine that is free: {error}") from error
            found = Serving(server, token_path(Path(folder), "viewer"))
            opened.push_async_callback(found.close)
            yield found


def _wall_s(entry: StreamEntry) -> float | None:
    """Return the wall-clock time of an entry, or None for one without a date."""
    if entry.kind is not EntryKind.FRAME:
        return None
    try:
        found = header_of(entry.body).get("wall_s")
    except BadFrame:
        return None
    return found if isinstance(found, float) and 0.0 < found < math.inf else None
