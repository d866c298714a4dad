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
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

__all__ = ["APART", "GRACE_S", "LIBC", "MARK", "SWEEP_S", "die_with_parent", "leave_notices_to_driver", "sweep"]

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
    give_up = time.monotonic() + SWEEP_S
    while (left := _marked(folder)) and time.monotonic() < give_up:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(SWEEP_POLL_S)
    shutil.rmtree(folder, ignore_errors=True)


def _marked(folder: str) -> list[int]:
    """Return the live processes that carry the mark; those of other users cannot be seen."""
    mark = f"{MARK}={folder}".encode()
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
