"""Unexpected errors, caught at the top of a command: one line for the user, the traceback in a file.

Called by the command lines. A file system that refuses is the user's to mend; anything else is a fault of this package.
"""

from __future__ import annotations

import errno
import tempfile
import traceback
from pathlib import Path

from nemo_rl.errors import shorten

__all__ = ["CRASH_FILE", "crash_line", "machine_problem", "text_of"]

CRASH_FILE = "error.txt"
_ADVICE = {
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "the disk quota is used up: free some",
    errno.EFBIG: "the limit on the size of a file is reached: raise it (ulimit -f)",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.EACCES: "change its permissions, or choose another path",
    errno.EPERM: "change its permissions, or choose another path",
    errno.EMFILE: "the limit on open files is reached: raise it (ulimit -n)",
    errno.ENFILE: "the machine has no open file left",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EIO: "the disk fails: see the system's log",
}


def text_of(error: BaseException) -> str:
    """What an error says, also where making its text fails."""
    try:
        return str(error)
    except Exception as second:  # noqa: BLE001  (the class of somebody else)
        return f"(no text: its __str__ raises {type(second).__name__})"


def machine_problem(error: BaseException) -> str | None:
    """What a file system or the memory refused, and what to do; None for an error of another kind."""
    # Torch has no kind of its own for the memory of the CPU.
    said = text_of(error)
    if isinstance(error, MemoryError) or "can't allocate memory" in said or "out of memory" in said:
        return f"no memory is left ({shorten(said)}); shorter rows, smaller batches or a smaller model need less"
    if not isinstance(error, OSError) or error.errno is None:
        return None
    advice = _ADVICE.get(error.errno)
    if advice is None and error.filename is None:
        return None
    where = f"{error.filename}: " if error.filename is not None else ""
    return f"{where}{error.strerror}; {advice or 'correct the path'}"


def crash_line(error: BaseException, *, folder: Path | None) -> str:
    """One line about an error of ours; its traceback goes to `folder`, or to a temporary file."""
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
            return f"{line}\n  (not foreseen: a fault of nemo_rl; the whole text is in {path})"
    return f"{line}\n{text}"
