"""The journal of a ledger: a file of checked frames, from which a new process builds the same ledger.

    8 bytes magic and format | frame {"run", "state"} | frame | frame | ...
    a frame: 4 bytes length | 4 bytes check of the length | 8 bytes check of the content | content, msgpack

`state` is a snapshot, None at the beginning of a run; the frames behind it are the changes since. Used by
`recovery.py`; the driver makes the file. Checks are xxh3_64 and count the frames, so that none can be lost, repeated
or moved unseen. Invariant: a frame is in the file as a whole, or it is the last one and is cut off.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack
import xxhash

from nemo_rl.errors import DataPlaneError
from nemo_rl.utils.files import replace_file

__all__ = ["JOURNAL_FILE", "Journal", "create_journal", "remove_journal"]

JOURNAL_FILE = "ledger.journal"
FORMAT = 1
"""Raised when a file can no longer be read by the version before."""
_MAGIC, _GIVEN_UP = b"NRLJ", b"GONE"
_START = struct.Struct("<4sI")
_HEAD = struct.Struct("<IIQ")


def create_journal(path: Path, *, run_id: str) -> None:
    """Write the journal of a ledger that has not served a request yet, in place of an older one."""
    replace_file(path, lambda temporary: os.close(_write(temporary, _beginning(run_id, None))))


def remove_journal(path: Path) -> None:
    """Remove a journal, and a snapshot that a kill has left half written."""
    path.unlink(missing_ok=True)
    _remove_unfinished(path)


class Journal:
    """One open journal. Not thread-safe: the ledger's host serialises its calls.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / JOURNAL_FILE
        >>> create_journal(path, run_id="r")
        >>> with Journal(path, run_id="r") as journal:
        ...     journal.append(msgpack.packb("first"))
        >>> with Journal(path, run_id="r") as journal:
        ...     list(journal.replay())
        ['first']
    """

    def __init__(self, path: Path, *, run_id: str, sync: bool = False) -> None:
        """Open a journal; `replay` has to be read to its end before the first `append`.

        Args:
            sync: write each frame through to the disk.

        Raises:
            DataPlaneError: it does not exist, is of another run or a newer format, was given up, or is damaged.
        """
        self.path, self._run_id, self._sync = path, run_id, sync
        self.num_bytes, self._num_frames = 0, 0
        """Size of the file, and frames in it with the first one; known after `replay`."""
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DataPlaneError(f"run {run_id!r}: the ledger's journal cannot be opened: {error}") from error
        try:
            _remove_unfinished(path)
            self._content = _read(self._file)
            self._frames = self._read_frames()
            self.state = self._read_beginning()
            self.is_fresh = self.state is None and len(self._content) == self.num_bytes
            """True when no ledger has changed anything before this one."""
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def replay(self) -> Iterator[Any]:
        """Yield the content of each frame behind the snapshot, then cut off a frame that was not written to its end."""
        yield from self._frames
        self._content = b""
        os.ftruncate(self._file, self.num_bytes)
        os.lseek(self._file, self.num_bytes, os.SEEK_SET)

    def append(self, content: bytes) -> None:
        """Write one frame.

        Raises:
            OSError: it is not in the file as a whole; `give_up` or `restart` must follow.
        """
        frame = _frame(content, self._num_frames)
        _write_all(self._file, frame)
        if self._sync:
            os.fsync(self._file)
        self._num_frames += 1
        self.num_bytes += len(frame)

    def restart(self, state: Mapping[str, object]) -> None:
        """Put a new file with a snapshot in place of this one, at once.

        Raises:
            OSError: the file is as it was.
        """
        content, opened = _beginning(self._run_id, state), []

        def write(temporary: Path) -> None:
            opened.append(_write(temporary, content))
            if self._sync:
                os.fsync(opened[0])

        try:
            replace_file(self.path, write)
        except OSError:
            for file in opened:
                os.close(file)
            raise
        os.close(self._file)
        self._file, self.num_bytes, self._num_frames = opened[0], len(content), 1
        if self._sync:
            _sync_folder(self.path.parent)

    def give_up(self) -> None:
        """Mark the file as one that lacks changes, which works on a full disk: nobody recovers from it."""
        try:
            os.pwrite(self._file, _GIVEN_UP, 0)
        except OSError:
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._file)

    def _read_beginning(self) -> dict[str, Any] | None:
        where = f"run {self._run_id!r}: the ledger's journal {self.path}"
        if len(self._content) < _START.size:
            raise DataPlaneError(f"{where} is empty; the run cannot go on")
        magic, version = _START.unpack_from(self._content)
        if magic == _GIVEN_UP:
            raise DataPlaneError(f"{where} was given up when it could not be written; the run cannot go on")
        if magic != _MAGIC:
            raise DataPlaneError(f"{where} is no journal of a ledger: it starts with {magic!r}")
        if version > FORMAT:
            raise DataPlaneError(
                f"{where} has format {version}, this version reads up to {FORMAT}; use the version that wrote it"
            )
        beginning = next(self._frames, None)
        if beginning is None:
            raise DataPlaneError(f"{where} has no beginning; the run cannot go on")
        if beginning["run"] != self._run_id:
            raise DataPlaneError(f"{where} is of run {beginning['run']!r}; expected one of {self._run_id!r}")
        state = beginning["state"]
        assert isinstance(state, dict | None)
        return state

    def _read_frames(self) -> Iterator[Any]:
        content, at, number = memoryview(self._content), _START.size, 0
        self.num_bytes = at
        while at + _HEAD.size <= len(content):
            size, size_check, check = _HEAD.unpack_from(content, at)
            end = at + _HEAD.size + size
            if _check_of_size(size, number) != size_check:
                if not any(content[at:]):
                    break  # zeros: the machine stopped before the pages were written
                raise self._damaged(at)
            frame = content[at + _HEAD.size : end]
            if end > len(content):
                break
            if xxhash.xxh3_64_intdigest(frame, seed=number) != check:
                if end == len(content):
                    break
                raise self._damaged(at)
            at, number = end, number + 1
            self.num_bytes, self._num_frames = at, number
            yield msgpack.unpackb(frame)

    def _damaged(self, at: int) -> DataPlaneError:
        return DataPlaneError(
            f"run {self._run_id!r}: the ledger's journal {self.path} is damaged at byte {at} of {len(self._content)}; "
            "the run cannot go on; check the disk"
        )


def _beginning(run_id: str, state: Mapping[str, object] | None) -> bytes:
    return _START.pack(_MAGIC, FORMAT) + _frame(msgpack.packb({"run": run_id, "state": state}), 0)


def _frame(content: bytes, number: int) -> bytes:
    size = len(content)
    return _HEAD.pack(size, _check_of_size(size, number), xxhash.xxh3_64_intdigest(content, seed=number)) + content


def _check_of_size(size: int, number: int) -> int:
    """Return a check of its own: a frame whose length is wrong must not pass for one that was cut off."""
    return xxhash.xxh3_64_intdigest(size.to_bytes(4, "little"), seed=number) & 0xFFFFFFFF


def _read(file: int) -> bytes:
    with os.fdopen(os.dup(file), "rb") as whole:
        return whole.read()


def _remove_unfinished(path: Path) -> None:
    for left in path.parent.glob(f".{path.stem}.*.tmp{path.suffix}"):
        left.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> int:
    """Write a file that only its owner may read; return it open, at its end."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        _write_all(file, content)
    except OSError:
        os.close(file)
        raise
    return file


def _write_all(file: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(file, left) :]


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
