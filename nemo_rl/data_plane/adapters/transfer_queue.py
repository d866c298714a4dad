"""`transfer_queue`: payloads in TransferQueue, backends `simple` and `mooncake_cpu`. The door to `transfer_queue`.

A chunk is one TransferQueue key with one uint8 field. TransferQueue is used for transport only: its cursors, tags and
key lists are never asked. What this file adds: every call ends by a deadline, a short read is an error, a controller
of another run is refused, and only the owner's close ends the service.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import ray
import transfer_queue as tq
from tensordict import NonTensorData, NonTensorStack, TensorDict

from nemo_rl.config.data_plane import CONTROLLER_CPUS, DataPlaneConfig
from nemo_rl.data_plane.adapters.mooncake_codes import NO_SPACE, NOT_FOUND, TRANSFER_FAILED
from nemo_rl.data_plane.adapters.mooncake_master import (
    MooncakeServers,
    StoreAddress,
    is_listening,
    own_address,
    start_servers,
)
from nemo_rl.data_plane.adapters.transfer_queue_service import (
    CONTROLLER,
    CONTROLLER_NAMESPACE,
    CPU_WAIT_S,
    actor_processes,
    await_controller,
    bounded,
    dead_actors,
    end_actors,
    forget_module_state,
    refuse_other_controller,
    service_config,
    start_actors,
    stopped_actors,
    wait_for_cpus,
)
from nemo_rl.data_plane.interfaces import Handles, Parts, PayloadStore, StoreHealth
from nemo_rl.distributed.liveness import ProcessIdentity
from nemo_rl.errors import (
    CapacityExceeded,
    DataPlaneClosed,
    DataPlaneError,
    DataPlaneTimeout,
    KeysNotFound,
    PayloadLost,
    ResourceError,
    name_some,
)
from nemo_rl.utils.deadlines import DEFAULT_START, StartUp

__all__ = ["CONTROLLER", "CONTROLLER_NAMESPACE", "CPU_WAIT_S", "TransferQueueStore"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_Value = bytes | list[bytes | np.ndarray]
"""A chunk as one value of TransferQueue."""

FIELD = "payload"
INLINE_BYTES = 64 << 10
"""Smaller parts are sent inside TransferQueue's message: a frame of its own costs 20 us on each side."""
UNIT_LACKS_KEY = "TQKeyNotFound"
"""The error text of a storage unit for a row that was cleared; the error arrives as text."""
CLOSE_TIMEOUT_S = 30.0
END_ACTORS_S = 10.0
PROBE_S = 1.0
"""A call that takes longer asks Ray whether the actors are alive, so that a death is seen before the deadline."""
LONGEST_TRIES_S = 4.0
"""TransferQueue tries a put into a full Mooncake segment for 2 s before it says so."""
CLEAR_S = 5.0
"""Seconds for clearing what a failed put has left, past its deadline."""
CLEAR_BATCH = 4096
"""Keys per clear: the controller answers all clients from one thread."""


@dataclass(slots=True)
class _QueueSession:
    """This process's one connection; TransferQueue keeps it in module globals."""

    run_id: str
    client: Any
    namespace: str
    """Ray namespace of the storage units."""
    num_units: int
    is_owner: bool
    mooncake: StoreAddress | None = None
    """The run's Mooncake servers, for backend `mooncake_cpu`."""
    servers: MooncakeServers | None = None
    """The same for their owner."""
    users: int = 0
    processes: Mapping[str, ProcessIdentity] = field(default_factory=dict)
    """Processes of controller and units, by actor name."""
    ended: str = ""
    """The reason for which the session cannot be used any more; empty while it can."""


