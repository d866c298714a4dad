"""`UserProcess`: a Python process that runs user code under a guard, and what it prints and replies.

Started by `ScorerProcess` and `Zygote`; `isolation` is the child's side.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from nemo_rl.environments.isolation import Lines
from nemo_rl.utils.child_process import ChildProcess

__all__ = [
    "LEFTOVER_TIMEOUT_S",
    "PART_BYTES",
    "Exchange",
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
PART_BYTES = 1 << 16
"""Read at once; between two parts the deadline is looked at."""
_LINE_LIMIT_BYTES = 1 << 16
"""Most bytes of a printed line; the rest of it is counted and dropped."""


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

    It ends with the thread that has started it, also when that is killed.

    Args:
        arguments: of the module, after the descriptor of its channel and the id of this process.
    """

    _stdin = subprocess.DEVNULL

    def __init__(self, module: str, *arguments: str, name: str) -> None:
        self.channel, theirs = socket.socketpair()
        command = [*python_command(module), str(theirs.fileno()), str(os.getpid()), *arguments]
        try:
            super().__init__(command, name=name, log=subprocess.STDOUT, is_read=True, pass_fds=[theirs.fileno()])
        except BaseException:
            self.channel.close()
            raise
        finally:
            theirs.close()

    def ask_to_end(self) -> None:
        """Have its guard end it and everything that it has started, without waiting."""
        if self.exit_code is None:
            self._process.terminate()

    def kill(self) -> None:
        """End it and everything that it has started, from any thread; who waits for it sees its channel end."""
        self.end(timeout_s=_END_TIMEOUT_S)


class PrintedLines:
    """Hand on lines, of which it keeps no more than a limit."""

    def __init__(self, hear: Callable[[str], None]) -> None:
        self._hear = hear
        self._line, self._num_dropped = bytearray(), 0

    def add(self, part: bytes) -> None:
        """Take a piece of what was printed."""
        *whole, rest = part.split(b"\n")
        for piece in whole:
            self._extend(piece)
            self._hand_on()
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
        self._lines, self._id = Lines(limit_bytes), ""

    def request(self, content: Mapping[str, object]) -> bytes:
        """Return the request to send; raise TypeError or ValueError for one that is no JSON."""
        self._id = secrets.token_hex(8)
        return json.dumps({"id": self._id, **content}).encode() + b"\n"

    def reply_in(self, piece: bytes) -> Mapping[str, object] | None:
        """Return the reply, once a piece of what has come ends it; raises as `Lines.add`."""
        for line in self._lines.add(piece):
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(message, dict) and message.get("id") == self._id:
                return message
        return None
