"""The claims one client holds, and the heartbeat that keeps them alive.

Used by `LedgerClient`. The heartbeat thread lives only while claims are held; a claim is remembered until its rows are
released, written or cleared here, so that a late write without its meta can show which claim it belongs to.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence

from nemo_rl.data_plane.batch_meta import KVBatchMeta
from nemo_rl.data_plane.schema import stage_of_task, writes_that_end_claims
from nemo_rl.errors import DataPlaneClosed, DataPlaneError, SchemaMismatch

__all__ = ["LeaseRenewer"]

logger = logging.getLogger(__name__)


class LeaseRenewer:
    """Claims by partition, task and key."""

    def __init__(self, *, renew: Callable[[list[int]], list[int]], period_s: float) -> None:
        """Args:
        renew: renews claims at the ledger; returns those that have ended.
        period_s: seconds between heartbeats.
        """
        self._renew, self._period_s = renew, period_s
        self._held: dict[tuple[str, str], dict[str, int]] = {}
        self._ended: set[int] = set()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def add(self, partition_id: str, task_name: str, keys: Sequence[str], claim_id: int) -> None:
        """Hold a claim; start the heartbeat if it is the first."""
        with self._lock:
            self._held.setdefault((partition_id, task_name), {}).update(dict.fromkeys(keys, claim_id))
            if self._thread is None and not self._is_closed:
                self._wake.clear()
                self._thread = threading.Thread(target=self._beat, name="data-plane-heartbeat", daemon=True)
                self._thread.start()

    def held(self, partition_id: str, keys: Sequence[str]) -> dict[str, dict[str, int]]:
        """Return task -> key -> claim id, for the keys that this client holds."""
        with self._lock:
            found = {
                task: {key: claims[key] for key in keys if key in claims}
                for (partition, task), claims in self._held.items()
                if partition == partition_id
            }
        return {task: claims for task, claims in found.items() if claims}

    def claims_of(self, partition_id: str, keys: Sequence[str], meta: KVBatchMeta | None) -> dict[str, dict[str, int]]:
        """Return task -> key -> claim id: what the meta says, and for other tasks what this client holds."""
        claims = self.held(partition_id, keys)
        if meta is not None and meta.claims is not None and meta.task_name is not None:
            if meta.partition_id != partition_id:
                raise SchemaMismatch(f"the claimed meta is of partition {meta.partition_id!r}, not {partition_id!r}")
            its = meta.claims_by_key()
            claims[meta.task_name] = {key: its[key] for key in keys if key in its}
        return claims

    def forget(self, partition_id: str, keys: Collection[str] | None) -> None:
        """Drop rows (all when None) of all tasks: they are gone."""
        with self._lock:
            for (partition, _), claims in self._held.items():
                if partition == partition_id:
                    for key in list(claims) if keys is None else keys:
                        claims.pop(key, None)
            self._prune()

    def forget_claims(self, partition_id: str, task_name: str, claims: Mapping[str, int]) -> None:
        """Drop rows (key -> claim id) of one task, unless they were claimed anew."""
        with self._lock:
            held = self._held.get((partition_id, task_name), {})
            for key, claim_id in claims.items():
                if held.get(key) == claim_id:
                    del held[key]
            self._prune()

    def forget_written(self, partition_id: str, keys: Sequence[str], fields: Collection[str]) -> None:
        """Rows whose task wrote its fields are done: the ledger has ended their claims."""
        with self._lock:
            tasks = [task for partition, task in self._held if partition == partition_id]
        for task in tasks:
            writes = writes_that_end_claims(stage_of_task(task))
            if writes and set(writes) <= set(fields):
                self.forget_claims(partition_id, task, self.held(partition_id, keys).get(task, {}))

    def close(self) -> None:
        """Stop the heartbeat; the claims expire at the ledger."""
        with self._lock:
            self._is_closed = True
            self._held.clear()
            thread = self._thread
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _prune(self) -> None:
        self._held = {where: claims for where, claims in self._held.items() if claims}
        self._ended &= _ids(self._held)

    def _beat(self) -> None:
        while not self._wake.wait(self._period_s):
            with self._lock:
                alive = sorted(_ids(self._held) - self._ended)
                if not self._held:
                    self._thread = None
                    return
            if not alive:
                continue
            try:
                ended = self._renew(alive)
            except DataPlaneClosed:
                break
            except DataPlaneError as error:
                logger.warning("heartbeat for %d claims failed: %s", len(alive), error)
                continue
            with self._lock:
                self._ended.update(ended)
        with self._lock:
            self._thread = None


def _ids(held: Mapping[tuple[str, str], Mapping[str, int]]) -> set[int]:
    return {claim_id for claims in held.values() for claim_id in claims.values()}
