"""Processes that this process starts: each ends with it, is waited for with a deadline, and is ended by its id.

    ChildProcess    a program of this library that ends when its standard input does
    Guard           removes a folder, and ends what belongs to it, once this process has died; runs any other command

Invariant: nothing here waits without a deadline, and after `stop` or `close` no process is left.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from nemo_rl.errors import ResourceError
from nemo_rl.utils import process_guard
from nemo_rl.utils.files import read_line, read_tail, wait_readable

__all__ = ["ChildProcess", "Guard"]

logger = logging.getLogger(__name__)

KILL_S = 10.0
"""Seconds from SIGKILL to the end; a process in the kernel may take longer, and is then left."""
CLOSE_S = process_guard.GRACE_S + process_guard.SWEEP_S + 3.0
"""A guard itself needs a moment after the time that it gives."""
LOG_TAIL_BYTES = 400


class ChildProcess:
    """A process that ends when its standard input does, which the kernel brings about however this process dies.

    It has a session of its own: neither Ctrl-C nor the end of this process's group reaches it. A subclass may have
    another way to ask it to end, and no pipe as its input.

    Args:
        name: the process as messages call it.
        log: file that gets its errors, or `subprocess.STDOUT` or `DEVNULL`; None: they go where those of this process
            go. What it prints goes there too, unless it is read.
        is_read: what it prints is read from `output`, its first line by `read_line`.
        environment: further variables.
        pass_fds: descriptors that it inherits.
    """

    _stdin = subprocess.PIPE

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        log: Path | int | None = None,
        is_read: bool = False,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        with ExitStack() as stack:
            errors = stack.enter_context(log.open("ab")) if isinstance(log, Path) else log
            self._process = subprocess.Popen(
                command,
                stdin=self._stdin,
                stdout=subprocess.PIPE if is_read else errors,
                stderr=errors,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
                pass_fds=pass_fds,
            )

    @property
    def pid(self) -> int:
        """Return its process id, which is that of its session and group too."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Return the code with which it has ended, minus the number of a signal; None: it runs."""
        return self._process.poll()

    @property
    def output(self) -> IO[bytes]:
        """Return the pipe of what it prints; `stop` closes it."""
        assert self._process.stdout is not None, "is_read was not set"
        return self._process.stdout

    def tell(self, content: bytes) -> None:
        """Write to its standard input; one that has ended hears nothing."""
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            with suppress(OSError):
                stdin.write(content)
                stdin.flush()

    def read_line(self, *, timeout_s: float) -> bytes:
        """Return the first line that it prints; what there is of it after `timeout_s` or its end."""
        return read_line(self.output.fileno(), timeout_s=timeout_s)

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end and return its exit code; None: it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def ask_to_end(self) -> None:
        """Ask it to end, without waiting."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def stop(self, word: bytes = b"", *, timeout_s: float) -> int | None:
        """Tell it a last word, ask it to end and wait; kill it and its group after `timeout_s`. Idempotent.

        Returns:
            The exit code; None: it cannot even be killed.
        """
        if word:
            self.tell(word)
        code = self.end(timeout_s=timeout_s)
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code

    def end(self, *, timeout_s: float) -> int | None:
        """Do what `stop` does, from any thread, and leave `output` open."""
        self.ask_to_end()
        if not self._ends_within(timeout_s):
            logger.warning("%s (process %d) did not end within %g s and is killed", self.name, self.pid, timeout_s)
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._ends_within(KILL_S)
        return self._process.returncode

    def _ends_within(self, timeout_s: float) -> bool:
        deadline, output = time.monotonic() + timeout_s, self._process.stdout
        if self.wait(timeout_s) is None:
            return False
        # A process that has forked away from this one holds the pipe for as long as it lives.
        if output is None or output.closed:
            return True
        return bool(wait_readable(output.fileno(), timeout_s=deadline - time.monotonic()))


class Guard:
    """Ends what belongs to a folder, and removes it, when it is closed or this process has died.

    A command belongs to it, which need not know of its owner, and every process that carries the folder's mark
    (`process_guard.MARK`).

    Args:
        command: it writes to a file of the folder.
        start_timeout_s: for the guard itself.
        environment: further variables of the command.
        is_apart: Ray may kill this process's children when this process dies; it must not find the guard.

    Raises:
        ResourceError: the command cannot be run.

    Example:
        >>> import tempfile
        >>> guard = Guard(Path(tempfile.mkdtemp()), ["sleep", "60"], start_timeout_s=60)
        >>> guard.close()
        >>> guard.is_alive()
        False
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str] = (),
        *,
        start_timeout_s: float,
        environment: Mapping[str, str] | None = None,
        is_apart: bool = False,
    ) -> None:
        self.folder, self.name = folder, Path(command[0]).name if command else f"the guard of {folder}"
        self._log = folder / "guard.log"
        # -I -S: it needs neither site-packages nor the user's environment.
        line = [sys.executable, "-I", "-S", process_guard.__file__, str(folder), *command]
        self._child = ChildProcess(
            [*line, process_guard.APART] if is_apart else line,
            name=f"the guard of {folder}",
            log=self._log,
            is_read=True,
            environment=environment,
        )
        said = self._child.read_line(timeout_s=start_timeout_s).strip()
        self.pid = int(said) if said.isdigit() else self._child.pid
        """Process id of the command, or of the guard where there is none."""
        if is_apart:
            self._child.wait(start_timeout_s)
        if not said.isdigit():
            problem = f"no process id within {start_timeout_s:g} s: {self.log_tail()}"
            if command:
                self.close()
                raise ResourceError(f"cannot run {command[0]!r}: {problem}")
            logger.warning("%s: %s", self.name, problem)

    def is_alive(self) -> bool:
        """Return whether the command runs."""
        return self._child.exit_code is None

    def log_tail(self) -> str:
        try:
            content = read_tail(self._log, LOG_TAIL_BYTES)
        except OSError as error:
            return f"(no log: {error})"
        return content.decode(errors="replace").strip() or "(it wrote nothing)"

    def close(self) -> None:
        """End the command, by SIGTERM and by SIGKILL after a grace, and what carries the mark. Idempotent."""
        # When the guard must be killed, the kernel kills the command with it.
        self._child.stop(timeout_s=CLOSE_S)
        process_guard.sweep(str(self.folder))
