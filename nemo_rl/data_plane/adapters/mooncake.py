"""`mooncake`: payloads in Mooncake's store, called directly, through this process's `mooncake_link`.

A chunk is one object. Bytes go through registered, warm buffers in one batch call each way. What this file adds to
Mooncake: byte counts are checked, a full store is waited for, and codes become the data plane's errors. Who holds the
bytes is `data_plane.mooncake.segment_owner`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np

from nemo_rl.config.base import START_TIMEOUT_S
from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.adapters.mooncake_link import (
    CLOSE_GRACE_S,
    CONNECTION_BROKEN,
    NO_SPACE,
    NOT_FOUND,
    OK,
    TRANSFER_FAILED,
    BufferLease,
    MooncakeLink,
    call_error,
    read_error,
)
from nemo_rl.data_plane.adapters.mooncake_master import (
    MooncakeServers,
    StoreAddress,
    is_listening,
    start_servers,
)
from nemo_rl.data_plane.chunks.ragged import copy_end_to_end
from nemo_rl.data_plane.interfaces import Handles, Parts, PayloadStore, StoreHealth
from nemo_rl.errors import DataPlaneClosed, DataPlaneError, name_some
from nemo_rl.utils.deadlines import DEFAULT_START, StartUp

__all__ = ["MooncakeStore"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

FULL_POLL_S = 0.05
"""Seconds between tries of a put into a full segment."""
LEAST_CALL_S = 0.2
"""A try that has less time would end as one that Mooncake did not answer, and hide that there was no space."""
DYING_S, DYING_POLL_S = 2.0, 0.02
"""Seconds that a process that was killed may still seem to listen, and seconds between two looks."""


class MooncakeStore(PayloadStore):
    """Chunks in Mooncake's store."""

    def __init__(
        self,
        config: DataPlaneConfig,
        *,
        run_id: str,
        address: StoreAddress,
        start_timeout_s: float,
        servers: MooncakeServers | None = None,
    ) -> None:
        """Connect this process; use `start` or `join`."""
        self._config, self._run_id, self._address, self._servers = config.mooncake, run_id, address, servers
        self._lock = threading.Lock()
        self._is_closed = False
        self._link = MooncakeLink.take(config, run_id=run_id, address=address, timeout_s=start_timeout_s)

    @classmethod
    def start(cls, config: DataPlaneConfig, *, run_id: str, start: StartUp = DEFAULT_START) -> MooncakeStore:
        """Start the run's master and holder; this process owns them.

        Raises:
            ResourceError: Mooncake is not installed, or a process cannot be started.
        """
        servers = start_servers(config.mooncake, has_holder=config.mooncake.segment_owner == "holder", start=start)
        try:
            with start.waiting_for("this process's connection to Mooncake"):
                return cls(
                    config, run_id=run_id, address=servers.address, start_timeout_s=start.timeout_s, servers=servers
                )
        except BaseException:
            servers.stop()
            raise

    @classmethod
    def join(
        cls, config: DataPlaneConfig, *, run_id: str, address: str, timeout_s: float = START_TIMEOUT_S
    ) -> MooncakeStore:
        """Connect to what the owner of the run has started.

        Raises:
            DataPlaneClosed: nothing answers at the address.
        """
        return cls(config, run_id=run_id, address=StoreAddress.parse(address), start_timeout_s=timeout_s)

    @property
    def address(self) -> str:
        """The address that `join` takes."""
        return str(self._address)

    @property
    def chunk_bytes(self) -> int:
        return self._config.chunk_bytes

    @property
    def reuses_memory(self) -> bool:
        return True

    @property
    def place(self) -> str:
        return self._link.host

    @property
    def process_ids(self) -> Mapping[str, int]:
        """Name -> process id of the servers that this process owns."""
        return {} if self._servers is None else self._servers.process_ids

    def put(self, chunks: Mapping[str, Parts], *, timeout_s: float) -> Handles:
        deadline = time.monotonic() + timeout_s
        sizes = {chunk_id: sum(part.nbytes for part in parts) for chunk_id, parts in chunks.items()}
        wanted = [chunk_id for chunk_id, size in sizes.items() if size]  # Mooncake has no empty objects
        if not wanted:
            return {chunk_id: [0, ""] for chunk_id in sizes}
        if self._config.segment_owner == "producer":
            self._check_open()
            self._link.mount_own_segment(deadline)
        call = self._stage(chunks, sizes)
        left = wanted
        while left:
            codes = self._put_once(call, left, deadline)
            full = [chunk_id for chunk_id, code in zip(left, codes, strict=True) if code == NO_SPACE]
            if set(codes) - {OK, NO_SPACE} or (full and not self._may_wait(call, full, deadline)):
                dead = self._dead_servers(codes)
                if not dead:
                    self._drop_quietly(wanted, deadline)
                raise call_error("put", codes, dead=dead, segment_bytes=self._config.segment_bytes)
            left = full
        return {chunk_id: [size, self._link.endpoint] for chunk_id, size in sizes.items()}

    def get(self, chunk_ids: Sequence[str], *, timeout_s: float, handles: Handles) -> list[Parts]:
        deadline = time.monotonic() + timeout_s
        sizes = [_size(chunk_id, handles) for chunk_id in chunk_ids]
        starts = [0, *np.cumsum(sizes).tolist()] if sizes else [0]
        wanted = [index for index, size in enumerate(sizes) if size]
        if not wanted:
            return [(memoryview(b""),) for _ in sizes]
        lease = self._link.buffers.lease(starts[-1])
        names = [self._name(chunk_ids[index]) for index in wanted]
        pointers, expected = [lease.address + starts[index] for index in wanted], [sizes[index] for index in wanted]

        def read() -> list[int]:
            codes: list[int] = self._link.native.batch_get_into(names, pointers, expected)
            assert lease.view.size  # the buffer lives as long as Mooncake may write into it
            return codes

        codes = self._run("get", read, deadline)
        if codes != expected:
            asked = [chunk_ids[index] for index in wanted]
            bad = [chunk_id for chunk_id, code, size in zip(asked, codes, expected, strict=True) if code != size]
            raise read_error(asked, codes, expected, dead=self._dead_holders(bad, codes, handles))
        content = lease.view.data.toreadonly()
        return [(content[start:stop],) for start, stop in pairwise(starts)]

    def drop(self, chunk_ids: Sequence[str], *, timeout_s: float) -> None:
        names = [self._name(chunk_id) for chunk_id in chunk_ids]
        if not names:
            return
        codes = self._run(
            "drop", lambda: self._link.native.batch_remove(names, force=True), time.monotonic() + timeout_s
        )
        if set(codes) - {OK, NOT_FOUND}:
            raise call_error("drop", codes, dead=self._dead_servers(codes), segment_bytes=self._config.segment_bytes)

    def health(self) -> StoreHealth:
        if self._is_closed or self._link.ended:
            return StoreHealth(is_alive=False, detail=self._link.ended or "this client is closed")
        try:
            dead = self._dead_servers()
        except DataPlaneClosed as error:
            return StoreHealth(is_alive=False, detail=str(error))
        return StoreHealth(
            is_alive=not dead, detail=f"lost {name_some(dead)}" if dead else f"master {self._address.master}"
        )

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._link.give_back(self._servers)

    def _check_open(self) -> None:
        if self._is_closed:
            raise DataPlaneClosed("Mooncake cannot be used: this client is closed")

    def _run(self, what: str, action: Callable[[], _T], deadline: float) -> _T:
        self._check_open()
        return self._link.run(what, action, deadline)

    def _stage(self, chunks: Mapping[str, Parts], sizes: Mapping[str, int]) -> _OpenPut:
        """Copy the parts into registered memory: the caller's may be freed while a late call still reads."""
        lease = self._link.buffers.lease(sum(sizes.values()))
        starts = accumulate(sizes.values(), initial=lease.address)
        pointers = dict(zip(sizes, starts, strict=False))
        copy_end_to_end(
            [np.frombuffer(part, dtype=np.uint8) for parts in chunks.values() for part in parts if part.nbytes],
            lease.view,
        )
        return _OpenPut(lease=lease, pointers=pointers, sizes=sizes)

    def _put_once(self, call: _OpenPut, chunk_ids: list[str], deadline: float) -> list[int]:
        names = [self._name(chunk_id) for chunk_id in chunk_ids]
        pointers, sizes = [call.pointers[i] for i in chunk_ids], [call.sizes[i] for i in chunk_ids]

        def write() -> list[int]:
            codes: list[int] = self._link.native.batch_put_from(names, pointers, sizes, self._link.placement)
            assert call.lease.view.size  # the buffer lives as long as Mooncake may read it
            return codes

        return self._run("put", write, deadline)

    def _may_wait(self, call: _OpenPut, full: Sequence[str], deadline: float) -> bool:
        """Return whether space may still come; sleeps a moment if so."""
        fits = max(call.sizes[chunk_id] for chunk_id in full) < self._config.segment_bytes
        if not fits or time.monotonic() + FULL_POLL_S + LEAST_CALL_S >= deadline or self._dead_servers():
            return False
        time.sleep(FULL_POLL_S)
        # On a busy machine the sleep may outlast the deadline.
        return time.monotonic() + LEAST_CALL_S < deadline

    def _drop_quietly(self, chunk_ids: Sequence[str], deadline: float) -> None:
        try:
            self.drop(chunk_ids, timeout_s=max(deadline - time.monotonic(), CLOSE_GRACE_S))
        except DataPlaneError as error:
            logger.warning("could not drop %d chunks of a failed put: %s", len(chunk_ids), error)

    def _dead_servers(self, codes: Sequence[int] = ()) -> list[str]:
        """Return the run's servers that do not listen any more.

        Args:
            codes: of the call that failed. A connection breaks, and a transfer fails, a moment before the socket of a
                killed process goes, so with such a code among them the look is repeated for a while.

        Raises:
            DataPlaneClosed: the master is among them, which ends this client.
        """
        master, holder = self._address.master, self._address.holder
        give_up = time.monotonic() + (DYING_S if {CONNECTION_BROKEN, TRANSFER_FAILED}.intersection(codes) else 0.0)
        while True:
            if not is_listening(master):
                self._link.ended = f"Mooncake has lost its master at {master}"
                raise DataPlaneClosed(f"{self._link.ended}; its rows are gone")
            if holder and not is_listening(holder):
                return [f"its holder at {holder}"]
            if time.monotonic() >= give_up:
                return []
            time.sleep(DYING_POLL_S)

    def _dead_holders(self, chunk_ids: Sequence[str], codes: Sequence[int], handles: Handles) -> list[str]:
        """Return the holders of the chunks that listen no more; `codes` are those of `_dead_servers`."""
        endpoints = {str(handles[chunk_id][1]) for chunk_id in chunk_ids} - {""}  # type: ignore[index]
        producers = [f"a producer at {where}" for where in sorted(endpoints) if not is_listening(where)]
        return self._dead_servers(() if producers else codes) + producers

    def _name(self, chunk_id: str) -> str:
        # A named master serves several runs.
        return f"nemo_rl/{self._run_id}/{chunk_id}"


@dataclass(frozen=True, slots=True)
class _OpenPut:
    """A put under way: its bytes are in `lease`, each chunk at its address."""

    lease: BufferLease
    pointers: Mapping[str, int]
    sizes: Mapping[str, int]


def _size(chunk_id: str, handles: Handles) -> int:
    handle = handles.get(chunk_id)
    if not isinstance(handle, list) or len(handle) != 2:
        raise DataPlaneError(f"chunk {chunk_id!r}: expected the handle that its put returned, got {handle!r}")
    return int(handle[0])
