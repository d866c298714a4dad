"""The file that a process writes its route trace to: `r3_trace_<host>_pid<pid>.jsonl`, one record a line.

A record is one write, so that a killed process leaves at most one torn line, and threads do not mix theirs. A folder
that cannot be written ends the trace with one log line, never the run. Imports neither torch nor numpy.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from nemo_rl.config.r3_trace_env import r3_trace_verify_forward_enabled, trace_folder, trace_limits

__all__ = ["FORMAT", "TraceFile", "file_name"]

logger = logging.getLogger(__name__)

FORMAT = 1
"""Version of the records; a reader refuses others."""


def file_name(host: str, pid: int) -> str:
    """Return the file name of the trace of one process."""
    return f"r3_trace_{host}_pid{pid}.jsonl"


class TraceFile:
    """Appends records; opened by the first of them, and anew after a fork or when the folder changes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._owner: tuple[str, int] | None = None
        """Folder and process of the open file, or of the one that failed."""

    def write(self, event: str, fields: Mapping[str, object]) -> bool:
        """Write a record, and return whether it is in the file."""
        owner = (trace_folder(), os.getpid())
        with self._lock:
            try:
                if self._owner != owner:
                    self._open(owner)
                if self._descriptor is None:
                    return False
                self._append(event, fields)
                return True
            except OSError as error:
                self._shut()
                logger.warning("%s: routes are no longer traced by process %d: %s", owner[0], owner[1], error)
                return False

    def close(self) -> None:
        """Close the file; the next record opens one again."""
        with self._lock:
            self._shut()
            self._owner = None

    def _shut(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def _open(self, owner: tuple[str, int]) -> None:
        if self._owner is not None and self._owner[1] == owner[1]:
            self._shut()
        # After a fork the descriptor is left to the parent.
        self._owner, self._descriptor = owner, None
        folder = Path(owner[0])
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / file_name(socket.gethostname(), owner[1])
        is_torn = _is_torn(path)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if is_torn:
            os.write(self._descriptor, b"\n")
        limits = trace_limits().as_record()
        verify = r3_trace_verify_forward_enabled()
        self._append("trace_started", {"format": FORMAT, "limits": limits, "verify_forward": verify})

    def _append(self, event: str, fields: Mapping[str, object]) -> None:
        assert self._descriptor is not None
        process = {"time": time.time(), "host": socket.gethostname(), "pid": os.getpid(), **_rank()}
        line = json.dumps({**process, **fields, "event": event}, sort_keys=True, separators=(",", ":")) + "\n"
        encoded = line.encode()
        if os.write(self._descriptor, encoded) < len(encoded):
            raise OSError("only a part of a record was written")


def _is_torn(path: Path) -> bool:
    """Return whether an earlier process of this number was killed inside a record."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _rank() -> dict[str, int]:
    """Return the rank and world size where this process has joined a process group."""
    dist = sys.modules.get("torch.distributed")
    try:
        if dist is None or not dist.is_available() or not dist.is_initialized():
            return {}
        return {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    except (AttributeError, RuntimeError, ValueError):  # a module half imported, a group being destroyed
        return {}
