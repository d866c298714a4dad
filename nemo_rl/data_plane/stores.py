"""Payload stores by name: starts the one that a run's config names, or joins that of its owner. Used by `factory`.

Adapters are imported when they are used: a process needs the engines of its own store only.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Protocol

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.config.parts import STORES
from nemo_rl.data_plane.adapters.noop import NoopStore, SharedNoopStore
from nemo_rl.data_plane.adapters.shm import SharedMemoryStore
from nemo_rl.data_plane.address import DataPlaneAddress
from nemo_rl.data_plane.environment import transport_environment
from nemo_rl.data_plane.interfaces import PayloadStore
from nemo_rl.data_plane.memory_plan import memory_plan
from nemo_rl.errors import DataPlaneClosed
from nemo_rl.utils.start_up import DEFAULT_START, StartUp

if TYPE_CHECKING:
    from nemo_rl.data_plane.adapters.mooncake import MooncakeStore
    from nemo_rl.data_plane.adapters.ray_node import RayNodeStore
    from nemo_rl.data_plane.adapters.ray_store import RayStore
    from nemo_rl.data_plane.adapters.transfer_queue import TransferQueueStore

__all__ = ["forget_store", "impl_of", "join_store", "start_store"]

logger = logging.getLogger(__name__)

_noop_stores: dict[str, NoopStore] = {}
"""Of the runs whose owner is in this process."""


def impl_of(config: DataPlaneConfig) -> str:
    """The adapter's name; a config that nobody has resolved means one process."""
    return config.resolved(has_actors=False).impl or "noop"


def start_store(config: DataPlaneConfig, *, run_id: str, start: StartUp = DEFAULT_START) -> PayloadStore:
    """The owner's store; its close ends the service."""
    impl = impl_of(config)
    plan = memory_plan(config)
    if plan:
        logger.info("%s", plan)
    if impl == "ray":
        return _ray_kind(config).start(config, run_id=run_id, start=start)
    if impl == "transfer_queue":
        return _transfer_queue(config).start(config, run_id=run_id, start=start)
    if impl == "mooncake":
        return _mooncake(config).start(config, run_id=run_id, start=start)
    if not STORES.is_builtin(impl):
        return _user_defined(impl).start(config, run_id=run_id, start=start)
    if impl == "shm":
        return SharedMemoryStore.start(config.shm, run_id=run_id, start=start)
    store = _noop_stores[run_id] = NoopStore()
    return store


def join_store(address: DataPlaneAddress) -> PayloadStore:
    """A store for another client of the run.

    Raises:
        DataPlaneClosed: the run's store is gone, or this process cannot reach it.
    """
    config, run_id, impl = address.config, address.run_id, impl_of(address.config)
    if impl == "ray":
        return _ray_kind(config).join(config, run_id=run_id)
    if impl == "transfer_queue":
        return _transfer_queue(config).join(run_id=run_id, timeout_s=address.start_timeout_s)
    if impl == "mooncake":
        return _mooncake(config).join(config, run_id=run_id, address=address.store, timeout_s=address.start_timeout_s)
    if not STORES.is_builtin(impl):
        return _user_defined(impl).join(address)
    if impl == "shm":
        return SharedMemoryStore.join(config.shm, run_id=run_id)
    store = _noop_stores.get(run_id)
    if store is None:
        raise DataPlaneClosed(
            f"run {run_id!r}: its noop store lives in process {address.process_id} and this is {os.getpid()}, or its "
            "owner has closed it; for workers in other processes use data_plane.impl=shm, or ray under Ray"
        )
    return SharedNoopStore(store)


def forget_store(run_id: str) -> None:
    """The run has ended."""
    _noop_stores.pop(run_id, None)


class _OpenableStore(Protocol):
    """What `data_plane.impl: module:Class` names, beside being a `PayloadStore`."""

    def start(self, config: DataPlaneConfig, *, run_id: str, start: StartUp) -> PayloadStore:
        """(class method) The owner's store; its close ends the service."""

    def join(self, address: DataPlaneAddress) -> PayloadStore:
        """(class method) The store of another process; `address.store` is the owner's `PayloadStore.address`."""


def _user_defined(impl: str) -> _OpenableStore:
    kind: _OpenableStore = STORES.load(impl, key="data_plane.impl")  # type: ignore[assignment]
    return kind


def _ray_kind(config: DataPlaneConfig) -> type[RayNodeStore] | type[RayStore]:
    if config.ray.owner == "node":
        from nemo_rl.data_plane.adapters.ray_node import RayNodeStore  # noqa: PLC0415 - Ray is optional here

        return RayNodeStore
    from nemo_rl.data_plane.adapters.ray_store import RayStore  # noqa: PLC0415 - Ray is optional here

    return RayStore


def _mooncake(config: DataPlaneConfig) -> type[MooncakeStore]:
    """The adapter, imported after the variables that Mooncake reads are set."""
    _set_environment(config)
    from nemo_rl.data_plane.adapters.mooncake import MooncakeStore  # noqa: PLC0415 - see above

    return MooncakeStore


def _set_environment(config: DataPlaneConfig) -> None:
    for name, value in transport_environment(config).items():
        os.environ.setdefault(name, value)


def _transfer_queue(config: DataPlaneConfig) -> type[TransferQueueStore]:
    """The adapter, imported after the variables that TransferQueue reads at import are set."""
    _set_environment(config)
    from nemo_rl.data_plane.adapters.transfer_queue import TransferQueueStore  # noqa: PLC0415 - see above

    return TransferQueueStore
