"""The driver's view of the workers: rows come back in the caller's order, ranks are merged by their reductions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.loss import LossConfig
from nemo_rl.distributed.collectives import RankSpec
from nemo_rl.distributed.packing import plan_padded
from nemo_rl.distributed.worker_groups import LocalWorkerGroup
from nemo_rl.models.policy.interfaces import TrainResult
from nemo_rl.models.policy.tq_policy import Policy, summarize
from nemo_rl.models.policy.workers.launch import WorkerSpec, build_policy_worker
from nemo_rl.utils.metrics import Max, Mean
from tests.helpers.tiny_model import tiny_batch, tiny_policy, write_tiny_folder


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Iterator[Policy]:
    folder = write_tiny_folder(tmp_path_factory.mktemp("model"))
    spec = WorkerSpec(
        policy=tiny_policy(folder), rank=RankSpec(rank=0, world_size=1), num_steps=4, keep_reference=True, seed=0
    )
    made = Policy(LocalWorkerGroup(lambda: build_policy_worker(spec)), timeout_s=60)
    yield made
    made.shutdown()


def test_logprobs_come_back_in_the_order_of_the_batch(policy):
    batch = tiny_batch(8)
    lengths = batch.tensor("input_lengths").tolist()
    plan = plan_padded(lengths, capacity=60, dp_world=1)
    assert plan.rows_of_rank(0) != tuple(range(8)), "the plan must reorder rows for this test to mean anything"
    policy.prepare_for_lp_inference()
    shuffled = policy.get_logprobs(batch, plan=plan)
    in_order = policy.get_logprobs(batch, plan=plan_padded(lengths, capacity=10_000, dp_world=1))
    torch.testing.assert_close(shuffled, in_order, rtol=1e-5, atol=1e-5)
    reference = policy.get_reference_policy_logprobs(batch, plan=plan)
    torch.testing.assert_close(reference, shuffled, rtol=1e-5, atol=1e-5)


def test_training_moves_the_policy_away_from_its_reference(policy):
    batch = tiny_batch(8)
    plan = plan_padded(batch.tensor("input_lengths").tolist(), capacity=200, dp_world=1)
    policy.prepare_for_lp_inference()
    before = policy.get_logprobs(batch, plan=plan)
    policy.prepare_for_training()
    summary = policy.train(batch, PolicyLoss(config=LossConfig()), plan=plan)
    assert summary.num_tokens == int(batch.tensor("input_lengths").sum()) and summary.grad_norms[0] > 0
    assert summary.loss == pytest.approx(summary.metrics["loss"].value, rel=1e-5)
    policy.prepare_for_lp_inference()
    drift = policy.get_logprobs(batch, plan=plan) - policy.get_reference_policy_logprobs(batch, plan=plan)
    assert float(drift.abs().max()) > 1e-4
    assert torch.equal(policy.get_reference_policy_logprobs(batch, plan=plan), before)
    assert policy.is_alive()
    peaks = policy.memory_metrics()
    ends = {"memory/train_end_bytes", "memory/logprobs_start_bytes", "memory/train_start_bytes"}
    assert peaks.keys() >= {f"memory/{stage}_peak_bytes" for stage in ("train", "logprobs")} | ends
    assert min(peaks.values()) > 2**20


def result(rank: int, metrics: tuple[dict[str, object], ...]) -> TrainResult:
    return TrainResult(
        loss=(0.5, 0.25),
        grad_norm=(1.0, 2.0),
        rank=rank,
        metrics=metrics,
        total_flops=10.0,
        theoretical_tflops=2.0,
        learning_rate=0.1,
        num_tokens=7,
    )


def test_ranks_are_merged_by_the_reduction_each_metric_carries():
    merged = summarize(
        [
            result(0, ({"kl": Mean(2.0, 4.0), "top": Max(1.0)}, {"kl": Mean(0.0, 4.0)})),
            result(1, ({"kl": Mean(6.0, 8.0), "top": Max(3.0)},)),
        ]
    )
    assert merged.metrics["kl"].value == 0.5 and merged.metrics["top"].value == 3.0
    assert (merged.loss, merged.losses, merged.grad_norms) == (0.375, (0.5, 0.25), (1.0, 2.0))
    assert (merged.num_tokens, merged.total_flops, merged.theoretical_tflops) == (14, 20.0, 4.0)
