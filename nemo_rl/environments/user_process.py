"""`UserProcess`: a Python process that runs user code under a guard, and what it prints and replies.

Started by `ScorerProcess` and `Zygote`; `isolation` is the child's side.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nemo_rl.environments.isolation import Lines
from nemo_rl.environments.wire import shown
from nemo_rl.utils.child_process import ChildProcess
from nemo_rl.utils.process_guard import MARK, kill_marked, remove_folder

__all__ = [
    "LEFTOVER_TIMEOUT_S",
    "PART_BYTES",
    "Exchange",
    "Form",
    "PrintedLines",
    "UserProcess",
    "import_paths",
    "python_command",
]

_ROOT = Path(__file__).parents[2]
LEFTOVER_TIMEOUT_S = 5.0
"""Seconds from the end of a channel to the end of the process: more means that user code has closed the channel."""
_END_TIMEOUT_S = 10.0
"""Seconds from the request to end a process to SIGKILL: its guard first ends what user code has started."""
Form = Mapping[str, type | tuple[type, ...]]
"""Fields of a reply and their types."""
_FAILURES = ("error", "failed")
"""Fields, one of which a reply has that says what failed."""
PART_BYTES = 1 << 16
"""Read at once; between two parts the deadline is looked at."""
_PREFIX = "nemo-rl-environment-"
"""Beginning of the name of the folder of user code."""
_LINE_LIMIT_BYTES = 1 << 16
"""Most bytes of a printed line; the rest of it is counted and dropped."""
_LINES_AT_ONCE = 1 << 12
"""Most lines of one piece that are handed on: a program that prints line feeds alone keeps nobody busy."""


def python_command(module: str) -> list[str]:
    """Return the command that runs `main` of a module of this library, to which arguments are appended."""
    # -P, and the path for this import alone: nothing that lies beside this library hides the standard library's.
    code = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from {module} import main; del sys.path[0]; main()"
    return [sys.executable, "-P", "-c", code]


def import_paths() -> list[str]:
    """Return where user code is looked for: as in this process, and in the working directory."""
    return [path for path in sys.path if path] + [os.getcwd()]


class UserProcess(ChildProcess):
    """A module of this library that starts with `isolation.start_guarded`, and everything that it starts.

    It ends with the thread that has started it, also when that is killed. The arguments of the module are the
    descriptor of its channel, the id of this process, and its folder for temporary files, which ends with it.
    """

    _stdin = subprocess.DEVNULL

    def __init__(self, module: str, *, name: str) -> None:
        # Inside the folder of the run, which is removed with it: a child that is killed as it starts removes nothing.
        run_folder = os.environ.get(MARK)
        self._folder = tempfile.mkdtemp(
            prefix=_PREFIX, dir=run_folder if run_folder and Path(run_folder).is_dir() else None
        )
        self.channel, theirs = socket.socketpair()
        fds, out = [theirs.fileno()], subprocess.STDOUT
        command = [*python_command(module), str(fds[0]), str(os.getpid()), self._folder]
        variables = {"TMPDIR": self._folder}
        try:
            super().__init__(command, name=name, log=out, is_read=True, environment=variables, pass_fds=fds)
        except BaseException:
            self.channel.close()
            remove_folder(self._folder)
            raise
        finally:
            theirs.close()

    def ask_to_end(self) -> None:
        """Have its guard end it and everything that it has started, without waiting."""
        if self.exit_code is None:
            self._process.terminate()
            self._process.send_signal(signal.SIGCONT)  # user code may have stopped it

    def kill(self) -> None:
        """End it and all that it has started, from any thread, and remove its folder. Idempotent.

        Who waits for it sees its channel end.
        """
        code = self.end(timeout_s=_END_TIMEOUT_S)
        if code is None or code < 0:
            # Its guard was killed: what it was to end carries the folder's name.
            kill_marked("TMPDIR", self._folder)
        remove_folder(self._folder)


class PrintedLines:
    """Hand on lines, of which it keeps no more than a limit."""

    def __init__(self, hear: Callable[[str], None]) -> None:
        self._hear = hear
        self._line, self._num_dropped = bytearray(), 0

    def add(self, part: bytes) -> None:
        """Take a piece of what was printed."""
        *whole, rest = part.split(b"\n")
        for piece in whole[:_LINES_AT_ONCE]:
            self._extend(piece)
            self._hand_on()
        if len(whole) > _LINES_AT_ONCE:
            self._hear(f"... and {len(whole) - _LINES_AT_ONCE} more short lines")
        self._extend(rest)

    def end(self) -> None:
        """Flush the last line, which may have no end."""
        if self._line:
            self._hand_on()

    def _extend(self, piece: bytes) -> None:
        kept = piece[: _LINE_LIMIT_BYTES - len(self._line)]
        self._line += kept
        self._num_dropped += len(piece) - len(kept)

    def _hand_on(self) -> None:
        text = self._line.decode("utf-8", "backslashreplace").rstrip("\r")
        self._hear(f"{text} ... and {self._num_dropped} more bytes" if self._num_dropped else text)
        self._line, self._num_dropped = bytearray(), 0


class Exchange:
    """One request after another, and the reply to each; what does not repeat the id of its request is no reply.

    Args:
        limit_bytes: most bytes of a reply.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._lines, self._limit_bytes, self._id = Lines(limit_bytes), limit_bytes, ""
        self._form: Form = {}
        self._num_bytes = 0

    def request(self, content: Mapping[str, object], *, form: Form | None = None) -> bytes:
        """Return the request to send; raise TypeError or ValueError for one that is no JSON.

        Args:
            form: fields that its reply has, unless it says what failed.
        """
        self._id, self._form, self._num_bytes = secrets.token_hex(8), form or {}, 0
        return json.dumps({"id": self._id, **content}).encode() + b"\n"

    def reply_in(self, piece: bytes) -> Mapping[str, Any] | None:
        """Return the reply, once a piece of what has come ends it.

        Raises:
            OSError: too much has come without one, or it has another form: user code has changed its process.
        """
        self._num_bytes += len(piece)
        for line in self._lines.add(piece):
            if self._id.encode() not in line:
                continue
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(message, dict) and message.get("id") == self._id:
                form = next(({name: str} for name in _FAILURES if name in message), self._form)
                if all(isinstance(message.get(name), kind) for name, kind in form.items()):
                    return message
                raise OSError(errno.EBADMSG, f"a reply of another form came: {shown(message)}")
        if self._num_bytes > 2 * self._limit_bytes:
            raise OSError(errno.EMSGSIZE, f"more than {self._num_bytes} bytes came where a reply was expected")
        return None
