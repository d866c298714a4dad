"""Payload stores by name: starts the one that a run's config names, or joins that of its owner. Used by `factory`.

What differs from store to store is in `store_kinds`. Adapters are imported when they are used: a process needs the
engines of its own store only.
"""

from __future__ import annotations

import logging

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.adapters.noop import NoopStore
from nemo_rl.data_plane.address import DataPlaneAddress
from nemo_rl.data_plane.interfaces import PayloadStore
from nemo_rl.data_plane.memory_plan import memory_plan
from nemo_rl.data_plane.store_kinds import kind_named
from nemo_rl.utils.deadlines import DEFAULT_START, StartUp

__all__ = ["forget_store", "impl_of", "join_store", "start_store"]

logger = logging.getLogger(__name__)


def impl_of(config: DataPlaneConfig) -> str:
    """The adapter's name; a config that nobody has resolved means one process."""
    return config.resolved(has_actors=False).impl or "noop"


def start_store(config: DataPlaneConfig, *, run_id: str, start: StartUp = DEFAULT_START) -> PayloadStore:
    """The owner's store; its close ends the service."""
    plan = memory_plan(config)
    if plan:
        logger.info("%s", plan)
    return kind_named(impl_of(config)).start(config, run_id=run_id, start=start)


def join_store(address: DataPlaneAddress) -> PayloadStore:
    """A store for another client of the run.

    Raises:
        DataPlaneClosed: the run's store is gone, or this process cannot reach it.
    """
    return kind_named(impl_of(address.config)).join(address)


def forget_store(run_id: str) -> None:
    """The run has ended."""
    NoopStore.forget(run_id)
