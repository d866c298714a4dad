"""`transfer_queue`: payloads in TransferQueue's storage actors (backend `simple`). The one door to `transfer_queue`.

A chunk is one TransferQueue key with one uint8 field. TransferQueue is used for transport only: its cursors, tags and
key lists are never asked. What this file adds: every call ends by a deadline, a short read is an error, a controller
of another run is refused, and only the owner's close ends the service.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from ray import exceptions as ray_errors
from tensordict import TensorDict
from transfer_queue import interface as tq_interface

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.interfaces import PayloadStore, StoreHealth
from nemo_rl.data_plane.ragged import nest
from nemo_rl.errors import (
    DataPlaneClosed,
    DataPlaneError,
    DataPlaneTimeout,
    KeysNotFound,
    ResourceError,
    name_some,
)

__all__ = ["TransferQueueStore"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

CONTROLLER = "TransferQueueController"
CONTROLLER_NAMESPACE = "transfer_queue"
CONTROLLER_CPUS = 1
FIELD = "payload"
START_TIMEOUT_S = 90.0
"""Controller and storage units start in 7 to 9 s on a quiet machine."""
CPU_WAIT_S = 5.0
"""Ray's view of free CPUs lags behind actors that have just ended."""
CLOSE_TIMEOUT_S = 30.0
PROBE_S = 1.0
"""A call that takes longer asks Ray whether the actors are alive, so that a death is seen before the deadline."""
GIVE_UP_S = 5.0
"""How long a function that was made to fail may take to notice."""
CLEAR_BATCH = 4096
"""Keys per clear: the controller answers all clients from one thread."""


@dataclass(slots=True)
class _Session:
    """This process's one connection; TransferQueue keeps it in module globals."""

    run_id: str
    client: Any
    namespace: str
    """Ray namespace of the storage units."""
    num_units: int
    is_owner: bool
    users: int = 0
    ended: str = ""
    """Why the session cannot be used any more."""


