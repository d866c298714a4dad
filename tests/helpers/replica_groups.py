"""A replica group of two tensor-parallel workers without actors: steps over several stores, then planted failures."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import ray
import torch
import torch.distributed as dist
from ray._common.utils import reset_ray_address
from ray.cluster_utils import Cluster

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.algorithms.token_work import LOGPROB_ERROR, TokenStatistics
from nemo_rl.config.backends import DTensorConfig
from nemo_rl.config.base import START_TIMEOUT_S
from nemo_rl.config.data_plane import DataPlaneConfig, FetchPolicy
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.data_plane.batch_meta import shard_meta_for_dp
from nemo_rl.data_plane.client.operation_counts import OperationCount
from nemo_rl.data_plane.column_io import kv_first_write, read_columns, write_columns
from nemo_rl.data_plane.factory import build_data_plane_client
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from nemo_rl.data_plane.schema import LP_SEED_FIELDS
from nemo_rl.distributed import fork_stub
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.collectives import RankSpec, destroy_process_group
from nemo_rl.distributed.environment import FAIR_SHARE, NO_SPARE_WORKERS
from nemo_rl.distributed.fork_server import ForkServer
from nemo_rl.distributed.packing import plan_padded
from nemo_rl.distributed.ray_private import started_by
from nemo_rl.distributed.worker_pass import RowPass
from nemo_rl.errors import DataPlaneClosed
from nemo_rl.models.policy.interfaces import LossOutput, LossScale
from nemo_rl.models.policy.workers.launch import WorkerSpec, build_policy_worker
from nemo_rl.models.policy.workers.tq_worker import TQWorker
from tests.helpers.data_planes import IMPORTED, ray_cluster
from tests.helpers.tiny_model import tiny_batch, tiny_policy

ROWS = 8
GIB = 1 << 30
HEAD = {"num_cpus": 3, "include_dashboard": False, "object_store_memory": 100 << 20}
WRITTEN = ("input_ids", "input_lengths", "token_mask", "sample_mask", "generation_logprobs")
TRAINED = (*WRITTEN, "prev_logprobs", "advantages")
LOSS = PolicyLoss(config=LossConfig(reference_policy_kl_penalty=0.0))


@dataclass(frozen=True)
class Plane:
    """The store of one step, and how the workers read it."""

    impl: str
    fetch_policy: FetchPolicy = "auto"
    cache_bytes: int = GIB


PLANES: dict[str, Plane] = {
    "noop": Plane("noop"),
    "noop, nothing kept": Plane("noop", "leader_broadcast", 0),
    "transfer_queue": Plane("transfer_queue", "leader_broadcast"),
    "ray, nothing kept": Plane("ray", "auto", 0),
    "shm, each for itself": Plane("shm", "independent"),
}


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The results of one rank in one step."""

    fetched: dict[str, str]
    """Digest of each column before training."""
    logprobs: dict[str, list[float]]
    """Log-probabilities as stored; read by rank 0 only."""
    puts: int | None
    """Writes of this rank's client in the log-probability stage; None without a client."""
    errors: list[float]
    """Log-probability errors of the rows that this rank has measured."""
    sample_mask: list[float]
    """The mask that the rank trains on, after the driver has rewritten it."""
    refetched: set[str]
    """Fields that this rank's client moved after the log-probability stage."""
    trained: str
    """Digest of the full weights after training."""


def rows() -> BatchedDataDict:
    batch = tiny_batch(ROWS)
    made = BatchedDataDict({name: batch[name] for name in WRITTEN})
    made["input_lengths"] = made.tensor("input_lengths").to(torch.int32)
    return made


def start(rank: int, folder: str, port: int, *, policy: PolicyConfig | None = None, world_size: int = 2) -> TQWorker:
    policy = policy or tiny_policy(folder, dtensor_cfg=DTensorConfig(tensor_parallel_size=2))
    spec = RankSpec(rank=rank, world_size=world_size, master_port=port)
    return build_policy_worker(WorkerSpec(policy=policy, rank=spec, num_steps=4, keep_reference=False, seed=0))


def share(value: object, *, source: int = 0) -> object:
    """Give one rank's value to every rank, as the driver would."""
    box = [value]
    dist.broadcast_object_list(box, src=source)
    return box[0]


@contextmanager
def shared_cluster(rank: int, *, joins: bool = True) -> Iterator[None]:
    """(collective) A Ray of rank 0 which the ranks that join are drivers of."""
    os.environ.update({**FAIR_SHARE, **NO_SPARE_WORKERS})
    with ExitStack() as stack:
        cluster = stack.enter_context(_cluster()) if rank == 0 else None
        address = str(share(cluster.address if cluster is not None else None))
        if joins:
            ray.init(address=address, log_to_driver=False)
        yield
        if joins:
            ray.shutdown()


