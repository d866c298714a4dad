"""`ray`: payloads in Ray's object store, or in the shared memory of the node that made them.

Owners `producer` and `holder`: numpy arrays in Ray's object store. Readers on an object's node see it without a copy,
Ray moves it between nodes. On one node all chunks of a put are one object, because each `ray.put` costs a millisecond;
on several nodes each chunk is one, because whole objects move. No process can find an object by a chunk id: the
ledger's actor keeps the references (an actor of their own does where the ledger may die and come back), so an object
lives exactly as long as a row needs it. They are sent without waiting: a Ray call costs more than the ledger's socket
and the store together. With owner `producer` the process that puts owns the objects, and they are lost when it dies;
with `holder` an actor puts them once more and owns them.

Owner `node`: segments of `adapters.shm`. As fast as `producer` and outlives producers, because a segment belongs to its
node. On a cluster of several nodes each node has a storage actor, which owns the node's folder and sends chunks to
readers on other nodes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import ray
from ray import exceptions as ray_errors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_rl.config.data_plane import DataPlaneConfig, SharedMemoryConfig
from nemo_rl.data_plane.adapters.shm import SharedMemoryStore
from nemo_rl.data_plane.address import Handles
from nemo_rl.data_plane.interfaces import Parts, PayloadStore, StoreHealth
from nemo_rl.data_plane.keys import owner_of, place_of
from nemo_rl.data_plane.ledger.host_ray import NAMESPACE, ReferenceTable, ledger_actor_name
from nemo_rl.errors import (
    CapacityExceeded,
    DataPlaneClosed,
    DataPlaneTimeout,
    KeysNotFound,
    PayloadLost,
    name_some,
)
from nemo_rl.utils.deadlines import DEFAULT_START, StartUp

__all__ = ["RayNodeStore", "RayStore", "owners"]

PROBE_S = 1.0
"""Seconds that the holder may take to answer that it is alive."""


class _Holder:
    """Puts payloads again, so that they outlive their producer."""

    def put(self, objects: Sequence[Sequence[Sequence[np.ndarray]]]) -> list[Any]:
        return [ray.put(list(chunks)) for chunks in objects]

    def ping(self) -> bool:
        return True


class _ReferenceActor(ReferenceTable):
    """Keeps the references of a run whose ledger's process may die and come back."""

    def ping(self) -> bool:
        return True


