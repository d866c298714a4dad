"""Registered, warm memory for Mooncake transfers: leased per call, returned when the last view of it is gone.

Used by `mooncake.MooncakeStore`. A fresh buffer costs a page fault per page and a registration; a returned one costs
neither. The invariant: a buffer is leased to one call at a time, and as long as anybody can still see its bytes.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nemo_rl.errors import DataPlaneError

__all__ = ["BufferPool", "Lease"]

SMALLEST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Lease:
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

    def lease(self, num_bytes: int) -> Lease:
        """At least `num_bytes` of registered memory with unspecified content.

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
        return Lease(view=view, address=buffer.address)

    def free_bytes(self) -> int:
        """Bytes of buffers that nobody uses now."""
        with self._lock:
            self._collect()
            return sum(buffer.size for buffer in self._free)

    def close(self) -> None:
        """Forgets all buffers; Mooncake's client is about to end, which ends its registrations."""
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
