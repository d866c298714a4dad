"""One record per payload store: what the rest of the library asks about it. Reading a record imports no store.

`factory` starts and joins stores and places the ledger, `transport_environment` and `memory_plan` speak for a run, and
CPU needs, preflight and fork server ask before anything starts. A store of the user's own (`module:Class`) has a record
as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from nemo_rl.config.data_plane import CONTROLLER_CPUS, DataPlaneConfig
from nemo_rl.config.parts import STORES
from nemo_rl.data_plane.address import DataPlaneAddress, HostKind

if TYPE_CHECKING:
    from nemo_rl.data_plane.adapters.mooncake import MooncakeStore
    from nemo_rl.data_plane.adapters.ray_store import RayNodeStore, RayStore
    from nemo_rl.data_plane.adapters.transfer_queue import TransferQueueStore
    from nemo_rl.data_plane.interfaces import PayloadStore
    from nemo_rl.utils.deadlines import StartUp

__all__ = ["StoreKind", "kind_named", "memory_plan", "transport_environment"]

MIB = 1 << 20
MOONCAKE_WAIT_S = 5.0
"""Longest wait of Mooncake for one answer, in seconds."""
WARM_MEMORY = {"THP_MEM_ALLOC_ENABLE": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Fresh memory of many MB costs mostly page faults; huge pages halve the time of a transfer."""


class Start(Protocol):
    """Makes the owner's store."""

    def __call__(self, config: DataPlaneConfig, *, run_id: str, start: StartUp) -> PayloadStore: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreKind:
    """One payload store.

    Example:
        >>> kind_named("noop").ledger_host, kind_named("transfer_queue").cpus(DataPlaneConfig())
        ('in_process', 2)
    """

    start: Start
    """The owner's store; its close ends the service."""
    join: Callable[[DataPlaneAddress], PayloadStore]
    """A store for another client of the run."""
    ledger_host: HostKind = "ray_actor"
    """The default host of the ledger, where the config names none."""
    ledger_host_without_ray: HostKind | None = None
    """The same in a process that is not connected to Ray; None for a store where that makes no difference."""
    has_processes: bool = False
    """Its clients are in several processes, so a ledger of one process cannot serve them."""
    needs_ledger_actor: Callable[[DataPlaneConfig], bool] = lambda config: False
    """Returns whether references to its payloads are kept in the ledger's actor."""
    environment: Callable[[DataPlaneConfig], Mapping[str, str]] = lambda config: WARM_MEMORY
    """Variables for every process that uses the store."""
    cpus: Callable[[DataPlaneConfig], int] = lambda config: 0
    """Logical CPUs that its actors ask Ray for."""
    memory_plan: Callable[[DataPlaneConfig, int | None], str] = lambda config, num_processes: ""
    """(config, clients in all or None) -> what it pins or reserves, in one line; empty for nothing."""
    reserved_bytes: Callable[[DataPlaneConfig, int], int] = lambda config, num_processes: 0
    """(config, clients in all) -> the same as a number: rows lie inside it."""
    check_installed: Callable[[DataPlaneConfig], object] = lambda config: None
    """Raises ResourceError when a package or library that it is made of is missing."""
    forked_modules: tuple[str, ...] = ()
    """Modules that its clients import and that take long; none of them imports Ray."""


def kind_named(impl: str) -> StoreKind:
    """Return the record of a built-in store, or of `module:Class`, which is imported when it is started or joined."""
    return _BUILTIN[impl] if STORES.is_builtin(impl) else _user_defined(impl)


# ---- noop, shm


def _start_noop(config: DataPlaneConfig, *, run_id: str, start: StartUp) -> PayloadStore:
    from nemo_rl.data_plane.adapters.noop import NoopStore  # noqa: PLC0415 - a process needs its own store only

    return NoopStore.start(run_id=run_id)


def _join_noop(address: DataPlaneAddress) -> PayloadStore:
    from nemo_rl.data_plane.adapters.noop import NoopStore  # noqa: PLC0415 - see above

    return NoopStore.join(address)


def _start_shm(config: DataPlaneConfig, *, run_id: str, start: StartUp) -> PayloadStore:
    from nemo_rl.data_plane.adapters.shm import SharedMemoryStore  # noqa: PLC0415 - see above

    return SharedMemoryStore.start(config.shm, run_id=run_id, start=start)


