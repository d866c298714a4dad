"""The ledger in a Ray actor: the host for workers that are Ray actors. The only ledger file that imports Ray.

The actor is found by name, so its address is plain text. It needs no CPU of its own, and it ends with its owner.
Processes on its node call the ledger through a loopback socket, which answers several times faster than Ray; other
nodes go through Ray. The actor also keeps the references of `adapters.ray_store`, which only Ray can carry: producers
send them without waiting, so the order in which `hold` and `let_go` arrive does not matter.

With `data_plane.ledger.recovery: journal` Ray starts the actor again when it has died: it recovers from its journal,
and clients ask it for its new socket and make their calls again, by the same numbers (`recovery.py`).
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import exceptions as ray_errors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.address import Handles, LedgerAddress, write_attach_file
from nemo_rl.data_plane.keys import client_label
from nemo_rl.data_plane.ledger.host import LedgerHost, build_service, final_loss, read_reply
from nemo_rl.data_plane.ledger.host_socket import LedgerServer, SocketLedgerHost
from nemo_rl.data_plane.ledger.journal import JOURNAL_FILE, create_journal, remove_journal
from nemo_rl.data_plane.ledger.ledger import Args, Reply
from nemo_rl.data_plane.ledger.recovery import CallNumbers
from nemo_rl.distributed.run_folder import make_owned_folder
from nemo_rl.errors import DataPlaneClosed, DataPlaneTimeout, LedgerLost
from nemo_rl.utils.deadlines import DEFAULT_START, StartUp, awake_s

__all__ = ["NAMESPACE", "Place", "RayLedgerHost", "ReferenceTable", "ledger_actor_name"]

Place = tuple[object, int]
"""The reference of an object, and which of its chunks."""


class ReferenceTable:
    """References of live chunks. Not thread-safe: the actor's calls come one at a time.

    Example:
        >>> table = ReferenceTable()
        >>> table.let_go(["late"])
        >>> table.hold({"late": ("ref", 0), "live": ("ref", 1)})
        >>> table.lend(["late", "live"])
        {'live': ('ref', 1)}
    """

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}
        self._freed_early: set[str] = set()
        """Chunks that were freed before their reference came."""

    def hold(self, places: Mapping[str, Place]) -> None:
        """Keep references until their chunks are freed."""
        for chunk_id, place in places.items():
            if chunk_id in self._freed_early:
                self._freed_early.discard(chunk_id)
            else:
                self._places[chunk_id] = place

    def lend(self, chunk_ids: Sequence[str]) -> dict[str, Place]:
        return {chunk_id: self._places[chunk_id] for chunk_id in chunk_ids if chunk_id in self._places}

    def let_go(self, chunk_ids: Sequence[str]) -> None:
        """The chunks are freed; an object goes with its last reference."""
        for chunk_id in chunk_ids:
            if self._places.pop(chunk_id, None) is None:
                self._freed_early.add(chunk_id)

    def __len__(self) -> int:
        return len(self._places)


logger = logging.getLogger(__name__)

NAMESPACE = "nemo_rl"
CLOSE_TIMEOUT_S = 2.0
"""Time for the last events to reach their file."""
RECOVERY_LIMIT_S = 30.0
"""Longest wait of a call for a ledger that has died: it is back within two seconds, or ten on a busy machine."""
RECOVERY_POLL_S = 0.05


class _LedgerActor(ReferenceTable):
    """Serves requests one at a time."""

    def __init__(
        self,
        config: DataPlaneConfig,
        run_id: str,
        *,
        validate: bool,
        log_dir: Path | None,
        journal: Path | None,
        owner: int,
        metrics_port: int,
    ) -> None:
        """Args:
        journal: file to recover from; None where a death of this process is final.
        owner: id of the run's process.
        metrics_port: where that process serves metrics; 0 where it serves none.
        """
        super().__init__()
        self._service = build_service(config, run_id=run_id, validate=validate, log_dir=log_dir, journal=journal)
        self._server = LedgerServer(self._service)
        if journal is not None and log_dir is not None:
            address = self._server.address
            write_attach_file(log_dir, ledger=address, process_id=owner, metrics_port=metrics_port)

    def handle(self, request: Mapping[str, object], timeout_s: float) -> Reply:
        return self._service.handle(request, timeout_s=timeout_s)

    def socket_address(self) -> LedgerAddress:
        return self._server.address

    def close(self) -> None:
        self._server.close()


class RayLedgerHost(LedgerHost):
    """One client's way to the ledger actor of a run."""

    def __init__(
        self, *, address: LedgerAddress, actor: object, recovers: bool, at_close: ExitStack | None = None
    ) -> None:
        """Args:
        recovers: calls wait for an actor that has died, and are made again.
        at_close: given by the owner, whose close ends the ledger.
        """
        self._address, self._actor, self._at_close = address, actor, at_close
        self._is_near = bool(address.port) and address.node == ray.get_runtime_context().get_node_id()
        # The port of an actor that may have been started again is asked of it.
        socket = SocketLedgerHost(replace(address, kind="socket")) if self._is_near and not recovers else None
        self._socket: SocketLedgerHost | None = socket
        self._numbers = CallNumbers(client_label(address.node)) if recovers else None
        self._lock = threading.Lock()
        self._is_closed = False

    @classmethod
    def start(
        cls,
        config: DataPlaneConfig,
        *,
        run_id: str,
        start: StartUp = DEFAULT_START,
        validate: bool = False,
        log_dir: Path | None = None,
        metrics_port: int = 0,
    ) -> RayLedgerHost:
        """Start the actor, on the node of this process; its owner is this process.

        Args:
            log_dir: where the ledger's events and its journal are written.
            metrics_port: port of the run's metrics, for the file that names them; 0 when none are served.

        Raises:
            DataPlaneTimeout: the actor did not answer in time.
            DataPlaneClosed: the actor died while it started.
        """
        recovers, name = config.ledger.recovery == "journal", ledger_actor_name(run_id)
        with ExitStack() as undo:
            journal = _new_journal(run_id, log_dir, undo) if recovers else None
            node = ray.get_runtime_context().get_node_id()
            actor_class = ray.remote(_LedgerActor).options(
                name=name,
                namespace=NAMESPACE,
                num_cpus=0,
                max_restarts=-1 if recovers else 0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            actor = actor_class.remote(
                config,
                run_id,
                validate=validate,
                log_dir=None if log_dir is None else log_dir.absolute(),
                journal=journal,
                owner=os.getpid(),
                metrics_port=metrics_port,
            )
            undo.callback(_end_actor, actor)
            try:
                with start.waiting_for("the ledger actor"):
                    near: LedgerAddress = ray.get(actor.socket_address.remote(), timeout=start.timeout_s)
            except ray_errors.GetTimeoutError as error:
                raise DataPlaneTimeout(start.too_late("the ledger actor did not start")) from error
            except ray_errors.RayError as error:
                raise DataPlaneClosed(
                    f"run {run_id!r}: the ledger actor died while it started: {_cause_of(error)}"
                ) from error
            address = replace(near, kind="ray_actor", actor_name=name, node=node)
            return cls(address=address, actor=actor, recovers=recovers, at_close=undo.pop_all())

    @classmethod
    def join(cls, address: LedgerAddress, *, recovers: bool) -> RayLedgerHost:
        """Return the actor that the owner of the run started.

        Raises:
            DataPlaneClosed: there is no such actor (any more), or this process is not connected to Ray.
        """
        if not ray.is_initialized():
            raise DataPlaneClosed(f"run {address.run_id!r}: this process is not connected to Ray; call ray.init first")
        try:
            actor = ray.get_actor(address.actor_name, namespace=NAMESPACE)
        except ValueError as error:
            raise DataPlaneClosed(f"run {address.run_id!r} has no ledger actor; its owner has closed it") from error
        return cls(address=address, actor=actor, recovers=recovers)

    @property
    def address(self) -> LedgerAddress:
        return self._address

    def call(self, op: str, args: Args, *, timeout_s: float, handles: Handles | None = None) -> Reply:
        request: Args = {"run": self._address.run_id, "op": op, "args": args, "handles": handles}
        if self._numbers is None:
            with final_loss():
                return read_reply(self._exchange(request, timeout_s))
        with self._numbers.next() as numbered:
            return read_reply(self._exchange_until_back({**request, **numbered}, timeout_s))

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            socket, self._socket = self._socket, None
        if socket is not None:
            socket.close()
        if self._at_close is None:
            return
        if ray.is_initialized():
            try:
                closing = self._actor.close.remote()  # type: ignore[attr-defined]
                _get(self._address, closing, timeout_s=CLOSE_TIMEOUT_S)
            except (DataPlaneTimeout, DataPlaneClosed) as error:
                logger.debug("the ledger actor did not close by itself: %s", error)
        self._at_close.close()

    def _exchange(self, request: Args, timeout_s: float) -> Reply:
        if self._is_near:
            socket = self._socket or self._find_socket(timeout_s)
            return socket.exchange(request, timeout_s=timeout_s)
        pending = self._actor.handle.remote(request, timeout_s)  # type: ignore[attr-defined]
        reply: Reply = _get(self._address, pending, timeout_s=timeout_s)
        return reply

    def _exchange_until_back(self, request: Args, timeout_s: float) -> Reply:
        """Send a numbered request until the ledger has answered, also when it has died meanwhile.

        Raises:
            LedgerLost: it has not come back in time. DataPlaneClosed: it never will.
        """
        give_up = awake_s() + timeout_s
        lost_at = 0.0
        while True:
            left = max(give_up - awake_s(), 0.0)
            try:
                if lost_at and self._is_near:
                    self._find_socket(left)
                reply = self._exchange(request, left)
            except LedgerLost as error:
                now = awake_s()
                if not lost_at:
                    lost_at, give_up = now, min(give_up, now + RECOVERY_LIMIT_S)
                if now + RECOVERY_POLL_S > give_up:
                    raise LedgerLost(f"{error}; it has not come back for {now - lost_at:.1f} s") from error
                time.sleep(RECOVERY_POLL_S)
                continue
            if lost_at:
                gone_s = awake_s() - lost_at
                logger.warning("run %s: the ledger has come back after %.1f s", self._address.run_id, gone_s)
            return reply

    def _find_socket(self, timeout_s: float) -> SocketLedgerHost:
        """Ask the actor for its socket, and use it from now on."""
        asked = self._actor.socket_address.remote()  # type: ignore[attr-defined]
        near: LedgerAddress = _get(self._address, asked, timeout_s=timeout_s)
        with self._lock:
            if self._is_closed:
                raise DataPlaneClosed(f"this client of run {self._address.run_id!r} is closed")
            before = self._socket
            if before is not None and before.address == near:
                return before
            self._socket = found = SocketLedgerHost(near)
        if before is not None:
            before.drop_idle()
        return found


def _get(ledger: LedgerAddress, reference: object, *, timeout_s: float) -> Any:
    try:
        return ray.get(reference, timeout=timeout_s)
    except ray_errors.GetTimeoutError as error:
        raise DataPlaneTimeout(
            f"the ledger actor (process {ledger.process_id}) did not answer within {timeout_s:.1f} s"
        ) from error
    except (ray_errors.RayActorError, ray_errors.RaySystemError) as error:
        kind = LedgerLost if isinstance(error, ray_errors.ActorUnavailableError) else DataPlaneClosed
        text = f"run {ledger.run_id!r}: the ledger actor is gone (process {ledger.process_id}): {_cause_of(error)}"
        raise kind(text) from error


def _new_journal(run_id: str, log_dir: Path | None, at_end: ExitStack) -> Path:
    """Make the file in the run's folder, or in a temporary one."""
    if log_dir is None:
        folder = make_owned_folder()
        at_end.callback(shutil.rmtree, folder, ignore_errors=True)
    else:
        folder = log_dir.absolute()
    journal = folder / JOURNAL_FILE
    at_end.callback(remove_journal, journal)
    create_journal(journal, run_id=run_id)
    return journal


def _cause_of(error: Exception) -> str:
    """Return Ray's text; of an actor that could not start, and so not recover, the error alone, without its trace."""
    text = str(error).strip()
    return text.splitlines()[-1].partition("Error: ")[2] or text if "creation task" in text else text


def _end_actor(actor: Any) -> None:
    if ray.is_initialized():
        ray.kill(actor, no_restart=True)


def ledger_actor_name(run_id: str) -> str:
    """Name of the ledger's actor, in `NAMESPACE`."""
    return f"ledger-{run_id}"
