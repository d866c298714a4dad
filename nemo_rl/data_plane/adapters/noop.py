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

__all__ = ["NoopStore", "SharedNoopStore"]

_stores: dict[str, NoopStore] = {}
"""Stores of the runs whose owner is in this process."""


class NoopStore(PayloadStore):
    """Payloads by chunk id, shared by the clients of one process."""

    def __init__(self) -> None:
        self._chunks: dict[str, memoryview] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    @classmethod
    def start(cls, *, run_id: str) -> NoopStore:
        store = _stores[run_id] = cls()
        return store

    @staticmethod
    def join(address: DataPlaneAddress) -> SharedNoopStore:
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
        return SharedNoopStore(store)

    @staticmethod
    def forget(run_id: str) -> None:
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
            return StoreHealth(is_alive=not self._is_closed, detail=f"{len(self._chunks)} chunks in this process")

    def close(self) -> None:
        """Free all payloads; called by the owner's client only."""
        with self._lock:
            self._is_closed = True
            self._chunks.clear()

    def _check_open(self) -> None:
        if self._is_closed:
            raise DataPlaneClosed("the noop store has been closed by its owner")


class SharedNoopStore(PayloadStore):
    """Another client's view of the owner's store; its close leaves the store open."""

    def __init__(self, store: NoopStore) -> None:
        self._store = store

    def put(self, chunks: Mapping[str, Parts], *, timeout_s: float) -> None:
        self._store.put(chunks, timeout_s=timeout_s)

    def get(self, chunk_ids: Sequence[str], *, timeout_s: float, handles: Handles) -> list[Parts]:
        return self._store.get(chunk_ids, timeout_s=timeout_s, handles=handles)

    def drop(self, chunk_ids: Sequence[str], *, timeout_s: float) -> None:
        self._store.drop(chunk_ids, timeout_s=timeout_s)

    def health(self) -> StoreHealth:
        return self._store.health()

    def close(self) -> None:
        """Do nothing: the store has nothing to end."""
