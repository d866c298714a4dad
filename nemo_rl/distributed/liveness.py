"""Liveness of processes and of the cluster: the identity of a process, and the watchdog of a lost connection.

The abort watch asks `ProcessIdentity` and so learns of a killed peer before any connection says so. A driver has
`STOPPED_WORKERS` warn of workers that somebody has stopped. `DriverWatchdog`
ends a worker process whose cluster can no longer be reached: a machine that is cut off from the others keeps its
processes, since Ray there goes on looking for its head and nobody ends a worker that waits for its next call. The actor
behind `RayWorkerGroup` holds one where a cluster has several machines.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LOST_S", "STOPPED_S", "STOPPED_WORKERS", "DriverWatchdog", "ProcessIdentity", "StoppedProcesses"]

PROC = Path("/proc")
STATE_FIELD, START_FIELD = 0, 19
"""Indices in `/proc/<pid>/stat`, counted after the command's closing parenthesis."""
STOPPED_STATES = frozenset("Tt")
ENDED_STATES = frozenset("ZX")
"""A zombie has ended, whether or not its parent has noticed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessIdentity:
    """A process that cannot be confused with a later one of the same number."""

    namespace: str
    """Machine and process namespace; empty where `/proc` says neither."""
    pid: int
    start: int
    """Clock ticks from the machine's start to the process's."""

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        stat = _stat(pid)
        if stat is None:
            return cls(namespace="", pid=pid, start=0)
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return cls(namespace=f"{boot}/{os.readlink(PROC / 'self/ns/pid')}", pid=pid, start=int(stat[START_FIELD]))

    def is_visible_from(self, other: ProcessIdentity) -> bool:
        """Return whether `other` can ask for this process: both share the machine and its process numbers."""
        return bool(self.namespace) and self.namespace == other.namespace

    def is_alive(self) -> bool:
        """Asked in a process from which it is visible."""
        stat = _stat(self.pid)
        return stat is not None and stat[STATE_FIELD] not in ENDED_STATES and int(stat[START_FIELD]) == self.start

    def is_stopped(self) -> bool:
        """Alive, but somebody has stopped it (SIGSTOP, a debugger)."""
        stat = _stat(self.pid)
        return stat is not None and stat[STATE_FIELD] in STOPPED_STATES and int(stat[START_FIELD]) == self.start

    def stopped_text(self) -> str:
        return f"process {self.pid} is stopped (state T in /proc/{self.pid}/stat); kill -CONT {self.pid} lets it go on"


def _stat(pid: int) -> list[str] | None:
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


logger = logging.getLogger(__name__)

STOPPED_S = 15.0
"""Longer than a look with a debugger, shorter than Ray's own health checks take."""
LOST_S = 60.0
"""Longer than a switch takes to come back; what a driver waits for was given up long before."""
LOOK_S = 5.0
LOST_EXIT_CODE = 70
"""EX_SOFTWARE of sysexits.h."""


class StoppedProcesses:
    """Warns of processes of this machine that somebody has stopped, from a thread that begins with the first one.

    Args:
        stopped_s: seconds from the stop to the warning.
    """

    def __init__(self, *, stopped_s: float = STOPPED_S, look_s: float = LOOK_S) -> None:
        self._stopped_s, self._look_s = stopped_s, look_s
        self._watched: dict[str, ProcessIdentity] = {}
        self._thread: threading.Thread | None = None

    def watch(self, processes: Mapping[str, ProcessIdentity]) -> None:
        """Watch these until they have ended, as far as this process can see them; names are for the warning."""
        me = ProcessIdentity.of_this_process()
        self._watched |= {name: each for name, each in processes.items() if each.is_visible_from(me)}
        if self._thread is None and self._watched:
            self._thread = threading.Thread(target=self._look, name="stopped-workers", daemon=True)
            self._thread.start()

    def _look(self) -> None:
        since: dict[ProcessIdentity, float] = {}
        told: set[ProcessIdentity] = set()
        while True:
            time.sleep(self._look_s)
            for name, process in tuple(self._watched.items()):
                if not process.is_stopped():
                    since.pop(process, None)
                    told.discard(process)
                    if not process.is_alive():
                        del self._watched[name]
                elif (
                    time.monotonic() - since.setdefault(process, time.monotonic()) >= self._stopped_s
                    and process not in told
                ):
                    told.add(process)
                    logger.warning("the run waits for %s: %s", name, process.stopped_text())


STOPPED_WORKERS = StoppedProcesses()


class DriverWatchdog:
    """Looks from a thread whether `address` still takes connections, and ends this process when it has not for long.

    Args:
        address: `host:port` of Ray's metadata server.
    """

    def __init__(self, address: str, *, lost_s: float = LOST_S, look_s: float = LOOK_S) -> None:
        host, _, port = address.rpartition(":")
        self._place = (host.strip("[]"), int(port))
        self._lost_s, self._look_s = lost_s, look_s
        threading.Thread(target=self._watch, name="driver-watchdog", daemon=True).start()

    def _watch(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(self._look_s)
            if self._is_there():
                last = time.monotonic()
            elif time.monotonic() - last > self._lost_s:
                logger.error("the cluster's head at %s:%d cannot be reached for %.0f s", *self._place, self._lost_s)
                # Other threads may be blocked in a collective for as long as its deadline, and nobody hears of it.
                os._exit(LOST_EXIT_CODE)

    def _is_there(self) -> bool:
        try:
            socket.create_connection(self._place, timeout=self._look_s).close()
        except OSError:
            return False
        return True
