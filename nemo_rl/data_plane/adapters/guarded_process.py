"""Server processes of a payload store that end when their owner ends, also when it is killed.

Used by `mooncake_master`. A command runs under `process_guard`, in a session of its own, with its output in a file of a
temporary folder; `stop` ends it by process id and removes the folder.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_rl.config.base import START_TIMEOUT_S
from nemo_rl.data_plane.adapters import process_guard
from nemo_rl.errors import ResourceError
from nemo_rl.utils.deadlines import read_line
from nemo_rl.utils.files import read_tail

__all__ = ["GuardedProcess", "answers", "free_port"]

logger = logging.getLogger(__name__)

POLL_S = 0.02
CONNECT_S = 1.0
STOP_S = process_guard.GRACE_S + 3.0
"""The guard itself needs a moment after the grace that it gives."""
LOG_TAIL_BYTES = 400


class GuardedProcess:
    """One running command.

    Example:
        >>> process = GuardedProcess("sleep", ["sleep", "60"])
        >>> process.stop()
        >>> process.is_alive()
        False
    """

    def __init__(self, name: str, command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._folder = Path(tempfile.mkdtemp(prefix=f"nemo_rl-{name}-"))
        self._log = self._folder / f"{name}.log"
        # -I -S: the guard needs neither site-packages nor the user's environment.
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", process_guard.__file__, str(self._log), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        assert self._guard.stdout is not None
        with self._guard.stdout as said:
            first = read_line(said.fileno(), timeout_s=START_TIMEOUT_S).strip()
        if not first.isdigit():
            self.stop()
            raise ResourceError(
                f"cannot run {command[0]!r}: its guard gave {first[:100]!r} within {START_TIMEOUT_S:g} s, no process "
                f"id, and ended with code {self._guard.returncode}"
            )
        self.pid = int(first)

    def is_alive(self) -> bool:
        """Whether the command runs."""
        return self._guard.poll() is None

    def wait_for_port(self, host: str, port: int, *, timeout_s: float) -> None:
        """Until something listens there.

        Raises:
            ResourceError: the command ended, or nothing listens after `timeout_s`; the text has the end of its log.
        """
        give_up = time.monotonic() + timeout_s
        while not answers(host, port):
            if not self.is_alive():
                raise ResourceError(f"{self.name} ended while it started: {self.log_tail()}")
            if time.monotonic() > give_up:
                raise ResourceError(
                    f"{self.name} (process {self.pid}) does not listen on {host}:{port} after {timeout_s:.1f} s: "
                    f"{self.log_tail()}"
                )
            time.sleep(POLL_S)

    def log_tail(self) -> str:
        """The end of what the command wrote."""
        try:
            content = read_tail(self._log, LOG_TAIL_BYTES)
        except OSError as error:
            return f"(no log: {error})"
        return content.decode(errors="replace").strip() or "(it wrote nothing)"

    def stop(self) -> None:
        """Ends the command: SIGTERM, and SIGKILL after a grace. Idempotent."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        try:
            self._guard.wait(STOP_S)
        except subprocess.TimeoutExpired:
            logger.warning("the guard of %s (process %d) does not end; killing it", self.name, self._guard.pid)
            # The guard is its session's only other process: the kernel kills the command with it.
            os.kill(self._guard.pid, signal.SIGKILL)
            self._guard.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def free_port(host: str) -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def answers(host: str, port: int, *, timeout_s: float = CONNECT_S) -> bool:
    """Whether somebody listens on the port; a stopped process still does."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True
