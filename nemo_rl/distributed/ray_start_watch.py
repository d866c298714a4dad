"""`watch_ray_start`: ends this process when one of Ray's servers dies while `ray.init` waits for it.

`OwnRay` starts Ray inside it. Ray's own clients wait a minute for a metadata server that is gone, in calls that no
signal and no exception reaches, and end the process then with a text of their own.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from nemo_rl.distributed.liveness import ProcessIdentity

__all__ = ["watch_ray_start"]

SERVERS = ("gcs_server", "raylet")
GRACE_S = 12.0
"""From a server's end to ours: where Ray notices by itself it raises within this time, and may be started again."""
LOOK_S = 0.5


@contextmanager
def watch_ray_start() -> Iterator[None]:
    """Inside it, a server of Ray that this process has started and that ends takes this process along, with a word.

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


def _watch(is_over: threading.Event, earlier: dict[ProcessIdentity, str]) -> None:
    seen: dict[ProcessIdentity, str] = {}
    ended: dict[ProcessIdentity, float] = {}
    while not is_over.wait(LOOK_S):
        seen |= {server: name for server, name in _servers().items() if server not in earlier}
        for server, name in seen.items():
            if server.is_alive():
                continue
            if time.monotonic() - ended.setdefault(server, time.monotonic()) > GRACE_S:
                _leave(f"Ray has lost its {name} (process {server.pid}) while it started")


def _servers() -> dict[ProcessIdentity, str]:
    """Ray's servers among this process's children."""
    found = {}
    for child in psutil.Process().children():
        try:
            name = child.name()
        except psutil.NoSuchProcess:
            continue
        if name in SERVERS:
            found[ProcessIdentity.of(child.pid)] = name
    return found


def _leave(what: str) -> None:
    sys.stderr.write(f"error: cluster: {what}; look for a kill or an out-of-memory\n")
    sys.stderr.flush()
    os._exit(1)
