"""Memory of processes on this machine.

Called by benchmarks, the trainer and tests. Invariant: shared pages are counted once over a set of processes (PSS),
where the operating system can tell.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import psutil

__all__ = ["proportional_bytes", "resident_bytes", "tree_proportional_bytes"]


def resident_bytes(pid: int | None = None) -> int:
    """Resident memory of one process, shared pages included."""
    return int(psutil.Process(pid or os.getpid()).memory_info().rss)


def proportional_bytes(pids: Iterable[int]) -> int:
    """Memory of several processes: each shared page counts by its share (PSS), resident size where that is unknown.

    Processes that have ended count 0.
    """
    total = 0
    for pid in pids:
        try:
            process = psutil.Process(pid)
            try:
                total += int(process.memory_full_info().pss)
            except (AttributeError, psutil.AccessDenied):
                total += int(process.memory_info().rss)
        except psutil.NoSuchProcess:
            continue
    return total


def tree_proportional_bytes(pid: int | None = None) -> int:
    """Memory of a process and all its descendants."""
    try:
        root = psutil.Process(pid or os.getpid())
        pids = [root.pid, *(child.pid for child in root.children(recursive=True))]
    except psutil.NoSuchProcess:
        return 0
    return proportional_bytes(pids)
