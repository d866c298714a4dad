"""Builds data plane clients: the only place that knows which store and which ledger host a run uses.

The driver calls `build_data_plane_client(..., role="owner")`; workers call `attach_data_plane(address)`. `open_step`
opens a partition for the rows of one step and leaves none of them, whatever happens inside. What differs from store to
store is in `store_kinds`; adapters are imported when they are used, since a process needs the engines of its own store
only.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.adapters.noop import NoopStore
from nemo_rl.data_plane.address import (
    ATTACH_FILE,
    AttachPoint,
    DataPlaneAddress,
    HostKind,
    LedgerAddress,
    write_attach_file,
)
from nemo_rl.data_plane.client.ledger_client import LedgerClient
from nemo_rl.data_plane.client.link import CLEAR, stage_context
from nemo_rl.data_plane.interfaces import DataPlaneClient, PayloadStore
from nemo_rl.data_plane.ledger.host import InProcessHost, LedgerHost, LedgerService, build_service
from nemo_rl.data_plane.ledger.host_socket import LedgerServer, SocketLedgerHost
from nemo_rl.data_plane.store_kinds import kind_named, memory_plan
from nemo_rl.errors import ConfigError, DataPlaneClosed, DataPlaneError, name_some
from nemo_rl.utils.deadlines import DEFAULT_START, StartUp

if TYPE_CHECKING:
    from nemo_rl.data_plane.metrics_endpoint import MetricsEndpoint

__all__ = [
    "DataPlaneAddress",
    "attach_data_plane",
    "build_data_plane_client",
    "check_empty",
    "cleared_after_error",
    "observe",
    "open_step",
    "start_store",
]

logger = logging.getLogger(__name__)

_owned: set[str] = set()
"""Runs whose owner is in this process, with what other clients of this process join."""
_services: dict[str, LedgerService] = {}
_registry_lock = threading.Lock()


def build_data_plane_client(
    config: DataPlaneConfig,
    *,
    run_id: str,
    role: Literal["owner", "attach"] = "owner",
    address: DataPlaneAddress | None = None,
    validate: bool = False,
    log_dir: Path | None = None,
    start: StartUp = DEFAULT_START,
) -> DataPlaneClient:
    """Return a client of the run's data plane.

    Args:
        role: the owner starts ledger and store, and its close ends them; `attach` joins those at `address`.
        validate: the owner's ledger checks all of its invariants after each request; slow, for tests.
        log_dir: where the owner writes events and the file that `nemo-rl data-plane` attaches with.
        start: how long servers and actors may take to start, and others to join; who is informed meanwhile.

    Raises:
        ConfigError: a combination of store and ledger host that cannot work.
        ResourceError: too few CPUs for the storage actors, another run owns the cluster's data plane, or the port of
            the metrics is taken.
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
        at_end = undo.enter_context(ExitStack())
        at_end.callback(_forget, run_id)
        metrics = _take_metrics_port(config, at_end)
        metrics_port = 0 if metrics is None else metrics.port
        host = _own_host(config, run_id, validate=validate, log_dir=log_dir, metrics_port=metrics_port, start=start)
        undo.callback(host.close)
        if log_dir is not None:
            is_written = config.ledger.recovery == "journal"
            _open_to_observers(log_dir, host.address, metrics_port, at_end, is_written=is_written)
        store = start_store(config, run_id=run_id, start=start)
        undo.callback(store.close)
        own = DataPlaneAddress(
            run_id=run_id,
            config=config,
            ledger=host.address,
            process_id=os.getpid(),
            start_timeout_s=start.timeout_s,
            store=store.address,
        )
        client = LedgerClient(host=host, store=store, address=own, on_close=at_end.close)
        if metrics is not None:
            metrics.serve(run_id=run_id, store=impl_of(config), ledger=host)
            start.report(f"metrics of the data plane, for Prometheus: {metrics.url}")
        undo.pop_all()
    return client


