"""The journal of a ledger: a framed log from which a new process builds the same ledger.

Its head is `{"run", "state"}`: `state` is a snapshot, None at the beginning of a run, and the frames behind it are the
changes since. Used by `recovery.py`; the driver makes the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_rl.errors import DataPlaneError
from nemo_rl.utils.files import replace_file
from nemo_rl.utils.framed_log import (
    JOURNAL,
    DamagedLog,
    ForeignLog,
    TornFrame,
    begin,
    frame,
    read_frames,
    read_head,
    write_all,
)

__all__ = ["JOURNAL_FILE", "Journal", "create_journal", "remove_journal"]

JOURNAL_FILE = "ledger.journal"
_GIVEN_UP = b"GONE"
"""In place of the magic of a journal that lacks changes."""


def create_journal(path: Path, *, run_id: str) -> None:
    """Write the journal of a ledger that has not served a request yet, in place of an older one."""
    replace_file(path, lambda temporary: os.close(_write(temporary, begin(JOURNAL, {"run": run_id, "state": None}))))


def remove_journal(path: Path) -> None:
    """Remove a journal, and a snapshot that a kill has left half written."""
    path.unlink(missing_ok=True)
    _remove_unfinished(path)


class Journal:
    """One open journal. Not thread-safe: the ledger's host serialises its calls.

    Example:
        >>> import msgpack, tempfile
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
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DataPlaneError(f"run {run_id!r}: the ledger's journal cannot be opened: {error}") from error
        try:
            _remove_unfinished(path)
            self.state, self.num_bytes = self._read_beginning()
            """`num_bytes` is the size of the file once `replay` was read."""
            self.is_fresh = self.state is None and os.fstat(self._file).st_size == self.num_bytes
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
        with os.fdopen(os.dup(self._file), "rb") as file:
            try:
                for found in read_frames(file, self.num_bytes):
                    self.num_bytes = found.end
                    yield found.text
            except DamagedLog as problem:
                raise self._damaged(problem) from problem
        os.ftruncate(self._file, self.num_bytes)
        os.lseek(self._file, self.num_bytes, os.SEEK_SET)

    def append(self, content: bytes) -> None:
        """Write one frame.

        Raises:
            OSError: it is not in the file as a whole; `give_up` or `restart` must follow.
        """
        written = frame(content, at=self.num_bytes)
        write_all(self._file, written)
        if self._sync:
            os.fsync(self._file)
        self.num_bytes += len(written)

    def restart(self, state: Mapping[str, object]) -> None:
        """Put a new file with a snapshot in place of this one, at once.

        Raises:
            OSError: the file is as it was.
        """
        content, opened = begin(JOURNAL, {"run": self._run_id, "state": state}), []

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
        self._file, self.num_bytes = opened[0], len(content)
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

    def _read_beginning(self) -> tuple[dict[str, Any] | None, int]:
        """Return the snapshot, and the byte at which the first frame behind it begins."""
        where = f"run {self._run_id!r}: the ledger's journal {self.path}"
        with os.fdopen(os.dup(self._file), "rb") as file:
            if file.read(len(_GIVEN_UP)) == _GIVEN_UP:
                raise DataPlaneError(f"{where} was given up when it could not be written; the run cannot go on")
            try:
                found = read_head(file, JOURNAL)
            except ForeignLog as problem:
                raise DataPlaneError(f"{where} cannot be read: {problem}") from problem
            except TornFrame as problem:
                raise DataPlaneError(f"{where} has no beginning ({problem}); the run cannot go on") from problem
            except DamagedLog as problem:
                raise self._damaged(problem) from problem
        if found.text["run"] != self._run_id:
            raise DataPlaneError(f"{where} is of run {found.text['run']!r}; expected one of {self._run_id!r}")
        return found.text["state"], found.end

    def _damaged(self, problem: DamagedLog) -> DataPlaneError:
        return DataPlaneError(
            f"run {self._run_id!r}: the ledger's journal {self.path} is damaged: {problem}; the run cannot go "
            "on; check the disk"
        )


def _remove_unfinished(path: Path) -> None:
    for left in path.parent.glob(f".{path.stem}.*.tmp{path.suffix}"):
        left.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> int:
    """Write a file that only its owner may read; return it open, at its end."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        write_all(file, content)
    except OSError:
        os.close(file)
        raise
    return file


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
