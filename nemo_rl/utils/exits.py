"""The ways in which a command ends: its exit code, and what the user reads about an unexpected error.

`ray.sub` knows the two exit codes that may start the job again. A file system that refuses is for the user to mend; any
other unexpected error is an error of this package: one line for the user, the traceback in a file.
"""

from __future__ import annotations

import errno
import os
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
_FULL_BYTES = 64 << 20
"""A file system with less is called full: what could not be written may have been as large."""


def text_of(error: BaseException) -> str:
    """Return the text of an error, also where making it fails."""
    try:
        return str.__getitem__(str(error), slice(None))  # a text of a class of its own may say anything
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
    """Return which folders of a run have no room, their free bytes and the keys that move them.

    Args:
        error: of this process or of a worker, whose text alone is left; None is returned for an error that no disk has
            caused, or that names the key itself.
        folders: by the key, or the variable of the environment, that names each.
    """
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    text = "\n".join([*map(text_of, chain), *(str(one.filename) for one in chain if isinstance(one, OSError))])
    if not any(os.strerror(number) in text for number in _DISK_ERRORS):
        return None
    states = {key: (folder, *_room(folder)) for key, folder in folders.items()}
    lines = {key: f"{key} {folder}: {said}" for key, (folder, _, said) in states.items()}
    # Deeper folders first: one names a file better than the folder around it.
    named = sorted(
        (key for key, folder in folders.items() if str(folder) in text), key=lambda key: -len(str(folders[key]))
    )
    chosen = named[:1] or [key for key, (_, is_full, _) in states.items() if is_full] or list(states)
    if all(key in text for key in chosen):
        return None  # it is said already
    keys = [f"{key}=FOLDER" for key in chosen]
    return f"{'; '.join(lines[key] for key in chosen)}; free some, or set {' or '.join(keys)} to one that has room"


def _room(folder: Path) -> tuple[bool, str]:
    """Return whether a folder's file system takes nothing more, and what is left of it."""
    place = next((one for one in (folder.absolute(), *folder.absolute().parents) if one.is_dir()), Path("/"))
    try:
        found = os.statvfs(place)
    except OSError as error:
        return True, f"not to be asked: {error.strerror}"
    free, has_names = found.f_bavail * found.f_frsize, found.f_favail > 0 or found.f_files == 0
    said = f"{free >> 20} MiB free" + ("" if has_names else ", no file more")
    is_read_only = bool(found.f_flag & os.ST_RDONLY)
    return free < _FULL_BYTES or not has_names or is_read_only, said + (", read-only" if is_read_only else "")


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
