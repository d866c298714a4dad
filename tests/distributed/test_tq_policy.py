"""`TQPolicy` over real actors: a replica group counts once, and the driver raises the root cause of a failed step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import torch

from nemo_rl.config.backends import DTensorConfig
from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.config.parts import TRAINING_ENGINES
from nemo_rl.data_plane.column_io import kv_first_write, read_columns, write_columns
from nemo_rl.data_plane.factory import build_data_plane_client
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from nemo_rl.distributed.collectives import RankSpec
from nemo_rl.distributed.job_store import reserve_port
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.packing import plan_padded
from nemo_rl.distributed.ray_worker_groups import RayPlacement, RayWorkerGroup
from nemo_rl.errors import ConfigError, WorkerError
from nemo_rl.models.policy.interfaces import LossOutput, LossScale
from nemo_rl.models.policy.tq_policy import TQPolicy
from nemo_rl.models.policy.workers.launch import WorkerSpec, build_policy_worker
from tests.helpers.data_planes import IMPORTED, ray_cluster
from tests.helpers.replica_groups import LOSS, ROWS, TRAINED, FailsOnRankOne, rows
from tests.helpers.tiny_model import tiny_policy, tiny_worker, write_tiny_folder

START_S = 600.0
LAUNCH, ENGINE = "nemo_rl.models.policy.workers.compose", TRAINING_ENGINES.builtin["dtensor"].partition(":")[0]
IMPORTED_BY_WORKERS = (*IMPORTED, LAUNCH, ENGINE)
LIMIT_S, SLACK = 5.0, 6
"""The contract of the abort, and the time that a busy machine may take."""


@dataclass(frozen=True)
class KillsRankOne:
    """The process of rank 1 ends in its loss, while rank 0 waits for it."""

    input_fields: tuple[str, ...] = LOSS.input_fields

    def __call__(
        self, token_logprobs: torch.Tensor, batch: Mapping[str, torch.Tensor], *, scale: LossScale
    ) -> LossOutput:
        if torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return LOSS(token_logprobs, batch, scale=scale)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(write_tiny_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def groups(folder) -> Iterator[dict[str, RayWorkerGroup]]:
    """Two jobs of two workers, started at the same time: tensor parallel, and data parallel."""
    made = {}
    with ExitStack() as stack:
        stack.enter_context(ray_cluster(num_cpus=5, imported=IMPORTED_BY_WORKERS))
        for name, tensor_parallel in (("tp", 2), ("dp", 1)):
            group = RayWorkerGroup(name, world_size=2, placement=RayPlacement(num_cpus=1))
            stack.callback(group.shutdown)
            policy = tiny_policy(folder, dtensor_cfg=DTensorConfig(tensor_parallel_size=tensor_parallel))
            _, port = group.rendezvous(reserve_port, timeout_s=START_S)
            ranks = [RankSpec(rank=rank, world_size=2, master_port=port) for rank in range(2)]
            specs = [WorkerSpec(policy=policy, rank=r, num_steps=4, keep_reference=False, seed=0) for r in ranks]
            group.begin_start(build_policy_worker, [{"spec": spec} for spec in specs])
            made[name] = group
        for group in made.values():
            group.finish_start(timeout_s=START_S)
        yield made


@pytest.fixture
def store(groups) -> Iterator[tuple[DataPlaneClient, KVBatchMeta]]:
    client = build_data_plane_client(DataPlaneConfig(impl="ray"), run_id=f"tq{time.monotonic_ns():x}", role="owner")
    client.register_partition("train", TRAINED, ROWS, ["train"])
    yield client, kv_first_write(client, rows(), [f"u{i}_g0" for i in range(ROWS)], partition_id="train")
    client.close()


def with_weights(client: DataPlaneClient, meta: KVBatchMeta) -> KVBatchMeta:
    width = max(meta.sequence_lengths)
    columns = {"advantages": torch.arange(ROWS) - 3.5, "prev_logprobs": torch.full((ROWS, width), -3.0)}
    return write_columns(client, meta, columns)


@pytest.mark.slow
def test_a_replica_group_counts_once_and_its_failure_is_the_first_cause(groups, store, folder):
    client, meta = store
    layout = ParallelLayout.of(2, tp=2)
    policy = TQPolicy(groups["tp"], address=client.address, timeout_s=60, layout=layout)
    assert (policy.dp_world, policy.layout) == (1, layout)
    plan = plan_padded(meta.sequence_lengths, capacity=64, dp_world=policy.dp_world)
    under_way = policy.get_logprobs_from_meta.submit(meta, plan)
    again = policy.get_logprobs_from_meta.submit(meta, plan)
    assert again.result().versions["prev_logprobs"] > under_way.result().versions["prev_logprobs"], "in their order"
    done = again.result()
    got = read_columns(client, done, ("prev_logprobs",)).tensor("prev_logprobs")
    worker = tiny_worker(tiny_policy(folder))
    expected = worker.get_logprobs(rows(), mbs=ROWS)
    worker.shutdown()
    torch.testing.assert_close(got, expected[:, : got.shape[1]], rtol=0, atol=2e-5)
    assert len(policy.data_plane_snapshots()) == 1, "a follower has a client"
    ready = with_weights(client, done)
    summary = policy.train_from_meta(ready, plan, LOSS, fields=TRAINED)
    assert summary.num_tokens == sum(meta.sequence_lengths)
    batch = policy.get_logprobs(rows(), plan=plan)
    assert batch.shape[0] == ROWS
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1, stage train: ValueError: planted in the loss") as caught:
        policy.train_from_meta(ready, plan, FailsOnRankOne(), fields=TRAINED)
    assert time.monotonic() - started < LIMIT_S * SLACK
    assert (caught.value.rank, caught.value.stage) == (1, "train")
    assert not groups["tp"].is_running


@pytest.mark.slow
def test_a_killed_worker_is_named_by_the_driver(groups, store):
    client, meta = store
    policy = TQPolicy(groups["dp"], address=client.address, timeout_s=60)
    assert policy.layout == ParallelLayout.of(2)
    plan = plan_padded(meta.sequence_lengths, capacity=64, dp_world=2)
    meta = with_weights(client, meta)
    started = time.monotonic()
    with pytest.raises(WorkerError, match="process") as caught:
        policy.train_from_meta(meta, plan, KillsRankOne(), fields=TRAINED)
    assert time.monotonic() - started < LIMIT_S * SLACK
    assert (caught.value.rank, caught.value.stage) == (1, "train")


@pytest.mark.slow
def test_what_does_not_fit_the_layout_is_refused(groups, store):
    client, _ = store
    group = groups["dp"]
    with pytest.raises(ConfigError, match="2 policy workers do not fit"):
        TQPolicy(group, address=client.address, timeout_s=60, layout=ParallelLayout.of(4, tp=2))
