"""`QueueSession`: this process's one connection to TransferQueue. Every call on it ends by a deadline.

TransferQueue keeps its client in module globals, so a process has one session, which all stores of the process share.
The one invariant: past a deadline, or once an actor has died, the session is over for good (`ended` says why), because
TransferQueue's own calls have no end.

`write_values`, `read_values` and `drop_values` keep chunks in the storage units of a run's own TransferQueue. A unit
keeps values by a number, which is made from a chunk's id: the ledger knows every chunk, so no call asks the controller.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import re
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
import transfer_queue as tq

from nemo_rl.data_plane.adapters.mooncake_link import NO_SPACE, NOT_FOUND, TRANSFER_FAILED
from nemo_rl.data_plane.adapters.mooncake_master import MooncakeServers, StoreAddress, is_listening
from nemo_rl.data_plane.adapters.transfer_queue_service import (
    bounded,
    dead_actors,
    end_actors,
    forget_module_state,
    is_controller,
    stopped_actors,
)
from nemo_rl.data_plane.interfaces import Parts
from nemo_rl.data_plane.keys import chunk_tag
from nemo_rl.distributed.liveness import ProcessIdentity
from nemo_rl.errors import (
    CapacityExceeded,
    DataPlaneClosed,
    DataPlaneError,
    DataPlaneTimeout,
    KeysNotFound,
    PayloadLost,
    name_some,
)

__all__ = [
    "FIELD",
    "Guest",
    "QueueProcess",
    "QueueSession",
    "Value",
    "as_parts",
    "as_value",
    "drop_values",
    "read_values",
    "write_values",
]


logger = logging.getLogger(__name__)

_T = TypeVar("_T")

UNIT_LACKS_KEY = ("TQKeyNotFound", "field 'payload' not found")
"""Error texts of a storage unit for a row that was cleared, and of one that never had a row."""
UNIT_IS_FULL = "Storage capacity exceeded"
"""The error text of a storage unit that would hold more rows than its owner allows."""
CLOSE_TIMEOUT_S = 30.0
END_ACTORS_S = 10.0
PROBE_S = 1.0
"""A call that takes longer asks whether the actors are alive, so that a death is seen before the deadline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Guest:
    """A TransferQueue that another program has started, as a session knows it."""

    controller: str
    """Ray's id of its controller actor."""
    units: Mapping[str, str]
    """Storage unit -> `host:port` where it listens."""
    is_client_shared: bool
    """The program in this process had a TransferQueue client already, which stays when the session ends."""


