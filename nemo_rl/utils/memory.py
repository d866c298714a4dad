"""Memory of processes on this machine.

Called by benchmarks, the trainer, policy workers and tests. Invariant: shared pages are counted once over a set of
processes (PSS), where the operating system can tell.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

__all__ = [
    "available_bytes",
    "peak_resident_bytes",
    "proportional_bytes",
    "reset_peak_resident",
    "resident_bytes",
    "tree_proportional_bytes",
]

CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
"""Limit, use and statistics of a container, in the second and the first version of control groups."""
RESET_PEAK = "5"
"""What Linux takes in `clear_refs` to restart the peak of the resident size."""


def resident_bytes(pid: int | None = None) -> int:
    """Resident memory of one process, shared pages included."""
    return int(psutil.Process(pid or os.getpid()).memory_info().rss)


def peak_resident_bytes() -> int:
    """Largest resident memory of this process since `reset_peak_resident`; the present one where none is kept."""
    with suppress(OSError):
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        if found is not None:
            return int(found.group(1)) * 1024
    return resident_bytes()


def reset_peak_resident() -> None:
    """Starts the peak anew, where the operating system can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)


def available_bytes(*, cgroup_root: Path = CGROUP_ROOT) -> int:
    """Memory that this process can still get, within its container's limit where there is one."""
    free = int(psutil.virtual_memory().available)
    for limit_name, used_name, statistics_name in CGROUP_FILES:
        with suppress(OSError, ValueError):
            # "max" is no number: no limit.
            limit = int((cgroup_root / limit_name).read_text())
            used = int((cgroup_root / used_name).read_text())
            cache = re.search(r"^inactive_file (\d+)", (cgroup_root / statistics_name).read_text(), re.MULTILINE)
            # Cached file pages count as used, but are dropped when somebody wants the memory.
            free = min(free, max(0, limit - used + (int(cache.group(1)) if cache is not None else 0)))
    return free


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
