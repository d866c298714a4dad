"""Cleans up after a run: ends processes that carry its mark in their environment, then removes its folder.

Runs as a script alongside the driver (`python run_reaper.py FOLDER`), whose end it sees as the end of its own standard
input, and is imported by `run_folder`. Imports nothing but the standard library, so it starts in milliseconds.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

MARK = "NEMO_RL_RUN_FOLDER"
"""Variable that every process of a run's Ray inherits."""
SWEEP_S = 10.0
"""A killed process is gone in milliseconds; one in the kernel may take longer."""
POLL_S = 0.05
LEFT_IN_PEACE = b"closed"
"""The message of a driver that has swept by itself."""


def marked(folder: str) -> list[int]:
    """Live processes of the run, by number; those of other users cannot be seen."""
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


def sweep(folder: str) -> None:
    """Kill every process of the run and remove its folder. Idempotent."""
    give_up = time.monotonic() + SWEEP_S
    while time.monotonic() < give_up:
        left = marked(folder)
        if not left:
            break
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(POLL_S)
    shutil.rmtree(folder, ignore_errors=True)


def main(folder: str) -> None:
    """Wait for the end of the driver, however it ends."""
    os.write(sys.stdout.fileno(), b"ready\n")
    if sys.stdin.buffer.read() != LEFT_IN_PEACE:
        sweep(folder)


if __name__ == "__main__":
    main(sys.argv[1])