@dataclass(slots=True)
class _Process:
    """What this process has of TransferQueue."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    session: _Session | None = None

    def usable(self) -> _Session | None:
        return None if self.session is None or self.session.ended else self.session


_process = _Process()


class TransferQueueStore(PayloadStore):
    """Chunks in TransferQueue."""

    def __init__(self, session: _Session, *, is_owner: bool) -> None:
        self._session, self._is_owner = session, is_owner
        self._partition = f"nemo_rl-{session.run_id}"
        self._is_closed = False

    @classmethod
    def start(cls, config: DataPlaneConfig, *, run_id: str) -> TransferQueueStore:
        """Starts controller and storage units; this process owns them.

        Raises:
            ResourceError: too few free CPUs for the actors, or another run owns this Ray cluster's controller.
            DataPlaneTimeout: the actors did not start in time; what was half made is ended.
        """
        with _process.lock:
            known = _process.usable()
            if known is not None:
                raise ResourceError(f"this process uses TransferQueue of run {known.run_id!r} already; close it first")
            _refuse_other_controller(run_id)
            _wait_for_cpus(CONTROLLER_CPUS + config.simple.num_storage_units)
            namespace = ray.get_runtime_context().namespace
            units = config.simple.num_storage_units
            try:
                _bounded(
                    "start",
                    lambda: tq.init(_tq_config(run_id, namespace, units)),
                    timeout_s=START_TIMEOUT_S,
                    give_up=lambda: _end_actors(namespace, units),
                )
            except BaseException:
                _end_actors(namespace, units)
                raise
            _process.session = _Session(
                run_id=run_id, client=tq.get_client(), namespace=namespace, num_units=units, is_owner=True, users=1
            )
            return cls(_process.session, is_owner=True)

    @classmethod
    def join(cls, *, run_id: str, timeout_s: float) -> TransferQueueStore:
        """Attaches to the controller that the owner of the run started.

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
                return cls(known, is_owner=False)
            ours = _await_controller(run_id, timeout_s)
            _bounded("attach", tq.init, timeout_s=timeout_s)
            _process.session = _Session(
                run_id=run_id,
                client=tq.get_client(),
                namespace=ours["namespace"],
                num_units=ours["units"],
                is_owner=False,
                users=1,
            )
            return cls(_process.session, is_owner=False)

    def put(self, chunks: Mapping[str, memoryview], *, timeout_s: float) -> None:
        keys, deadline = list(chunks), time.monotonic() + timeout_s
        if not keys:
            return
        parts = [np.frombuffer(chunk, dtype=np.uint8) for chunk in chunks.values()]
        sizes = torch.tensor([part.size for part in parts], dtype=torch.int64)
        payloads = TensorDict({FIELD: nest(torch.from_numpy(np.concatenate(parts)), sizes)}, batch_size=[len(keys)])
        try:
            self._run(
                "put", lambda: tq.async_kv_batch_put(keys=keys, partition_id=self._partition, fields=payloads), deadline
            )
            self._check_accepted(keys, deadline)
        except (DataPlaneClosed, DataPlaneTimeout):
            raise  # the connection has ended: nothing can be cleared
        except DataPlaneError:
            self._clear_quietly(keys, deadline)
            raise

    def get(self, chunk_ids: Sequence[str], *, timeout_s: float) -> list[memoryview]:
        keys = list(chunk_ids)
        if not keys:
            return []
        rows = self._run(
            "get",
            lambda: _get_or_none(keys, self._partition),
            time.monotonic() + timeout_s,
        )
        # TransferQueue leaves out unknown keys, and fields that are not ready on every key, without an error.
        found = 0 if rows is None or FIELD not in rows.keys() else rows.batch_size[0]  # noqa: SIM118
        if found != len(keys):
            raise KeysNotFound(f"{len(keys) - found} of {len(keys)} chunks are gone, of {name_some(keys)}")
        assert rows is not None
        return [row.numpy().data for row in rows[FIELD].unbind()]

    def drop(self, chunk_ids: Sequence[str], *, timeout_s: float) -> None:
        keys, deadline = list(chunk_ids), time.monotonic() + timeout_s
        for start in range(0, len(keys), CLEAR_BATCH):
            part = keys[start : start + CLEAR_BATCH]
            self._run("clear", partial(tq.async_kv_clear, keys=part, partition_id=self._partition), deadline)

    def health(self) -> StoreHealth:
        if self._is_closed or self._session.ended:
            return StoreHealth(is_alive=False, detail=self._session.ended or "this client is closed")
        dead = _dead_actors(self._session)
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
        """A put reports success even when the controller refused it; its own record of the keys tells."""
        meta = self._run(
            "check after put",
            lambda: self._session.client.async_kv_retrieve_meta(keys=keys, partition_id=self._partition, create=False),
            deadline,
        )
        if meta.size != len(keys) or FIELD not in meta.field_names:
            raise DataPlaneError(f"TransferQueue's controller did not accept a put of {len(keys)} chunks")

    def _clear_quietly(self, keys: list[str], deadline: float) -> None:
        try:
            self.drop(keys, timeout_s=max(deadline - time.monotonic(), PROBE_S))
        except DataPlaneError as error:
            logger.warning("could not clear %d chunks of a failed put: %s", len(keys), error)

    def _run(self, what: str, start: Callable[[], Coroutine[Any, Any, _T]], deadline: float) -> _T:
        """One TransferQueue call on its own loop; past the deadline the connection counts as broken."""
        session = self._session
        if self._is_closed or session.ended:
            raise DataPlaneClosed(f"TransferQueue cannot be used: {session.ended or 'this client is closed'}")
        future = asyncio.run_coroutine_threadsafe(start(), session.client._loop)
        try:
            return _wait(future, session, deadline)
        except concurrent.futures.TimeoutError as error:
            future.cancel()
            session.ended = f"an earlier {what} did not end in time, so its connection is broken; build a new client"
            raise DataPlaneTimeout(f"TransferQueue did not finish a {what} in time") from error
        except concurrent.futures.CancelledError as error:
            raise DataPlaneClosed(f"TransferQueue was closed during a {what}") from error
        except DataPlaneError:
            future.cancel()
            raise
        except Exception as error:
            # The door: whatever the engine raises becomes an error of the data plane, with its cause.
            dead = _dead_actors(session)
            kind = DataPlaneClosed if dead else DataPlaneError
            raise kind(f"TransferQueue failed in {what} ({name_some(dead) or 'all actors live'}): {error}") from error