class RayStore(PayloadStore):
    """Chunks in Ray's object store."""

    def __init__(
        self, config: DataPlaneConfig, *, run_id: str, holder: Any, own_actors: Mapping[str, Any] | None = None
    ) -> None:
        """Args:
        own_actors: given by the owner, whose close ends them.
        """
        check_connected(run_id)
        self._chunk_bytes = config.ray.chunk_bytes
        is_apart = config.ledger.recovery == "journal"
        name = _references_name(run_id) if is_apart else ledger_actor_name(run_id)
        self._references = _find_actor(name, run_id, "reference" if is_apart else "ledger")
        self._run_id, self._holder, self._own_actors = run_id, holder, list((own_actors or {}).values())
        self._place = node_place()
        self._is_on_one_node = _is_one_node()
        self._is_closed = False

    @classmethod
    def start(cls, config: DataPlaneConfig, *, run_id: str, start: StartUp = DEFAULT_START) -> RayStore:
        """Return the owner's store; with owner `holder` it starts the holder actor, and an actor for the references
        where the ledger's does not live as long as the run.

        Raises:
            DataPlaneTimeout: an actor did not answer in time.
            DataPlaneClosed: this process is not connected to Ray, or an actor died while it started.
        """
        check_connected(run_id)
        own: dict[str, Any] = {}
        if config.ledger.recovery == "journal":
            options: Callable[..., Any] = ray.remote(_ReferenceActor).options
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            references = options(
                name=_references_name(run_id),
                namespace=NAMESPACE,
                num_cpus=0,
                max_restarts=0,
                scheduling_strategy=here,
            )
            own["references"] = references.remote()
        if config.ray.owner == "holder":
            options = ray.remote(_Holder).options
            holder = options(
                name=_holder_name(run_id), namespace=NAMESPACE, num_cpus=0, max_restarts=0, max_concurrency=4
            )
            own["holder"] = holder.remote()
        store = cls(config, run_id=run_id, holder=own.get("holder"), own_actors=own)
        try:
            for name, actor in own.items():
                with start.waiting_for(f"the actor of the data plane's {name}"):
                    store._wait("start", actor.ping.remote(), timeout_s=start.timeout_s)
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def join(cls, config: DataPlaneConfig, *, run_id: str) -> RayStore:
        """Return another process's store of the run.

        Raises:
            DataPlaneClosed: this process is not connected to Ray, or the run's holder is gone.
        """
        if config.ray.owner != "holder":
            return cls(config, run_id=run_id, holder=None)
        check_connected(run_id)
        holder = _find_actor(_holder_name(run_id), run_id, "holder")
        return cls(config, run_id=run_id, holder=holder)

    @property
    def chunk_bytes(self) -> int | None:
        return self._chunk_bytes

    @property
    def is_mapped(self) -> bool:
        return self._is_on_one_node

    @property
    def place(self) -> str:
        return self._place

    def put(self, chunks: Mapping[str, Parts], *, timeout_s: float) -> Handles | None:
        self._check_open()
        payloads = [[np.frombuffer(part, dtype=np.uint8) for part in parts] for parts in chunks.values()]
        objects = [payloads] if self._is_on_one_node else [[payload] for payload in payloads]
        if self._holder is None:
            references = [self._put_one(payloads) for payloads in objects]
        else:
            references = self._wait("put", self._holder.put.remote(objects), timeout_s=timeout_s)
        places = [(reference, i) for reference, held in zip(references, objects, strict=True) for i in range(len(held))]
        self._references.hold.remote(dict(zip(chunks, places, strict=True)))
        return None

    def get(self, chunk_ids: Sequence[str], *, timeout_s: float, handles: Handles) -> list[Parts]:
        self._check_open()
        deadline = time.monotonic() + timeout_s
        lent = self._wait("lend references", self._references.lend.remote(list(chunk_ids)), timeout_s=timeout_s)
        missing = [chunk_id for chunk_id in chunk_ids if chunk_id not in lent]
        if missing:
            raise KeysNotFound(
                f"{len(missing)} of {len(chunk_ids)} chunks of {owners(missing)} lack a reference: {name_some(missing)}"
            )
        places: list[tuple[Any, int]] = [lent[chunk_id] for chunk_id in chunk_ids]
        references = list(dict.fromkeys(reference for reference, _ in places))
        try:
            brought = ray.get(references, timeout=max(deadline - time.monotonic(), 0.0))
        except ray_errors.GetTimeoutError as error:
            raise DataPlaneTimeout(
                f"Ray did not bring {len(chunk_ids)} chunks of {owners(chunk_ids)} within {timeout_s:.1f} s"
            ) from error
        except ray_errors.ObjectLostError as error:
            # Ray names one object; all that its maker has put are lost with it.
            found = [chunk for chunk, (reference, _) in lent.items() if reference.hex() == error.object_ref_hex]
            makers = {owner_of(chunk) for chunk in found or chunk_ids}
            lost = [chunk for chunk in chunk_ids if owner_of(chunk) in makers]
            raise PayloadLost(
                f"{len(lost)} of {len(chunk_ids)} chunks cannot be read: their owner {owners(lost)} is gone "
                f"({type(error).__name__}); data_plane.ray.owner=node or holder outlives producers"
            ) from error
        objects = dict(zip(references, brought, strict=True))
        return [[part.data for part in objects[reference][index]] for reference, index in places]

    def drop(self, chunk_ids: Sequence[str], *, timeout_s: float) -> None:
        self._check_open()
        self._references.let_go.remote(list(chunk_ids))

    def health(self) -> StoreHealth:
        if self._is_closed or not ray.is_initialized():
            return StoreHealth(is_alive=False, detail="this client is closed, or Ray is")
        if self._holder is None:
            return StoreHealth(is_alive=True, detail="each producer owns its objects")
        try:
            self._wait("answer", self._holder.ping.remote(), timeout_s=PROBE_S)
        except (DataPlaneClosed, DataPlaneTimeout) as error:
            return StoreHealth(is_alive=False, detail=str(error))
        return StoreHealth(is_alive=True, detail="the holder lives")

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        own_actors, self._own_actors = self._own_actors, []
        for actor in own_actors if ray.is_initialized() else ():
            ray.kill(actor, no_restart=True)

    def _put_one(self, payloads: Sequence[Sequence[np.ndarray]]) -> Any:
        try:
            return ray.put(list(payloads))
        except ray_errors.ObjectStoreFullError as error:
            num_bytes = sum(part.nbytes for payload in payloads for part in payload)
            raise CapacityExceeded(
                f"Ray's object store has no space for {num_bytes} bytes; clear rows, set "
                "data_plane.storage_capacity.bytes below it, or start Ray with a larger --object-store-memory"
            ) from error

    def _check_open(self) -> None:
        if self._is_closed:
            raise DataPlaneClosed(f"this client of run {self._run_id!r} is closed")
        check_connected(self._run_id)

    def _wait(self, what: str, reference: Any, *, timeout_s: float) -> Any:
        try:
            return ray.get(reference, timeout=timeout_s)
        except ray_errors.GetTimeoutError as error:
            raise DataPlaneTimeout(f"an actor of the store did not {what} within {timeout_s:.1f} s") from error
        except (ray_errors.RayActorError, ray_errors.RaySystemError) as error:
            raise DataPlaneClosed(f"run {self._run_id!r}: an actor of the store is gone: {error}") from error


