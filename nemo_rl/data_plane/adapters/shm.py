"""`shm`: payloads in the node's shared memory, without Ray. Serves plain processes, and Ray's with `ray.owner: node`.

Segments belong to the node: they outlive the process that wrote them. The run's owner removes them at close, and a
watcher process removes them when the owner dies first.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from nemo_rl.config.data_plane import SharedMemoryConfig
from nemo_rl.data_plane.adapters.shm_segments import SegmentFolder, folder_of
from nemo_rl.data_plane.address import Handles
from nemo_rl.data_plane.interfaces import Parts, PayloadStore, StoreHealth
from nemo_rl.data_plane.keys import owner_of, process_of
from nemo_rl.errors import DataPlaneClosed, DataPlaneError
from nemo_rl.utils.readable import wait_readable
from nemo_rl.utils.start_up import DEFAULT_START, StartUp

__all__ = ["SegmentWatcher", "SharedMemoryStore"]

logger = logging.getLogger(__name__)

WATCHER_EXIT_S = 10.0
# Ends with its owner's end of the pipe, whatever ended the owner. It forks away from it, because Ray kills the
# children of a worker that dies. `-S -E`: it needs the standard library only.
_WATCH = """
import os, shutil, sys
if os.fork():
    os._exit(0)
sys.stdin.buffer.read()
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


class SegmentWatcher:
    """A process that removes a folder when this process ends, also by SIGKILL."""

    def __init__(self, folder: Path, *, start: StartUp) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", _WATCH, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with start.waiting_for(f"the watcher of {folder}"):
            self._process.wait(timeout=start.timeout_s)

    def close(self) -> None:
        """Removes the folder and ends the process."""
        shutil.rmtree(self._folder, ignore_errors=True)
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.close()
        # The watcher writes nothing: its output ends when it does.
        if not wait_readable(stdout.fileno(), timeout_s=WATCHER_EXIT_S):
            logger.warning("the watcher of %s did not end within %.0f s", self._folder, WATCHER_EXIT_S)
        stdout.close()


class SharedMemoryStore(PayloadStore):
    """Chunks in segments of one node."""

    def __init__(self, config: SharedMemoryConfig, *, run_id: str, watcher: SegmentWatcher | None) -> None:
        self._config, self._run_id, self._watcher = config, run_id, watcher
        self._folder = folder_of(config.folder, run_id)
        self._segments = SegmentFolder(self._folder, keep_bytes=config.keep_bytes)
        self._lock = threading.Lock()
        self._orphans: dict[str, float] = {}
        """Chunks of dead writers, with the moment when that was seen first."""
        self._is_closed = False

    @classmethod
    def start(cls, config: SharedMemoryConfig, *, run_id: str, start: StartUp = DEFAULT_START) -> SharedMemoryStore:
        """Makes the run's folder on this node; this process owns it.

        Raises:
            DataPlaneError: the folder cannot be made.
        """
        folder = folder_of(config.folder, run_id)
        try:
            SegmentFolder.create(folder)
        except OSError as error:
            raise DataPlaneError(
                f"cannot make {folder} for shared-memory segments: {error}; set data_plane.shm.folder to a tmpfs that "
                "this user can write to"
            ) from error
        return cls(config, run_id=run_id, watcher=SegmentWatcher(folder, start=start))

    @classmethod
    def join(cls, config: SharedMemoryConfig, *, run_id: str) -> SharedMemoryStore:
        """Another process's view of the run's segments on this node.

        Raises:
            DataPlaneClosed: the run has no segments on this node (any more).
        """
        store = cls(config, run_id=run_id, watcher=None)
        store._check_open()
        return store

    @property
    def chunk_bytes(self) -> int | None:
        return self._config.chunk_bytes

    def put(self, chunks: Mapping[str, Parts], *, timeout_s: float) -> Handles | None:
        self._check_open()
        written: list[str] = []
        with self._while_folder_exists():
            try:
                for chunk_id, parts in chunks.items():
                    self._segments.write(chunk_id, parts)
                    written.append(chunk_id)
            except BaseException:
                self._segments.free(written)
                raise
        return None

    def get(self, chunk_ids: Sequence[str], *, timeout_s: float, handles: Handles) -> list[Parts]:
        self._check_open()
        return [[self._segments.read(chunk_id)] for chunk_id in chunk_ids]

    def confirm(self, chunk_ids: Sequence[str]) -> None:
        for chunk_id in chunk_ids:
            self._segments.check(chunk_id)

    def drop(self, chunk_ids: Sequence[str], *, timeout_s: float) -> None:
        self._check_open()
        with self._while_folder_exists():
            self._segments.free(chunk_ids)

    def abandoned(self, after_s: float) -> list[str]:
        now, names = time.monotonic(), self._segments.live()
        dead = {pid for pid in map(_writer, names) if not Path(f"/proc/{pid}").exists()}
        self._orphans = {name: self._orphans.get(name, now) for name in names if _writer(name) in dead}
        return [name for name, seen in self._orphans.items() if now - seen >= after_s]

    def health(self) -> StoreHealth:
        if self._is_closed or not self._folder.is_dir():
            return StoreHealth(is_alive=False, detail=f"{self._folder} is gone, or this client is closed")
        return StoreHealth(is_alive=True, detail=f"segments in {self._folder}")

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._segments.clear_cache()
        if self._watcher is not None:
            self._watcher.close()

    @contextmanager
    def _while_folder_exists(self) -> Iterator[None]:
        """The owner may remove the folder while another process is inside a call."""
        try:
            yield
        except FileNotFoundError as error:
            self._check_open()
            raise DataPlaneError(f"a segment of run {self._run_id!r} was removed from outside: {error}") from error

    def _check_open(self) -> None:
        if self._is_closed:
            raise DataPlaneClosed(f"this client of run {self._run_id!r} is closed")
        if not self._folder.is_dir():
            raise DataPlaneClosed(f"run {self._run_id!r} has no segments in {self._folder}; its owner has ended")


def _writer(chunk: str) -> int:
    return process_of(owner_of(chunk))
