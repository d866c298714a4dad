"""Processes of a run, found by a mark in their environment that every descendant inherits, and memory of a process."""

from __future__ import annotations

import mmap
import time
from socket import SOCK_DGRAM

import psutil

LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
MARK = "NEMO_RL_TEST_RUN"


def marked(mark: str) -> list[psutil.Process]:
    """Return every live process whose environment carries the mark."""
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


def listening_off_loopback(mark: str) -> tuple[int, list[str]]:
    """Count the listening sockets, and describe those that another machine could reach."""
    count, found = 0, []
    for process in marked(mark):
        try:
            sockets = process.net_connections("inet")
            name = " ".join(process.cmdline()[:2])
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        waiting = [s for s in sockets if s.status == psutil.CONN_LISTEN or (s.type == SOCK_DGRAM and not s.raddr)]
        count += len(waiting)
        found += [f"{name}: {s.laddr}" for s in waiting if s.laddr.ip not in LOOPBACK]
    return count, found


def end_all(mark: str) -> None:
    """Kills what is left, by process id."""
    for process in marked(mark):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def touched_pages(num_bytes: int) -> mmap.mmap:
    """Map anonymous pages and write each once, so that they show in the process's size; `close` gives them back."""
    pages = mmap.mmap(-1, num_bytes)
    for offset in range(0, num_bytes, mmap.PAGESIZE):
        pages[offset] = 1
    return pages