@dataclass(slots=True)
class _QueueProcess:
    """This process's client of TransferQueue and the session that it is in."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    session: _QueueSession | None = None

    def usable(self) -> _QueueSession | None:
        return None if self.session is None or self.session.ended else self.session


_process = _QueueProcess()
_left_behind: list[Any] = []
"""Clients whose loop did not end; they must never be collected."""


class TransferQueueStore(PayloadStore):
    """Chunks in TransferQueue."""

    def __init__(self, session: _QueueSession, *, is_owner: bool, config: DataPlaneConfig | None = None) -> None:
        self._session, self._is_owner = session, is_owner
        self._simple = config.simple if config is not None and config.backend == "simple" else None
        self._partition = f"nemo_rl-{session.run_id}"
        self._is_closed = False

    @classmethod
    def start(cls, config: DataPlaneConfig, *, run_id: str, start: StartUp = DEFAULT_START) -> TransferQueueStore:
        """Start controller and storage units; this process owns them.

        Raises:
            ResourceError: too few free CPUs for the actors, or another run owns this Ray cluster's controller.
            DataPlaneTimeout: the actors did not start in time; what was half made is ended.
        """
        with _process.lock:
            known = _process.usable()
            if known is not None:
                raise ResourceError(f"this process uses TransferQueue of run {known.run_id!r} already; close it first")
            refuse_other_controller(run_id)
            units, namespace = config.num_storage_units, ray.get_runtime_context().namespace
            wait_for_cpus(CONTROLLER_CPUS + units, start)
            servers = _start_mooncake(config, start)
            address = "" if servers is None else str(servers.address)
            settings = service_config(config, run_id=run_id, namespace=namespace, mooncake=address)
            try:
                # Controller and storage units start in 7 to 9 s on a quiet machine.
                with start.waiting_for("TransferQueue"):
                    bounded(
                        start.too_late("TransferQueue did not start"),
                        lambda: start_actors(settings),
                        timeout_s=start.timeout_s,
                        give_up=lambda: end_actors(namespace, units),
                    )
                    processes = actor_processes(namespace, units, timeout_s=start.timeout_s)
            except BaseException:
                end_actors(namespace, units)
                if servers is not None:
                    servers.stop()
                raise
            _process.session = _QueueSession(
                run_id=run_id,
                client=tq.get_client(),
                namespace=namespace,
                num_units=units,
                processes=processes,
                is_owner=True,
                mooncake=None if servers is None else servers.address,
                servers=servers,
                users=1,
            )
            return cls(_process.session, is_owner=True, config=config)

    @classmethod
    def join(cls, *, run_id: str, timeout_s: float, config: DataPlaneConfig | None = None) -> TransferQueueStore:
        """Attach to the controller that the owner of the run started.

        Raises:
            DataPlaneClosed: another run's controller, or this process is not connected to Ray.
            DataPlaneTimeout: no controller, or one that was never finished, within `timeout_s`.
        """
        with _process.lock:
            known = _process.usable()
            if known is not None:
                if known.run_id != run_id:
                    raise DataPlaneClosed(f"this process is attached to run {known.run_id!r}, not to {run_id!r}")
                known.users += 1
                return cls(known, is_owner=False, config=config)
            ours = await_controller(run_id, timeout_s)
            mooncake = StoreAddress.parse(ours["mooncake"]) if ours["mooncake"] else None
            if mooncake is not None:
                _bind_to_own_address(mooncake.master)
            bounded(f"TransferQueue did not attach within {timeout_s:.1f} s", tq.init, timeout_s=timeout_s)
            _process.session = _QueueSession(
                run_id=run_id,
                client=tq.get_client(),
                namespace=ours["namespace"],
                num_units=ours["units"],
                processes=actor_processes(ours["namespace"], ours["units"], timeout_s=timeout_s),
                is_owner=False,
                mooncake=mooncake,
                users=1,
            )
            return cls(_process.session, is_owner=False, config=config)

    @property
    def reuses_memory(self) -> bool:
        return True  # numbers rows over all partitions, and gives the number of a cleared one to the next

    @property
    def chunk_bytes(self) -> int | None:
        return self._simple.chunk_bytes if self._simple is not None else None

    @property
    def block_bytes(self) -> int | None:
        return self._simple.block_bytes if self._simple is not None else None

    def put(self, chunks: Mapping[str, Parts], *, timeout_s: float) -> None:
        keys, deadline = list(chunks), time.monotonic() + timeout_s
        if not keys:
            return
        values = [_as_value(parts) for parts in chunks.values()]
        while True:
            try:
                self._send(keys, values, deadline)
                self._check_accepted(keys, deadline)
                return
            except (DataPlaneClosed, DataPlaneTimeout):
                raise  # the connection has ended: nothing can be cleared
            except CapacityExceeded as error:
                self._clear_quietly(keys, deadline)
                if time.monotonic() + LONGEST_TRIES_S > deadline:
                    raise CapacityExceeded(
                        f"Mooncake has no space for {_num_bytes(chunks)} bytes; raise "
                        f"data_plane.mooncake.segment_bytes, or clear rows sooner: {error}"
                    ) from error
            except DataPlaneError:
                self._clear_quietly(keys, deadline)
                raise

    def get(self, chunk_ids: Sequence[str], *, timeout_s: float, handles: Handles) -> list[Parts]:
        keys = list(chunk_ids)
        if not keys:
            return []
        session, deadline = self._session, time.monotonic() + timeout_s
        is_simple = session.mooncake is None
        values = self._run(
            "get", lambda: _read_rows(session.client, keys, self._partition, is_simple=is_simple), deadline
        )
        # TransferQueue leaves out unknown keys, and fields that are not ready on every key, without an error.
        if len(values) != len(keys):
            raise KeysNotFound(f"{len(keys) - len(values)} of {len(keys)} chunks are gone, of {name_some(keys)}")
        return [_as_parts(value) for value in values]

    def drop(self, chunk_ids: Sequence[str], *, timeout_s: float) -> None:
        keys, deadline = list(chunk_ids), time.monotonic() + timeout_s
        if self._session.mooncake is not None and not is_listening(self._session.mooncake.master):
            # TransferQueue would report success.
            raise DataPlaneClosed(f"TransferQueue has lost Mooncake's master at {self._session.mooncake.master}")
        for start in range(0, len(keys), CLEAR_BATCH):
            part = keys[start : start + CLEAR_BATCH]
            self._run("clear", partial(tq.async_kv_clear, keys=part, partition_id=self._partition), deadline)

    def health(self) -> StoreHealth:
        if self._is_closed or self._session.ended:
            return StoreHealth(is_alive=False, detail=self._session.ended or "this client is closed")
        dead = _dead(self._session)
        return StoreHealth(
            is_alive=not dead, detail=f"dead: {name_some(dead)}" if dead else "controller and units live"
        )

    def close(self) -> None:
        with _process.lock:
            if self._is_closed:
                return
            self._is_closed = True
            session = self._session
            session.users -= 1
            if self._is_owner:
                session.ended = session.ended or f"its owner has closed TransferQueue of run {session.run_id!r}"
                _end_service(session)
            elif session.users == 0 and not session.is_owner:
                session.ended = session.ended or "the last client of this process is closed"
                _leave(session)
            if session.ended and _process.session is session:
                _process.session = None

    def _check_accepted(self, keys: list[str], deadline: float) -> None:
        """A put reports success even when the controller refused it; its own record of the keys says so."""
        meta = self._retrieve(keys, deadline)
        if meta.size != len(keys) or FIELD not in meta.field_names:
            raise DataPlaneError(f"TransferQueue's controller did not accept a put of {len(keys)} chunks")

    def _clear_quietly(self, keys: list[str], deadline: float) -> None:
        """All of a put or nothing: what a failed one has left in the controller and the backend is cleared."""
        deadline = max(deadline, time.monotonic() + CLEAR_S)
        try:
            if self._session.mooncake is not None:
                # Keys without a field cannot be cleared there: their bytes go first, then each gets a field of a byte.
                self._remove_objects(keys, deadline)
                self._send(keys, [b"0"] * len(keys), deadline)
            self.drop(keys, timeout_s=deadline - time.monotonic())
        except DataPlaneError as error:
            logger.warning("could not clear %d chunks of a failed put: %s", len(keys), error)

    def _remove_objects(self, keys: list[str], deadline: float) -> None:
        """Free the bytes of keys in Mooncake, past TransferQueue, which names its objects by row number and field."""
        meta = self._retrieve(keys, deadline)
        names = [f"{index}@{FIELD}" for index in meta.global_indexes]
        clear = self._session.client.storage_manager.storage_client.clear
        bounded("TransferQueue did not free a failed put", lambda: clear(names), timeout_s=deadline - time.monotonic())

    def _retrieve(self, keys: list[str], deadline: float) -> Any:
        """Return the controller's own record of the keys."""
        return self._run(
            "look-up of keys",
            lambda: self._session.client.async_kv_retrieve_meta(keys=keys, partition_id=self._partition, create=False),
            deadline,
        )

    def _send(self, keys: list[str], values: Sequence[_Value], deadline: float) -> None:
        client = self._session.client
        rows = _Rows(values) if self._session.mooncake is None else _rows_of_store(values)
        self._run("put", lambda: _write_rows(client, keys, self._partition, rows), deadline)

    def _run(self, what: str, start: Callable[[], Coroutine[Any, Any, _T]], deadline: float) -> _T:
        """Make one TransferQueue call on its own loop; past the deadline the connection counts as broken."""
        session = self._session
        if self._is_closed or session.ended:
            raise DataPlaneClosed(f"TransferQueue cannot be used: {session.ended or 'this client is closed'}")
        future = asyncio.run_coroutine_threadsafe(start(), session.client._loop)
        try:
            return _wait(future, session, deadline)
        except concurrent.futures.TimeoutError as error:
            future.cancel()
            session.ended = f"an earlier {what} did not end in time, so its connection is broken; build a new client"
            stopped = stopped_actors(session.processes)
            why = f": somebody has stopped {name_some(stopped)}" if stopped else ""
            raise DataPlaneTimeout(f"TransferQueue did not finish a {what} in time{why}") from error
        except concurrent.futures.CancelledError as error:
            raise DataPlaneClosed(f"TransferQueue was closed during a {what}") from error
        except DataPlaneError:
            future.cancel()
            raise
        except Exception as error:
            # The door: whatever the engine raises becomes an error of the data plane, with its cause.
            dead = _dead(session)
            kind = DataPlaneClosed if dead else _kind_of(error)
            raise kind(f"TransferQueue failed in {what} ({name_some(dead) or 'all actors live'}): {error}") from error