def _join_shm(address: DataPlaneAddress) -> PayloadStore:
    from nemo_rl.data_plane.adapters.shm import SharedMemoryStore  # noqa: PLC0415 - see above

    return SharedMemoryStore.join(address.config.shm, run_id=address.run_id)


# ---- ray


def _ray(config: DataPlaneConfig) -> type[RayNodeStore] | type[RayStore]:
    if config.ray.owner == "node":
        from nemo_rl.data_plane.adapters.ray_store import RayNodeStore  # noqa: PLC0415 - Ray is optional here

        return RayNodeStore
    from nemo_rl.data_plane.adapters.ray_store import RayStore  # noqa: PLC0415 - Ray is optional here

    return RayStore


def _ray_environment(config: DataPlaneConfig) -> Mapping[str, str]:
    # Ray gives freed objects back once a second; sooner, the next put finds memory that is warm.
    return {**WARM_MEMORY, "RAY_free_objects_period_milliseconds": "20"}


# ---- transfer_queue


def _transfer_queue(config: DataPlaneConfig) -> type[TransferQueueStore]:
    """Return the adapter, imported after the variables that TransferQueue reads at import are set."""
    _set(_transfer_queue_environment(config))
    from nemo_rl.data_plane.adapters.transfer_queue import TransferQueueStore  # noqa: PLC0415 - see above

    return TransferQueueStore


def _join_transfer_queue(address: DataPlaneAddress) -> PayloadStore:
    kind = _transfer_queue(address.config)
    return kind.join(run_id=address.run_id, timeout_s=address.start_timeout_s, config=address.config)


def _transfer_queue_environment(config: DataPlaneConfig) -> Mapping[str, str]:
    own = {
        # One thread per process: with the default of 8, reads are several times slower on few cores.
        "TQ_NUM_THREADS": "1",
        "TQ_CLIENT_ZMQ_IO_THREADS": "1",
        "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT": str(config.simple.send_recv_timeout_s),
        "TQ_SIMPLE_STORAGE_MAX_ATTEMPTS": "2",
        "TQ_LOGGING_LEVEL": "ERROR",
    }
    return {**WARM_MEMORY, **own, **(_mooncake_waits(config) if config.uses_mooncake else {})}


# ---- mooncake, by itself and under TransferQueue


def _mooncake(config: DataPlaneConfig) -> type[MooncakeStore]:
    """Return the adapter, imported after the variables that Mooncake reads are set."""
    _set(_mooncake_environment(config))
    from nemo_rl.data_plane.adapters.mooncake import MooncakeStore  # noqa: PLC0415 - see above

    return MooncakeStore


def _join_mooncake(address: DataPlaneAddress) -> PayloadStore:
    config, run_id = address.config, address.run_id
    return _mooncake(config).join(config, run_id=run_id, address=address.store, timeout_s=address.start_timeout_s)


def _mooncake_environment(config: DataPlaneConfig) -> Mapping[str, str]:
    return {**WARM_MEMORY, **_mooncake_waits(config)}


def _mooncake_waits(config: DataPlaneConfig) -> Mapping[str, str]:
    """Mooncake's own waits end before ours do, so that its errors are seen and its calls are not left behind."""
    wait_s = min(max(config.timeout_s / 4, 1.0), MOONCAKE_WAIT_S)
    wait_ms = str(round(wait_s * 1000))
    return {
        "MC_LOG_LEVEL": "ERROR",
        "MC_STORE_CLIENT_METRIC": "0",
        "MC_STORE_CLIENT_SETUP_RETRIES": "2",
        "MC_RPC_CONNECT_TIMEOUT_MS": wait_ms,
        "MC_RPC_TIMEOUT_MS": wait_ms,
        "MC_TCP_ADMISSION_TIMEOUT_MS": wait_ms,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(round(wait_s)),
        "MC_TCP_STATUS_TIMEOUT_SEC": str(round(wait_s)),
    }


def _mooncake_memory(config: DataPlaneConfig, num_processes: int | None) -> str:
    if not config.starts_mooncake:
        return ""
    section = config.mooncake
    segment, buffers = section.segment_bytes // MIB, section.local_buffer_bytes // MIB
    is_held = section.segment_owner == "holder"
    each = f"{buffers} MiB of transfer buffers"
    if num_processes is None:
        held = f"{segment} MiB of segments (one holder)" if is_held else f"{segment} MiB of segments per process"
        return f"Mooncake memory: {held}, up to {each} per process"
    held = f"{segment} MiB of segments (one holder)" if is_held else f"{num_processes} x {segment} MiB of segments"
    total = _mooncake_bytes(config, num_processes) // MIB
    return f"Mooncake memory: {held}, up to {num_processes} x {each}, {total} MiB in all"