@contextmanager
def _cluster() -> Iterator[Cluster]:
    """Start a Ray whose actors are forked off a process that has imported what the stores need."""
    with (
        ForkServer(IMPORTED, environment={"OMP_NUM_THREADS": "1"}, deadline_s=START_TIMEOUT_S) as forks,
        patch.dict(os.environ, forks.environment),
        started_by(Path(fork_stub.__file__)),
    ):
        cluster = Cluster(initialize_head=True, head_node_args=HEAD)
        reset_ray_address()  # else every Ray start on this machine would join it
        try:
            yield cluster
        finally:
            cluster.shutdown()


def open_store(rank: int, plane: Plane, stack: ExitStack) -> tuple[DataPlaneClient | None, object, KVBatchMeta]:
    """Play the driver on rank 0: open the store, write the rows, and plan one shard."""
    client, made = None, None
    if rank == 0:
        name = hashlib.sha1(repr(plane).encode()).hexdigest()[:8]
        config = DataPlaneConfig(impl=plane.impl, ledger_host="socket" if plane.impl == "shm" else None)
        client = build_data_plane_client(config, run_id=f"replica{name}", role="owner")
        stack.callback(client.close)
        client.register_partition("train", TRAINED, ROWS, ["train"])
        meta = kv_first_write(client, rows(), [f"u{i}_g0" for i in range(ROWS)], partition_id="train")
        made = client.address, sharded(meta)
    address, meta = share(made)
    return client, address, meta


def sharded(meta: KVBatchMeta) -> KVBatchMeta:
    plan = plan_padded(meta.sequence_lengths, capacity=64, dp_world=1)
    return shard_meta_for_dp(meta, plan)[0]


def one_step(worker: TQWorker, plane: Plane) -> StepReport:
    rank = worker.rank
    with ExitStack() as stack:
        client, address, meta = open_store(rank, plane, stack)
        worker.setup_data_plane(address, fetch_policy=plane.fetch_policy, cache_bytes=plane.cache_bytes)
        stack.callback(worker.close_data_plane)
        before = worker.fetch(meta, LP_SEED_FIELDS)
        worker.prepare_for_lp_inference()
        done = share(worker.get_logprobs_presharded(meta), source=worker.layout.writer(0))
        puts = operations(worker, "prev_logprobs").get("kv_batch_put", OperationCount()).count
        logprobs = read_columns(client, done, ("prev_logprobs",)).tensor("prev_logprobs") if client else None
        rewritten = {"sample_mask": torch.arange(ROWS) / 8.0, "advantages": torch.arange(ROWS) - 3.5}
        meta = share(write_columns(client, done, rewritten) if client else None)
        if has_client(worker):
            worker.data_plane_snapshot()
        batch = worker.fetch(meta, TRAINED)
        snapshot = worker.data_plane_snapshot()
        worker.prepare_for_training()
        worker.train_presharded(meta, LOSS, fields=TRAINED)
        measured = worker.map_rows(meta, TokenStatistics(error_threshold=2.0), stage=RowPass.MEASURE).numbers
        worker.end_step()
        # Also a barrier, behind which rank 0 may end the store.
        return StepReport(
            fetched={name: digest(value) for name, value in before.items()},
            logprobs=dict(zip(done.keys, logprobs.tolist(), strict=True)) if logprobs is not None else {},
            puts=puts if has_client(worker) else None,
            errors=measured[LOGPROB_ERROR].tolist() if measured else [],
            sample_mask=batch.tensor("sample_mask").tolist(),
            refetched=set(snapshot.field_bytes) if snapshot is not None else set(),
            trained=digest(torch.cat([weight.flatten() for _, weight in worker.export_weights()])),
        )


def has_client(worker: TQWorker) -> bool:
    try:
        return worker.client is not None
    except DataPlaneClosed:
        return False


def operations(worker: TQWorker, stage: str) -> Mapping[str, OperationCount]:
    return worker.client.snapshot().stages.get(stage, {}) if has_client(worker) else {}


def digest(column: object) -> str:
    if isinstance(column, torch.Tensor):
        raw = f"{column.dtype}{list(column.shape)}".encode() + column.contiguous().view(torch.uint8).numpy().tobytes()
        return hashlib.sha256(raw).hexdigest()
    return repr(column)