@dataclass(slots=True)
class QueueSession:
    """One connection; its controller belongs to a run of ours, or to another program (`guest`)."""

    run_id: str
    """The run that started the controller; empty for another program's."""
    client: Any
    namespace: str
    """Ray namespace of the storage units; empty for those of another program."""
    num_units: int
    is_owner: bool
    mooncake: StoreAddress | None = None
    """The Mooncake servers, for backend `mooncake_cpu`."""
    servers: MooncakeServers | None = None
    users: int = 0
    processes: Mapping[str, ProcessIdentity] = field(default_factory=dict)
    """Processes of controller and units, by actor name."""
    guest: Guest | None = None
    ended: str = ""
    """The reason for which the session cannot be used any more; empty while it can."""

    def dead(self) -> list[str]:
        """Return actors and servers of the service that are gone."""
        if self.guest is None:
            dead = dead_actors(self.namespace, self.num_units, self.processes)
        else:
            dead = [] if is_controller(self.guest.controller) else ["its controller"]
            dead += [f"{unit} at {where}" for unit, where in self.guest.units.items() if not is_listening(where)]
        if self.mooncake is not None:
            named = {"Mooncake's master at": self.mooncake.master, "Mooncake's holder at": self.mooncake.holder}
            dead += [f"{what} {where}" for what, where in named.items() if where and not is_listening(where)]
        return dead

    def run(self, what: str, start: Callable[[], Coroutine[Any, Any, _T]], deadline: float) -> _T:
        """Make one TransferQueue call on its own loop; past the deadline the connection counts as broken."""
        if self.ended:
            raise DataPlaneClosed(f"TransferQueue cannot be used: {self.ended}")
        future = asyncio.run_coroutine_threadsafe(start(), self.client._loop)
        try:
            return _wait(future, self, deadline)
        except concurrent.futures.TimeoutError as error:
            future.cancel()
            self.ended = f"an earlier {what} did not end in time, so its connection is broken; build a new client"
            stopped = stopped_actors(self.processes)
            why = f": somebody has stopped {name_some(stopped)}" if stopped else ""
            raise DataPlaneTimeout(f"TransferQueue did not finish a {what} in time{why}") from error
        except concurrent.futures.CancelledError as error:
            raise DataPlaneClosed(f"TransferQueue was closed during a {what}") from error
        except DataPlaneError:
            future.cancel()
            raise
        except Exception as error:
            # The door: whatever the engine raises becomes an error of the data plane, with its cause.
            dead = self.dead()
            kind = DataPlaneClosed if dead else _kind_of(error)
            raise kind(f"TransferQueue failed in {what} ({name_some(dead) or 'all actors live'}): {error}") from error

    def end_service(self) -> None:
        """End client, storage units and controller. A dead controller must not keep the rest from ending."""
        self._cancel_calls()
        try:
            bounded(f"TransferQueue did not close within {CLOSE_TIMEOUT_S:.0f} s", tq.close, timeout_s=CLOSE_TIMEOUT_S)
        except DataPlaneTimeout as error:
            logger.warning("%s; ending its actors", error)
        try:
            # Without Ray's metadata server these calls have no end.
            bounded(
                f"TransferQueue's actors did not end within {END_ACTORS_S:.0f} s",
                lambda: end_actors(self.namespace, self.num_units),
                timeout_s=END_ACTORS_S,
            )
        except DataPlaneTimeout as error:
            logger.warning("%s", error)
            forget_module_state()
        if self.servers is not None:
            self.servers.stop()

    def leave(self) -> None:
        """End this process's connection only: `tq.close` would end the controller for everybody."""
        if self.guest is not None and self.guest.is_client_shared:
            return
        self._cancel_calls()
        try:
            bounded("TransferQueue did not disconnect", self.client.close, timeout_s=CLOSE_TIMEOUT_S)
        except DataPlaneTimeout as error:
            logger.warning("%s", error)
        forget_module_state()

    def _cancel_calls(self) -> None:
        """Calls that still wait for a dead peer end with CancelledError instead of blocking their threads for ever."""
        loop = self.client._loop

        done = threading.Event()

        def cancel() -> None:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            done.set()

        loop.call_soon_threadsafe(cancel)
        if not done.wait(PROBE_S):
            # Over Mooncake its reads block the loop. TransferQueue leaks its context then, whose collection would hang.
            _left_behind.append(self.client)
            logger.warning("TransferQueue's loop does not answer; abandoning its calls")


_left_behind: list[Any] = []
"""Clients whose loop did not end; they must never be collected."""


@dataclass(slots=True)
class QueueProcess:
    """This process's session, while it has one."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    session: QueueSession | None = None

    def usable(self) -> QueueSession | None:
        return None if self.session is None or self.session.ended else self.session

    def give_up(self, session: QueueSession, *, is_owner: bool) -> None:
        """End a store's use of the session; called under the lock."""
        session.users -= 1
        if is_owner:
            session.ended = session.ended or f"its owner has closed TransferQueue of run {session.run_id!r}"
            session.end_service()
        elif session.users == 0 and not session.is_owner:
            session.ended = session.ended or "the last client of this process is closed"
            session.leave()
        if session.ended and self.session is session:
            self.session = None


def _wait(future: concurrent.futures.Future[_T], session: QueueSession, deadline: float) -> _T:
    while True:
        left = deadline - time.monotonic()
        try:
            return future.result(timeout=max(min(left, PROBE_S), 0.0))
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            dead = session.dead()
            if dead:
                session.ended = f"TransferQueue has lost {name_some(dead)}"
                raise DataPlaneClosed(f"{session.ended}; its rows are gone") from None
            if left <= PROBE_S:
                raise


