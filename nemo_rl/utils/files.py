"""Files for people and for later runs: replaced at once or not at all, readable by whom the umask says, and refused
where they are of another version (`check_format`)."""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import BinaryIO

from nemo_rl.errors import UnsupportedFormat

__all__ = [
    "MOST_BYTES",
    "FileFormat",
    "check_format",
    "give_usual_mode",
    "give_usual_modes",
    "open_plain",
    "read_line",
    "read_plain",
    "read_plain_text",
    "read_tail",
    "receive_exactly",
    "replace_file",
    "time_left",
    "wait_readable",
    "write_text",
]


class FileFormat(Enum):
    """Formats of the files that a run leaves to look at, with the version that is written and read."""

    STEP = "kept steps", 1
    CONVERSATIONS = "conversations of kept steps", 1
    TENSORS = "records of tensors", 1
    ROUTES = "routes of a model", 1
    ROUTE_TRACE = "route traces", 1
    RECORDING = "recordings of the tracer", 1

    @property
    def version(self) -> int:
        """Return the version that this release writes, the only one that it reads."""
        return self.value[1]


def check_format(kind: FileFormat, found: object, *, where: object) -> None:
    """Refuse a file of another version: nothing is guessed from one.

    Args:
        found: the version that the file names.
        where: the file, for the error.

    Raises:
        UnsupportedFormat: it is another one.
    """
    name, version = kind.value
    if type(found) is int and found == version:
        return
    raise UnsupportedFormat(
        f"{where}: expected version {version} of the format of {name}, got {ascii(found)[:40]}; read it with the "
        "release of nemo-rl that wrote it, or write it anew"
    )


def replace_file(path: Path, write: Callable[[Path], object]) -> Path:
    """Let `write` fill a temporary file next to `path`, then rename it; a failed write leaves `path` as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The suffix stays last: matplotlib and others choose the format by it.
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def write_text(path: Path, text: str) -> Path:
    """Write a text as a whole: `path` holds `text`, or its former content after a failure."""
    return replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def open_plain(path: Path) -> BinaryIO:
    """Return a plain file, opened for reading; nothing waits for the writer of a named pipe, or reads a device without
    end.

    Raises:
        OSError: it cannot be opened, or is not a plain file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "expected a plain file, got a pipe, socket or device", str(path))
    return os.fdopen(descriptor, "rb")


MOST_BYTES = 64 << 20
"""Largest text that somebody gives to be read as a whole: a recipe, a table, limits."""


def read_plain(path: Path, *, most_bytes: int | None = None) -> bytes:
    """Return the content of a plain file; raises as `open_plain`, and OSError for a file of more than `most_bytes`."""
    with open_plain(path) as file:
        if most_bytes is not None and os.fstat(file.fileno()).st_size > most_bytes:
            raise OSError(errno.EFBIG, f"expected at most {most_bytes >> 20} MiB", str(path))
        return file.read()


def read_plain_text(path: Path) -> str:
    """Return the text of a plain file that somebody gives; raises as `read_plain`, and ValueError for other bytes."""
    text = read_plain(path, most_bytes=MOST_BYTES).decode("utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_tail(path: Path, num_bytes: int) -> bytes:
    """Return the last bytes of a plain file that may be large, such as a log."""
    with open_plain(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - num_bytes))
        return file.read(num_bytes)


def give_usual_modes(folder: Path) -> None:
    """Give files under `folder` the mode that `open` gives; those of safetensors are for their owner alone."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            give_usual_mode(path)


def give_usual_mode(path: Path) -> None:
    """Give one file the mode that `open` gives."""
    # File systems that know no modes have no use for one.
    with suppress(OSError):
        path.chmod(0o666 & ~_umask())


def _umask() -> int:
    """Return the umask of this process; os.umask can only be asked by changing it, for all threads."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))


def wait_readable(*descriptors: int, timeout_s: float) -> set[int]:
    """Return the descriptors that can be read without waiting, at their end included; empty after `timeout_s`."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(math.ceil(max(timeout_s, 0.0) * 1000))}


def read_line(descriptor: int, *, timeout_s: float, limit_bytes: int = 1 << 16) -> bytes:
    """Return the first line that comes, with its line feed. Without one: what came until the end, the limit or the
    deadline.

    What follows the line in the same piece is dropped, so this is for who says one line.
    """
    deadline, line = time.monotonic() + timeout_s, b""
    while b"\n" not in line and len(line) < limit_bytes:
        left = deadline - time.monotonic()
        if left <= 0 or not wait_readable(descriptor, timeout_s=left):
            break
        part = os.read(descriptor, limit_bytes - len(line))
        if not part:
            break
        line += part
    first, feed, _ = line.partition(b"\n")
    return first + feed


def receive_exactly(connection: socket.socket, size: int, *, deadline: float | None) -> bytearray:
    """Return the next bytes of a connection; raise EOFError at its end, and TimeoutError after the deadline, if any."""
    content = bytearray()
    while len(content) < size:
        if deadline is not None:
            connection.settimeout(time_left(deadline))
        part = connection.recv(min(size - len(content), 1 << 20))
        if not part:
            raise EOFError(f"the peer closed the connection, {size - len(content)} bytes too early")
        content += part
    return content


def time_left(deadline: float) -> float:
    """Return the seconds until a moment of the monotonic clock; raise TimeoutError when it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left
