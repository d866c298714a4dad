"""Memory of this process and its children."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from nemo_rl.utils.memory import (
    PeakMemory,
    available_bytes,
    peak_resident_bytes,
    proportional_bytes,
    reset_peak_resident,
    resident_bytes,
    tree_proportional_bytes,
)
from tests.helpers.processes import touched_pages

MIB = 2**20


def test_a_large_buffer_shows_in_resident_and_proportional_size() -> None:
    resident, proportional = resident_bytes(), proportional_bytes([os.getpid()])
    pages = touched_pages(64 * MIB)
    assert resident_bytes() - resident > 48 * MIB
    assert proportional_bytes([os.getpid()]) - proportional > 48 * MIB
    pages.close()


def test_the_tree_counts_children_and_ended_processes_count_nothing() -> None:
    before = tree_proportional_bytes()
    code = "import sys; b = bytearray(64 << 20); b[::4096] = b'x' * 16384; print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"up\n"
        assert tree_proportional_bytes() - before > 48 * MIB
        assert child.stdin is not None
        child.stdin.close()
        child.wait(timeout=20)
    assert proportional_bytes([child.pid]) == 0


def test_the_peak_remembers_a_buffer_that_is_gone_until_it_is_reset() -> None:
    reset_peak_resident()
    before = peak_resident_bytes()
    touched_pages(64 * MIB).close()
    assert peak_resident_bytes() - before > 48 * MIB
    assert resident_bytes() - before < 32 * MIB
    reset_peak_resident()
    assert peak_resident_bytes() - before < 32 * MIB


def test_a_container_limits_what_is_available(tmp_path: Path) -> None:
    files = {"memory.max": str(100 * MIB), "memory.current": str(70 * MIB), "memory.stat": f"inactive_file {20 * MIB}"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert available_bytes(cgroup_root=tmp_path) == 50 * MIB
    (tmp_path / "memory.max").write_text("max")
    assert available_bytes(cgroup_root=tmp_path) > 50 * MIB
    assert available_bytes(cgroup_root=tmp_path / "none") <= psutil.virtual_memory().total


def test_the_peak_of_a_tree_remembers_a_child_that_is_gone() -> None:
    with PeakMemory(look_s=0.05) as memory:
        child = subprocess.Popen(
            [sys.executable, "-c", "import sys; held = b'x' * (200 << 20); print(1, flush=True); sys.stdin.read()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        give_up = time.monotonic() + 60
        while memory.num_bytes < 200 << 20 and time.monotonic() < give_up:
            time.sleep(0.05)
        child.communicate()
    assert memory.num_bytes >= 200 << 20
    seen = memory.num_bytes
    time.sleep(0.2)
    assert memory.num_bytes == seen and not memory._thread.is_alive()
