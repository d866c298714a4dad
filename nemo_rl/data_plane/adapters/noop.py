"""`noop`: payloads in a dict of this process. The reference adapter, and the test double of all tests.

Used by the single-process launcher; it satisfies the same contract suite as every other store.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence

from nemo_rl.data_plane.address import DataPlaneAddress
from nemo_rl.data_plane.codec import join
from nemo_rl.data_plane.interfaces import Handles, Parts, PayloadStore, StoreHealth
from nemo_rl.errors import DataPlaneClosed, DataPlaneError, KeysNotFound, name_some

__all__ = ["NoopStore"]

_stores: dict[str, NoopStore] = {}
"""Stores of the runs whose owner is in this process."""


class NoopStore(PayloadStore):
    """Payloads by chunk id, shared by the clients of one process.

    Args:
        owned: store of the owner, whose payloads another client sees; None makes the owner's.
    """

    def __init__(self, owned: NoopStore | None = None) -> None:
        self._is_owner = owned is None
        self._chunks: dict[str, memoryview] = {} if owned is None else owned._chunks
        self._lock: threading.Lock = threading.Lock() if owned is None else owned._lock
        self._closed: threading.Event = threading.Event() if owned is None else owned._closed

    @classmethod
    def start(cls, *, run_id: str) -> NoopStore:
        """Return the owner's store."""
        store = _stores[run_id] = cls()
        return store

    @staticmethod
    def join(address: DataPlaneAddress) -> NoopStore:
        """Return the store for another client of this process.

        Raises:
            DataPlaneClosed: the owner is in another process, or has closed the store.
        """
        run_id = address.run_id
        store = _stores.get(run_id)
        if store is None:
            raise DataPlaneClosed(
                f"run {run_id!r}: its noop store lives in process {address.process_id} and this is {os.getpid()}, or "
                "its owner has closed it; for workers in other processes use data_plane.impl=shm, or ray under Ray"
            )
        return NoopStore(store)

    @staticmethod
    def forget(run_id: str) -> None:
        """The run has ended."""
        _stores.pop(run_id, None)

    def put(self, chunks: Mapping[str, Parts], *, timeout_s: float) -> None:
        copies = {chunk_id: join(parts) for chunk_id, parts in chunks.items()}
        with self._lock:
            self._check_open()
            known = [chunk_id for chunk_id in chunks if chunk_id in self._chunks]
            if known:
                raise DataPlaneError(f"chunk ids are used once, got again: {name_some(known)}")
            self._chunks.update(copies)

    def get(self, chunk_ids: Sequence[str], *, timeout_s: float, handles: Handles) -> list[Parts]:
        with self._lock:
            self._check_open()
            missing = [chunk_id for chunk_id in chunk_ids if chunk_id not in self._chunks]
            if missing:
                raise KeysNotFound(f"{len(missing)} of {len(chunk_ids)} chunks are gone: {name_some(missing)}")
            return [(self._chunks[chunk_id],) for chunk_id in chunk_ids]

    def drop(self, chunk_ids: Sequence[str], *, timeout_s: float) -> None:
        with self._lock:
            self._check_open()
            for chunk_id in chunk_ids:
                self._chunks.pop(chunk_id, None)

    def health(self) -> StoreHealth:
        with self._lock:
            return StoreHealth(is_alive=not self._closed.is_set(), detail=f"{len(self._chunks)} chunks in this process")

    def close(self) -> None:
        """Free all payloads; those of other clients leave the store open."""
        if self._is_owner:
            with self._lock:
                self._closed.set()
                self._chunks.clear()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise DataPlaneClosed("the noop store has been closed by its owner")