async def _get_or_none(keys: list[str], partition: str) -> TensorDict | None:
    try:
        rows: TensorDict = await tq.async_kv_batch_get(keys=keys, partition_id=partition, select_fields=[FIELD])
    except ValueError as error:
        # Raised when no key at all is known; any other count comes back short.
        logger.debug("TransferQueue knows none of %d keys: %s", len(keys), error)
        return None
    return rows


def _wait(future: concurrent.futures.Future[_T], session: _Session, deadline: float) -> _T:
    while True:
        left = deadline - time.monotonic()
        try:
            return future.result(timeout=max(min(left, PROBE_S), 0.0))
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            dead = _dead_actors(session)
            if dead:
                session.ended = f"TransferQueue has lost {name_some(dead)}"
                raise DataPlaneClosed(f"{session.ended}; its rows are gone") from None
            if left <= PROBE_S:
                raise


def _tq_config(run_id: str, namespace: str, units: int) -> Any:
    # `polling_mode`: else an unsatisfied fetch of anybody blocks the controller's only thread for seconds.
    return OmegaConf.create(
        {
            "nemo_rl": {"run_id": run_id, "namespace": namespace, "units": units},
            "controller": {"polling_mode": True},
            "backend": {
                "storage_backend": "SimpleStorage",
                "SimpleStorage": {"num_data_storage_units": units, "total_storage_size": None},
            },
        }
    )


def _find_controller() -> Any:
    try:
        return ray.get_actor(CONTROLLER, namespace=CONTROLLER_NAMESPACE)
    except ValueError:
        return None


def _read_config(controller: Any, timeout_s: float) -> Mapping[str, Any] | None:
    """Our part of a controller's configuration; empty for one that another program made, None while it starts.

    Raises:
        RayActorError: the controller has died.
    """
    try:
        config = ray.get(controller.get_config.remote(), timeout=timeout_s)
    except ray_errors.GetTimeoutError:
        return None
    return None if config is None else dict(config.get("nemo_rl", {}))


def _refuse_other_controller(run_id: str) -> None:
    """There is one TransferQueue per Ray cluster: a second `init` would silently join the first."""
    give_up = time.monotonic() + CPU_WAIT_S
    while (controller := _find_controller()) is not None:
        try:
            ours = _read_config(controller, CPU_WAIT_S)
        except ray_errors.RayActorError:
            ours = None  # it is ending; its name is free in a moment
        else:
            other = "half made" if ours is None else f"of run {ours.get('run_id', 'another program')!r}"
            raise ResourceError(
                f"this Ray cluster has a TransferQueue controller already ({other}), run {run_id!r} needs its own; "
                "end that run, or start this one on another cluster"
            )
        if time.monotonic() > give_up:
            raise ResourceError("a TransferQueue controller that has ended keeps its name; restart the Ray cluster")
        time.sleep(0.1)


def _await_controller(run_id: str, timeout_s: float) -> Mapping[str, Any]:
    if not ray.is_initialized():
        raise DataPlaneClosed(f"run {run_id!r}: this process is not connected to Ray; call ray.init first")
    give_up = time.monotonic() + timeout_s
    state = "there is no controller"
    while True:
        controller = _find_controller()
        try:
            ours = None if controller is None else _read_config(controller, max(give_up - time.monotonic(), 0.1))
        except ray_errors.RayActorError:
            controller = ours = None
        if ours is not None:
            if ours.get("run_id") != run_id:
                raise DataPlaneClosed(
                    f"the TransferQueue controller serves run {ours.get('run_id')!r}, not {run_id!r}, which has ended"
                )
            return ours
        state = "its controller is not finished" if controller is not None else "there is no controller"
        if time.monotonic() > give_up:
            raise DataPlaneTimeout(f"attach to TransferQueue of run {run_id!r}: {state} after {timeout_s:.1f} s")
        time.sleep(0.1)