def _as_value(parts: Parts) -> _Value:
    """Return a chunk as TransferQueue sends it with the fewest copies: small parts inside its message, large ones as
    frames of their own, which nobody copies on the way into the socket and out of it."""
    if sum(part.nbytes for part in parts) < INLINE_BYTES:
        return b"".join(parts)
    return [bytes(part) if part.nbytes < INLINE_BYTES else np.frombuffer(part, dtype=np.uint8) for part in parts]


def _num_bytes(chunks: Mapping[str, Parts]) -> int:
    return sum(part.nbytes for parts in chunks.values() for part in parts)


def _as_parts(value: Any) -> Parts:
    return [memoryview(part) for part in (value if isinstance(value, list) else [value])]


class _Rows(dict[str, list[Any]]):
    """One field of many rows, as TransferQueue's simple backend takes it: a TensorDict costs 10 us per value."""

    def __init__(self, values: Sequence[_Value]) -> None:
        super().__init__({FIELD: list(values)})
        self.batch_size = (len(values),)


def _rows_of_store(values: Sequence[_Value]) -> TensorDict:
    stack = NonTensorStack(*[NonTensorData(value) for value in values])
    return TensorDict({FIELD: stack}, batch_size=[len(values)])


async def _write_rows(client: Any, keys: list[str], partition: str, rows: _Rows | TensorDict) -> None:
    """Put as `async_kv_batch_put` does, without its last call, which sets tags: there are none."""
    meta = await client.async_kv_retrieve_meta(keys=keys, partition_id=partition, create=True)
    if meta.size != len(keys):
        raise RuntimeError(f"TransferQueue's controller made {meta.size} of {len(keys)} keys")
    await client.storage_manager.put_data(rows, meta)


