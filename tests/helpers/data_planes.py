"""Data planes for tests: rows with known values, ledgers with a clock that tests move, one Ray cluster per module."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from nemo_rl.config.base import START_TIMEOUT_S
from nemo_rl.config.data_plane import DataPlaneConfig, RayStoreConfig, StorageCapacityConfig, TransferQueueConfig
from nemo_rl.data_plane.adapters import noop
from nemo_rl.data_plane.factory import attach_data_plane, build_data_plane_client
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.data_plane.store_kinds import transport_environment
from nemo_rl.distributed.fork_server import ForkServer
from nemo_rl.distributed.own_ray import OwnRay
from nemo_rl.errors import DataPlaneClosed
from nemo_rl.jagged import nest
from tests.helpers import mooncake
from tests.helpers.data_plane_peers import PEERS, Mode, Peer
from tests.helpers.foreign_queue import foreign_queue

NATIVE = TransferQueueConfig(layout="native")
NATIVE_ON_MOONCAKE = mooncake.under_transfer_queue(segment_bytes=96 << 20).model_copy(update={"transfer_queue": NATIVE})
NOOP = DataPlaneConfig(impl="noop", timeout_s=20.0)


@dataclass(frozen=True)
class PlaneKind:
    """One adapter under the contract suite."""

    config: DataPlaneConfig
    modes: tuple[Mode, ...]
    """Places where the other client lives; the suite runs once for each."""

    @property
    def needs_ray(self) -> bool:
        return self.config.impl in ("ray", "transfer_queue") or "actors" in self.modes


PLANES: dict[str, PlaneKind] = {
    "noop": PlaneKind(NOOP, ("threads",)),
    "noop-socket": PlaneKind(NOOP.model_copy(update={"ledger_host": "socket"}), ("threads",)),
    "shm": PlaneKind(DataPlaneConfig(impl="shm", timeout_s=20.0), ("threads", "processes")),
    "ray-producer": PlaneKind(DataPlaneConfig(impl="ray", timeout_s=20.0), ("actors",)),
    "ray-holder": PlaneKind(
        DataPlaneConfig(impl="ray", ray=RayStoreConfig(owner="holder"), timeout_s=20.0), ("actors",)
    ),
    "ray-node": PlaneKind(DataPlaneConfig(impl="ray", ray=RayStoreConfig(owner="node"), timeout_s=20.0), ("actors",)),
    "transfer_queue": PlaneKind(DataPlaneConfig(impl="transfer_queue", timeout_s=20.0), ("actors",)),
    "transfer_queue-native": PlaneKind(
        DataPlaneConfig(impl="transfer_queue", transfer_queue=NATIVE, timeout_s=20.0), ("actors",)
    ),
    "transfer_queue-connect": PlaneKind(
        DataPlaneConfig(
            impl="transfer_queue",
            transfer_queue=TransferQueueConfig(layout="native", connect=True),
            storage_capacity=StorageCapacityConfig(rows=100_000),
            timeout_s=20.0,
        ),
        ("actors",),
    ),
    "mooncake": PlaneKind(mooncake.small_config(segment_bytes=96 << 20), ("threads", "processes")),
    "transfer_queue-mooncake": PlaneKind(mooncake.under_transfer_queue(segment_bytes=96 << 20), ("actors",)),
    "transfer_queue-native-mooncake": PlaneKind(NATIVE_ON_MOONCAKE, ("actors",)),
    "mooncake-ray": PlaneKind(mooncake.small_config(segment_bytes=96 << 20), ("actors",)),
}
"""Each adapter once; a new one is added here, and the whole suite runs over it."""
CONFIGS = {name: kind.config for name, kind in PLANES.items()}
LEASE_S = 3.0
IMPORTED = ("tensordict", "nemo_rl.data_plane.factory")
"""Once for all actors of the cluster: those of tests, of the ledger and of TransferQueue."""


@dataclass
class Plane:
    """The owner's client, fresh partitions and more clients of the same run."""

    name: str
    owner: DataPlaneClient
    mode: Mode = "threads"
    attached: list[DataPlaneClient] = field(default_factory=list)
    partitions: list[str] = field(default_factory=list)
    _peer: Peer | None = None
    _guest: Peer | None = None

    def attach(self) -> DataPlaneClient:
        client = attach_data_plane(self.owner.address)
        self.attached.append(client)
        return client

    @property
    def peer(self) -> Peer:
        """The other client, in another process if the mode says so; the same one for the life of the plane."""
        if self._peer is None:
            self._peer = PEERS[self.mode](self.owner.address)
        return self._peer

    def guest(self) -> Peer:
        """Return one more client with its own process, for tests that close or kill it."""
        if self._guest is None:
            self._guest = PEERS[self.mode](self.owner.address)
        else:
            self._guest.reopen()
        return self._guest

    def kill_guest(self) -> None:
        """Kill the guest's process at once, so that no client is closed."""
        assert self._guest is not None
        guest, self._guest = self._guest, None
        guest.kill()

    def partition(
        self, fields: Sequence[object] = ("input_ids", "sample_mask"), *, tasks: Sequence[str] = (), **options: object
    ) -> str:
        """Register a fresh partition and return its name."""
        partition_id = f"p{uuid.uuid4().hex[:8]}"
        self.owner.register_partition(partition_id, fields, options.pop("num_samples", 4096), tasks, **options)
        self.partitions.append(partition_id)
        return partition_id

    def settle(self) -> None:
        """Ends what a test has opened, and checks that nothing is left behind."""
        for client in self.attached:
            client.close()
        for partition_id in self.partitions:
            self.owner.kv_clear(None, partition_id)
        self.attached, self.partitions = [], []
        left = {name: value for name, value in self.owner.stats().items() if name.startswith("live")}
        assert left == {"live_rows": 0, "live_bytes": 0, "live_chunks": 0}
        assert not stored_chunks(self), "the ledger has let go of chunks that the store still has"


