"""`ScorerProcess`: a process that runs a reward function under a wall-clock limit and can be killed.

Called by `ScorerPool`. Every wait has a deadline; what the process prints is read while its reply is waited for, so
that it never blocks on a full pipe. A reply that does not repeat the id of its request is no reply.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from nemo_rl.errors import RewardError
from nemo_rl.utils.console import printable
from nemo_rl.utils.files import wait_readable

__all__ = ["PrintedLines", "ScorerProcess", "ScorerSpec", "python_command", "reply_in"]

_ROOT = Path(__file__).parents[2]
_END_TIMEOUT_S = 10.0
"""Seconds from the request to end a process to SIGKILL: its guard first ends what the reward function has started."""
_LEFTOVER_TIMEOUT_S = 5.0
"""Seconds from the end of a channel to the end of the process: more means that the reward function has closed the
channel."""
_REPLY_LIMIT_BYTES = 64 * 1024 * 1024
"""A reply is a few numbers; more comes from something else that writes to the channel."""
_ERROR_LIMIT = 4000
"""Characters of an error's text."""
_PART_BYTES = 1 << 14
"""Read at once; between two parts the deadline is looked at."""
_PIPE_BYTES = 1 << 16
"""Bytes that a pipe holds: no more can wait there of what was printed before a reply."""
_LINE_LIMIT_BYTES = 1 << 16
"""Most bytes of a printed line; the rest of it is counted and dropped."""


def python_command(module: str) -> list[str]:
    """Return the command that runs `main` of a module of this library, to which arguments are appended."""
    # -P, and the path for this import alone: nothing that lies beside this library hides the standard library's.
    code = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from {module} import main; del sys.path[0]; main()"
    return [sys.executable, "-P", "-c", code]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorerSpec:
    """The function that scores, and the form of its calls."""

    target: str
    """`module:function`, looked up in the working directory too, or `FILE.py:function`."""
    is_factory: bool = False
    """True: the function takes nothing and returns the one that scores."""
    in_batches: bool = False
    """True: the function gets lists, and returns one score for each of their items."""


class ScorerProcess:
    """A process that scores, and everything that it starts.

    Args:
        spec: the function.
        start_timeout_s: for loading it.
        hear: gets what the process prints, line by line.

    Raises:
        RewardError: the function cannot be loaded, or takes other arguments.
    """

    def __init__(self, spec: ScorerSpec, *, start_timeout_s: float, hear: Callable[[str], None]) -> None:
        self._end_lock = threading.Lock()
        self._channel, theirs = socket.socketpair()
        self._replies = bytearray()
        self._lines: deque[bytes] = deque()
        """Lines that have come and were not looked at."""
        self._prints = PrintedLines(hear)
        self._output, writing = os.pipe()
        os.set_blocking(self._output, False)
        try:
            self._process = subprocess.Popen(
                [*python_command("nemo_rl.environments.scorer_child"), str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(writing)
        self.wants: frozenset[str] = frozenset()
        """Further arguments that the function takes."""
        self.source = ""
        """Digest of the function's source."""
        self.checks_answers = False
        """True where the function can say which gold answers it cannot read."""
        self._start_timeout_s = start_timeout_s
        self._spec = spec

    def load(self) -> None:
        """Wait until the function is loaded; apart from the start, so that a wait can be ended by `end`."""
        spec = self._spec
        request = {
            "paths": [path for path in sys.path if path] + [os.getcwd()],
            "target": spec.target,
            "is_factory": spec.is_factory,
            "in_batches": spec.in_batches,
        }
        try:
            reply = self.ask(request, timeout_s=self._start_timeout_s)
        except TimeoutError:
            reply = {"failed": f"not loaded within {self._start_timeout_s:.0f} s"}
        except (OSError, EOFError) as error:
            reply = {"failed": f"its process ended while loading it: {error}"}
        if "failed" in reply:
            cause = printable(str(reply["failed"]), limit=_ERROR_LIMIT, keep_lines=True)
            raise RewardError(f"reward function {spec.target!r}: cannot be loaded: {cause}")
        self.wants = frozenset(cast("list[str]", reply["wants"]))
        self.source, self.checks_answers = str(reply["source"]), bool(reply["checks_answers"])

    def ask(self, request: Mapping[str, object], *, timeout_s: float) -> Mapping[str, object]:
        """Send a request and wait for its reply.

        Raises:
            TimeoutError: no reply in time.
            EOFError: the process ended.
            TypeError: the request is no JSON.
        """
        deadline, number = time.monotonic() + timeout_s, secrets.token_hex(8)
        line = json.dumps({"id": number, **request}).encode() + b"\n"
        self._channel.settimeout(timeout_s)
        self._channel.sendall(line)
        while True:
            reply = reply_in(self._next_line(deadline), number)
            if reply is not None:
                self._hear_rest()
                return reply

    def end(self) -> None:
        """End the process and everything that it started; a caller that waits for it gets an EOFError. Idempotent."""
        with self._end_lock:
            if self._process.poll() is not None:
                return
            self._process.terminate()
            try:
                self._process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(_END_TIMEOUT_S)

    def close(self) -> None:
        """End the process and close its channels; no thread may wait for it any more. Idempotent."""
        self.end()
        if self._channel.fileno() != -1:
            self._hear_rest()
            self._prints.end()
            self._channel.close()
            os.close(self._output)

    def _next_line(self, deadline: float) -> bytes:
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            if self._lines:
                return self._lines.popleft()
            channel = self._channel.fileno()
            readable = wait_readable(channel, self._output, timeout_s=remaining)
            if self._output in readable and self._hear_part() == 0:
                # Nobody prints any more: the process is gone, or has closed its outputs.
                readable = wait_readable(channel, timeout_s=remaining)
            if channel in readable:
                self._receive()

    def _receive(self) -> None:
        part = self._channel.recv(_PART_BYTES)
        if not part:
            # Its guard exits with the code of the scorer, once it has ended what that has left.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_LEFTOVER_TIMEOUT_S)
            self.end()
            raise EOFError(f"exit code {self._process.returncode}")
        first, *others = part.split(b"\n")
        self._replies += first
        if len(self._replies) > _REPLY_LIMIT_BYTES:
            raise OSError(f"more than {_REPLY_LIMIT_BYTES} bytes came where a reply was expected")
        if others:
            *whole, rest = others
            self._lines += [bytes(self._replies), *whole]
            self._replies = bytearray(rest)

    def _hear_rest(self) -> None:
        """Hand on what waits in the pipe."""
        count = 0
        while count < _PIPE_BYTES and (heard := self._hear_part()):
            count += heard

    def _hear_part(self) -> int | None:
        """Hand on what was printed, as far as it is read at once; its bytes, 0 at the end, None: nothing waits."""
        try:
            part = os.read(self._output, _PART_BYTES)
        except BlockingIOError:
            return None
        self._prints.add(part)
        return len(part)


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


def reply_in(line: bytes, number: str) -> dict[str, object] | None:
    """Return the reply to the request of this number; None for anything else that came."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and message.get("id") == number else None
