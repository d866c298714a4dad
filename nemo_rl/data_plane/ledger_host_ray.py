"""The ledger in a Ray actor: the host for workers that are Ray actors. The only ledger file that imports Ray.

The actor is found by name, so its address is plain text. It needs no CPU of its own, and it ends with its owner.
"""

from __future__ import annotations

from collections.abc import Mapping

import ray
from ray import exceptions as ray_errors

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.address import LedgerAddress
from nemo_rl.data_plane.ledger import Args, Reply
from nemo_rl.data_plane.ledger_host import LedgerService, build_ledger, read_reply
from nemo_rl.errors import DataPlaneClosed, DataPlaneTimeout

__all__ = ["RayLedgerHost"]

NAMESPACE = "nemo_rl"
START_TIMEOUT_S = 60.0
"""A worker process on a busy node can take tens of seconds to import Ray."""


class _LedgerActor:
    """Serves requests one at a time."""

    def __init__(self, config: DataPlaneConfig, run_id: str) -> None:
        self._service = LedgerService(build_ledger(config, run_id=run_id))

    def handle(self, request: Mapping[str, object], timeout_s: float) -> Reply:
        return self._service.handle(request, timeout_s=timeout_s)

    def ping(self) -> bool:
        return True


class RayLedgerHost:
    """One client's way to the ledger actor of a run."""

    def __init__(self, *, run_id: str, actor: object, is_owner: bool) -> None:
        self._run_id, self._actor, self._is_owner = run_id, actor, is_owner

    @classmethod
    def start(cls, config: DataPlaneConfig, *, run_id: str) -> RayLedgerHost:
        """Starts the actor; its owner is this process.

        Raises:
            DataPlaneTimeout: the actor did not answer in time.
            DataPlaneClosed: the actor died while it started.
        """
        actor_class = ray.remote(_LedgerActor)
        actor = actor_class.options(name=_actor_name(run_id), namespace=NAMESPACE, num_cpus=0, max_restarts=0).remote(
            config, run_id
        )
        host = cls(run_id=run_id, actor=actor, is_owner=True)
        try:
            host._get(actor.ping.remote(), timeout_s=START_TIMEOUT_S)
        except BaseException:
            host.close()
            raise
        return host

    @classmethod
    def join(cls, address: LedgerAddress) -> RayLedgerHost:
        """The actor that the owner of the run started.

        Raises:
            DataPlaneClosed: there is no such actor (any more), or this process is not connected to Ray.
        """
        if not ray.is_initialized():
            raise DataPlaneClosed(f"run {address.run_id!r}: this process is not connected to Ray; call ray.init first")
        try:
            actor = ray.get_actor(address.actor_name, namespace=NAMESPACE)
        except ValueError as error:
            raise DataPlaneClosed(f"run {address.run_id!r} has no ledger actor; its owner has closed it") from error
        return cls(run_id=address.run_id, actor=actor, is_owner=False)

    @property
    def address(self) -> LedgerAddress:
        return LedgerAddress(kind="ray_actor", run_id=self._run_id, actor_name=_actor_name(self._run_id))

    def call(self, op: str, args: Args, *, timeout_s: float) -> Reply:
        request = {"run": self._run_id, "op": op, "args": args}
        return read_reply(self._get(self._actor.handle.remote(request, timeout_s), timeout_s=timeout_s))  # type: ignore[attr-defined]

    def close(self) -> None:
        if self._is_owner and ray.is_initialized():
            ray.kill(self._actor, no_restart=True)

    def _get(self, reference: object, *, timeout_s: float) -> Reply:
        try:
            reply: Reply = ray.get(reference, timeout=timeout_s)
        except ray_errors.GetTimeoutError as error:
            raise DataPlaneTimeout(f"the ledger actor did not answer within {timeout_s:.1f} s") from error
        except (ray_errors.RayActorError, ray_errors.RaySystemError) as error:
            raise DataPlaneClosed(f"run {self._run_id!r}: the ledger actor is gone: {error}") from error
        return reply


def _actor_name(run_id: str) -> str:
    return f"ledger-{run_id}"
