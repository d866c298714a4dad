"""A process's one connection to a run's Mooncake store, shared by its clients. Used by `mooncake.MooncakeStore`.

Mooncake's client has dozens of threads, and closing one holds Python's interpreter lock for a second, so a process has
one per run. `DeadlineCalls` runs its blocking calls in daemon threads, so that each caller gets its answer by a
deadline; `BufferPool` holds registered, warm memory for transfers, since a fresh buffer costs a page fault per page and
a registration. Invariants: no native call starts after the connection has ended, and it is not torn down under a call,
since either would crash the process; a buffer is leased to one call at a time, and as long as anybody can still see its
bytes.

Mooncake's codes and what they mean to the data plane: pure functions from codes to errors.

Used by `mooncake.MooncakeStore`, which finds out who is dead before it asks. A code alone does not say: a full store
and a store whose holder has died answer alike.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.adapters.mooncake_master import (
    MooncakeServers,
    StoreAddress,
    check_installed,
    is_listening,
    own_address,
)
from nemo_rl.data_plane.keys import owner_of
from nemo_rl.errors import (
    CapacityExceeded,
    DataPlaneClosed,
    DataPlaneError,
    DataPlaneTimeout,
    KeysNotFound,
    PayloadLost,
    name_some,
)

__all__ = [
    "CLOSE_GRACE_S",
    "CONNECTION_BROKEN",
    "NOT_FOUND",
    "NO_SPACE",
    "OK",
    "TRANSFER_FAILED",
    "BufferLease",
    "BufferPool",
    "DeadlineCalls",
    "MooncakeLink",
    "call_error",
    "read_error",
]

logger = logging.getLogger(__name__)


OK = 0
NO_SPACE = -200
NOT_FOUND = -704
TRANSFER_FAILED = -800
CONNECTION_BROKEN = -900
MASTER_SILENT = -901


def call_error(what: str, codes: Sequence[int], *, dead: Sequence[str], segment_bytes: int) -> DataPlaneError:
    """Return the error of a put or a drop.

    Args:
        dead: the run's servers that do not listen any more.
    """
    found = _in_words(codes)
    if dead:
        return DataPlaneClosed(f"Mooncake has lost {name_some(dead)}; {what} ended with {found}")
    if MASTER_SILENT in codes:
        return DataPlaneTimeout(f"the Mooncake master did not answer a {what} in time: {found}")
    if NO_SPACE in codes:
        return CapacityExceeded(
            f"Mooncake has no space for {codes.count(NO_SPACE)} of {len(codes)} chunks; raise "
            f"data_plane.mooncake.segment_bytes (now {segment_bytes}), or clear rows sooner"
        )
    return DataPlaneError(f"Mooncake failed in a {what} of {len(codes)} chunks: {found}")


def read_error(
    chunk_ids: Sequence[str], codes: Sequence[int], expected: Sequence[int], *, dead: Sequence[str]
) -> DataPlaneError:
    """Return the error of a read whose codes are not the byte counts that were expected.

    Args:
        dead: servers and producers that held these chunks and do not listen any more.
    """
    bad = [(chunk, code) for chunk, code, size in zip(chunk_ids, codes, expected, strict=True) if code != size]
    names, bad_codes = [chunk for chunk, _ in bad], [code for _, code in bad]
    share = f"{len(bad)} of {len(codes)} chunks"
    if dead or TRANSFER_FAILED in bad_codes:
        owners = name_some(sorted({owner_of(chunk) if chunk.count("/") > 1 else chunk for chunk in names}))
        held = f"{name_some(dead)}, which is gone" if dead else "a process that answers no more"
        return PayloadLost(
            f"{share} are lost: they were held by {held}; they came from {owners} ({_in_words(bad_codes)})"
        )
    if MASTER_SILENT in bad_codes:
        return DataPlaneTimeout(f"the Mooncake master did not answer a get in time: {_in_words(bad_codes)}")
    if set(bad_codes) == {NOT_FOUND}:
        return KeysNotFound(f"{share} are gone: {name_some(names)}")
    return DataPlaneError(
        f"Mooncake read {share} wrongly: {name_some(names)}: expected "
        f"{name_some([size for size, code in zip(expected, codes, strict=True) if size != code])} bytes, got "
        f"{name_some(bad_codes)}"
    )


def _in_words(codes: Sequence[int]) -> str:
    return name_some(f"code {code} ({count} times)" for code, count in sorted(Counter(codes).items()) if code < 0)


_T = TypeVar("_T")


class DeadlineCalls:
    """Threads that are made on demand and reused."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._idle: list[_LinkWorker] = []
        self._busy: set[_LinkWorker] = set()
        self._is_closed = False

    def run(self, action: Callable[[], _T], *, timeout_s: float) -> _T:
        """Return the result of `action`.

        Raises:
            DataPlaneTimeout: it is not there in time; the action goes on alone, with what it refers to.
            DataPlaneClosed: after `close`.
        """
        outcome: Future[_T] = Future()

        def job() -> None:
            try:
                result = action()
            except BaseException as error:  # noqa: BLE001 - raised again in the caller
                self._rest(worker)
                outcome.set_exception(error)
            else:
                self._rest(worker)
                outcome.set_result(result)

        with self._changed:
            if self._is_closed:
                raise DataPlaneClosed(f"this {self._name} client is closed")
            worker = self._idle.pop() if self._idle else _LinkWorker(self._name)
            self._busy.add(worker)
        worker.jobs.put(job)
        try:
            return outcome.result(timeout=max(timeout_s, 0.0))
        except TimeoutError as error:
            if outcome.done():
                raise
            raise DataPlaneTimeout(f"{self._name} did not answer within {timeout_s:.1f} s") from error

    def close(self, *, grace_s: float) -> bool:
        """End the threads; whether none is left inside a call. May be called again to wait for the rest."""
        give_up = time.monotonic() + grace_s
        with self._changed:
            self._is_closed = True
            idle, self._idle = self._idle, []
            while self._busy and time.monotonic() < give_up:
                self._changed.wait(give_up - time.monotonic())
            is_idle = not self._busy
            idle += self._idle
            self._idle = []
        for worker in idle:
            worker.jobs.put(None)
        for worker in idle:
            worker.thread.join(grace_s)
        return is_idle

    def _rest(self, worker: _LinkWorker) -> None:
        with self._changed:
            self._busy.discard(worker)
            if self._is_closed:
                worker.jobs.put(None)
            else:
                self._idle.append(worker)
            self._changed.notify_all()


