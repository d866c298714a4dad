"""Segments of shared memory: reuse, races between processes, full file systems, and memory of killed writers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_rl.config.data_plane import DataPlaneConfig, SharedMemoryConfig
from nemo_rl.data_plane.adapters import shm
from nemo_rl.data_plane.adapters.shm import SegmentFolder, SharedMemoryStore, folder_of
from nemo_rl.data_plane.factory import build_data_plane_client
from nemo_rl.errors import CapacityExceeded, DataPlaneClosed, DataPlaneError, KeysNotFound
from tests.helpers.data_planes import wait_until

KIB = 1 << 10


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "segments"
    SegmentFolder.create(made)
    return made


@pytest.fixture
def segments(folder: Path) -> Iterator[SegmentFolder]:
    made = SegmentFolder(folder, keep_bytes=1 << 20)
    yield made
    made.clear_cache()


def chunk(fill: int, num_bytes: int) -> list[memoryview]:
    whole = np.full(num_bytes, fill, dtype=np.uint8).data
    return [whole[: num_bytes // 3], whole[:0], whole[num_bytes // 3 :]]


def test_a_chunk_is_read_back_by_another_process_view(folder: Path, segments: SegmentFolder) -> None:
    other = SegmentFolder(folder, keep_bytes=1 << 20)
    segments.write("run/a:1.x/0", chunk(7, 100_001))
    view = other.read("run/a:1.x/0")
    assert bytes(view) == b"\7" * 100_001 and view.readonly
    other.check("run/a:1.x/0")
    other.clear_cache()
    assert view[5] == 7


def test_a_freed_segment_is_reused_and_a_reader_of_the_old_chunk_is_told(folder: Path, segments: SegmentFolder) -> None:
    segments.write("run/a/0", chunk(1, 90_000))
    view = segments.read("run/a/0")
    inode = os.stat(folder / "live" / "run|a|0").st_ino
    segments.free(["run/a/0", "run/a/unknown"])
    with pytest.raises(KeysNotFound):
        segments.check("run/a/0")
    segments.write("run/a/1", chunk(2, 88_000))
    assert os.stat(folder / "live" / "run|a|1").st_ino == inode
    assert view[0] == 2
    for call in (segments.check, segments.read):
        with pytest.raises(KeysNotFound):
            call("run/a/0")


def test_a_segment_is_not_wasted_on_a_much_smaller_chunk(folder: Path, segments: SegmentFolder) -> None:
    segments.write("run/a/0", chunk(1, 900 * KIB))
    segments.free(["run/a/0"])
    segments.write("run/a/1", chunk(2, 100 * KIB))
    assert len(list((folder / "free").iterdir())) == 1


def test_free_segments_beyond_the_limit_are_given_back(folder: Path) -> None:
    segments = SegmentFolder(folder, keep_bytes=300 * KIB)
    names = [f"run/a/{i}" for i in range(5)]
    for name in names:
        segments.write(name, chunk(1, 120 * KIB))
    segments.free(names)
    kept = [int(path.name.split("-")[0]) for path in (folder / "free").iterdir()]
    assert 0 < sum(kept) <= 300 * KIB
    segments.clear_cache()


def test_mappings_of_segments_that_are_gone_are_let_go(folder: Path, segments: SegmentFolder) -> None:
    other = SegmentFolder(folder, keep_bytes=1)
    segments.write("run/a/0", chunk(1, 200 * KIB))
    other.free(["run/a/0"])
    for i in range(shm.PRUNE_EVERY):
        segments.write(f"run/b/{i}", chunk(1, 10))
        segments.free([f"run/b/{i}"])
    gone = [segment for segment in segments._mapped.values() if os.fstat(segment.descriptor).st_nlink == 0]
    assert gone == []
    other.clear_cache()


def test_threads_never_share_a_free_segment(folder: Path, segments: SegmentFolder) -> None:
    failures: list[str] = []

    def work(worker: int) -> None:
        for turn in range(200):
            name = f"run/{worker}/{turn}"
            fill = (worker * 7 + turn) % 251
            segments.write(name, chunk(fill, 70_000))
            view = segments.read(name)
            if set(view[::777]) != {fill}:
                failures.append(name)
            segments.check(name)
            segments.free([name])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []


def test_a_full_file_system_is_an_error_that_says_what_to_change(folder, segments, monkeypatch):
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CapacityExceeded, match=r"has no space for a segment of \d+ bytes"):
        segments.write("run/a/0", chunk(1, 10))
    assert list((folder / "live").iterdir()) == []


@pytest.mark.slow
def test_an_owner_that_is_killed_leaves_no_segments() -> None:
    run_id = f"t-{uuid.uuid4().hex[:8]}"
    code = (
        "import sys, time\n"
        "from nemo_rl.config.data_plane import SharedMemoryConfig\n"
        "from nemo_rl.data_plane.adapters.shm import SharedMemoryStore\n"
        "store = SharedMemoryStore.start(SharedMemoryConfig(), run_id=sys.argv[1])\n"
        "store.put({'r/a/0': [memoryview(b'x' * 1000)]}, timeout_s=5)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, run_id], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline() == "ready\n"
    folder = folder_of(SharedMemoryConfig().folder, run_id)
    guest = SharedMemoryStore.join(SharedMemoryConfig(), run_id=run_id)
    assert bytes(guest.get(["r/a/0"], timeout_s=5, handles={})[0][0]) == b"x" * 1000
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: not folder.exists())
    with pytest.raises(DataPlaneClosed, match="its owner has ended"):
        guest.put({"r/b/0": [memoryview(b"x")]}, timeout_s=5)
    guest.close()


def test_calls_that_meet_the_end_of_the_owner_are_told_so(tmp_path: Path) -> None:
    owner = SharedMemoryStore.start(SharedMemoryConfig(folder=str(tmp_path)), run_id="r")
    guest = SharedMemoryStore.join(SharedMemoryConfig(folder=str(tmp_path)), run_id="r")
    check, guest._check_open = guest._check_open, lambda: None  # the folder goes after the check
    owner.close()
    for call in (lambda: guest.put({"r/a/0": [memoryview(b"x")]}, timeout_s=5), lambda: guest.drop(["x"], timeout_s=5)):
        with pytest.raises(DataPlaneError):
            call()
    guest._check_open = check
    guest.close()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataPlaneError, match=r"set data_plane\.shm\.folder"):
        SharedMemoryStore.start(SharedMemoryConfig(folder=str(tmp_path / "missing")), run_id="r")


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
