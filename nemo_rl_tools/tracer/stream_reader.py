"""`StreamReader`: reads recordings of `nemo_rl_tools.tracer.store`, finished or being written, whole or damaged.

Invariant: damaged bytes cost the entries that they belong to and are counted, never an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from time import monotonic
from typing import TypeAlias

from nemo_rl.errors import UserError
from nemo_rl.tracer.process import RECORDING_FOLDER
from nemo_rl.utils.files import FileFormat, check_format, open_plain
from nemo_rl_tools.tracer.entry import EntryKind, EntryProblem, StreamEntry, entry_at, find_entry, size_of
from nemo_rl_tools.tracer.store import stream_files

__all__ = ["Follow", "StreamReader", "find_recording"]

Seen: TypeAlias = tuple[EntryKind, int, int]
"""Kind, length and hash of an entry."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Follow:
    """Limits of a reader that waits for entries which are still to be written."""

    idle_s: float
    """It ends when nothing has come for so long."""
    stop: Event = field(default_factory=Event)
    """It ends when this is set."""
    poll_s: float = 0.1
    caught_up: Event = field(default_factory=Event)


def find_recording(path: Path) -> Path:
    """Return the folder of a recording: itself, or the one in the log folder of a run.

    Raises:
        UserError: there is none.
    """
    for folder in (path, path / RECORDING_FOLDER):
        if stream_files(folder):
            return folder
    found = "no such folder" if not path.exists() else "a file" if path.is_file() else "a folder without these files"
    raise UserError(
        f"{path}: expected a recording (files stream_00001.nrt, ...) or the log folder of a run that has one in "
        f"{RECORDING_FOLDER}/, got {found}; runs with diagnostics.tracer.enabled: true in their recipe are recorded, "
        f"others by `nemo-rl trace watch RUN --to FOLDER`"
    )


class StreamReader:
    """Reads one recording.

    Example:
        reader = StreamReader(find_recording(Path("logs/exp_001")))
        for entry in reader.entries():
            if entry.kind is EntryKind.FRAME:
                print(entry.frame().where)
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_damaged = 0
        """Stretches of bytes that were skipped by the last reading."""
        self.num_torn = 0
        """Files whose last entry was not written to its end."""

    def entries(self, follow: Follow | None = None) -> Iterator[StreamEntry]:
        """Yield all entries in the order in which they were written, each once.

        Args:
            follow: waits for more at the end, also for the first file; None: ends there.

        Raises:
            UnsupportedFormat: the recording is of another version.
        """
        self.num_damaged = self.num_torn = 0
        seen: set[Seen] = set()
        wait = _Wait(follow)
        last = 0
        while True:
            number, path = next((item for item in stream_files(self.folder).items() if item[0] > last), (0, None))
            if path is not None:
                # It may fall out between being listed and being opened.
                with suppress(FileNotFoundError):
                    yield from _unseen(self._of_file(number, path, wait), seen)
                last = number
            elif not wait.for_more():
                return

    def _of_file(self, number: int, path: Path, wait: _Wait) -> Iterator[StreamEntry]:
        with open_plain(path) as file:
            at, tried, is_complete = 0, -1, not wait.is_following
            while True:
                size = size_of(file)
                found = entry_at(file, at, size=size)
                if isinstance(found, StreamEntry):
                    if found.kind is EntryKind.BEGIN:
                        check_format(FileFormat.RECORDING, found.message().get("version"), where=self.folder)
                    wait.has_come()
                    yield found
                    at = found.end
                    continue
                if not is_complete and max(stream_files(self.folder), default=0) > number:
                    # Nothing is added to a file once the next has begun; what came meanwhile is read once more.
                    is_complete = True
                    continue
                if at < size and size != tried:
                    tried = size
                    after = find_entry(file, at + 1, size=size)
                    if after is not None:
                        self.num_damaged += 1
                        at = after
                        continue
                if not is_complete and wait.for_more():
                    continue
                if at < size:
                    self.num_torn += found is EntryProblem.INCOMPLETE
                    self.num_damaged += found is EntryProblem.DAMAGED
                return


class _Wait:
    """Waits for entries that are still to be written."""

    def __init__(self, follow: Follow | None) -> None:
        self._follow = follow
        self._since = monotonic()

    @property
    def is_following(self) -> bool:
        return self._follow is not None

    def has_come(self) -> None:
        self._since = monotonic()

    def for_more(self) -> bool:
        """Sleep a little; False: it is not worth it any longer."""
        follow = self._follow
        if follow is None or monotonic() - self._since > follow.idle_s:
            return False
        follow.caught_up.set()
        return not follow.stop.wait(follow.poll_s)


def _unseen(entries: Iterator[StreamEntry], seen: set[Seen]) -> Iterator[StreamEntry]:
    """Yield the entries that earlier files have not had, without those that every file begins with."""
    for entry in entries:
        if entry.kind is EntryKind.BEGIN:
            continue
        if entry.kind is not EntryKind.FRAME:
            mark = (entry.kind, len(entry.body), hash(entry.body))
            if entry.is_repeat and mark in seen:
                continue
            seen.add(mark)
        yield entry