class _LinkWorker:
    def __init__(self, name: str) -> None:
        self.jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name=f"{name}-call", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while (job := self.jobs.get()) is not None:
            job()
            del job


SMALLEST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class BufferLease:
    """Memory of one call: `view` keeps it, and so does every memoryview of `view`."""

    view: npt.NDArray[np.uint8]
    address: int


@dataclass(frozen=True, slots=True)
class _Buffer:
    memory: mmap.mmap
    address: int
    size: int


class BufferPool:
    """Buffers of powers of two; at most `keep_bytes` of free ones are kept."""

    def __init__(
        self, *, register: Callable[[int, int], int], unregister: Callable[[int], int], keep_bytes: int
    ) -> None:
        self._register, self._unregister, self._keep_bytes = register, unregister, keep_bytes
        self._lock = threading.Lock()
        self._free: list[_Buffer] = []
        self._returned: deque[_Buffer] = deque()
        self._is_closed = False

    def lease(self, num_bytes: int) -> BufferLease:
        """Lease at least `num_bytes` of registered memory with unspecified content.

        Raises:
            DataPlaneError: Mooncake refuses to register memory.
        """
        with self._lock:
            self._collect()
            fitting = [buffer for buffer in self._free if buffer.size >= num_bytes]
            buffer = min(fitting, key=lambda buffer: buffer.size, default=None)
            if buffer is not None:
                self._free.remove(buffer)
        if buffer is None:
            buffer = self._make(max(SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length()))
        view = np.frombuffer(buffer.memory, dtype=np.uint8, count=num_bytes)
        # A finalizer may run at any allocation, also under our lock, so it only appends.
        weakref.finalize(view, self._returned.append, buffer).atexit = False
        return BufferLease(view=view, address=buffer.address)

    def free_bytes(self) -> int:
        """Return bytes of buffers that nobody uses now."""
        with self._lock:
            self._collect()
            return sum(buffer.size for buffer in self._free)

    def close(self) -> None:
        """Forget all buffers; Mooncake's client is about to end, which ends its registrations."""
        with self._lock:
            self._is_closed = True
            self._collect()

    def _collect(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())
        if self._is_closed:
            self._free.clear()
            return
        self._free.sort(key=lambda buffer: buffer.size)
        kept = 0
        for index, buffer in enumerate(self._free):
            kept += buffer.size
            if kept > self._keep_bytes:
                for old in self._free[index:]:
                    self._unregister(old.address)
                del self._free[index:]
                return

    def _make(self, size: int) -> _Buffer:
        memory = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        address = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
        code = self._register(address, size)
        if code != 0:
            raise DataPlaneError(f"Mooncake refused to register {size} bytes of memory: code {code}")
        return _Buffer(memory, address, size)


