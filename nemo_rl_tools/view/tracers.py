"""`OpenTracers`: pages of the live tracer that the page of runs leads to.

A run whose hub answers is shown by that hub. A recording gets a hub in this process when it is first opened, with a
loopback port and its own token; all of them end with the server.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from threading import Lock, Thread

from nemo_rl.errors import UserError, boundary
from nemo_rl.tracer.process import find_hub
from nemo_rl.tracer.protocol import read_token, token_path
from nemo_rl_tools.tracer.playback import serving
from nemo_rl_tools.tracer.stream_reader import find_recording

__all__ = ["OpenTracers"]

LOOPBACK = ("127.0.0.1", "[::1]", "localhost")
CONNECT_S = 1.0
"""A hub on this machine that does not answer in this time is gone."""
SHOW_S = 3.0
"""Seconds in which a recording that cannot be read says so; a longer one is shown while it is read."""
OPEN_S = 20.0
"""Most seconds until a hub has started and shows its recording."""
CLOSE_S = 10.0


class OpenTracers:
    """The tracers that are open; a thread of its own runs their hubs."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None
        self._addresses: dict[Path, str] = {}
        self._opened = AsyncExitStack()

    def address(self, run: Path) -> str:
        """Return the address of a page that shows what was traced of a run, with the token of viewers.

        Raises:
            UserError: nothing was traced, or it cannot be read.
        """
        live = _live_address(run)
        if live is not None:
            return live
        folder = find_recording(run)
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = Thread(target=self._loop.run_forever, name="tracers", daemon=True)
                self._thread.start()
            if folder not in self._addresses:
                opening = asyncio.run_coroutine_threadsafe(self._open(folder), self._loop)
                with boundary(UserError, f"{folder}: its tracer did not open; try `nemo-rl inspect {run} play`"):
                    self._addresses[folder] = opening.result(OPEN_S)
            return self._addresses[folder]

    def close(self) -> None:
        """End all hubs. Idempotent."""
        with self._lock:
            loop, self._loop = self._loop, None
            if loop is None or self._thread is None:
                return
            with suppress(TimeoutError):  # its threads end with the process
                asyncio.run_coroutine_threadsafe(self._opened.aclose(), loop).result(CLOSE_S)
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(CLOSE_S)
            loop.close()

    async def _open(self, folder: Path) -> str:
        async with AsyncExitStack() as opened:
            found = await opened.enter_async_context(serving())
            showing = asyncio.create_task(found.show([folder]))
            opened.callback(showing.cancel)
            await asyncio.wait([showing], timeout=SHOW_S)
            if showing.done():
                showing.result()
            self._opened.push_async_exit(opened.pop_all())
            return f"{found.address}#token={read_token(found.token_file)}"


def _live_address(run: Path) -> str | None:
    """Return the address of the run's own hub, where one on this machine answers."""
    try:
        address, folder = find_hub(run)
        host, _, port = address.rpartition(":")
        if host not in LOOPBACK or not port.isdecimal():
            return None
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S):
            return f"http://{address}/#token={read_token(token_path(folder, 'viewer'))}"
    except (UserError, OSError, OverflowError):
        return None
