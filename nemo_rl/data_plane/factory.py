"""Builds data plane clients: the only place that knows which store and which ledger host a run uses.

The driver calls `build_data_plane_client(..., role="owner")`; workers call `attach_data_plane(address)`. `open_step`
opens a partition for one step and leaves it empty, whatever happens inside.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Literal

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.adapters.noop import NoopStore, SharedNoopStore
from nemo_rl.data_plane.address import DataPlaneAddress, LedgerAddress
from nemo_rl.data_plane.client import LedgerClient
from nemo_rl.data_plane.environment import transport_environment
from nemo_rl.data_plane.interfaces import DataPlaneClient, PayloadStore
from nemo_rl.data_plane.ledger_host import InProcessHost, LedgerHost, LedgerService, build_ledger
from nemo_rl.data_plane.ledger_host_socket import LedgerServer, SocketLedgerHost
from nemo_rl.errors import ConfigError, DataPlaneClosed, DataPlaneError, name_some

if TYPE_CHECKING:
    from nemo_rl.data_plane.adapters.transfer_queue import TransferQueueStore

__all__ = ["DataPlaneAddress", "attach_data_plane", "build_data_plane_client", "open_step"]

logger = logging.getLogger(__name__)

HostKind = Literal["in_process", "ray_actor", "socket"]

_owned: set[str] = set()
"""Runs whose owner is in this process, with what other clients of this process join."""
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
    with _registry_lock:
        if run_id in _owned:
            raise DataPlaneError(f"run {run_id!r} has a data plane in this process already; close its owner first")
        _owned.add(run_id)
    with ExitStack() as undo:
        undo.callback(_forget, run_id)
        host = _own_host(config, run_id)
        undo.callback(host.close)
        store = _own_store(config, run_id)
        undo.pop_all()
    own = DataPlaneAddress(run_id=run_id, config=config, ledger=host.address, process_id=os.getpid())
    return LedgerClient(host=host, store=store, address=own, on_close=lambda: _forget(run_id))


def attach_data_plane(address: DataPlaneAddress) -> DataPlaneClient:
    """A client for another part of the run; its close leaves the service running.

    Raises:
        DataPlaneClosed: the run's ledger or store does not exist (any more).
    """
    with ExitStack() as undo:
        host = _join_host(address.ledger)
        undo.callback(host.close)
        store = _join_store(address)
        undo.pop_all()
    return LedgerClient(host=host, store=store, address=address)


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


def _forget(run_id: str) -> None:
    with _registry_lock:
        _owned.discard(run_id)
        _services.pop(run_id, None)
        _noop_stores.pop(run_id, None)


def _impl(config: DataPlaneConfig) -> str:
    return config.impl if config.enabled else "noop"


def _host_kind(config: DataPlaneConfig) -> HostKind:
    kind: HostKind = config.ledger_host or ("in_process" if _impl(config) == "noop" else "ray_actor")
    if _impl(config) == "transfer_queue" and kind == "in_process":
        raise ConfigError(
            "data_plane.ledger_host: 'in_process' cannot serve the processes of impl 'transfer_queue'; "
            "use 'ray_actor' or leave it null"
        )
    return kind


def _own_host(config: DataPlaneConfig, run_id: str) -> LedgerHost:
    kind = _host_kind(config)
    if kind == "ray_actor":
        from nemo_rl.data_plane.ledger_host_ray import RayLedgerHost  # noqa: PLC0415 - Ray is optional here

        return RayLedgerHost.start(config, run_id=run_id)
    service = LedgerService(build_ledger(config, run_id=run_id))
    if kind == "socket":
        server = LedgerServer(service)
        return SocketLedgerHost(server.address, server=server)
    _services[run_id] = service
    return InProcessHost(service, is_owner=True)


def _join_host(address: LedgerAddress) -> LedgerHost:
    if address.kind == "ray_actor":
        from nemo_rl.data_plane.ledger_host_ray import RayLedgerHost  # noqa: PLC0415 - Ray is optional here

        return RayLedgerHost.join(address)
    if address.kind == "socket":
        return SocketLedgerHost(address)
    service = _services.get(address.run_id)
    if service is None:
        raise DataPlaneClosed(f"run {address.run_id!r} has no ledger in this process, or its owner has closed it")
    return InProcessHost(service, is_owner=False)


def _own_store(config: DataPlaneConfig, run_id: str) -> PayloadStore:
    if _impl(config) == "transfer_queue":
        return _transfer_queue(config).start(config, run_id=run_id)
    store = _noop_stores[run_id] = NoopStore()
    return store


def _join_store(address: DataPlaneAddress) -> PayloadStore:
    if _impl(address.config) == "transfer_queue":
        return _transfer_queue(address.config).join(run_id=address.run_id, timeout_s=address.config.timeout_s)
    store = _noop_stores.get(address.run_id)
    if store is None:
        raise DataPlaneClosed(
            f"run {address.run_id!r}: its noop store lives in process {address.process_id} and this is {os.getpid()}, "
            "or its owner has closed it; use data_plane.impl=transfer_queue for workers in other processes"
        )
    return SharedNoopStore(store)


def _transfer_queue(config: DataPlaneConfig) -> type[TransferQueueStore]:
    """The adapter, imported after the variables that TransferQueue reads at import are set."""
    for name, value in transport_environment(config).items():
        os.environ.setdefault(name, value)
    from nemo_rl.data_plane.adapters.transfer_queue import TransferQueueStore  # noqa: PLC0415 - see above

    return TransferQueueStore