def _mooncake_bytes(config: DataPlaneConfig, num_processes: int) -> int:
    if not config.starts_mooncake:
        return 0
    section = config.mooncake
    num_segments = 1 if section.segment_owner == "holder" else num_processes
    return num_segments * section.segment_bytes + num_processes * section.local_buffer_bytes


def _check_mooncake(config: DataPlaneConfig) -> None:
    if config.uses_mooncake:
        from nemo_rl.data_plane.adapters.mooncake_master import check_installed  # noqa: PLC0415 - see above

        check_installed()


# ---- a store of the user's own


class _OpenableStore(Protocol):
    """The class that `data_plane.impl: module:Class` names, besides being a `PayloadStore`."""

    def start(self, config: DataPlaneConfig, *, run_id: str, start: StartUp) -> PayloadStore:
        """(class method) Return the owner's store; its close ends the service."""

    def join(self, address: DataPlaneAddress) -> PayloadStore:
        """(class method) Return the store of another process; `address.store` is the owner's `PayloadStore.address`."""


def _user_defined(impl: str) -> StoreKind:
    def loaded() -> _OpenableStore:
        kind: _OpenableStore = STORES.load(impl, key="data_plane.impl")  # type: ignore[assignment]
        return kind

    return StoreKind(
        start=lambda config, *, run_id, start: loaded().start(config, run_id=run_id, start=start),
        join=lambda address: loaded().join(address),
        ledger_host_without_ray="socket",
    )


def _set(variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        os.environ.setdefault(name, value)


_BUILTIN: Mapping[str, StoreKind] = {
    "noop": StoreKind(start=_start_noop, join=_join_noop, ledger_host="in_process", environment=lambda config: {}),
    "shm": StoreKind(start=_start_shm, join=_join_shm, ledger_host="socket"),
    "ray": StoreKind(
        start=lambda config, *, run_id, start: _ray(config).start(config, run_id=run_id, start=start),
        join=lambda address: _ray(address.config).join(address.config, run_id=address.run_id),
        has_processes=True,
        needs_ledger_actor=lambda config: config.ray.owner != "node",
        environment=_ray_environment,
    ),
    "transfer_queue": StoreKind(
        start=lambda config, *, run_id, start: _transfer_queue(config).start(config, run_id=run_id, start=start),
        join=_join_transfer_queue,
        has_processes=True,
        environment=_transfer_queue_environment,
        cpus=lambda config: 0 if config.is_guest_of_queue else CONTROLLER_CPUS + config.num_storage_units,
        memory_plan=_mooncake_memory,
        reserved_bytes=_mooncake_bytes,
        check_installed=_check_mooncake,
        forked_modules=("tensordict",),
    ),
    "mooncake": StoreKind(
        start=lambda config, *, run_id, start: _mooncake(config).start(config, run_id=run_id, start=start),
        join=_join_mooncake,
        ledger_host_without_ray="socket",
        has_processes=True,
        environment=_mooncake_environment,
        memory_plan=_mooncake_memory,
        reserved_bytes=_mooncake_bytes,
        check_installed=_check_mooncake,
    ),
}
"""The words of `STORES`."""


def transport_environment(config: DataPlaneConfig) -> Mapping[str, str]:
    """Return variables for every process that uses the payload store; empty for stores that need none."""
    return kind_named(config.impl).environment(config) if config.enabled and config.impl is not None else {}


def memory_plan(config: DataPlaneConfig, *, num_processes: int | None = None) -> str:
    """Return one line; empty for a store that reserves nothing.

    Args:
        num_processes: clients of the data plane in all, None where that is not known.

    Example:
        >>> memory_plan(DataPlaneConfig(impl="mooncake"), num_processes=3)
        'Mooncake memory: 512 MiB of segments (one holder), up to 3 x 256 MiB of transfer buffers, 1280 MiB in all'
    """
    return kind_named(config.impl or "noop").memory_plan(config, num_processes)
