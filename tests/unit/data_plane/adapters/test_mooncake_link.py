"""Calls of Mooncake end by the deadline, and transfer memory is registered once, reused, and given up past a limit."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest
import torch

from nemo_rl.data_plane.adapters.mooncake_link import SMALLEST_BYTES, BufferPool, DeadlineCalls
from nemo_rl.errors import DataPlaneClosed, DataPlaneError, DataPlaneTimeout


class Registry:
    """What Mooncake would know."""

    def __init__(self) -> None:
        self.known: dict[int, int] = {}

    def register(self, address: int, size: int) -> int:
        self.known[address] = size
        return 0

    def unregister(self, address: int) -> int:
        del self.known[address]
        return 0

    def pool(self, keep_bytes: int = 64 << 20) -> BufferPool:
        return BufferPool(register=self.register, unregister=self.unregister, keep_bytes=keep_bytes)


def test_a_buffer_comes_back_when_the_last_view_of_it_is_gone() -> None:
    registry = Registry()
    pool = registry.pool()
    lease = pool.lease(100)
    address, part = lease.address, lease.view.data[10:20]
    assert lease.view.nbytes == 100 and registry.known == {address: SMALLEST_BYTES}
    for view in (part, np.frombuffer(part, dtype=np.uint8), torch.frombuffer(part, dtype=torch.uint8)):
        del lease, part
        part = view  # whatever kind of view is last, it keeps the memory
        lease = pool.lease(100)
        assert lease.address != address
    del lease, part, view
    gc.collect()
    assert pool.free_bytes() == 2 * SMALLEST_BYTES
    assert pool.lease(SMALLEST_BYTES).address in registry.known and len(registry.known) == 2


def test_the_smallest_buffer_that_fits_is_taken() -> None:
    registry = Registry()
    pool = registry.pool()
    large, small = pool.lease(5 * SMALLEST_BYTES), pool.lease(1)
    assert sorted(registry.known.values()) == [SMALLEST_BYTES, 8 * SMALLEST_BYTES]
    addresses = large.address, small.address
    del large, small
    assert (pool.lease(1).address, pool.lease(4 * SMALLEST_BYTES).address) == addresses[::-1]


def test_free_memory_beyond_the_limit_is_given_up() -> None:
    registry = Registry()
    pool = registry.pool(keep_bytes=3 * SMALLEST_BYTES)
    leases = [pool.lease(1), pool.lease(1), pool.lease(8 * SMALLEST_BYTES)]
    del leases
    assert pool.free_bytes() == 2 * SMALLEST_BYTES and len(registry.known) == 2


def test_memory_that_cannot_be_registered_is_an_error() -> None:
    pool = BufferPool(register=lambda address, size: -600, unregister=lambda address: 0, keep_bytes=0)
    with pytest.raises(DataPlaneError, match="refused to register 1048576 bytes of memory: code -600"):
        pool.lease(1)


def test_a_closed_pool_keeps_nothing() -> None:
    pool = Registry().pool()
    lease = pool.lease(1)
    pool.close()
    del lease
    assert pool.free_bytes() == 0


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lib")]


def test_results_and_errors_reach_the_caller_and_threads_are_reused() -> None:
    calls = DeadlineCalls("lib")
    assert [calls.run(lambda value=value: value * 2, timeout_s=5) for value in range(20)] == list(range(0, 40, 2))
    with pytest.raises(ZeroDivisionError):
        calls.run(lambda: 1 // 0, timeout_s=5)
    with pytest.raises(TimeoutError, match="its own"):
        calls.run(lambda: (_ for _ in ()).throw(TimeoutError("its own")), timeout_s=5)
    assert len(names()) == 1
    assert calls.close(grace_s=1)
    assert not names()


def test_past_the_deadline_the_caller_goes_on_and_close_waits_for_the_call() -> None:
    calls, release = DeadlineCalls("lib"), threading.Event()
    started = time.monotonic()
    with pytest.raises(DataPlaneTimeout, match="lib did not answer within 0.1 s"):
        calls.run(release.wait, timeout_s=0.1)
    assert time.monotonic() - started < 3
    assert calls.run(lambda: 7, timeout_s=5) == 7  # others are not behind it
    assert not calls.close(grace_s=0.1)
    with pytest.raises(DataPlaneClosed):
        calls.run(lambda: 8, timeout_s=5)
    threading.Timer(0.1, release.set).start()
    assert calls.close(grace_s=5)
    time.sleep(0.1)
    assert not names()
