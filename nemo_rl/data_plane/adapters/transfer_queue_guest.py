"""Runs in a TransferQueue that another program has started: found, checked, and left as it was.

A run has partitions of its own there (`keys.queue_partition`), and one row that says which process owns them. Its
close removes all of them; those of a run whose owner has died are removed by its guard (`transfer_queue_guard`), or by
the next run that joins. The one invariant: nothing outside the partitions of a run is ever touched, and the controller
is never ended.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from subprocess import DEVNULL
from typing import Any

import ray
import torch
from tensordict import TensorDict

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.adapters.transfer_queue_rows import remove_partition
from nemo_rl.data_plane.adapters.transfer_queue_service import find_controller, read_settings
from nemo_rl.data_plane.adapters.transfer_queue_session import QueueSession
from nemo_rl.data_plane.keys import QUEUE_PREFIX, queue_partition
from nemo_rl.distributed.liveness import ProcessIdentity
from nemo_rl.errors import DataPlaneClosed, DataPlaneError, ResourceError
from nemo_rl.utils.child_process import ChildProcess

__all__ = ["CLOSED", "CLOSE_S", "find_queue", "leave_clean", "mark_owner", "remove_dead_runs", "start_guard"]

logger = logging.getLogger(__name__)

BACKENDS = {"simple": "SimpleStorage", "mooncake_cpu": "MooncakeStore"}
OWNER = "owner"
"""Key of the row that says which process owns a run's partitions."""
SWITCH = "data_plane.transfer_queue.connect"
GUARD = "nemo_rl.data_plane.adapters.transfer_queue_guard"
CLOSED = b"closed"
"""Word to a guard: the run has removed its partitions itself."""
CLOSE_S = 10.0
"""Seconds in which a guard must end then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundQueue:
    """A TransferQueue that runs in this Ray cluster."""

    controller: str
    """Ray's id of its controller actor."""
    units: Mapping[str, str]
    """Storage unit -> `host:port` where it listens."""
    master: str
    """`host:port` of its Mooncake master; empty for backend `simple`."""


def find_queue(config: DataPlaneConfig, *, timeout_s: float, checks: bool) -> FoundQueue:
    """Return the cluster's TransferQueue, if a run can use it.

    Args:
        checks: its settings must suit the config.

    Raises:
        ResourceError: there is none, or its settings do not suit the run's.
        DataPlaneClosed: this process is not connected to Ray.
    """
    if not ray.is_initialized():
        raise DataPlaneClosed(f"{SWITCH}: this process is not connected to Ray; call ray.init first")
    controller = find_controller()
    if controller is None:
        raise ResourceError(
            f"{SWITCH}: this Ray cluster has no TransferQueue controller to join; start it first "
            f"(transfer_queue.init), or set {SWITCH}=false"
        )
    settings = read_settings(controller, timeout_s)
    if settings is None:
        raise ResourceError(f"{SWITCH}: the cluster's TransferQueue controller was not finished in {timeout_s:.0f} s")
    backend = str(settings["backend"]["storage_backend"])
    own = settings["backend"][backend]
    if checks:
        _check_settings(config, settings, backend)
    units = {f"storage unit {name}": f"{one.ip}:{one.ports['put_get_socket']}" for name, one in _units(own).items()}
    master = str(own["master_server_address"]) if backend == BACKENDS["mooncake_cpu"] else ""
    return FoundQueue(controller=controller._actor_id.hex(), units=units, master=master)


