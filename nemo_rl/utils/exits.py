"""The ways in which a command ends: its exit code, and what the user reads about an unexpected error.

`ray.sub` knows the two exit codes that may start the job again. A file system that refuses is for the user to mend; any
other unexpected error is an error of this package: one line for the user, the traceback in a file.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path

from nemo_rl.errors import shorten

__all__ = [
    "CHILD_FAILED",
    "CRASH_FILE",
    "FAILURE",
    "INTERRUPTED",
    "NODE_LOST",
    "TIME_LIMIT",
    "USER_ERROR",
    "crash_line",
    "disk_line",
    "machine_problem",
    "text_of",
]

FAILURE = 1
"""A worker, the data plane or Ray failed."""
USER_ERROR = 2
"""Something the user can fix."""
CHILD_FAILED = 8
"""A process that a command started for its work ended with an error."""
TIME_LIMIT = 75
"""Saved and ended before `checkpointing.must_save_by`; to be continued."""
NODE_LOST = 76
"""A node of the job has ended in the middle of it."""
INTERRUPTED = 130
"""A signal ended the command."""

CRASH_FILE = "error.txt"
_ADVICE = {
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "the disk quota is used up: free some",
    errno.EFBIG: "the limit on the size of a file is reached: raise it (ulimit -f)",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.EACCES: "change its permissions, or choose another path",
    errno.EPERM: "change its permissions, or choose another path",
    errno.EMFILE: "the limit on open files is reached: raise it (ulimit -n)",
    errno.ENFILE: "the machine has no file handle left",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EIO: "the disk fails: see the system's log",
}
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_CAUSES_SEEN = 20


def text_of(error: BaseException) -> str:
    try:
        return str.__getitem__(str(error), slice(None))  # a text of its own class may say anything
    except BaseException as second:  # noqa: BLE001  (the class of somebody else)
        return f"(no text: its __str__ raises {type(second).__name__})"


def machine_problem(error: BaseException) -> str | None:
    """Return what a file system or the memory refused, and what to do; None for an error of another kind."""
    # Torch has no kind of its own for the memory of the CPU.
    said = text_of(error)
    if isinstance(error, MemoryError) or "can't allocate memory" in said or "out of memory" in said:
        return f"out of memory ({shorten(said)}); shorter rows, smaller batches or a smaller model need less"
    if not isinstance(error, OSError) or error.errno is None:
        return None
    advice = _ADVICE.get(error.errno)
    if advice is None and error.filename is None:
        return None
    where = f"{error.filename}: " if error.filename is not None else ""
    return f"{where}{error.strerror}; {advice or 'correct the path'}"


def disk_line(error: BaseException, folders: Mapping[str, Path]) -> str | None:
    """Return which of a run's folders has no room, its free bytes and the key that moves it.

    Args:
        error: of this process, or of a worker, whose text alone is left. For one that no disk has caused, or that names
            the key itself, None is returned.
        folders: by the key, or the variable of the environment, that names each.
    """
    texts = list[str]()
    cause: BaseException | None = error
    while cause is not None and len(texts) < _CAUSES_SEEN:
        texts.append(f"{text_of(cause)} {cause.filename if isinstance(cause, OSError) else ''}")
        cause = cause.__cause__ or cause.__context__
    text = "\n".join(texts)
    if not any(os.strerror(number) in text for number in _DISK_ERRORS):
        return None
    free = {key: _free_bytes(folder) for key, folder in folders.items()}
    # The folder that the error names, the deepest of several; else the one with the least room.
    named = [key for key, folder in folders.items() if str(folder) in text]
    chosen = max(named, key=lambda key: len(str(folders[key])), default=min(free, key=lambda key: free[key]))
    said = f"{chosen} {folders[chosen]}: {free[chosen] >> 20} MiB free"
    return None if chosen in text else f"{said}; free some, or set {chosen}=FOLDER to one that has room"


def _free_bytes(folder: Path) -> int:
    place = next((one for one in (folder, *folder.parents) if one.is_dir()), Path("/"))
    return shutil.disk_usage(place).free


def crash_line(error: BaseException, *, folder: Path | None) -> str:
    """Return one line about an error of ours; its traceback goes to `folder`, or to a temporary file."""
    said = shorten(" ".join(text_of(error).split()))
    line = f"{type(error).__name__}{': ' if said else ''}{said}"
    text = "".join(traceback.format_exception(error))
    for place in (folder, Path(tempfile.gettempdir())):
        if place is not None and place.is_dir():
            path = place / (CRASH_FILE if place is folder else f"nemo_rl_{CRASH_FILE}")
            try:
                path.write_text(text, encoding="utf-8", errors="backslashreplace")
            except OSError:
                continue
            return f"{line}\n  (internal error, please report it; the traceback is in {path})"
    return f"{line}\n{text}"
