"""Settings of the data plane (`data_plane` section)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from nemo_rl.config.base import Options, Section
from nemo_rl.config.parts import STORES

__all__ = [
    "CONTROLLER_CPUS",
    "DataPlaneConfig",
    "DurableConfig",
    "FetchPolicy",
    "Layout",
    "LedgerConfig",
    "MooncakeConfig",
    "ObservabilityConfig",
    "RayStoreConfig",
    "SharedMemoryConfig",
    "SimpleBackendConfig",
    "StorageCapacityConfig",
    "TransferQueueConfig",
]

CONTROLLER_CPUS = 1
"""Logical CPUs that TransferQueue's controller asks Ray for."""

Layout = Literal["chunks", "native"]

FetchPolicy = Literal["auto", "independent", "leader_broadcast"]


class RayStoreConfig(Section):
    """Payloads in Ray's object store or in shared memory (`impl: ray`)."""

    owner: Literal["producer", "holder", "node"] = "producer"
    """Owner of the payloads, which are lost when it dies: `producer` (fastest), `holder` (an actor that copies them,
    slower), `node` (segments of shared memory that belong to the node)."""
    chunk_bytes: PositiveInt = 64 << 20
    """Target size of one object, in bytes. Readers on its node copy only the rows they ask for; another node gets
    whole objects, so many data-parallel nodes are served better by smaller ones."""


class SharedMemoryConfig(Section):
    """Segments in the node's shared memory (`impl: shm`, and `impl: ray` with `ray.owner: node`)."""

    folder: str = "/dev/shm"
    """The folder of the segments; a tmpfs large enough for a step's rows on this node."""
    chunk_bytes: PositiveInt = 64 << 20
    """Target size of one segment, in bytes; readers copy only the rows they ask for."""
    keep_bytes: PositiveInt = 1 << 30
    """Free segments kept for the next put, in bytes: memory that is warm is several times faster."""


class TransferQueueConfig(Section):
    """The form of a run's rows in TransferQueue, and the TransferQueue that it uses (`impl: transfer_queue`)."""

    layout: Layout = "chunks"
    """Form of the rows in TransferQueue: `chunks` (rows packed together, fastest, readable by this library alone) or
    `native` (each column a TransferQueue field under the row's own key, for any TransferQueue client to read and
    add to)."""
    connect: bool = False
    """Use the TransferQueue that runs in the Ray cluster already, in partitions of this run's own, and leave it
    running; false starts one and refuses another's."""


class SimpleBackendConfig(Section):
    """TransferQueue's in-memory storage actors (`backend: simple`)."""

    num_storage_units: PositiveInt = 1
    """Storage actors; each reserves one logical CPU, the controller one more."""
    placement: Literal["driver", "spread"] = "driver"
    """Place the storage units on the driver's node, or in turn on all nodes of the Ray cluster."""
    chunk_bytes: PositiveInt = 4 << 20
    """Rows of one put are freed together until they have so many bytes."""
    block_bytes: PositiveInt = 12 << 10
    """Target size of what a read moves at least, in bytes: smaller blocks move less that nobody asked for, and each
    costs time."""
    send_recv_timeout_s: PositiveInt = 60
    """Limit of one transfer to a storage unit, in seconds (TransferQueue's own default is 200)."""


