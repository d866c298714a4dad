"""Finding the processes of a run by a mark in their environment, which every descendant inherits."""

from __future__ import annotations

import time

import psutil

MARK = "NEMO_RL_TEST_RUN"


def marked(mark: str) -> list[psutil.Process]:
    """Every live process whose environment carries the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def wait_for_none(mark: str, *, timeout_s: float) -> list[str]:
    """Waits until no marked process is left; returns the command lines of those that stay."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not marked(mark):
            return []
        time.sleep(0.2)
    return [" ".join(process.cmdline()[:4]) for process in marked(mark)]


def end_all(mark: str) -> None:
    """Kills what is left, by process id."""
    for process in marked(mark):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