async def _read_rows(client: Any, keys: list[str], partition: str, *, is_simple: bool) -> list[Any]:
    """Get the values of the keys in their order; fewer when some are unknown, or are not there yet."""
    meta = await client.async_kv_retrieve_meta(keys=keys, partition_id=partition, create=False)
    if not meta.size or FIELD not in meta.field_names or not meta.is_ready:
        return []
    manager = client.storage_manager
    if not is_simple:
        rows = await manager.get_data(meta.select_fields([FIELD]))
        return list(rows[FIELD])
    # As `get_data` does, without making a column of the values.
    values: list[Any] = [None] * meta.size
    groups = manager._group_by_hash(meta.global_indexes)

    async def read(unit: str, group: Any) -> None:
        ask = partial(manager._get_from_single_storage_unit, group.global_indexes, [FIELD], target_storage_unit=unit)
        _, found = await manager._request_with_retry("get", unit, f"samples={len(group.global_indexes)}", ask)
        for position, value in zip(group.batch_positions, found[FIELD], strict=True):
            values[position] = value

    await asyncio.gather(*(read(unit, group) for unit, group in groups.items()))
    return values


def _wait(future: concurrent.futures.Future[_T], session: _QueueSession, deadline: float) -> _T:
    while True:
        left = deadline - time.monotonic()
        try:
            return future.result(timeout=max(min(left, PROBE_S), 0.0))
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            dead = _dead(session)
            if dead:
                session.ended = f"TransferQueue has lost {name_some(dead)}"
                raise DataPlaneClosed(f"{session.ended}; its rows are gone") from None
            if left <= PROBE_S:
                raise