def _kind_of(error: Exception) -> type[DataPlaneError]:
    """Return the kind of error that an engine's error means while all of its processes live."""
    text = str(error)
    if any(lacks in text for lacks in UNIT_LACKS_KEY):
        return KeysNotFound  # cleared between the controller's answer and the unit's
    if UNIT_IS_FULL in text:
        return CapacityExceeded
    codes = {int(code) for code in re.findall(r"-\d{3}\b", text)}
    kinds = {NO_SPACE: CapacityExceeded, TRANSFER_FAILED: PayloadLost, NOT_FOUND: KeysNotFound}
    return next((kind for code, kind in kinds.items() if code in codes), DataPlaneError)


Value: TypeAlias = bytes | list[bytes | np.ndarray]
"""A chunk as one value of TransferQueue."""

FIELD = "payload"
"""Name of the field that holds chunks."""
INLINE_BYTES = 64 << 10
"""Smaller parts are sent inside TransferQueue's message: a frame of its own costs 20 us on each side."""


def as_value(parts: Parts) -> Value:
    """Return a chunk as TransferQueue takes it: small parts as bytes in its message, large ones as frames of their own,
    which are not copied on the way into the socket and out of it."""
    if sum([part.nbytes for part in parts]) < INLINE_BYTES:
        return b"".join(parts)
    return [bytes(part) if part.nbytes < INLINE_BYTES else np.frombuffer(part, dtype=np.uint8) for part in parts]


def as_parts(value: Any) -> Parts:
    return [memoryview(part) for part in (value if isinstance(value, list) else [value])]


async def write_values(manager: Any, values: Mapping[str, Value]) -> None:
    """Put chunks into their units.

    Args:
        manager: the storage manager of TransferQueue's client.
        values: by the ids under which they are stored.
    """
    rows = list(values.values())

    def write(unit: str, group: Any) -> Coroutine[Any, Any, Any]:
        fields = {FIELD: [rows[position] for position in group.batch_positions]}
        call = partial(manager._put_to_single_storage_unit, group.global_indexes, fields, target_storage_unit=unit)
        return _tried("put", manager, unit, group, call)

    await _in_each_unit(manager, list(values), write)


async def read_values(manager: Any, stored_ids: Sequence[str]) -> list[Any]:
    """Get chunks in the order asked for; the error of a unit that lacks one says so."""
    values: list[Any] = [None] * len(stored_ids)

    async def read(unit: str, group: Any) -> None:
        call = partial(manager._get_from_single_storage_unit, group.global_indexes, [FIELD], target_storage_unit=unit)
        _, found = await _tried("get", manager, unit, group, call)
        for position, value in zip(group.batch_positions, found[FIELD], strict=True):
            values[position] = value

    await _in_each_unit(manager, stored_ids, read)
    return values


async def drop_values(manager: Any, stored_ids: Sequence[str]) -> None:
    """Free chunks; unknown ones are ignored."""

    def drop(unit: str, group: Any) -> Coroutine[Any, Any, Any]:
        found: Coroutine[Any, Any, Any] = manager._clear_single_storage_unit(
            group.global_indexes, target_storage_unit=unit
        )
        return found

    await _in_each_unit(manager, stored_ids, drop)


async def _in_each_unit(manager: Any, stored_ids: Sequence[str], call: Any) -> None:
    # 63 bits: a unit is chosen by the remainder, and messages carry signed numbers.
    groups = manager._group_by_hash([chunk_tag(stored) >> 1 for stored in stored_ids])
    await asyncio.gather(*(call(unit, group) for unit, group in groups.items()))


def _tried(what: str, manager: Any, unit: str, group: Any, call: Any) -> Coroutine[Any, Any, Any]:
    found: Coroutine[Any, Any, Any] = manager._request_with_retry(
        what, unit, f"chunks={len(group.global_indexes)}", call
    )
    return found
