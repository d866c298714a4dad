"""`shm`: payloads in the node's shared memory, without Ray.

Serves plain processes, and Ray's with `ray.owner: node`. Segments are files that processes map, pass on and reuse; they
belong to the node and outlive the process that wrote them. The run's owner removes them at close, and a reaper process
removes them when the owner dies first.

    <folder>/nrl-<run>/live/<chunk>         a chunk's bytes behind a 64-byte head
    <folder>/nrl-<run>/free/<size>-<inode>  a segment that waits for its next chunk

A rename is the only lock: the process that renames a free segment owns it. A segment keeps its pages and every process
keeps its mapping, so a reused segment costs no page faults. Invariant: a segment's head carries the tag of the chunk
that its bytes belong to, it is erased before the segment becomes free and written after the bytes of the next chunk. A
reader that finds the same tag before and after it copied has copied that chunk.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nemo_rl.config.data_plane import SharedMemoryConfig
from nemo_rl.data_plane.address import Handles
from nemo_rl.data_plane.chunks.ragged import copy_end_to_end
from nemo_rl.data_plane.interfaces import Parts, PayloadStore, StoreHealth
from nemo_rl.data_plane.keys import chunk_tag, owner_of, process_of
from nemo_rl.errors import CapacityExceeded, DataPlaneClosed, DataPlaneError, KeysNotFound
from nemo_rl.utils.child_process import Guard
from nemo_rl.utils.deadlines import DEFAULT_START, StartUp

__all__ = ["SegmentFolder", "SharedMemoryStore", "folder_of"]

HEAD_BYTES = 64
LEAST_BYTES = 64 << 10
"""Smallest segment; sizes grow in steps of an eighth, so that a segment suits later chunks too."""
PRUNE_EVERY = 64
"""Puts and gets between two looks for mappings of segments that are gone."""
_HEAD = struct.Struct("<QQ")
_NO_TAG = 0


@dataclass(frozen=True, slots=True)
class _Segment:
    descriptor: int
    inode: int
    memory: mmap.mmap

    @property
    def size(self) -> int:
        return len(self.memory)

    def head(self) -> tuple[int, int]:
        """Return tag and bytes of the chunk inside."""
        tag, num_bytes = _HEAD.unpack_from(self.memory, 0)
        return tag, num_bytes

    def set_head(self, tag: int, num_bytes: int) -> None:
        _HEAD.pack_into(self.memory, 0, tag, num_bytes)


def folder_of(root: str, run_id: str) -> Path:
    return Path(root) / f"nrl-{run_id}"


class SegmentFolder:
    """This process's view of a run's segments on this node. Thread-safe."""

    def __init__(self, folder: Path, *, keep_bytes: int) -> None:
        """Args:
        folder: made by `create`.
        keep_bytes: most bytes in free segments; more are given back to the system.
        """
        self._live, self._free, self._keep_bytes = folder / "live", folder / "free", keep_bytes
        self._folder = folder
        self._mapped: dict[int, _Segment] = {}
        """Mapped segments by inode. tmpfs never numbers two files of one boot alike; the tag would show it."""
        self._lock = threading.Lock()
        self._num_calls = 0

    @staticmethod
    def create(folder: Path) -> None:
        """Make the folder; only this user can read it."""
        folder.mkdir(mode=0o700)
        (folder / "live").mkdir()
        (folder / "free").mkdir()

    def write(self, name: str, parts: Parts) -> None:
        """Store a copy of `parts` as chunk `name`.

        Raises:
            CapacityExceeded: the file system has no space.
            DataPlaneClosed: the folder is gone.
        """
        num_bytes = sum(part.nbytes for part in parts)
        path = self._live / _file_name(name)
        segment = self._take(path, HEAD_BYTES + num_bytes)
        content = np.frombuffer(segment.memory, dtype=np.uint8, offset=HEAD_BYTES, count=num_bytes)
        copy_end_to_end([np.frombuffer(part, dtype=np.uint8) for part in parts if part.nbytes], content)
        segment.set_head(chunk_tag(name), num_bytes)
        self._prune()

    def read(self, name: str) -> memoryview:
        """Return the bytes of a chunk, as they lie in shared memory; `check` them after use.

        Raises:
            KeysNotFound: no such chunk.
        """
        segment = self._find(name)
        tag, num_bytes = segment.head()
        if tag != chunk_tag(name):
            raise KeysNotFound(f"chunk {name} was freed")
        self._prune()
        return memoryview(segment.memory)[HEAD_BYTES : HEAD_BYTES + num_bytes].toreadonly()

    def check(self, name: str) -> None:
        """Raise KeysNotFound unless what `read` gave is still that chunk."""
        segment = self._find(name)
        if segment.head()[0] != chunk_tag(name):
            raise KeysNotFound(f"chunk {name} was freed while it was read")

    def free(self, names: Sequence[str]) -> None:
        """Free chunks; unknown ones are ignored."""
        for name in names:
            path = self._live / _file_name(name)
            try:
                segment = self._map(path)
            except FileNotFoundError:
                continue
            segment.set_head(_NO_TAG, 0)
            kept = self._free / f"{segment.size}-{segment.inode}"
            try:
                path.rename(kept)
            except FileNotFoundError:
                continue
        if names:
            self._trim()

    def live(self) -> list[str]:
        """Return names of all chunks that lie here, committed or not."""
        try:
            return [name.replace("|", "/") for name in os.listdir(self._live)]
        except FileNotFoundError:
            return []  # the run has ended

    def clear_cache(self) -> None:
        """Let go of all mappings; views that are still used keep theirs."""
        with self._lock:
            segments, self._mapped = list(self._mapped.values()), {}
        for segment in segments:
            _close(segment)

    def _take(self, path: Path, num_bytes: int) -> _Segment:
        """Return a segment of at least `num_bytes` under its live name, its tag erased."""
        for free in self._suited(num_bytes):
            try:
                (self._free / free).rename(path)
            except FileNotFoundError:
                continue  # another process was faster
            return self._map(path)
        return self._make(path, _round_up(num_bytes))

    def _suited(self, num_bytes: int) -> list[str]:
        """Free segments that fit without much waste; those that this process has mapped come first."""
        try:
            names = os.listdir(self._free)
        except FileNotFoundError as error:
            raise DataPlaneClosed(f"the segments in {self._folder} are gone; the run's owner has ended") from error
        fitting = []
        for name in names:
            size, inode = name.split("-")
            if num_bytes <= int(size) <= 2 * max(num_bytes, LEAST_BYTES):
                fitting.append((int(inode) not in self._mapped, int(size), name))
        return [name for _, _, name in sorted(fitting)]

    def _make(self, path: Path, size: int) -> _Segment:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError as error:
            raise DataPlaneClosed(f"the segments in {self._folder} are gone; the run's owner has ended") from error
        try:
            # Without its pages a full file system would end the process with SIGBUS at the first write.
            os.posix_fallocate(descriptor, 0, size)
            return self._keep(descriptor, size)
        except OSError as error:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise CapacityExceeded(
                f"{self._folder.parent} has no space for a segment of {size} bytes; clear rows, set "
                "data_plane.storage_capacity.bytes below its size, enlarge it, or set data_plane.shm.folder"
            ) from error

    def _find(self, name: str) -> _Segment:
        try:
            return self._map(self._live / _file_name(name))
        except FileNotFoundError as error:
            raise KeysNotFound(f"chunk {name} is gone") from error

    def _map(self, path: Path) -> _Segment:
        inode = path.stat().st_ino
        with self._lock:
            known = self._mapped.get(inode)
        if known is not None:
            return known
        descriptor = os.open(path, os.O_RDWR)
        return self._keep(descriptor, os.fstat(descriptor).st_size)

    def _keep(self, descriptor: int, size: int) -> _Segment:
        memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        segment = _Segment(descriptor, os.fstat(descriptor).st_ino, memory)
        with self._lock:
            known = self._mapped.setdefault(segment.inode, segment)
        if known is not segment:
            _close(segment)
        return known

    def _trim(self) -> None:
        """Give free segments beyond the limit back to the system, smallest first."""
        sizes = [(int(name.split("-")[0]), name) for name in os.listdir(self._free)]
        excess = sum(size for size, _ in sizes) - self._keep_bytes
        for size, name in sorted(sizes):
            if excess <= 0:
                return
            (self._free / name).unlink(missing_ok=True)
            excess -= size

    def _prune(self) -> None:
        """Now and then, lets go of segments that another process gave back to the system."""
        with self._lock:
            self._num_calls += 1
            if self._num_calls % PRUNE_EVERY:
                return
            gone = [inode for inode, s in self._mapped.items() if os.fstat(s.descriptor).st_nlink == 0]
            segments = [self._mapped.pop(inode) for inode in gone]
        for segment in segments:
            _close(segment)


def _close(segment: _Segment) -> None:
    """The mapping itself ends with its last view."""
    os.close(segment.descriptor)


def _file_name(name: str) -> str:
    return name.replace("/", "|")


def _round_up(num_bytes: int) -> int:
    if num_bytes <= LEAST_BYTES:
        return LEAST_BYTES
    step = 1 << max(num_bytes.bit_length() - 4, 12)
    return -(-num_bytes // step) * step


class SharedMemoryStore(PayloadStore):
    """Chunks in segments of one node."""

    def __init__(self, config: SharedMemoryConfig, *, run_id: str, reaper: Guard | None) -> None:
        self._config, self._run_id, self._reaper = config, run_id, reaper
        self._folder = folder_of(config.folder, run_id)
        self._segments = SegmentFolder(self._folder, keep_bytes=config.keep_bytes)
        self._lock = threading.Lock()
        self._orphans: dict[str, float] = {}
        """Chunks of dead writers, with the moment when that was seen first."""
        self._is_closed = False

    @classmethod
    def start(cls, config: SharedMemoryConfig, *, run_id: str, start: StartUp = DEFAULT_START) -> SharedMemoryStore:
        """Make the run's folder on this node; this process owns it.

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
        with start.waiting_for(f"the reaper of {folder}"):
            # Apart, since Ray kills the children of a worker that dies.
            reaper = Guard(folder, start_timeout_s=start.timeout_s, is_apart=True)
        return cls(config, run_id=run_id, reaper=reaper)

    @classmethod
    def join(cls, config: SharedMemoryConfig, *, run_id: str) -> SharedMemoryStore:
        """Return another process's view of the run's segments on this node.

        Raises:
            DataPlaneClosed: the run has no segments on this node (any more).
        """
        store = cls(config, run_id=run_id, reaper=None)
        store._check_open()
        return store

    @property
    def chunk_bytes(self) -> int | None:
        return self._config.chunk_bytes

    @property
    def is_mapped(self) -> bool:
        return True

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
        if self._reaper is not None:
            self._reaper.close()

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
