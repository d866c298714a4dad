"""What a killed writer has left in shared memory is given back after the lease, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch

from nemo_rl.config.data_plane import DataPlaneConfig, SharedMemoryConfig
from nemo_rl.data_plane.adapters.shm import SharedMemoryStore, folder_of
from nemo_rl.data_plane.factory import build_data_plane_client
from tests.helpers.data_planes import wait_until

LEASE_S = 0.5
WRITER = """
import os, signal, sys
from nemo_rl.config.data_plane import SharedMemoryConfig
from nemo_rl.data_plane.adapters.shm import SharedMemoryStore
store = SharedMemoryStore.join(SharedMemoryConfig(folder=sys.argv[1]), run_id=sys.argv[2])
store.put({f"{sys.argv[2]}/here:{os.getpid()}.aaaaaa/0": [memoryview(b"x" * 1000)]}, timeout_s=5)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_segments_of_a_killed_writer_are_given_back_after_the_lease(tmp_path: Path) -> None:
    run_id = f"t{uuid.uuid4().hex[:8]}"
    shm = SharedMemoryConfig(folder=str(tmp_path))
    owner = build_data_plane_client(DataPlaneConfig(impl="shm", shm=shm, lease_s=LEASE_S), run_id=run_id)
    try:
        owner.register_partition("p", ["sample_mask"], 4, [])
        owner.register_partition("q", ["sample_mask"], 4, [])
        owner.kv_batch_put(["kept"], "q", {"sample_mask": torch.ones(1)})
        under_way = f"{run_id}/here:{os.getpid()}.bbbbbb/0"
        peer = SharedMemoryStore.join(shm, run_id=run_id)
        peer.put({under_way: [memoryview(b"y")]}, timeout_s=5)
        subprocess.run([sys.executable, "-c", WRITER, str(tmp_path), run_id], check=False, timeout=120)
        live = folder_of(str(tmp_path), run_id) / "live"
        assert len(list(live.iterdir())) == 3

        def is_back() -> bool:
            owner.kv_clear(None, "p")
            return len(list(live.iterdir())) == 2

        wait_until(is_back)
        assert owner.kv_batch_get(["kept"], "q", ["sample_mask"])["sample_mask"].tolist() == [1.0]
        assert bytes(peer.get([under_way], timeout_s=5, handles={})[0][0]) == b"y", "its writer lives"
        peer.close()
    finally:
        owner.close()
