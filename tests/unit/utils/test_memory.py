"""Memory of this process and its children."""

from __future__ import annotations

import os
import subprocess
import sys

from nemo_rl.utils.memory import proportional_bytes, resident_bytes, tree_proportional_bytes

MIB = 2**20


def test_a_large_buffer_shows_in_resident_and_proportional_size() -> None:
    resident, proportional = resident_bytes(), proportional_bytes([os.getpid()])
    buffer = bytearray(os.urandom(MIB)) * 64
    assert resident_bytes() - resident > 48 * MIB
    assert proportional_bytes([os.getpid()]) - proportional > 48 * MIB
    assert len(buffer) == 64 * MIB


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