def _wait_for_cpus(needed: int) -> None:
    """Without CPUs for its actors, TransferQueue's start never returns."""
    give_up = time.monotonic() + CPU_WAIT_S
    while (free := ray.available_resources().get("CPU", 0.0)) < needed:
        if time.monotonic() > give_up:
            raise ResourceError(
                f"TransferQueue needs {needed} free CPUs in Ray (controller and storage units, one each), there are "
                f"{free:g}; raise cluster.num_cpus, or lower data_plane.simple.num_storage_units"
            )
        time.sleep(0.1)


def _dead_actors(session: _Session) -> list[str]:
    names = [(CONTROLLER, CONTROLLER_NAMESPACE)]
    names += [(f"TransferQueueStorageUnit#{i}", session.namespace) for i in range(session.num_units)]
    dead: list[str] = []
    for name, namespace in names:
        try:
            ray.get_actor(name, namespace=namespace)
        except ValueError:
            dead.append(name)
    return dead


def _bounded(
    what: str, action: Callable[[], _T], *, timeout_s: float, give_up: Callable[[], None] = lambda: None
) -> _T:
    """Runs a blocking TransferQueue function that has no deadline of its own.

    Args:
        give_up: called past the deadline, to make the function fail; it gets a moment to end.
    """
    outcome: concurrent.futures.Future[_T] = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(action())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name=f"transfer-queue-{what}", daemon=True)
    thread.start()
    try:
        return outcome.result(timeout=timeout_s)
    except concurrent.futures.TimeoutError as error:
        give_up()
        thread.join(GIVE_UP_S)
        raise DataPlaneTimeout(f"TransferQueue did not {what} within {timeout_s:.1f} s") from error


def _end_service(session: _Session) -> None:
    """Ends client, storage units and controller. A dead controller must not keep the rest from ending."""
    _cancel_calls(session)
    try:
        _bounded("close", tq.close, timeout_s=CLOSE_TIMEOUT_S)
    except DataPlaneTimeout as error:
        logger.warning("%s; ending its actors", error)
    _end_actors(session.namespace, session.num_units)


def _leave(session: _Session) -> None:
    """Ends this process's connection only: `tq.close` would end the controller for everybody."""
    _cancel_calls(session)
    try:
        _bounded("disconnect", session.client.close, timeout_s=CLOSE_TIMEOUT_S)
    except DataPlaneTimeout as error:
        logger.warning("%s", error)
    tq_interface._TQ_CLIENT = None
    tq_interface._TQ_CONTROLLER = None


def _cancel_calls(session: _Session) -> None:
    """Calls that still wait for a dead peer end with CancelledError instead of blocking their threads for ever."""
    loop = session.client._loop

    async def cancel() -> None:
        for task in asyncio.all_tasks(loop) - {asyncio.current_task(loop)}:
            task.cancel()

    try:
        asyncio.run_coroutine_threadsafe(cancel(), loop).result(timeout=PROBE_S)
    except concurrent.futures.TimeoutError:
        logger.warning("TransferQueue's loop does not answer; its calls are left behind")


def _end_actors(namespace: str, units: int) -> None:
    """Ends what is left of controller and units, and frees TransferQueue's module state for a new start."""
    names = [(CONTROLLER, CONTROLLER_NAMESPACE)]
    names += [(f"TransferQueueStorageUnit#{i}", namespace) for i in range(units)]
    for name, where in names:
        try:
            ray.kill(ray.get_actor(name, namespace=where))
        except ValueError:
            continue
    give_up = time.monotonic() + CPU_WAIT_S
    while _find_controller() is not None and time.monotonic() < give_up:
        time.sleep(0.05)
    tq_interface._TQ_CLIENT = None
    tq_interface._TQ_STORAGE = None
    tq_interface._TQ_CONTROLLER = None