def attach_data_plane(address: DataPlaneAddress) -> DataPlaneClient:
    """Return a client for another part of the run; its close leaves the service running.

    Raises:
        DataPlaneClosed: the run's ledger or store does not exist (any more).
    """
    with ExitStack() as undo:
        host = _join_host(address.ledger, recovers=address.config.ledger.recovery == "journal")
        undo.callback(host.close)
        store = join_store(address)
        undo.callback(store.close)
        client = LedgerClient(host=host, store=store, address=address)
        undo.pop_all()
    return client


def observe(point: AttachPoint) -> LedgerHost:
    """Return the ledger of a running job, for observers on its machine: no store, and its close leaves the job as it
    is.

    Calls raise DataPlaneClosed when the job has ended.
    """
    return SocketLedgerHost(replace(point.ledger, kind="socket"))


@contextmanager
def open_step(client: DataPlaneClient, partition_id: str, keys: Collection[str]) -> Iterator[None]:
    """One step in a registered partition: its rows are cleared at the end, also after an error, and none may be left.

    Args:
        keys: of all rows that the step may put; rows of other steps in the partition stay. Read when the step ends, so
            a set may grow meanwhile.
    """
    with cleared_after_error(client, partition_id, keys):
        yield
    with stage_context(CLEAR):
        client.kv_clear(list(keys), partition_id, reason="step end")
        check_empty(client, [partition_id], keys=keys)


@contextmanager
def cleared_after_error(client: DataPlaneClient, partition_id: str, keys: Collection[str]) -> Iterator[None]:
    """Clear the rows when the block ends with an error.

    Args:
        keys: read after the error, so a set may grow meanwhile.
    """
    try:
        yield
    except BaseException as error:
        try:
            with stage_context(CLEAR):
                client.kv_clear(list(keys), partition_id, reason=f"failed step: {type(error).__name__}")
        except DataPlaneError as problem:
            logger.warning("could not clear the rows of a failed step in %r: %s", partition_id, problem)
        raise


def check_empty(
    client: DataPlaneClient,
    partition_ids: Iterable[str],
    *,
    keys: Collection[str] | None = None,
    lost_of: Callable[[Mapping[str, str]], Collection[str]] | None = None,
) -> None:
    """Raise when rows are alive after a step, with the clients that made them.

    Args:
        keys: of the rows that must be gone; None means that no row may be left.
        lost_of: is given the rows that are alive, by key, and returns those that must be gone.
    """
    gone = None if keys is None else set(keys)
    for partition_id in partition_ids:
        owners = {key: owner for key, owner in client.row_owners(partition_id).items() if gone is None or key in gone}
        if lost_of is not None:
            owners = {key: owners[key] for key in lost_of(owners)}
        if owners:
            rows = name_some(f"{key} (put by {owner or 'an unnamed client'})" for key, owner in owners.items())
            raise DataPlaneError(
                f"partition {partition_id!r}: {len(owners)} rows were not freed after the step: {rows}; "
                "a stage still writes"
            )


def _forget(run_id: str) -> None:
    with _registry_lock:
        _owned.discard(run_id)
        _services.pop(run_id, None)
        forget_store(run_id)


def _host_kind(config: DataPlaneConfig) -> HostKind:
    impl = impl_of(config)
    store = kind_named(impl)
    by_itself = store.ledger_host_without_ray
    kind = config.ledger_host or (store.ledger_host if by_itself is None or _is_in_ray() else by_itself)
    if store.has_processes and kind == "in_process":
        raise ConfigError(
            f"data_plane.ledger_host: 'in_process' cannot serve the processes of impl {impl!r}; leave it null"
        )
    if store.needs_ledger_actor(config) and kind != "ray_actor":
        raise ConfigError(
            f"data_plane.ledger_host: impl {impl!r} keeps its references in the ledger's actor, got {kind!r}; "
            "use 'ray_actor' or leave it null"
        )
    if config.ledger.recovery == "journal" and kind != "ray_actor":
        raise ConfigError(
            f"data_plane.ledger.recovery: 'journal' needs the ledger in its own process, and {kind!r} lives in "
            "its owner's; use 'ray_actor', or recovery=none"
        )
    return kind