def _start_mooncake(config: DataPlaneConfig, start: StartUp) -> MooncakeServers | None:
    """Return the run's own master and holder, for the backend that needs them."""
    if config.backend != "mooncake_cpu":
        return None
    servers = start_servers(config.mooncake, has_holder=config.mooncake.segment_owner == "holder", start=start)
    _bind_to_own_address(servers.address.master)
    return servers


def _bind_to_own_address(master: str) -> None:
    os.environ["MC_TCP_BIND_ADDRESS"] = own_address(master)


def _dead(session: _QueueSession) -> list[str]:
    """Return actors and servers of the service that are gone."""
    dead = dead_actors(session.namespace, session.num_units, session.processes)
    if session.mooncake is not None:
        named = {"Mooncake's master at": session.mooncake.master, "Mooncake's holder at": session.mooncake.holder}
        dead += [f"{what} {where}" for what, where in named.items() if where and not is_listening(where)]
    return dead


def _kind_of(error: Exception) -> type[DataPlaneError]:
    """Return the kind of error that an engine's error means while all of its processes live."""
    if UNIT_LACKS_KEY in str(error):
        return KeysNotFound  # cleared between the controller's answer and the unit's
    codes = {int(code) for code in re.findall(r"-\d{3}\b", str(error))}
    kinds = {NO_SPACE: CapacityExceeded, TRANSFER_FAILED: PayloadLost, NOT_FOUND: KeysNotFound}
    return next((kind for code, kind in kinds.items() if code in codes), DataPlaneError)


def _end_service(session: _QueueSession) -> None:
    """End client, storage units and controller. A dead controller must not keep the rest from ending."""
    _cancel_calls(session)
    try:
        bounded(f"TransferQueue did not close within {CLOSE_TIMEOUT_S:.0f} s", tq.close, timeout_s=CLOSE_TIMEOUT_S)
    except DataPlaneTimeout as error:
        logger.warning("%s; ending its actors", error)
    try:
        # Without Ray's metadata server these calls have no end.
        bounded(
            f"TransferQueue's actors did not end within {END_ACTORS_S:.0f} s",
            lambda: end_actors(session.namespace, session.num_units),
            timeout_s=END_ACTORS_S,
        )
    except DataPlaneTimeout as error:
        logger.warning("%s", error)
        forget_module_state()
    if session.servers is not None:
        session.servers.stop()


def _leave(session: _QueueSession) -> None:
    """End this process's connection only: `tq.close` would end the controller for everybody."""
    _cancel_calls(session)
    try:
        bounded("TransferQueue did not disconnect", session.client.close, timeout_s=CLOSE_TIMEOUT_S)
    except DataPlaneTimeout as error:
        logger.warning("%s", error)
    forget_module_state()


def _cancel_calls(session: _QueueSession) -> None:
    """Calls that still wait for a dead peer end with CancelledError instead of blocking their threads for ever."""
    loop = session.client._loop

    done = threading.Event()

    def cancel() -> None:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        done.set()

    loop.call_soon_threadsafe(cancel)
    if not done.wait(PROBE_S):
        # Over Mooncake its reads block the loop. TransferQueue leaks its context then, whose collection would hang.
        _left_behind.append(session.client)
        logger.warning("TransferQueue's loop does not answer; abandoning its calls")
