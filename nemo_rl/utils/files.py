"""Files for people and for later runs: replaced at once or not at all, and readable by whom the umask says."""

from __future__ import annotations

import errno
import json
import math
import os
import select
import stat
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

__all__ = [
    "MANIFEST_FILE",
    "FileManifest",
    "give_usual_mode",
    "give_usual_modes",
    "open_plain",
    "read_line",
    "read_plain",
    "read_tail",
    "replace_file",
    "wait_readable",
    "write_text",
]


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


def read_plain(path: Path) -> bytes:
    """Return the content of a plain file; raises as `open_plain`."""
    with open_plain(path) as file:
        return file.read()


def read_tail(path: Path, num_bytes: int) -> bytes:
    """Return the last bytes of a file that may be large, such as a log."""
    with path.open("rb") as file:
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


MANIFEST_FILE = "manifest.json"
BLOCK_BYTES = 1 << 22
THREADS = 4
"""More do not help: storage is the limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _FileEntry:
    num_bytes: int
    crc32: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FileManifest:
    """The files of a folder.

    Example:
        >>> FileManifest.parse('{"files": {"a/b.bin": {"bytes": 3, "crc32": "352441c2"}}}').paths
        ('a/b.bin',)
    """

    entries: Mapping[str, _FileEntry]
    """Entries by path relative to the folder, with forward slashes."""

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(self.entries)

    @classmethod
    def write(cls, folder: Path) -> FileManifest:
        """Read every file of `folder` back and write the manifest next to them.

        Raises:
            OSError: a file cannot be read, or the manifest not written.
        """
        paths = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        entries = _in_threads(lambda name: _entry(folder / name), paths)
        files = {name: {"bytes": entry.num_bytes, "crc32": entry.crc32} for name, entry in entries.items()}
        write_text(folder / MANIFEST_FILE, json.dumps({"files": files}, indent=1))
        return cls(entries=entries)

    @classmethod
    def read(cls, folder: Path) -> FileManifest:
        """
        Raises:
            OSError, ValueError: there is none, or it is damaged.
        """
        return cls.parse(read_plain(folder / MANIFEST_FILE).decode("utf-8"))

    @classmethod
    def parse(cls, text: str) -> FileManifest:
        try:
            files = json.loads(text)["files"].items()
            entries = {str(n): _FileEntry(num_bytes=int(f["bytes"]), crc32=str(f["crc32"])) for n, f in files}
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{MANIFEST_FILE} is damaged: {error!r}") from error
        return cls(entries=entries)

    def without(self, prefix: str) -> FileManifest:
        """Return the manifest without the files whose paths start with `prefix`."""
        kept = {name: entry for name, entry in self.entries.items() if not name.startswith(prefix)}
        return FileManifest(entries=kept)

    def only(self, prefix: str, *, is_relative: bool = False) -> FileManifest:
        """Return the files whose paths start with `prefix`; relative ones are without it."""
        kept = {name: entry for name, entry in self.entries.items() if name.startswith(prefix)}
        return FileManifest(entries={name.removeprefix(prefix): e for name, e in kept.items()} if is_relative else kept)

    def missing(self, folder: Path) -> str | None:
        """Return the first file that is absent or of another size, in words; reads no file."""
        for name, entry in self.entries.items():
            try:
                status = (folder / name).stat()
            except (OSError, ValueError):
                return f"{name} is missing"
            if not stat.S_ISREG(status.st_mode):
                return f"{name} is not a plain file"
            size = status.st_size
            if size != entry.num_bytes:
                return f"{name} has {size} bytes, expected {entry.num_bytes}"
        return None

    def damage(self, folder: Path) -> str | None:
        """Return the first file that is not as it was written, in words; reads every file."""
        problem = self.missing(folder)
        if problem is not None:
            return problem
        try:
            found = _in_threads(lambda name: _entry(folder / name), list(self.entries))
        except OSError as error:
            return f"cannot be read: {error}"
        changed = [name for name, entry in self.entries.items() if found[name] != entry]
        return f"{changed[0]} is corrupt: its checksum differs" if changed else None


def _in_threads(read: Callable[[str], _FileEntry], names: list[str]) -> dict[str, _FileEntry]:
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(read, names), strict=True))


def _entry(path: Path) -> _FileEntry:
    checksum, num_bytes = 0, 0
    with open_plain(path) as file:
        while block := file.read(BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
            num_bytes += len(block)
    return _FileEntry(num_bytes=num_bytes, crc32=f"{checksum:08x}")


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