def steps_over_every_plane(rank: int, folder: str, port: int) -> dict[str, StepReport]:
    """Run a step over each plane, with one worker per rank, fresh rows and the first weights each time."""
    destroy_process_group()
    with ray_cluster(num_cpus=3) if rank == 0 else nullcontext():
        worker = start(rank, folder, port)
        weights = [shard.clone() for shard in worker.shards.held()]
        reports = {}
        for name, plane in PLANES.items():
            worker.shards.write(weights)
            reports[name] = one_step(worker, plane)
        worker.shutdown()
    return reports


# Planted failures, each in its own job.


@dataclass(frozen=True)
class FailsOnRankOne:
    """The loss of rank 1 raises, after collectives of the forward pass and before those of the backward pass."""

    input_fields: tuple[str, ...] = LOSS.input_fields

    def __call__(
        self, token_logprobs: torch.Tensor, batch: Mapping[str, torch.Tensor], *, scale: LossScale
    ) -> LossOutput:
        if dist.get_rank() == 1:
            raise ValueError("planted in the loss")
        return LOSS(token_logprobs, batch, scale=scale)


def in_the_fetch(worker: TQWorker, meta: KVBatchMeta) -> None:
    unknown = KVBatchMeta(partition_id="train", keys=("nobody_g0",), sequence_lengths=(9,))
    worker.get_logprobs_presharded(sharded(unknown))


def between_collectives(worker: TQWorker, meta: KVBatchMeta) -> None:
    def fail(*_: object) -> None:
        raise ValueError("planted in the forward pass")

    if worker.rank == 1:
        worker.engine.model.hf.model.layers[1].mlp.register_forward_pre_hook(fail)
    worker.get_logprobs_presharded(meta)


def in_the_loss(worker: TQWorker, meta: KVBatchMeta) -> None:
    columns = {"prev_logprobs": torch.zeros(ROWS, meta.pack.pad_to), "advantages": torch.ones(ROWS)}
    meta = share(write_columns(worker.client, meta, columns) if worker.rank == 0 else None)
    worker.prepare_for_training()
    worker.train_presharded(meta, FailsOnRankOne(), fields=TRAINED)


def in_the_write_back(worker: TQWorker, meta: KVBatchMeta) -> None:
    """Write into a partition without the column from rank 0, while rank 1 has gone on to the next stage."""
    narrow = None
    if worker.rank == 0:
        worker.client.register_partition("narrow", WRITTEN, ROWS, ["train"])
        narrow = sharded(kv_first_write(worker.client, rows(), meta.keys, partition_id="narrow"))
    narrow = share(narrow)
    worker.get_logprobs_presharded(narrow)
    worker.get_logprobs_presharded(narrow)


def in_the_plan(worker: TQWorker, meta: KVBatchMeta) -> None:
    """Run with a plan of rank 1 that has lost the order of its microbatches."""
    if worker.rank == 1:
        assert meta.pack is not None
        turned = (tuple(reversed(meta.pack.microbatches[0])),)
        meta = meta.with_pack(replace(meta.pack, microbatches=turned))
    worker.get_logprobs_presharded(meta)


PLANTS: dict[str, Callable[[TQWorker, KVBatchMeta], None]] = {
    plant.__name__: plant for plant in (in_the_fetch, between_collectives, in_the_loss, in_the_write_back, in_the_plan)
}


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """The reports of one rank."""

    steps: dict[str, StepReport]
    failures: dict[str, tuple[str, str, float]]
    """Kind, text and seconds of what this rank raised."""


def run_all_jobs(rank: int, folder: str, ports: list[int]) -> RankReport:
    """Run both parts in the same two processes; a port for the steps and one for each planted failure."""
    steps = steps_over_every_plane(rank, folder, ports[0])
    plants = zip(ports[1:], PLANTS.items(), strict=True)
    failures = {name: planted(rank, folder, port, plant) for port, (name, plant) in plants}
    return RankReport(steps=steps, failures=failures)


def planted(
    rank: int,
    folder: str,
    port: int,
    plant: Callable[[TQWorker, KVBatchMeta], None],
    *,
    policy: PolicyConfig | None = None,
    plane: Plane = PLANES["noop"],
) -> tuple[str, str, float]:
    worker = start(rank, folder, port, policy=policy)
    with ExitStack() as stack:
        stack.callback(worker.shutdown)
        _, address, meta = open_store(rank, plane, stack)
        worker.setup_data_plane(address, cache_bytes=GIB)
        worker.prepare_for_lp_inference()
        started = time.monotonic()
        try:
            plant(worker, meta)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
            return type(error).__name__, str(error), time.monotonic() - started
    raise AssertionError(f"rank {rank}: {plant.__name__} went on")