def _find_actor(name: str, run_id: str, what: str) -> Any:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError as error:
        raise DataPlaneClosed(f"run {run_id!r} has no {what} actor; its owner has closed it") from error


def node_place() -> str:
    """Return this process's node: its address, and enough of its id to distinguish nodes on one machine."""
    context = ray.get_runtime_context()
    return f"{ray.util.get_node_ip_address()}~{context.get_node_id()[:8]}"


def _is_one_node() -> bool:
    return sum(bool(node["Alive"]) for node in ray.nodes()) == 1


def owners(chunk_ids: Sequence[str]) -> str:
    return name_some(dict.fromkeys(owner_of(chunk_id) for chunk_id in chunk_ids))


def check_connected(run_id: str) -> None:
    """Raise DataPlaneClosed unless this process is connected to Ray."""
    if not ray.is_initialized():
        raise DataPlaneClosed(f"run {run_id!r}: this process is not connected to Ray; call ray.init first")


def _references_name(run_id: str) -> str:
    return f"references-{run_id}"


def _holder_name(run_id: str) -> str:
    return f"holder-{run_id}"


logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0


class _NodeStorage:
    """Owns one node's folder (or joins the one that the run's owner has) and serves readers on other nodes."""

    def __init__(self, config: SharedMemoryConfig, run_id: str, *, owns_folder: bool) -> None:
        name = _on_node(run_id)
        self._store = (
            SharedMemoryStore.start(config, run_id=name, start=DEFAULT_START)
            if owns_folder
            else SharedMemoryStore.join(config, run_id=name)
        )

    def place(self) -> str:
        return node_place()

    def read(self, chunk_ids: Sequence[str]) -> list[np.ndarray] | None:
        """Return copies of the chunks, or None when one of them is gone."""
        try:
            payloads = self._store.get(chunk_ids, timeout_s=0.0, handles={})
            copies = [np.frombuffer(parts[0], dtype=np.uint8).copy() for parts in payloads]
            self._store.confirm(chunk_ids)
        except KeysNotFound:
            return None
        return copies

    def free(self, chunk_ids: Sequence[str]) -> None:
        self._store.drop(chunk_ids, timeout_s=0.0)

    def close(self) -> None:
        self._store.close()