def _is_in_ray() -> bool:
    """Return whether this process is connected to Ray; asked without importing it."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _own_host(
    config: DataPlaneConfig,
    run_id: str,
    *,
    validate: bool,
    log_dir: Path | None,
    metrics_port: int,
    start: StartUp,
) -> LedgerHost:
    kind = _host_kind(config)
    if kind == "ray_actor":
        from nemo_rl.data_plane.ledger.host_ray import RayLedgerHost  # noqa: PLC0415 - Ray is optional here

        return RayLedgerHost.start(
            config, run_id=run_id, validate=validate, log_dir=log_dir, metrics_port=metrics_port, start=start
        )
    service = build_service(config, run_id=run_id, validate=validate, log_dir=log_dir)
    if kind == "socket":
        server = LedgerServer(service)
        return SocketLedgerHost(server.address, server=server)
    _services[run_id] = service
    return InProcessHost(service, is_owner=True)


def _take_metrics_port(config: DataPlaneConfig, at_end: ExitStack) -> MetricsEndpoint | None:
    port = config.observability.metrics_port
    if port is None:
        return None
    from nemo_rl.data_plane.metrics_endpoint import MetricsEndpoint  # noqa: PLC0415 - only where it is asked for

    endpoint = MetricsEndpoint(port)
    at_end.callback(endpoint.close)
    return endpoint


def _open_to_observers(
    log_dir: Path, ledger: LedgerAddress, metrics_port: int, at_end: ExitStack, *, is_written: bool
) -> None:
    """Write for `nemo-rl data-plane` where the ledger answers; a ledger of this process gets a socket for it.

    Args:
        is_written: the ledger writes the file itself, each time that it starts.
    """
    if is_written:
        at_end.callback((log_dir / ATTACH_FILE).unlink, missing_ok=True)
        return
    if ledger.kind == "in_process":
        server = LedgerServer(_services[ledger.run_id])
        at_end.callback(server.close)
        ledger = server.address
    path = write_attach_file(log_dir, ledger=ledger, process_id=os.getpid(), metrics_port=metrics_port)
    at_end.callback(path.unlink, missing_ok=True)


def _join_host(address: LedgerAddress, *, recovers: bool) -> LedgerHost:
    if address.kind == "ray_actor":
        from nemo_rl.data_plane.ledger.host_ray import RayLedgerHost  # noqa: PLC0415 - Ray is optional here

        return RayLedgerHost.join(address, recovers=recovers)
    if address.kind == "socket":
        return SocketLedgerHost(address)
    service = _services.get(address.run_id)
    if service is None:
        raise DataPlaneClosed(f"run {address.run_id!r} has no ledger in this process, or its owner has closed it")
    return InProcessHost(service, is_owner=False)


def impl_of(config: DataPlaneConfig) -> str:
    """Return the adapter's name; a config that nobody has resolved means one process."""
    return config.resolved(has_actors=False).impl or "noop"


def start_store(config: DataPlaneConfig, *, run_id: str, start: StartUp = DEFAULT_START) -> PayloadStore:
    """Return the owner's store; its close ends the service."""
    plan = memory_plan(config)
    if plan:
        logger.info("%s", plan)
    return kind_named(impl_of(config)).start(config, run_id=run_id, start=start)


def join_store(address: DataPlaneAddress) -> PayloadStore:
    """Return a store for another client of the run.

    Raises:
        DataPlaneClosed: the run's store is gone, or this process cannot reach it.
    """
    return kind_named(impl_of(address.config)).join(address)


def forget_store(run_id: str) -> None:
    NoopStore.forget(run_id)
