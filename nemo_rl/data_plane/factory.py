"""Builds data plane clients: the only place that knows which store and which ledger host a run uses.

The driver calls `build_data_plane_client(..., role="owner")`; workers call `attach_data_plane(address)`. `open_step`
opens a partition for one step and leaves it empty, whatever happens inside.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.adapters.noop import NoopStore
from nemo_rl.data_plane.address import DataPlaneAddress, LedgerAddress
from nemo_rl.data_plane.client import LedgerClient
from nemo_rl.data_plane.interfaces import DataPlaneClient, PayloadStore
from nemo_rl.data_plane.ledger_host import InProcessHost, LedgerHost, LedgerService, build_ledger
from nemo_rl.errors import ConfigError, DataPlaneClosed, DataPlaneError, name_some

__all__ = ["DataPlaneAddress", "attach_data_plane", "build_data_plane_client", "open_step"]

logger = logging.getLogger(__name__)

HostKind = Literal["in_process", "ray_actor", "socket"]

_services: dict[str, LedgerService] = {}
_noop_stores: dict[str, NoopStore] = {}
_registry_lock = threading.Lock()


def build_data_plane_client(
    config: DataPlaneConfig,
    *,
    run_id: str,
    role: Literal["owner", "attach"] = "owner",
    address: DataPlaneAddress | None = None,
) -> DataPlaneClient:
    """A client of the run's data plane.

    Args:
        role: the owner starts ledger and store, and its close ends them; `attach` joins those at `address`.

    Raises:
        ConfigError: a combination of store and ledger host that cannot work.
        ResourceError: too few CPUs for the storage actors, or another run owns the cluster's data plane.
    """
    if role == "attach":
        if address is None or address.run_id != run_id:
            raise DataPlaneError(f"attach to run {run_id!r}: pass the address of that run's owner, got {address}")
        return attach_data_plane(address)
    kind = _host_kind(config)
    host = _own_host(config, run_id, kind)
    try:
        store = _own_store(config, run_id)
    except BaseException:
        host.close()
        raise
    own = DataPlaneAddress(run_id=run_id, config=config, ledger=host.address, process_id=os.getpid())
    return _finish(LedgerClient(host=host, store=store, address=own, is_owner=True))


def attach_data_plane(address: DataPlaneAddress) -> DataPlaneClient:
    """A client for another part of the run; its close leaves the service running.

    Raises:
        DataPlaneClosed: the run's ledger or store does not exist (any more).
    """
    store = _join_store(address)
    host = _join_host(address.ledger, address.config)
    return _finish(LedgerClient(host=host, store=store, address=address, is_owner=False))


@contextmanager
def open_step(client: DataPlaneClient, partition_id: str) -> Iterator[None]:
    """One step in a registered partition: it is cleared at the end, also after an error, and must then be empty."""
    try:
        yield
    except BaseException:
        try:
            client.kv_clear(None, partition_id)
        except DataPlaneError as error:
            logger.warning("could not clear partition %r after a failed step: %s", partition_id, error)
        raise
    client.kv_clear(None, partition_id)
    left = client.kv_list(partition_id)
    if left:
        raise DataPlaneError(
            f"partition {partition_id!r}: {len(left)} rows are alive after the step was cleared: {name_some(left)}; "
            "a stage still writes"
        )


def _finish(client: LedgerClient) -> DataPlaneClient:
    return client


def _host_kind(config: DataPlaneConfig) -> HostKind:
    kind: HostKind = config.ledger_host or ("in_process" if _impl(config) == "noop" else "ray_actor")
    if _impl(config) == "transfer_queue" and kind == "in_process":
        raise ConfigError(
            "data_plane.ledger_host: 'in_process' cannot serve the processes of impl 'transfer_queue'; "
            "use 'ray_actor' or leave it null"
        )
    return kind


def _impl(config: DataPlaneConfig) -> str:
    return config.impl if config.enabled else "noop"


def _own_host(config: DataPlaneConfig, run_id: str, kind: HostKind) -> LedgerHost:
    service = LedgerService(build_ledger(config, run_id=run_id))
    with _registry_lock:
        if run_id in _services:
            raise DataPlaneError(f"run {run_id!r} has a ledger in this process already; close its owner first")
        _services[run_id] = service
    return _OwnedInProcessHost(service, is_owner=True)


class _OwnedInProcessHost(InProcessHost):
    """Leaves the registry when it is closed."""

    def close(self) -> None:
        super().close()
        with _registry_lock:
            _services.pop(self.address.run_id, None)


def _join_host(address: LedgerAddress, config: DataPlaneConfig) -> LedgerHost:
    service = _services.get(address.run_id)
    if service is None:
        raise DataPlaneClosed(f"run {address.run_id!r} has no ledger in this process; its owner has closed it")
    return InProcessHost(service, is_owner=False)


def _own_store(config: DataPlaneConfig, run_id: str) -> PayloadStore:
    with _registry_lock:
        store = _noop_stores[run_id] = NoopStore()
    return store


def _join_store(address: DataPlaneAddress) -> PayloadStore:
    store = _noop_stores.get(address.run_id)
    if store is None:
        raise DataPlaneClosed(
            f"run {address.run_id!r}: its noop store lives in process {address.process_id}, not in {os.getpid()}; "
            "use data_plane.impl=transfer_queue for workers in other processes"
        )
    return store
