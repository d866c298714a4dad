"""Runs a command that must not outlive the process that asked for it; started as a script by `mooncake_master`.

`python process_guard.py LOG_FILE COMMAND...` prints the command's process id. When its standard input ends, which the
kernel does however the owner dies, the command is ended and the folder of the log file removed. When the guard itself
is killed, the kernel kills the command. Imports nothing but the standard library, so it starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys

GRACE_S = 3.0
"""Seconds from SIGTERM to SIGKILL."""
POLL_S = 0.2
"""Seconds that the death of the command may go unnoticed."""
PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Guard one command; return its exit code."""
    log_file, *command = arguments
    libc, guard = ctypes.CDLL(None), os.getpid()

    def die_with_guard() -> None:
        # The signal follows the thread that forks: the guard has one, which lives as long as the guard does.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)

    with open(log_file, "wb") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_guard,  # noqa: PLW1509 - the guard has no other threads
        )
    os.write(sys.stdout.fileno(), f"{child.pid}\n".encode())
    while child.poll() is None:
        readable, _, _ = select.select([sys.stdin], [], [], POLL_S)
        if readable and not os.read(sys.stdin.fileno(), 1):
            _end(child)
            shutil.rmtree(os.path.dirname(log_file), ignore_errors=True)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