class MooncakeConfig(Section):
    """Mooncake's store (`impl: mooncake`, and `impl: transfer_queue` with `backend: mooncake_cpu`)."""

    host: str = "127.0.0.1"
    """Address of this node where the run's master and holder listen. With several nodes: `node`, the driver's address
    in the Ray cluster, or another one in a trusted network, because Mooncake's ports have no authentication."""
    master_address: str | None = None
    """`host:port` of a running master to use; null starts one for this run. Only for `impl: mooncake`."""
    segment_owner: Literal["holder", "producer"] = "holder"
    """Owner of the rows, which are lost when it dies: `holder` (a process that the run starts), `producer` (the process
    that put them; its own memory, so a put is a memcpy)."""
    segment_bytes: PositiveInt = 512 << 20
    """Bytes of rows that fit: in all with `holder`, per process with `producer`. Memory is taken when it is first
    written, and kept."""
    chunk_bytes: PositiveInt = 512 << 10
    """Target size of one object, in bytes: each object costs time, and readers get whole ones. Only for
    `impl: mooncake`."""
    local_buffer_bytes: PositiveInt = 256 << 20
    """Transfer buffers that one process keeps registered and warm, in bytes."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """The transport of bytes; `rdma` needs such network cards."""
    device_name: str = ""
    """RDMA devices, separated by commas; empty lets Mooncake choose."""


class DurableConfig(Section):
    """Finished groups of rollouts in files, so that a run that was killed does not sample them again."""

    path: Path | None = None
    """Folder of this run's own for segment files, on a disk that survives the job; null keeps none. A resumed run takes
    from it the groups that the weights of the resumed run have sampled."""
    fsync: bool = False
    """Wait for the disk after each put, in the background: rows survive a loss of power as well."""


class StorageCapacityConfig(Section):
    """The most that may be live at one time, over all partitions. A put that does not fit waits for rows to be cleared,
    until its deadline."""

    rows: PositiveInt = 1_000_000
    """Live rows."""
    bytes: PositiveInt | None = None
    """Live payload bytes, including those still being written; null means no limit."""


class LedgerConfig(Section):
    """Recovery of a ledger whose process dies."""

    recovery: Literal["none", "journal"] = "none"
    """`none`: every call fails, and the run ends. `journal`: each change is in a file before it is answered; Ray starts
    the ledger again, it reads the file, and calls that were under way are answered. Needs the ledger in a Ray actor."""
    fsync: bool = False
    """Write each change through to the disk. Not needed to survive the death of a process."""
    journal_bytes: PositiveInt = 8 << 20
    """Size at which a snapshot of the ledger replaces the journal, in bytes. A larger one takes longer to read."""


class ObservabilityConfig(Section):
    """The records that a client keeps about its own calls."""

    enabled: bool = True
    """Count calls, bytes and milliseconds per operation; they appear under `data_plane/` in the metrics."""
    event_log: bool = True
    """Write what happens to each row to `data_plane_events.jsonl` in `logger.log_dir`, for `nemo-rl data-plane`."""
    callback: str | None = None
    """`package.module:function`, called in every process with a `DataPlaneEvent` after each data plane call;
    `print_event` logs a line for each."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port on 127.0.0.1, on the driver's machine, at which Prometheus reads what the run's data plane does
    (`/metrics`): 0 takes a free one, which is printed; null serves nothing."""


class DataPlaneConfig(Section):
    """The payload store that carries bulk tensors, and its limits."""

    enabled: bool = True
    """False: the store that `impl: null` picks, with its defaults."""
    impl: Annotated[str, STORES] | None = None
    """`noop` works inside one process, `shm` between the processes of one node, `ray` and `transfer_queue` between Ray
    actors, `mooncake` between processes and actors. Null picks `ray` under Ray and `noop` in one process. Or
    `module:Class` of a store of your own, see docs/extending.md."""
    options: Options = Field(default_factory=dict)
    """Settings of your own store."""
    backend: Literal["simple", "mooncake_cpu"] = "simple"
    """TransferQueue's storage backend; read only by `impl: transfer_queue`."""
    ledger_host: Literal["in_process", "ray_actor", "socket"] | None = None
    """The host of the ledger; null picks `in_process` for one process and `ray_actor` under Ray."""
    ledger: LedgerConfig = Field(default_factory=LedgerConfig)
    timeout_s: PositiveFloat = 60.0
    """Deadline of one data plane call, in seconds."""
    lease_s: PositiveFloat = 30.0
    """Seconds without a heartbeat after which the rows of a claim are given to another consumer."""
    storage_capacity: StorageCapacityConfig = Field(default_factory=StorageCapacityConfig)
    chunk_bytes: PositiveInt = 128 * 1024
    """Target size of one chunk; a larger row is a chunk of its own."""
    checksums: bool | None = None
    """Check at each read that the bytes are those that were put, by a checksum of each column of a chunk in the ledger.
    Null checks over TransferQueue and Mooncake, whose bytes pass sockets, and not over shared memory and Ray."""
    fetch_policy: FetchPolicy = "auto"
    """The ranks that read the rows that tensor and context parallel ranks share: `leader_broadcast` (one of them, which
    sends them on), `independent` (each for itself), `auto` (the leader, where ranks share rows)."""
    worker_cache_bytes: NonNegativeInt = 1 << 30
    """Byte limit of fetched columns that a policy worker keeps within a step, so that they cross the wire once; 0
    keeps none."""
    ray: RayStoreConfig = Field(default_factory=RayStoreConfig)
    shm: SharedMemoryConfig = Field(default_factory=SharedMemoryConfig)
    transfer_queue: TransferQueueConfig = Field(default_factory=TransferQueueConfig)
    simple: SimpleBackendConfig = Field(default_factory=SimpleBackendConfig)
    mooncake: MooncakeConfig = Field(default_factory=MooncakeConfig)
    durable: DurableConfig = Field(default_factory=DurableConfig)
    observability: ObservabilityConfig = Field(default_factory=ObservabilityConfig)

    @property
    def num_storage_units(self) -> int:
        """Storage actors of TransferQueue's backend that the run starts."""
        return self.simple.num_storage_units if self.backend == "simple" and not self.is_guest_of_queue else 0

    @property
    def is_guest_of_queue(self) -> bool:
        """Return whether the run joins a TransferQueue that another program has started."""
        return self.impl == "transfer_queue" and self.transfer_queue.connect

    @property
    def uses_mooncake(self) -> bool:
        """Return whether bytes are in Mooncake's store, directly or under TransferQueue."""
        return self.impl == "mooncake" or self.is_queue_on_mooncake

    @property
    def starts_mooncake(self) -> bool:
        """Return whether the run's own settings say how much memory Mooncake takes."""
        return self.uses_mooncake and not self.is_guest_of_queue

    @property
    def is_queue_on_mooncake(self) -> bool:
        return self.impl == "transfer_queue" and self.backend == "mooncake_cpu"

    @property
    def has_checksums(self) -> bool:
        """Return whether chunks are put with checksums."""
        return self.impl in ("transfer_queue", "mooncake") if self.checksums is None else self.checksums

    def resolved(self, *, has_actors: bool) -> DataPlaneConfig:
        """Return the section with a named `impl`.

        Args:
            has_actors: workers are Ray actors.
        """
        if self.enabled and self.impl is not None:
            return self
        return self.model_copy(update={"enabled": True, "impl": "ray" if has_actors else "noop"})
