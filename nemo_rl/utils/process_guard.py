"""The child's side of `child_process`: a guard that outlives its owner for as long as it takes to clean up.

`python -I -S process_guard.py FOLDER [COMMAND...]`, started by `Guard`, prints a process id and waits for the end of
its standard input, which the kernel closes however the owner dies. Then it ends the command and the processes that
carry the folder's mark, and removes the folder. When the guard is killed, the kernel kills the command. Imports nothing
but the standard library, so it starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

__all__ = [
    "APART",
    "GRACE_S",
    "LIBC",
    "MARK",
    "SWEEP_S",
    "die_with_parent",
    "kill_marked",
    "leave_notices_to_driver",
    "remove_folder",
    "sweep",
]

_AS_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
LIBC = ctypes.CDLL(None, use_errno=True)
_set_handler = LIBC.signal
_set_handler.argtypes, _set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
PR_SET_PDEATHSIG = 1
APART = "--apart"
"""Makes the guard no child of its owner, in place of a command: Ray kills the children of a worker that dies."""
MARK = "NEMO_RL_RUN_FOLDER"
"""Variable that processes inherit which must end with a folder; its value is the folder."""
GRACE_S = 3.0
"""Seconds from SIGTERM to SIGKILL."""
POLL_S = 0.2
"""Seconds that the death of the command may go unnoticed."""
SWEEP_S, SWEEP_POLL_S = 10.0, 0.05
"""A killed process is gone in milliseconds; one in the kernel may take longer."""


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Get a signal when the parent's thread that made this process ends; exit at once if the parent is dead."""
    LIBC.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(0)


def leave_notices_to_driver() -> None:
    """Ignore SIGUSR1 and SIGUSR2 from now on, from any thread, and so do processes that this one starts.

    Clusters send them to every process of a job; the driver decides when the work ends.
    """
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        # Python's own function works in the main thread alone.
        _set_handler(number, ctypes.c_void_p(signal.SIG_IGN.value))


def sweep(folder: str) -> None:
    """Kill every process that carries the folder's mark, and remove the folder. Idempotent."""
    kill_marked(MARK, folder)
    remove_folder(folder)


def kill_marked(variable: str, value: str) -> None:
    """Kill every process that was started with this value of an environment variable. Idempotent."""
    give_up = time.monotonic() + SWEEP_S
    while (left := _marked(f"{variable}={value}".encode())) and time.monotonic() < give_up:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(SWEEP_POLL_S)


def _marked(mark: bytes) -> list[int]:
    """Return the live processes that carry the mark; those of other users cannot be seen."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            # Empty for a zombie.
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def remove_folder(folder: str | None, *, most: int | None = None) -> bool:
    """Remove a folder of user code, however deep, also where that has taken permissions away. Errors are ignored.

    Returns:
        False where the folder holds more than `most` files and folders: then as many were removed.
    """
    if folder is None:
        return True
    with suppress(OSError):
        if not os.path.islink(folder):
            os.chmod(folder, stat.S_IRWXU)
    try:
        top = os.open(folder, _AS_FOLDER)
    except OSError:
        with suppress(OSError):
            os.unlink(folder)  # user code has put a link or a file in its place
        return True
    try:
        with suppress(OSError):
            for number, _ in enumerate(_empty(top), start=1):
                if number == most:
                    return False
    finally:
        os.close(top)
    with suppress(OSError):
        os.rmdir(folder)
    return True


def _empty(top: int) -> Iterator[None]:
    """Remove what an open folder holds, one thing after the other.

    Folders that lie deeper are moved to the top first, so that neither the stack, the open descriptors nor the length
    of a path grow with the depth that user code has chosen.
    """
    prefix = os.urandom(8).hex()
    new_names = (f"{prefix}-{number}" for number in count())
    names: list[str] = []
    yield from _remove_files(top, top, new_names, names)
    while names:
        name = names.pop()
        with suppress(OSError):
            place = os.open(name, _AS_FOLDER, dir_fd=top)
            try:
                yield from _remove_files(place, top, new_names, names)
            finally:
                os.close(place)
            os.rmdir(name, dir_fd=top)


def _remove_files(place: int, top: int, new_names: Iterator[str], found: list[str]) -> Iterator[None]:
    """Remove the files of an open folder and move its folders to the top; their names there are added to `found`."""
    with os.scandir(place) as entries:
        for entry in entries:
            name = entry.name
            yield
            with suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(name, dir_fd=place)
                    continue
                os.chmod(name, stat.S_IRWXU, dir_fd=place)
                if place != top:
                    os.rename(name, name := next(new_names), src_dir_fd=place, dst_dir_fd=top)
                found.append(name)


def main(folder: str, *command: str) -> int:
    """Wait for the owner's end, or the command's; return the command's exit code."""
    leave_notices_to_driver()
    child = None
    if command == (APART,):
        if os.fork():
            return 0
    elif command:
        # The signal follows the thread that forks: the guard has one, which lives as long as the guard does.
        dies = partial(die_with_parent, os.getpid())
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, preexec_fn=dies)  # noqa: PLW1509
    os.write(sys.stdout.fileno(), f"{child.pid if child else os.getpid()}\n".encode())
    while child is None or child.poll() is None:
        if select.select([sys.stdin], [], [], POLL_S if child else None)[0] and not os.read(sys.stdin.fileno(), 1):
            if child is not None:
                _end(child)
            sweep(folder)
            break
    code = 0 if child is None else child.wait()
    return code if code >= 0 else 128 - code


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