LOCAL_TIMEOUT_S = 60.0
"""Deadline of calls that stay in this process; they take milliseconds on a quiet machine."""
CLOSE_GRACE_S = 1.0
"""Seconds for calls that are about to end; then the owner ends the servers, which ends calls that wait for them."""
CLOSE_TIMEOUT_S = 10.0

_links: dict[tuple[str, str], MooncakeLink] = {}
"""Connections of this process, by run and address of the servers."""
_links_lock = threading.Lock()


class MooncakeLink:
    """Mooncake's client, its transfer buffers and its calls."""

    def __init__(self, config: DataPlaneConfig, *, run_id: str, address: StoreAddress, timeout_s: float) -> None:
        """Connect; use `take`, which shares."""
        check_installed()
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig  # noqa: PLC0415 - an optional extra

        self.host = own_address(address.master)
        self.native: Any = MooncakeDistributedStore()
        self.placement: Any = ReplicateConfig()
        self.placement.with_hard_pin = True
        self.endpoint = ""
        """The address at which peers reach this process's own segment; empty while it has none."""
        self.ended = ""
        """The reason for which the connection cannot be used any more; empty while it can."""
        self._config, self._run_id, self._address = config.mooncake, run_id, address
        self._users = 0
        self._mounting = threading.Lock()
        self._calls = DeadlineCalls("mooncake")
        self.buffers = BufferPool(
            register=lambda at, size: self._quick(lambda: int(self.native.register_buffer(at, size))),
            unregister=lambda at: self._quick(lambda: int(self.native.unregister_buffer(at))),
            keep_bytes=self._config.local_buffer_bytes,
        )
        self._connect(timeout_s)

    @classmethod
    def take(cls, config: DataPlaneConfig, *, run_id: str, address: StoreAddress, timeout_s: float) -> MooncakeLink:
        """Return this process's connection, made if there is none that works; ends when each taker has given it back.

        Args:
            timeout_s: how long it may take to connect.

        Raises:
            DataPlaneClosed: nothing answers at the address.
        """
        with _links_lock:
            link = _links.get((run_id, str(address)))
            if link is None or link.ended:
                link = _links[run_id, str(address)] = cls(config, run_id=run_id, address=address, timeout_s=timeout_s)
            link._users += 1
            return link

    def give_back(self, servers: MooncakeServers | None) -> None:
        """One taker is done.

        Args:
            servers: given by the owner, whose close ends them, and the connection for everybody.
        """
        with _links_lock:
            self._users -= 1
            if servers is None and self._users > 0:
                return
            self.ended = self.ended or f"run {self._run_id!r} is closed in this process"
            if _links.get((self._run_id, str(self._address))) is self:
                del _links[self._run_id, str(self._address)]
        self._end(servers)

    def run(self, what: str, action: Callable[[], _T], deadline: float) -> _T:
        """Make one native call; past the deadline the connection counts as broken, for the call is still inside it."""
        if self.ended:
            raise DataPlaneClosed(f"Mooncake cannot be used: {self.ended}")
        try:
            return self._calls.run(action, timeout_s=deadline - time.monotonic())
        except DataPlaneTimeout as error:
            self.ended = f"an earlier {what} did not end in time, so its connection is broken; build a new client"
            raise DataPlaneTimeout(f"{what}: {error}; master {self._address.master}") from error

    def mount_own_segment(self, deadline: float) -> None:
        """This process's own memory for what it puts, made once."""
        with self._mounting:
            if self.endpoint:
                return
            size, protocol = self._config.segment_bytes, self._config.protocol
            made = self.run("mount", lambda: self.native.allocate_and_mount_segment(size, protocol), deadline)
            if made["ret"] != OK:
                raise CapacityExceeded(f"data_plane.mooncake.segment_bytes: Mooncake cannot mount {size} bytes: {made}")
            self.placement.preferred_segment = self.native.get_hostname()
            lease = self.buffers.lease(1)
            self.endpoint = self.run("mount", lambda: self._find_endpoint(lease.address), deadline)

    def _find_endpoint(self, byte: int) -> str:
        """Mooncake says where a segment is reached only with an object that lies there."""
        probes = [f"nemo_rl/{self._run_id}/probe/{self.host}:{os.getpid()}.{id(self)}"]
        self.native.batch_put_from(probes, [byte], [1], self.placement)
        copies = self.native.batch_get_replica_desc(probes).get(probes[0], [])
        self.native.batch_remove(probes, force=True)
        if not copies:
            raise DataPlaneError(f"Mooncake did not take a first object into the segment of {self.host}")
        return str(copies[0].get_memory_descriptor().buffer_descriptor.transport_endpoint)

    def _quick(self, action: Callable[[], _T]) -> _T:
        return self._calls.run(action, timeout_s=LOCAL_TIMEOUT_S)

    def _connect(self, timeout_s: float) -> None:
        master = self._address.master
        # Mooncake would retry for minutes.
        if not is_listening(master):
            raise DataPlaneClosed(
                f"run {self._run_id!r}: no Mooncake master listens at {master}; its owner has closed it, or "
                "data_plane.mooncake.host is not an address that this node reaches"
            )
        os.environ["MC_TCP_BIND_ADDRESS"] = self.host
        config, native = self._config, self.native
        arguments = (self.host, "P2PHANDSHAKE", 0, 0, config.protocol, config.device_name, master)
        try:
            code = self._calls.run(lambda: native.setup(*arguments), timeout_s=timeout_s)
        except BaseException:
            self._end(None)
            raise
        if code != OK:
            self._end(None)
            raise DataPlaneClosed(f"Mooncake's client at {self.host} cannot join the master at {master}: code {code}")

    def _end(self, servers: MooncakeServers | None) -> None:
        self.buffers.close()
        is_idle = self._calls.close(grace_s=CLOSE_GRACE_S)
        if is_idle:
            self._disconnect()
        if servers is not None:
            servers.stop()
        if is_idle:
            return
        if servers is not None and self._calls.close(grace_s=CLOSE_TIMEOUT_S):
            self._disconnect()
            return
        self._never_destroy()
        logger.warning("a Mooncake call of run %s does not return; abandoning its client", self._run_id)

    def _disconnect(self) -> None:
        closing = DeadlineCalls("mooncake-close")
        try:
            closing.run(self.native.close, timeout_s=CLOSE_TIMEOUT_S)
        except DataPlaneTimeout as error:
            self._never_destroy()
            logger.warning("cannot close Mooncake's client: %s", error)
        closing.close(grace_s=CLOSE_GRACE_S)

    def _never_destroy(self) -> None:
        """Its destructor under a running call would crash the process."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.native))
