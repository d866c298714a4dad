"""What rewards print: all of it in a file of the run, a few lines of it for the person at the terminal.

Called by `ProcessEnvironment` from its scoring threads. Invariant: a reward that prints without end fills neither the
disk nor the screen.
"""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path

from nemo_rl.utils.console import printable

__all__ = ["RewardLog"]

_FILE_LIMIT_BYTES = 64 * 1024 * 1024
"""Of one run; then the file ends with a line that says so."""
_LINES_SHOWN = 5
"""Per call: a step, a validation."""
_LAST_LINES = 5
"""Kept for the message of an error."""
_LINE_LIMIT = 300
"""Characters of a line that is shown."""


class RewardLog:
    """Takes lines and keeps what is to be shown.

    Args:
        path: the file, made with the first line; None writes none.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._shown: list[str] = []
        self._num_hidden = 0
        self._last: deque[str] = deque(maxlen=_LAST_LINES)

    def hear(self, line: str) -> None:
        """Takes one line."""
        with self._lock:
            self._write(line)
            text = printable(line, limit=_LINE_LIMIT)
            self._last.append(text)
            if len(self._shown) < _LINES_SHOWN:
                self._shown.append(text)
            else:
                self._num_hidden += 1

    def take(self) -> tuple[str, ...]:
        """The lines to show since the last call, and how many more there were."""
        with self._lock:
            lines, hidden = self._shown, self._num_hidden
            self._shown, self._num_hidden = [], 0
        if hidden:
            where = f" in {self._path}" if self._path is not None else ""
            lines.append(f"... and {hidden} more lines{where}")
        return tuple(lines)

    def last(self) -> tuple[str, ...]:
        """The newest lines, for the message of an error."""
        with self._lock:
            return tuple(self._last)

    def _write(self, line: str) -> None:
        if self._path is None or self._num_bytes > _FILE_LIMIT_BYTES:
            return
        encoded = line.encode("utf-8", "backslashreplace") + b"\n"
        self._num_bytes += len(encoded)
        if self._num_bytes > _FILE_LIMIT_BYTES:
            encoded = b"... more was printed than this file holds\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(encoded)
