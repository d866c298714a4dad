"""Whether a process of this machine still lives: its process id and start time, read from `/proc`.

Called by the abort watch, which learns of a killed peer before any connection says so.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessIdentity"]

PROC = Path("/proc")
STATE_FIELD, START_FIELD = 0, 19
"""In `/proc/<pid>/stat`, counted after the command's closing parenthesis."""
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
        """Of a process of this machine that lives now."""
        stat = _stat(pid)
        if stat is None:
            return cls(namespace="", pid=pid, start=0)
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return cls(namespace=f"{boot}/{os.readlink(PROC / 'self/ns/pid')}", pid=pid, start=int(stat[START_FIELD]))

    def is_visible_from(self, other: ProcessIdentity) -> bool:
        """Whether `other` can ask for it: both share the machine and its process numbers."""
        return bool(self.namespace) and self.namespace == other.namespace

    def is_alive(self) -> bool:
        """Asked in a process from which it is visible."""
        stat = _stat(self.pid)
        return stat is not None and stat[STATE_FIELD] not in ENDED_STATES and int(stat[START_FIELD]) == self.start

    def is_stopped(self) -> bool:
        """Alive, but somebody has stopped it (SIGSTOP, a debugger)."""
        stat = _stat(self.pid)
        return stat is not None and stat[STATE_FIELD] in STOPPED_STATES and int(stat[START_FIELD]) == self.start


def _stat(pid: int) -> list[str] | None:
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()
