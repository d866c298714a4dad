"""Mooncake for tests: whether it can run here, a store with small numbers, signals to its processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path

from nemo_rl.config.data_plane import DataPlaneConfig, MooncakeConfig
from nemo_rl.data_plane.adapters.mooncake_master import check_installed
from nemo_rl.data_plane.factory import start_store
from nemo_rl.data_plane.interfaces import PayloadStore
from nemo_rl.errors import ResourceError

SEGMENT_BYTES = 16 << 20
SLACK = 3
STOPPED = frozenset("tTZ")


def why_not() -> str:
    """Return the reason that Mooncake cannot run here, or an empty text."""
    try:
        check_installed()
    except ResourceError as error:
        return str(error)
    return ""


def small_config(*, timeout_s: float = 20.0, **changes: object) -> DataPlaneConfig:
    section = MooncakeConfig(segment_bytes=SEGMENT_BYTES, local_buffer_bytes=8 << 20).model_copy(update=changes)
    return DataPlaneConfig(impl="mooncake", timeout_s=timeout_s, mooncake=section)


def under_transfer_queue(**changes: object) -> DataPlaneConfig:
    return small_config(**changes).model_copy(update={"impl": "transfer_queue", "backend": "mooncake_cpu"})


@contextmanager
def open_store(run_id: str = "run-a", **changes: object) -> Iterator[PayloadStore]:
    store = start_store(small_config(**changes), run_id=run_id)
    try:
        yield store
    finally:
        store.close()


def chunk(run_id: str, number: int, *, client: str = "here:1.aaaaaa") -> str:
    return f"{run_id}/{client}/{number}"


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Keep a process stopped inside the block."""
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def stop(pid: int) -> None:
    """Stops it for certain: the signal reaches one thread, which has to run before it stops the others."""
    os.kill(pid, signal.SIGSTOP)
    give_up = time.monotonic() + 60
    while {Path(stat).read_text().rpartition(")")[2].split()[0] for stat in glob(f"/proc/{pid}/task/*/stat")} - STOPPED:
        assert time.monotonic() < give_up, f"process {pid} does not stop"
        time.sleep(0.01)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Check that the block takes no longer on a machine that does little else."""
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert took < SLACK * seconds + SLACK, f"took {took:.1f} s"
