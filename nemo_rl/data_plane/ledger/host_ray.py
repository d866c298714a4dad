"""The ledger in a Ray actor: the host for workers that are Ray actors. The only ledger file that imports Ray.

The actor is found by name, so its address is plain text. It needs no CPU of its own, and it ends with its owner.
Processes on its node call the ledger through a loopback socket, which answers several times faster than Ray; other
nodes go through Ray. The actor also keeps the references of `adapters.ray_store`, which only Ray can carry: producers
send them without waiting, so the order in which `hold` and `let_go` arrive does not matter.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import exceptions as ray_errors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.address import Handles, LedgerAddress
from nemo_rl.data_plane.ledger.host import build_service, read_reply
from nemo_rl.data_plane.ledger.host_socket import LedgerServer, SocketLedgerHost
from nemo_rl.data_plane.ledger.ledger import Args, Reply
from nemo_rl.errors import DataPlaneClosed, DataPlaneTimeout
from nemo_rl.utils.deadlines import DEFAULT_START, StartUp

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
        """Return the references of these chunks that are here."""
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


class _LedgerActor:
    """Serves requests one at a time."""

    def __init__(self, config: DataPlaneConfig, run_id: str, *, validate: bool, log_dir: Path | None) -> None:
        self._service = build_service(config, run_id=run_id, validate=validate, log_dir=log_dir)
        self._server = LedgerServer(self._service)
        self._references = ReferenceTable()

    def handle(self, request: Mapping[str, object], timeout_s: float) -> Reply:
        return self._service.handle(request, timeout_s=timeout_s)

    def socket_address(self) -> LedgerAddress:
        return self._server.address

    def hold(self, places: Mapping[str, Place]) -> None:
        self._references.hold(places)

    def lend(self, chunk_ids: Sequence[str]) -> dict[str, Place]:
        return self._references.lend(chunk_ids)

    def let_go(self, chunk_ids: Sequence[str]) -> None:
        self._references.let_go(chunk_ids)

    def close(self) -> None:
        self._server.close()


class RayLedgerHost:
    """One client's way to the ledger actor of a run."""

    def __init__(self, *, address: LedgerAddress, actor: object, is_owner: bool) -> None:
        self._address, self._actor, self._is_owner = address, actor, is_owner
        self._run_id = address.run_id
        is_near = bool(address.port) and address.node == ray.get_runtime_context().get_node_id()
        self._socket = SocketLedgerHost(replace(address, kind="socket")) if is_near else None

    @classmethod
    def start(
        cls,
        config: DataPlaneConfig,
        *,
        run_id: str,
        start: StartUp = DEFAULT_START,
        validate: bool = False,
        log_dir: Path | None = None,
    ) -> RayLedgerHost:
        """Start the actor, on the node of this process; its owner is this process.

        Args:
            log_dir: where the ledger's events are written.

        Raises:
            DataPlaneTimeout: the actor did not answer in time.
            DataPlaneClosed: the actor died while it started.
        """
        actor_class = ray.remote(_LedgerActor)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = actor_class.options(
            name=ledger_actor_name(run_id), namespace=NAMESPACE, num_cpus=0, max_restarts=0, scheduling_strategy=here
        ).remote(config, run_id, validate=validate, log_dir=None if log_dir is None else log_dir.absolute())
        try:
            with start.waiting_for("the ledger actor"):
                near: LedgerAddress = ray.get(actor.socket_address.remote(), timeout=start.timeout_s)
        except ray_errors.GetTimeoutError as error:
            ray.kill(actor, no_restart=True)
            raise DataPlaneTimeout(start.too_late("the ledger actor did not start")) from error
        except ray_errors.RayError as error:
            raise DataPlaneClosed(f"run {run_id!r}: the ledger actor died while it started: {error}") from error
        except BaseException:
            ray.kill(actor, no_restart=True)
            raise
        address = LedgerAddress(
            kind="ray_actor",
            run_id=run_id,
            actor_name=ledger_actor_name(run_id),
            node=ray.get_runtime_context().get_node_id(),
            port=near.port,
            token=near.token,
            process_id=near.process_id,
        )
        return cls(address=address, actor=actor, is_owner=True)

    @classmethod
    def join(cls, address: LedgerAddress) -> RayLedgerHost:
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
        return cls(address=address, actor=actor, is_owner=False)

    @property
    def address(self) -> LedgerAddress:
        return self._address

    def call(self, op: str, args: Args, *, timeout_s: float, handles: Handles | None = None) -> Reply:
        if self._socket is not None:
            return self._socket.call(op, args, timeout_s=timeout_s, handles=handles)
        request = {"run": self._run_id, "op": op, "args": args, "handles": handles}
        pending = self._actor.handle.remote(request, timeout_s)  # type: ignore[attr-defined]
        reply: Reply = _get(self._address, pending, timeout_s=timeout_s)
        return read_reply(reply)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if not self._is_owner or not ray.is_initialized():
            return
        try:
            _get(self._address, self._actor.close.remote(), timeout_s=CLOSE_TIMEOUT_S)  # type: ignore[attr-defined]
        except (DataPlaneTimeout, DataPlaneClosed) as error:
            logger.debug("the ledger actor did not close by itself: %s", error)
        finally:
            ray.kill(self._actor, no_restart=True)


def _get(ledger: LedgerAddress, reference: object, *, timeout_s: float) -> Any:
    try:
        return ray.get(reference, timeout=timeout_s)
    except ray_errors.GetTimeoutError as error:
        raise DataPlaneTimeout(
            f"the ledger actor (process {ledger.process_id}) did not answer within {timeout_s:.1f} s"
        ) from error
    except (ray_errors.RayActorError, ray_errors.RaySystemError) as error:
        raise DataPlaneClosed(
            f"run {ledger.run_id!r}: the ledger actor is gone (process {ledger.process_id}): {error}"
        ) from error


def ledger_actor_name(run_id: str) -> str:
    """Name of the ledger's actor, in `NAMESPACE`."""
    return f"ledger-{run_id}"