def _units(own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the addresses of the storage units, by name; none for Mooncake."""
    return own.get("zmq_info") or {}


def _check_settings(config: DataPlaneConfig, settings: Mapping[str, Any], backend: str) -> None:
    wanted = BACKENDS[config.backend]
    if backend != wanted:
        named = {name: key for key, name in BACKENDS.items()}.get(backend)
        advice = f"set data_plane.backend={named}" if named else f"only {', '.join(BACKENDS.values())} are supported"
        raise ResourceError(
            f"data_plane.backend: {config.backend!r} needs {wanted}, but the cluster's TransferQueue stores in "
            f"{backend}; {advice}"
        )
    if not settings["controller"]["polling_mode"]:
        raise ResourceError(
            f"{SWITCH}: the cluster's TransferQueue has controller.polling_mode=false, where one fetch that finds too "
            "few rows stops the controller for all clients, for seconds; start it with polling_mode=true"
        )
    room, rows = settings["backend"][backend].get("total_storage_size"), config.storage_capacity.rows
    if room is not None and room < rows:
        raise ResourceError(
            f"data_plane.storage_capacity.rows: {rows}, but the cluster's TransferQueue holds {room} rows in all "
            "(total_storage_size), and a put beyond that fails instead of waiting; set at most that"
        )


def mark_owner(session: QueueSession, *, run_id: str, deadline: float) -> None:
    """Write down which process owns the run's partitions, for `remove_dead_runs`."""
    me, node = ProcessIdentity.of_this_process(), ray.get_runtime_context().get_node_id()
    tags = {"namespace": me.namespace, "pid": me.pid, "start": me.start, "node": node}
    # Over Mooncake a row without a field cannot be cleared.
    fields = TensorDict({OWNER: torch.zeros(1, 1, dtype=torch.uint8)}, batch_size=[1])
    client, partition = session.client, queue_partition(run_id)

    async def put() -> None:
        meta = await client.async_kv_retrieve_meta(keys=[OWNER], partition_id=partition, create=True)
        meta.update_custom_meta([tags])
        await client.async_put(fields, meta)

    session.run("put", put, deadline)


def remove_run(session: QueueSession, *, run_id: str, deadline: float) -> None:
    client, own = session.client, queue_partition(run_id)

    async def remove() -> None:
        for partition in await client.async_get_partition_list():
            if partition == own or partition.startswith(f"{own}/"):
                await remove_partition(client, partition)

    session.run("removal of partitions", remove, deadline)


def remove_dead_runs(session: QueueSession, *, deadline: float) -> list[str]:
    """Remove the partitions of runs whose owner has died without closing; return their run ids."""
    client = session.client
    listed = session.run("list of keys", lambda: client.async_kv_list(None), deadline)
    removed = []
    for partition, rows in listed.items():
        if not partition.startswith(QUEUE_PREFIX) or OWNER not in rows or not _has_died(rows[OWNER]):
            continue
        run_id = partition.removeprefix(QUEUE_PREFIX)
        logger.warning("run %s has died without closing; removing its partitions in TransferQueue", run_id)
        remove_run(session, run_id=run_id, deadline=deadline)
        removed.append(run_id)
    return removed


def _has_died(tags: Mapping[str, Any]) -> bool:
    owner = ProcessIdentity(namespace=str(tags["namespace"]), pid=int(tags["pid"]), start=int(tags["start"]))
    if owner.is_visible_from(ProcessIdentity.of_this_process()):
        return not owner.is_alive()
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return tags["node"] not in alive


def leave_clean(session: QueueSession, *, run_id: str, timeout_s: float) -> None:
    """Remove the run's partitions at its close; what cannot be removed is left to the next run that joins."""
    try:
        remove_run(session, run_id=run_id, deadline=time.monotonic() + timeout_s)
    except DataPlaneError as error:
        logger.warning("could not remove the partitions of run %s in TransferQueue: %s", run_id, error)


def start_guard(*, run_id: str, ray_address: str, node: str) -> ChildProcess:
    """Start the guard of one run; `stop(CLOSED, ..)` ends it when the run has removed its partitions itself.

    Args:
        node: address of this node in the Ray cluster.
    """
    # Ray takes a loopback address for that of another card, where its driver is to join a cluster.
    loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if node.startswith("127.") else {}
    command = [sys.executable, "-m", GUARD, run_id, ray_address, node]
    return ChildProcess(command, name=f"the guard of run {run_id}", log=DEVNULL, environment=loopback)