@contextmanager
def ray_cluster(num_cpus: int = 8, *, imported: Sequence[str] = IMPORTED) -> Iterator[None]:
    environment = {**transport_environment(CONFIGS["transfer_queue"]), "OMP_NUM_THREADS": "1"}
    with (
        ForkServer(imported, environment=environment, deadline_s=START_TIMEOUT_S) as forks,
        OwnRay(num_cpus=num_cpus, environment=environment, object_store_bytes=100 << 20, forks=forks),
    ):
        yield


def with_small_chunks(config: DataPlaneConfig, chunk_bytes: int = 1024) -> DataPlaneConfig:
    """Return the config with chunks so small that a test's few rows fill several."""
    small = {"chunk_bytes": chunk_bytes}
    sections = {name: getattr(config, name).model_copy(update=small) for name in ("ray", "shm", "mooncake")}
    simple = config.simple.model_copy(update={**small, "block_bytes": max(chunk_bytes // 4, 1)})
    return config.model_copy(update={**small, **sections, "simple": simple})


@contextmanager
def open_plane(
    name: str, *, mode: Mode = "threads", lease_s: float = LEASE_S, validate: bool = True, **changes: object
) -> Iterator[Plane]:
    """Open a data plane whose ledger checks its invariants after each request, unless `validate` is false."""
    if "mooncake" in name and mooncake.why_not():
        pytest.skip(mooncake.why_not())
    config = with_small_chunks(CONFIGS[name]).model_copy(update={"lease_s": lease_s, **changes})
    with ExitStack() as around:
        if config.is_guest_of_queue:
            around.enter_context(foreign_queue())
        client = build_data_plane_client(config, run_id=f"run-{uuid.uuid4().hex[:8]}", validate=validate)
        plane = Plane(name, client, mode)
        try:
            yield plane
        finally:
            for peer in (plane._peer, plane._guest):
                if peer is not None:
                    peer.end()
            client.close()


def ids_column(lengths: Sequence[int], *, start: int = 0) -> torch.Tensor:
    """Jagged int32 rows whose values count up from `start`."""
    values = torch.arange(start, start + sum(lengths), dtype=torch.int32)
    return nest(values, torch.tensor(list(lengths), dtype=torch.int64))


def rows_of(column: torch.Tensor) -> list[list[object]]:
    return [row.tolist() for row in column.unbind()]


def keys_of(num_groups: int, group_size: int = 4, *, prefix: str = "u") -> list[str]:
    return [f"{prefix}{group}_g{i}" for group in range(num_groups) for i in range(group_size)]


def stored_chunks(plane: Plane) -> list[str]:
    """Chunks that the payload store holds, for stores of this process and of this node's shared memory."""
    run_id = plane.owner.address.run_id
    if plane.owner.address.config.impl == "noop":
        return list(noop._stores[run_id]._chunks)
    return [str(path) for folder in segments(run_id) for path in Path(folder).glob("live/*")]


def segments(run_id: str) -> list[str]:
    """Return the paths of a run in the node's shared memory."""
    return sorted(str(path) for path in Path("/dev/shm").glob(f"*{run_id}*"))


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 180.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, "the condition did not come true in time"
        time.sleep(0.02)


def check_closed(plane: Plane) -> None:
    """After the owner's close every call of every client fails at once."""
    partition = plane.partition(("input_ids", "sample_mask"), tasks=["train"])
    plane.owner.kv_batch_put(["a"], partition, {"input_ids": ids_column([1])})
    meta = plane.owner.get_meta(partition, "train", ["input_ids"], 1, consumer_id="c")
    other = plane.attach()
    plane.owner.close()
    plane.owner.close()
    calls: list[Callable[[DataPlaneClient], object]] = [
        lambda c: c.register_partition("q", ["input_ids"], 1, []),
        lambda c: c.kv_batch_put(["x"], partition, {"sample_mask": torch.ones(1)}),
        lambda c: c.kv_batch_get(["a"], partition, ["input_ids"]),
        lambda c: c.get_meta(partition, "train", ["input_ids"], 1, consumer_id="c"),
        lambda c: c.get_data(meta),
        lambda c: c.release(meta),
        lambda c: c.check_consumption_status(partition, ["train"]),
        lambda c: c.kv_list(partition),
        lambda c: c.kv_clear(None, partition),
        lambda c: c.stats(),
    ]
    for client in (plane.owner, other):
        for call in calls:
            started = time.monotonic()
            with pytest.raises(DataPlaneClosed):
                call(client)
            assert time.monotonic() - started < 30
    other.close()
    with pytest.raises(DataPlaneClosed):
        plane.attach()
