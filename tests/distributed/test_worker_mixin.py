"""A replica group without Ray: one rank reads the store, both compute, one writes, and errors reach both."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.column_io import kv_first_write, read_columns
from nemo_rl.data_plane.factory import build_data_plane_client
from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from nemo_rl.data_plane.worker_mixin import ReplicaMember, TQWorkerMixin
from nemo_rl.distributed.abort import StepWatch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.collectives import RankSpec, replica_group_of
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.packing import plan_padded
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.errors import ConfigError, DataPlaneClosed, KeysNotFound, SchemaMismatch
from nemo_rl.models.policy.steps import RankInfo
from nemo_rl.models.policy.workers.policy_worker import WorkerSpec
from nemo_rl.models.policy.workers.tq_worker import TQWorker
from tests.helpers.gloo import run_ranks
from tests.helpers.tiny_model import tiny_batch, tiny_policy, tiny_worker, write_tiny_folder

FIELDS = ("input_ids", "input_lengths", "token_mask", "sample_mask", "generation_logprobs", "prev_logprobs")


def rollout_batch() -> BatchedDataDict:
    batch = tiny_batch(8)
    names = ("input_ids", "input_lengths", "token_mask", "sample_mask", "generation_logprobs")
    rows = BatchedDataDict({name: batch[name] for name in names})
    rows["input_lengths"] = rows.tensor("input_lengths").to(torch.int32)
    return rows


def start_worker(rank: int, folder: str) -> TQWorker:
    """Rank 1 leads."""
    replica = ReplicaMember(group=replica_group_of(rank, [[0, 1]]), leader=1, is_write_back_leader=rank == 1)
    here = RankInfo(layout=ParallelLayout.of(2), rank=rank, device=torch.device("cpu"))
    spec = WorkerSpec(
        policy=tiny_policy(folder),
        rank=RankSpec(rank=rank, world_size=2),
        num_steps=4,
        collective_timeout_s=60,
        seed=0,
        keep_reference=False,
    )
    return TQWorker(spec, here, owns_group=True, replica=replica, watch=StepWatch())


def open_store() -> tuple[DataPlaneClient, KVBatchMeta]:
    config = DataPlaneConfig(impl="noop")
    client = build_data_plane_client(config, run_id="mixin", role="owner")
    client.register_partition("train", FIELDS, 8, ["prev_lp"])
    meta = kv_first_write(client, rollout_batch(), [f"u{i}_g0" for i in range(8)], partition_id="train")
    return client, meta


def logprobs_of_a_replica_group(rank: int, folder: str) -> dict[str, object]:
    """Rank 1 leads and owns the store; rank 0 has no client at all."""
    worker = start_worker(rank, folder)
    client, meta = open_store() if rank == 1 else (None, described_meta())
    plan = plan_padded(meta.sequence_lengths, capacity=64, dp_world=1)
    meta = meta.subset(plan.rows_of_rank(0)).with_pack(plan.for_rank(0))
    worker.setup_data_plane(client.address if client is not None else None)
    worker.prepare_for_lp_inference()
    done = worker.get_logprobs_presharded(meta)
    report: dict[str, object] = {"errors": errors(worker, meta)}
    if client is not None:
        read = read_columns(client, done, ("prev_logprobs",))
        report["prev_logprobs"] = dict(zip(done.keys, read.tensor("prev_logprobs").tolist(), strict=True))
        report["snapshot"] = worker.data_plane_snapshot()
        assert done.versions["prev_logprobs"] == 1
        client.close()
    worker.shutdown()
    return report


def described_meta() -> KVBatchMeta:
    lengths = tuple(rollout_batch().tensor("input_lengths").tolist())
    return KVBatchMeta(partition_id="train", keys=tuple(f"u{i}_g0" for i in range(8)), sequence_lengths=lengths)


def errors(worker: TQWorker, meta: KVBatchMeta) -> list[str]:
    unknown = KVBatchMeta(partition_id="train", keys=("nobody_g0",), sequence_lengths=(9,))
    with pytest.raises(KeysNotFound) as caught:
        worker.get_logprobs_presharded(unknown)
    with pytest.raises(SchemaMismatch, match=r"expected \[8, T\], got \[3, 4\]"):
        worker.write_back(meta, {"prev_logprobs": torch.zeros(3, 4)})
    return [str(caught.value)]


def test_a_replica_group_reads_once_writes_once_and_shares_errors(tmp_path):
    folder = str(write_tiny_folder(tmp_path / "model"))
    follower, leader = run_ranks(2, logprobs_of_a_replica_group, folder)
    assert follower["errors"] == leader["errors"] and "nobody_g0" in leader["errors"][0]
    gets = leader["snapshot"].stages["prev_logprobs"]["get_data"]
    assert gets.count == 2 and gets.errors == 1
    worker = tiny_worker(tiny_policy(folder))
    values = worker.get_logprobs(rollout_batch(), mbs=8)
    worker.shutdown()
    expected = {f"u{i}_g0": row for i, row in enumerate(values.tolist())}
    got = leader["prev_logprobs"]
    assert set(got) == set(expected)
    for key, row in expected.items():
        ours = torch.tensor(got[key])
        reference = torch.zeros(len(ours))
        reference[: len(row)] = torch.tensor(row)[: len(ours)]
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)


class Constant(TQWorkerMixin):
    """A worker without a model: its passes need the data plane half alone."""

    def train_presharded(self, meta: KVBatchMeta, *, fields: tuple[str, ...]) -> int:
        with self.stage(WorkerPass.TRAIN):
            return self.fetch(meta, fields).size

    def get_logprobs_presharded(self, meta: KVBatchMeta) -> KVBatchMeta:
        with self.stage(WorkerPass.PREV_LOGPROBS):
            shape = self.fetch(meta, ("input_ids", "input_lengths")).tensor("input_ids").shape
            return self.write_back(meta, {"prev_logprobs": torch.full(shape, -1.5)})


@pytest.fixture
def alone() -> Constant:
    return Constant(rank=0, replica=ReplicaMember(leader=0), watch=StepWatch(), pad_values={"input_ids": 0.0})


def test_a_fetch_policy_that_cannot_work_is_refused(alone):
    with pytest.raises(ConfigError, match="'leader_broadcast' needs a replica group"):
        alone.setup_data_plane(None, fetch_policy="leader_broadcast")
    with pytest.raises(ConfigError, match="expected one of auto, independent, leader_broadcast, got 'nobody'"):
        alone.setup_data_plane(None, fetch_policy="nobody")


def test_the_data_plane_half_is_all_that_a_worker_without_a_model_needs(alone):
    client, meta = open_store()
    alone.setup_data_plane(client.address)
    done = alone.get_logprobs_presharded(meta)
    column = read_columns(client, done, ("prev_logprobs",)).tensor("prev_logprobs")
    lengths = torch.tensor(meta.sequence_lengths)
    assert torch.equal(column, torch.where(torch.arange(column.shape[1]) < lengths[:, None], -1.5, 0.0))
    assert alone.train_presharded(meta, fields=("input_ids",)) == 8
    alone.close_data_plane()
    with pytest.raises(DataPlaneClosed, match="rank 0: no data plane client; call setup_data_plane first"):
        alone.get_logprobs_presharded(meta)
    assert alone.data_plane_snapshot() is None
    client.close()