class RayNodeStore(PayloadStore):
    """Chunks in shared memory, on the node of the process that put them."""

    def __init__(
        self, config: DataPlaneConfig, *, run_id: str, store: SharedMemoryStore, storage_actors: Sequence[Any] = ()
    ) -> None:
        """Args:
        storage_actors: given by the owner, whose close ends them.
        """
        self._chunk_bytes, self._run_id = config.ray.chunk_bytes, run_id
        self._store, self._storage_actors = store, list(storage_actors)
        self._place, self._is_on_one_node = node_place(), _is_one_node()

    @classmethod
    def start(cls, config: DataPlaneConfig, *, run_id: str, start: StartUp = DEFAULT_START) -> RayNodeStore:
        """Return the owner's store: a folder on this node, and a storage actor on every node of a larger cluster.

        Raises:
            DataPlaneTimeout: a storage actor did not start in time. DataPlaneClosed: this process is not connected to
                Ray.
        """
        check_connected(run_id)
        store = SharedMemoryStore.start(config.shm, run_id=_on_node(run_id), start=start)
        own = cls(config, run_id=run_id, store=store)
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        try:
            if len(nodes) > 1:
                own._storage_actors = [_start_storage(config.shm, run_id, node) for node in nodes]
                with start.waiting_for(f"a storage actor on each of {len(nodes)} nodes"):
                    own._call(
                        "start", [actor.place.remote() for actor in own._storage_actors], timeout_s=start.timeout_s
                    )
        except BaseException:
            own.close()
            raise
        return own

    @classmethod
    def join(cls, config: DataPlaneConfig, *, run_id: str) -> RayNodeStore:
        """Return another process's store of the run.

        Raises:
            DataPlaneClosed: not connected to Ray, or the run has no segments on this node.
        """
        check_connected(run_id)
        return cls(config, run_id=run_id, store=SharedMemoryStore.join(config.shm, run_id=_on_node(run_id)))

    @property
    def chunk_bytes(self) -> int | None:
        return self._chunk_bytes

    @property
    def is_mapped(self) -> bool:
        return self._is_on_one_node

    @property
    def place(self) -> str:
        return self._place

    def put(self, chunks: Mapping[str, Parts], *, timeout_s: float) -> Handles | None:
        return self._store.put(chunks, timeout_s=timeout_s)

    def get(self, chunk_ids: Sequence[str], *, timeout_s: float, handles: Handles) -> list[Parts]:
        found: dict[str, Parts] = {}
        deadline = time.monotonic() + timeout_s
        for place, ids in self._by_place(chunk_ids).items():
            if place == self._place:
                payloads = self._store.get(ids, timeout_s=timeout_s, handles={})
            else:
                payloads = self._read_from(place, ids, max(deadline - time.monotonic(), 0.0))
            found.update(zip(ids, payloads, strict=True))
        return [found[chunk_id] for chunk_id in chunk_ids]

    def confirm(self, chunk_ids: Sequence[str]) -> None:
        self._store.confirm(self._by_place(chunk_ids).get(self._place, []))

    def drop(self, chunk_ids: Sequence[str], *, timeout_s: float) -> None:
        by_place = self._by_place(chunk_ids)
        own = by_place.pop(self._place, [])
        # All nodes are asked before any is waited for: a dead one keeps nobody from freeing.
        freeing: list[Any] = []
        with ExitStack() as asked:
            for place, ids in by_place.items():
                asked.callback(self._free_on, place, ids, freeing)
            asked.callback(self._store.drop, own, timeout_s=timeout_s)
        self._call("free chunks", freeing, timeout_s=timeout_s)

    def abandoned(self, after_s: float) -> list[str]:
        return self._store.abandoned(after_s)  # of this node; on others they stay until the run ends

    def health(self) -> StoreHealth:
        return self._store.health()

    def close(self) -> None:
        storage_actors, self._storage_actors = self._storage_actors, []
        if storage_actors and ray.is_initialized():
            for actor, closing in [(actor, actor.close.remote()) for actor in storage_actors]:
                try:
                    self._call("close", closing, timeout_s=CLOSE_TIMEOUT_S)
                except (DataPlaneClosed, DataPlaneTimeout) as error:
                    logger.warning("a node's storage actor ended before the run: %s", error)
                ray.kill(actor, no_restart=True)
        self._store.close()

    def _free_on(self, place: str, ids: Sequence[str], freeing: list[Any]) -> None:
        freeing.append(_storage(self._run_id, place).free.remote(ids))

    def _read_from(self, place: str, ids: Sequence[str], timeout_s: float) -> list[Parts]:
        try:
            copies = self._call("read", _storage(self._run_id, place).read.remote(ids), timeout_s=timeout_s)
        except DataPlaneClosed as error:
            raise PayloadLost(f"{len(ids)} chunks of {owners(ids)} cannot be read: {error}") from error
        if copies is None:
            raise KeysNotFound(f"chunks on node {place} are gone, of {name_some(ids)}")
        return [[copy.data] for copy in copies]

    def _call(self, what: str, reference: Any, *, timeout_s: float) -> Any:
        try:
            return ray.get(reference, timeout=timeout_s)
        except ray_errors.GetTimeoutError as error:
            raise DataPlaneTimeout(f"a node's storage actor did not {what} within {timeout_s:.1f} s") from error
        except (ray_errors.RayActorError, ray_errors.RaySystemError) as error:
            raise DataPlaneClosed(f"run {self._run_id!r}: a node's storage actor is gone: {error}") from error

    @staticmethod
    def _by_place(chunk_ids: Sequence[str]) -> dict[str, list[str]]:
        grouped: dict[str, list[str]] = {}
        for chunk_id in chunk_ids:
            grouped.setdefault(place_of(owner_of(chunk_id)), []).append(chunk_id)
        return grouped


def _start_storage(config: SharedMemoryConfig, run_id: str, node_id: str) -> Any:
    is_own = node_id == ray.get_runtime_context().get_node_id()
    options: Callable[..., Any] = ray.remote(_NodeStorage).options
    actor_class = options(
        name=_storage_name(run_id, node_id[:8]),
        namespace=NAMESPACE,
        num_cpus=0,
        max_restarts=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    )
    return actor_class.remote(config, run_id, owns_folder=not is_own)


def _storage(run_id: str, place: str) -> Any:
    try:
        return ray.get_actor(_storage_name(run_id, place.rpartition("~")[2]), namespace=NAMESPACE)
    except ValueError as error:
        raise DataPlaneClosed(f"run {run_id!r}: node {place} has no storage actor, or it has ended") from error


def _storage_name(run_id: str, node: str) -> str:
    return f"storage-{run_id}-{node}"


def _on_node(run_id: str) -> str:
    """Name the folder: nodes that share a machine, as in tests, have their own folders."""
    return f"{run_id}-{ray.get_runtime_context().get_node_id()[:8]}"
