"""Recordings: everything a viewer gets, in files `stream_00001.nrt`, `stream_00002.nrt`, ... of one folder.

The hub and `nemo-rl trace watch --to` feed `StreamWriter`, and `StreamReader` (`nemo_rl_tools.tracer.stream_reader`)
serves every other command. Files are of bounded size, and the oldest fall out. Invariant: each file can be read alone:
it begins with what is known of the runs and of the plan, and holds every table that its frames refer to.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from nemo_rl.errors import RecordingError, UserError
from nemo_rl.tracer.frame import BadFrame, Frame, FrameTable, header_of
from nemo_rl.utils.exits import machine_problem
from nemo_rl.utils.files import FileFormat
from nemo_rl_tools.tracer.entry import HEAD, EntryKind, StreamEntry, entry_at, pack_entry, pack_message, size_of

__all__ = ["StreamWriter", "quiet_s", "stream_files"]

logger = logging.getLogger(__name__)

FILE = re.compile(r"stream_(\d{5,})\.nrt")
NUM_FILES = 8
"""A recording has about so many files when it is full: one of so many parts falls out at a time."""
MAX_FILE_BYTES = 256 << 20
MIN_BYTES = 64 << 10
"""Fewest bytes of a whole recording."""
LASTING = ("run", "plan")
"""Types of messages that hold until the next of their kind; every file begins with them."""


@dataclass(frozen=True, slots=True)
class _TablePlace:
    number: int
    at: int
    content: int


def stream_files(folder: Path) -> dict[int, Path]:
    """Return the files of a recording by number, oldest first; none where there is no such folder."""
    found = {}
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in folder.iterdir():
            if (match := FILE.fullmatch(path.name)) is not None:
                found[int(match[1])] = path
    return dict(sorted(found.items()))


def quiet_s(folder: Path) -> float:
    """Return the seconds since something was written to a recording, infinite where there is none."""
    newest = -math.inf
    for path in stream_files(folder).values():
        # Old files fall out while a run is on.
        with suppress(FileNotFoundError):
            newest = max(newest, path.stat().st_mtime)
    return max(0.0, time.time() - newest)


class StreamWriter:
    """Writes one recording; of one thread. Each entry is with the operating system when the call returns.

    A call that fails leaves what was written before whole; later calls try again. An entry that is too large for the
    recording is left out, which is written into it once.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Begin a new file; those that are there already count, too, and fall out first.

        Args:
            folder: made for its owner alone, if it is not there: prompts are texts of people.
            max_bytes: of all files.

        Raises:
            UserError: `max_bytes` is too small for anything.
            RecordingError: the folder cannot be written, or another writer has it.
        """
        if max_bytes < MIN_BYTES:
            raise UserError(f"recording {folder}: expected at least {MIN_BYTES} bytes, got {max_bytes}")
        self.folder = folder
        self.num_lost = 0
        """Frames and messages that could not be written."""
        self._max_bytes = max_bytes
        self._file_bytes = min(MAX_FILE_BYTES, max_bytes // NUM_FILES)
        self._lasting: dict[tuple[str, str], bytes] = {}
        self._tables: dict[tuple[str, str], _TablePlace] = {}
        self._has_told = False
        self._lock: int | None = None
        self._descriptor: int | None = None
        self._number = 0
        self._last = 0
        """First byte of the last entry in its file."""
        self._has_own = False
        """True when the current file has entries beside those that every file begins with."""
        self._sizes: dict[int, int] = {}
        try:
            if not folder.is_dir():
                folder.parent.mkdir(parents=True, exist_ok=True)
                folder.mkdir(mode=0o700)
            self._lock = self._take_folder()
            self._sizes = {number: path.stat().st_size for number, path in stream_files(folder).items()}
        except OSError as error:
            raise self._problem(error) from error
        self._number = max(self._sizes, default=0)
        try:
            self._begin_file()
        except RecordingError:
            self.close()
            raise

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    def frame(self, encoded: bytes) -> None:
        """Write a frame or a table of tokens as it travels.

        Raises:
            BadFrame: it is neither.
            RecordingError: it cannot be written.
        """
        header = header_of(encoded)
        run, step = str(header.get("run")), header.get("step")
        if header.get("what") == FrameTable.what:
            key, content = (run, str(header.get("name"))), hash(encoded)
            # The passes of a step mostly have the same tokens.
            is_known = key in self._tables and self._tables[key].content == content
            if not is_known and self._write(EntryKind.TABLE, encoded, step):
                self._tables[key] = _TablePlace(self._number, self._last, content)
        elif header.get("what") == Frame.what:
            table = header.get("table")
            self._write(EntryKind.FRAME, encoded, step, table=None if table is None else (run, str(table)))
        else:
            raise BadFrame(f"expected a frame or a table of tokens, got {str(header.get('what'))[:40]!r}")

    def message(self, record: Mapping[str, object]) -> None:
        """Write a message with its `type`; the newest `run` of each run and the newest `plan` begin later files.

        Raises:
            RecordingError: it cannot be written.
        """
        body, kind = pack_message(record), str(record.get("type"))
        if kind in LASTING:
            self._lasting[kind, str(record.get("run"))] = body
        self._write(EntryKind.MESSAGE, body, record.get("step"))

    def close(self) -> None:
        self._close_file()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _write(self, kind: EntryKind, body: bytes, step: object, *, table: tuple[str, str] | None = None) -> bool:
        """Write an entry, and return False where it is too large."""
        try:
            again = self._missing_table(table)
            length = HEAD.size + len(body)
            full = self._descriptor is not None and self._sizes[self._number] + length + len(again) > self._file_bytes
            if length + len(again) > self._max_bytes - self._file_bytes:
                self._tell_too_large(length + len(again))
                return False
            if self._descriptor is None or (full and self._has_own):
                self._begin_file()
                again = again or self._missing_table(table)
            self._make_room(length + len(again))
            if again and table is not None:
                self._append(again)
                self._tables[table] = _TablePlace(self._number, self._last, hash(again[HEAD.size :]))
            self._append(pack_entry(kind, body, step=step))
            self._has_own = True
        except RecordingError:
            self.num_lost += 1
            raise
        return True

    def _tell_too_large(self, num_bytes: int) -> None:
        self.num_lost += 1
        if not self._has_told:
            self._has_told = True
            text = (
                f"recording: an entry of {num_bytes} bytes does not fit into {self._max_bytes} bytes and is skipped; "
                f"watch fewer sites, or allow a larger recording"
            )
            logger.warning("%s: %s", self.folder, text)
            self.message({"type": "problem", "text": text})

    def _missing_table(self, key: tuple[str, str] | None) -> bytes:
        """Return entry of the table, if it lies in an older file only."""
        place = None if key is None else self._tables.get(key)
        if place is None or (self._descriptor is not None and place.number == self._number):
            return b""
        try:
            with self._path(place.number).open("rb") as file:
                found = entry_at(file, place.at, size=size_of(file))
        except OSError:
            return b""
        if not isinstance(found, StreamEntry):
            return b""
        return pack_entry(found.kind, found.body, step=found.step, is_repeat=True)

    def _take_folder(self) -> int:
        """Return a descriptor that keeps other writers out as long as it is open."""
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise RecordingError(
                f"recording {self.folder}: another process writes it; choose another folder"
            ) from error
        except OSError:
            # Some network file systems lock no folders.
            logger.debug("%s cannot be locked", self.folder, exc_info=True)
        return descriptor

    def _close_file(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _begin_file(self) -> None:
        self._close_file()
        number, path = self._number + 1, self._path(self._number + 1)
        entries = [pack_entry(EntryKind.BEGIN, pack_message({"version": FileFormat.RECORDING.version}))]
        entries += [pack_entry(EntryKind.MESSAGE, body, is_repeat=True) for body in self._lasting.values()]
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        except OSError as error:
            raise self._problem(error) from error
        before, self._number = self._number, number
        self._sizes[number] = 0
        self._has_own = False
        try:
            self._make_room(sum(map(len, entries)))
            for entry in entries:
                self._append(entry)
        except RecordingError:
            self._close_file()
            self._number = before
            self._remove(number)
            raise

    def _make_room(self, num_bytes: int) -> None:
        """Let the oldest files fall out until so many bytes more fit."""
        for number in list(self._sizes):
            if self.num_bytes + num_bytes <= self._max_bytes:
                return
            if number != self._number:
                self._remove(number)

    def _remove(self, number: int) -> None:
        try:
            self._path(number).unlink(missing_ok=True)
        except OSError as error:
            raise self._problem(error) from error
        self._sizes.pop(number, None)
        self._tables = {key: place for key, place in self._tables.items() if place.number != number}

    def _append(self, entry: bytes) -> None:
        """Write all of it or nothing."""
        assert self._descriptor is not None, "a file has begun"
        self._last = self._sizes[self._number]
        rest = memoryview(entry)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            try:
                os.ftruncate(self._descriptor, self._last)
            except OSError:
                # Readers skip the rest of the entry; later entries go to a new file.
                self._close_file()
            raise self._problem(error) from error
        self._sizes[self._number] += len(entry)

    def _path(self, number: int) -> Path:
        return self.folder / f"stream_{number:05d}.nrt"

    def _problem(self, error: OSError) -> RecordingError:
        return RecordingError(f"recording {self.folder}: {machine_problem(error) or error}")
