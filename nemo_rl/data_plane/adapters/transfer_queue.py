"""`transfer_queue`: payloads in TransferQueue, backends `simple` and `mooncake_cpu`. The door to `transfer_queue`.

Chunks lie in the storage units of the run (`transfer_queue_session`); over Mooncake, and in another program's
TransferQueue, each is one key with one field. With layout `native` each column is a field under the row's own key as
well (`transfer_queue_rows`). TransferQueue is used for transport: its cursors, tags and key lists decide nothing. What
this file adds: every call ends by a deadline, a short read is an error, a controller of another run is refused unless
the run is told to join it (`transfer_queue_guest`), and only the owner's close ends the service.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import ray
import transfer_queue as tq
from tensordict import NonTensorData, NonTensorStack, TensorDict

from nemo_rl.config.data_plane import CONTROLLER_CPUS, DataPlaneConfig
from nemo_rl.data_plane.adapters.mooncake_master import (
    MooncakeServers,
    StoreAddress,
    is_listening,
    own_address,
    start_servers,
)
from nemo_rl.data_plane.adapters.transfer_queue_guest import (
    CLOSE_S,
    CLOSED,
    find_queue,
    leave_clean,
    mark_owner,
    remove_dead_runs,
    start_guard,
)
from nemo_rl.data_plane.adapters.transfer_queue_rows import QueueRows
from nemo_rl.data_plane.adapters.transfer_queue_service import (
    CONTROLLER,
    CONTROLLER_NAMESPACE,
    CPU_WAIT_S,
    actor_processes,
    await_controller,
    bounded,
    end_actors,
    has_client,
    refuse_other_controller,
    service_config,
    start_actors,
    wait_for_cpus,
)
from nemo_rl.data_plane.adapters.transfer_queue_session import (
    FIELD,
    Guest,
    QueueProcess,
    QueueSession,
    Value,
    as_parts,
    as_value,
    drop_values,
    read_values,
    write_values,
)
from nemo_rl.data_plane.interfaces import ColumnStore, Handles, Parts, PayloadStore, StoreHealth
from nemo_rl.data_plane.keys import queue_partition
from nemo_rl.errors import (
    CapacityExceeded,
    DataPlaneClosed,
    DataPlaneError,
    DataPlaneTimeout,
    KeysNotFound,
    ResourceError,
    name_some,
)
from nemo_rl.utils.child_process import ChildProcess
from nemo_rl.utils.deadlines import DEFAULT_START, StartUp

__all__ = ["CONTROLLER", "CONTROLLER_NAMESPACE", "CPU_WAIT_S", "TransferQueueStore"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

LONGEST_TRIES_S = 4.0
"""TransferQueue tries a put into a full Mooncake segment for 2 s before it says so."""
CLEAR_S = 5.0
"""Seconds for clearing what a failed put has left, past its deadline."""
CLEAR_BATCH = 4096
"""Keys per clear: the controller answers all clients from one thread."""

REMOVE_S = 30.0
"""Seconds for removing a run's partitions from another program's TransferQueue."""
DEFAULTS = DataPlaneConfig(impl="transfer_queue")

_process = QueueProcess()


class TransferQueueStore(PayloadStore):
    """Chunks in TransferQueue."""

    def __init__(
        self,
        session: QueueSession,
        *,
        run_id: str,
        config: DataPlaneConfig = DEFAULTS,
        owns: Literal["service", "partitions", "nothing"] = "nothing",
    ) -> None:
        """Args:
        owns: what the close of this store ends.
        """
        self._session, self._run_id, self._owns = session, run_id, owns
        self._partition, self._config, layout = queue_partition(run_id), config, config.transfer_queue.layout
        self._has_own_units = session.guest is None and session.mooncake is None
        self._rows = QueueRows(session, run_id=run_id) if layout == "native" else None
        self._guard: ChildProcess | None = None
        self._is_closed = False

    @classmethod
    def start(cls, config: DataPlaneConfig, *, run_id: str, start: StartUp = DEFAULT_START) -> TransferQueueStore:
        """Start controller and storage units, which this process owns; or join those of another program, when the
        config says so.

        Raises:
            ResourceError: too few free CPUs for the actors, or another run owns this Ray cluster's controller; or
                there is none to join, or one whose settings do not suit.
            DataPlaneTimeout: the actors did not start in time; what was half made is ended.
        """
        if config.transfer_queue.connect:
            return cls._start_as_guest(config, run_id=run_id, timeout_s=start.timeout_s)
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
            _process.session = QueueSession(
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
            return cls(_process.session, run_id=run_id, config=config, owns="service")

    @classmethod
    def _start_as_guest(cls, config: DataPlaneConfig, *, run_id: str, timeout_s: float) -> TransferQueueStore:
        with _process.lock:
            session = _guest_session(config, timeout_s)
        store = cls(session, run_id=run_id, config=config, owns="partitions")
        try:
            node = ray.util.get_node_ip_address()
            store._guard = start_guard(run_id=run_id, ray_address=ray.get_runtime_context().gcs_address, node=node)
            deadline = time.monotonic() + timeout_s
            remove_dead_runs(session, deadline=deadline)
            mark_owner(session, run_id=run_id, deadline=deadline)
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def take_over(cls, config: DataPlaneConfig, *, run_id: str, timeout_s: float) -> TransferQueueStore:
        """Return the store of a run whose owner has died in another program's TransferQueue; its close removes all of
        it."""
        with _process.lock:
            return cls(_guest_session(config, timeout_s, checks=False), run_id=run_id, owns="partitions")

    @classmethod
    def join(cls, *, run_id: str, timeout_s: float, config: DataPlaneConfig = DEFAULTS) -> TransferQueueStore:
        """Attach to the controller that the owner of the run started, or joined.

        Raises:
            DataPlaneClosed: another run's controller, or this process is not connected to Ray.
            DataPlaneTimeout: no controller, or one that was never finished, within `timeout_s`.
        """
        with _process.lock:
            if config.transfer_queue.connect:
                return cls(_guest_session(config, timeout_s), run_id=run_id, config=config)
            known = _process.usable()
            if known is not None:
                if known.run_id != run_id:
                    raise DataPlaneClosed(f"this process is attached to run {known.run_id!r}, not to {run_id!r}")
                known.users += 1
                return cls(known, run_id=run_id, config=config)
            ours = await_controller(run_id, timeout_s)
            mooncake = StoreAddress.parse(ours["mooncake"]) if ours["mooncake"] else None
            if mooncake is not None:
                _bind_to_own_address(mooncake.master)
            bounded(f"TransferQueue did not attach within {timeout_s:.1f} s", tq.init, timeout_s=timeout_s)
            _process.session = QueueSession(
                run_id=run_id,
                client=tq.get_client(),
                namespace=ours["namespace"],
                num_units=ours["units"],
                processes=actor_processes(ours["namespace"], ours["units"], timeout_s=timeout_s),
                is_owner=False,
                mooncake=mooncake,
                users=1,
            )
            return cls(_process.session, run_id=run_id, config=config)

    @property
    def rows(self) -> ColumnStore | None:
        return self._rows

    @property
    def reuses_memory(self) -> bool:
        # TransferQueue's controller numbers rows over all partitions, and gives the number of a cleared one away.
        return not self._has_own_units

    @property
    def chunk_bytes(self) -> int | None:
        return self._config.simple.chunk_bytes if self._has_own_units else None

    @property
    def block_bytes(self) -> int | None:
        return self._config.simple.block_bytes if self._has_own_units and self._rows is None else None

    def put(self, chunks: Mapping[str, Parts], *, timeout_s: float) -> None:
        keys, deadline = list(chunks), time.monotonic() + timeout_s
        if not keys:
            return
        values = {stored: as_value(parts) for stored, parts in chunks.items()}
        while True:
            try:
                self._send(values, deadline)
                return
            except (DataPlaneClosed, DataPlaneTimeout):
                raise  # the connection has ended: nothing can be cleared
            except CapacityExceeded as error:
                self._clear_quietly(keys, deadline)
                if time.monotonic() + LONGEST_TRIES_S > deadline:
                    advice = (
                        "raise data_plane.mooncake.segment_bytes, or" if self._session.servers else "give it more, or"
                    )
                    raise CapacityExceeded(
                        f"TransferQueue's backend has no space for {_num_bytes(chunks)} bytes; {advice} clear rows "
                        f"sooner: {error}"
                    ) from error
            except DataPlaneError:
                self._clear_quietly(keys, deadline)
                raise

    def get(self, chunk_ids: Sequence[str], *, timeout_s: float, handles: Handles) -> list[Parts]:
        keys = list(chunk_ids)
        if not keys:
            return []
        client, deadline = self._session.client, time.monotonic() + timeout_s
        if self._has_own_units:
            try:
                values = self._run("get", lambda: read_values(client.storage_manager, keys), deadline)
            except KeysNotFound as error:
                raise KeysNotFound(f"not all of {len(keys)} chunks are there, of {name_some(keys)}: {error}") from error
            return list(map(as_parts, values))
        rows = self._run("get", lambda: _get_or_none(keys, self._partition), deadline)
        # TransferQueue leaves out unknown keys, and fields that are not ready on every key, without an error.
        found = 0 if rows is None or FIELD not in rows.keys() else rows.batch_size[0]  # noqa: SIM118
        if found != len(keys):
            raise KeysNotFound(f"{len(keys) - found} of {len(keys)} chunks are gone, of {name_some(keys)}")
        assert rows is not None
        return list(map(as_parts, rows[FIELD]))

    def drop(self, chunk_ids: Sequence[str], *, timeout_s: float) -> None:
        keys, deadline = list(chunk_ids), time.monotonic() + timeout_s
        if self._session.mooncake is not None and not is_listening(self._session.mooncake.master):
            # TransferQueue would report success.
            raise DataPlaneClosed(f"TransferQueue has lost Mooncake's master at {self._session.mooncake.master}")
        for start in range(0, len(keys), CLEAR_BATCH):
            part = keys[start : start + CLEAR_BATCH]
            if self._has_own_units:
                manager = self._session.client.storage_manager
                self._run("clear", partial(drop_values, manager, part), deadline)
                continue
            self._run("clear", partial(tq.async_kv_clear, keys=part, partition_id=self._partition), deadline)

    def health(self) -> StoreHealth:
        if self._is_closed or self._session.ended:
            return StoreHealth(is_alive=False, detail=self._session.ended or "this client is closed")
        dead = self._session.dead()
        return StoreHealth(
            is_alive=not dead, detail=f"dead: {name_some(dead)}" if dead else "controller and units live"
        )

    def close(self) -> None:
        with _process.lock:
            if self._is_closed:
                return
            if self._owns == "partitions" and not self._session.ended:
                leave_clean(self._session, run_id=self._run_id, timeout_s=REMOVE_S)
            self._is_closed = True
            if self._rows is not None:
                self._rows.is_closed = True
            _process.give_up(self._session, is_owner=self._owns == "service")
        if self._guard is not None:
            self._guard.stop(CLOSED, timeout_s=CLOSE_S)

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
                self._send_as_rows(dict.fromkeys(keys, b"0"), deadline)
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

    def _send(self, values: Mapping[str, Value], deadline: float) -> None:
        if self._has_own_units:
            manager = self._session.client.storage_manager
            self._run("put", lambda: write_values(manager, values), deadline)
            return
        self._send_as_rows(values, deadline)
        self._check_accepted(list(values), deadline)

    def _send_as_rows(self, values: Mapping[str, Value], deadline: float) -> None:
        keys, stack = list(values), NonTensorStack(*[NonTensorData(value) for value in values.values()])
        payloads = TensorDict({FIELD: stack}, batch_size=[len(keys)])
        self._run(
            "put", lambda: tq.async_kv_batch_put(keys=keys, partition_id=self._partition, fields=payloads), deadline
        )

    def _run(self, what: str, start: Callable[[], Coroutine[Any, Any, _T]], deadline: float) -> _T:
        if self._is_closed and not self._session.ended:
            raise DataPlaneClosed("TransferQueue cannot be used: this client is closed")
        return self._session.run(what, start, deadline)


def _guest_session(config: DataPlaneConfig, timeout_s: float, *, checks: bool = True) -> QueueSession:
    """Return this process's session in the TransferQueue of another program; called under the lock.

    Args:
        checks: the queue's settings must suit the config.

    Raises:
        ResourceError: there is none, or its settings do not suit.
    """
    known = _process.usable()
    if known is None:
        found = find_queue(config, timeout_s=timeout_s, checks=checks)
        if found.master:
            _bind_to_own_address(found.master)
        guest = Guest(controller=found.controller, units=found.units, is_client_shared=has_client())
        bounded(f"TransferQueue did not attach within {timeout_s:.1f} s", tq.init, timeout_s=timeout_s)
        known = _process.session = QueueSession(
            run_id="",
            client=tq.get_client(),
            namespace="",
            num_units=0,
            is_owner=False,
            mooncake=StoreAddress(master=found.master, holder="") if found.master else None,
            guest=guest,
        )
    known.users += 1
    return known


def _num_bytes(chunks: Mapping[str, Parts]) -> int:
    return sum(part.nbytes for parts in chunks.values() for part in parts)


async def _get_or_none(keys: list[str], partition: str) -> TensorDict | None:
    try:
        rows: TensorDict = await tq.async_kv_batch_get(keys=keys, partition_id=partition, select_fields=[FIELD])
    except ValueError as error:
        # Raised when no key at all is known; any other count comes back short.
        logger.debug("TransferQueue knows none of %d keys: %s", len(keys), error)
        return None
    return rows


def _start_mooncake(config: DataPlaneConfig, start: StartUp) -> MooncakeServers | None:
    """Return the run's own master and holder, for the backend that needs them."""
    if config.backend != "mooncake_cpu":
        return None
    servers = start_servers(config.mooncake, has_holder=config.mooncake.segment_owner == "holder", start=start)
    _bind_to_own_address(servers.address.master)
    return servers


def _bind_to_own_address(master: str) -> None:
    os.environ["MC_TCP_BIND_ADDRESS"] = own_address(master)
