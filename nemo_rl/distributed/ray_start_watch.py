"""`watch_ray_start`: ends this process when Ray's metadata server dies while `ray.init` waits for it.

`OwnRay` starts Ray inside it. Ray's own clients wait a minute for a metadata server that is gone, in calls that no
signal and no exception reaches, and end the process then with a text of their own. A raylet that dies (it does where
its agents take longer than half a minute to import) makes `ray.init` raise, and is started again.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from nemo_rl.distributed.liveness import ProcessIdentity

__all__ = ["end_servers", "leave", "watch_ray_start"]

SERVER = "gcs_server"
GRACE_S = 12.0
"""From the server's end to ours: a start that fails by itself within this time raises what it knows."""
LOOK_S = 0.5


@contextmanager
def watch_ray_start() -> Iterator[None]:
    """Inside it, a metadata server that this process has started and that ends takes this process along, with a word.

    The files and processes of the run are then left to its sweeper, as after a kill.
    """
    is_over = threading.Event()
    watch = threading.Thread(target=_watch, args=(is_over, _servers()), name="ray-start", daemon=True)
    watch.start()
    try:
        yield
    finally:
        is_over.set()
        watch.join()


def end_servers() -> None:
    """Kills metadata servers that this process has started: a start that fails leaves its own behind."""
    for server in _servers():
        with suppress(psutil.NoSuchProcess):
            child = psutil.Process(server.pid)
            child.kill()
            child.wait(GRACE_S)


def _watch(is_over: threading.Event, earlier: set[ProcessIdentity]) -> None:
    seen: set[ProcessIdentity] = set()
    ended: dict[ProcessIdentity, float] = {}
    while not is_over.wait(LOOK_S):
        seen |= _servers() - earlier
        for server in seen:
            if not server.is_alive() and time.monotonic() - ended.setdefault(server, time.monotonic()) > GRACE_S:
                leave(f"Ray has lost its {SERVER} (process {server.pid}) while it started")


def _servers() -> set[ProcessIdentity]:
    """Metadata servers among this process's children."""
    found = set()
    for child in psutil.Process().children():
        try:
            if child.name() == SERVER:
                found.add(ProcessIdentity.of(child.pid))
        except psutil.NoSuchProcess:
            continue
    return found


def leave(what: str) -> None:
    """Ends this process where no exception is heard; its sweeper ends and removes the rest."""
    sys.stderr.write(f"error: cluster: {what}; look for a kill or an out-of-memory\n")
    sys.stderr.flush()
    os._exit(1)
