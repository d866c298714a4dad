"""Numbers of a step: data plane traffic over processes and on the step's own path, and the speed of training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_rl.algorithms.grpo import score_rows
from nemo_rl.algorithms.stages.stage import ChosenRows, begin_step
from nemo_rl.algorithms.step_metrics import (
    data_plane_metrics,
    ending_texts,
    informative_kl,
    pack_metrics,
    staleness_metrics,
    step_metrics,
    training_speed,
)
from nemo_rl.config.load import load_config
from nemo_rl.data.sampler import SampledPrompt
from nemo_rl.data_plane.batch_meta import KVBatchMeta
from nemo_rl.data_plane.client.operation_counts import OperationCount, Totals
from nemo_rl.distributed.packing import PackPlan, plan_fixed
from nemo_rl.experience.payload import SampleStats
from nemo_rl.experience.rollout_records import RolloutResult
from nemo_rl.models.policy.tq_policy import TrainSummary
from nemo_rl.utils.metrics import Mean, Sum

RECIPE = Path(__file__).parents[3] / "configs/grpo_sort_cpu.yaml"


def snapshot(**ms_of_stage: float) -> Totals:
    """One process: one put of 100 bytes per stage; `outside` is the time of calls outside every stage."""
    stages = {
        "" if stage == "outside" else stage: {
            "kv_batch_put": OperationCount.of_call(ms, error=None, payload_bytes=100, meta_bytes=10)
        }
        for stage, ms in ms_of_stage.items()
    }
    return Totals(stages=stages, field_bytes={"input_ids": 60, "advantages": 40}, over_read_bytes=7)


def test_side_by_side_processes_count_once_per_stage() -> None:
    driver, rollout = snapshot(advantages=5.0, outside=1000.0), snapshot(rollout=20.0)
    workers = [snapshot(train=30.0), snapshot(train=45.0)]
    traffic = data_plane_metrics(
        [driver, rollout, *workers], {"live_rows": 0, "peak_rows": 8}, driver_bytes=3, step_seconds=0.7
    )
    assert traffic.metrics["data_plane/seconds"] == pytest.approx(0.005 + 0.020 + 0.045)
    assert traffic.metrics["data_plane/share_of_step"] == pytest.approx(0.1)
    assert traffic.metrics["data_plane/process_seconds"] == pytest.approx(1.1)
    assert traffic.metrics["data_plane/kv_batch_put/count"] == 5
    assert traffic.metrics["data_plane/kv_batch_put/bytes"] == 500
    assert traffic.metrics["data_plane/kv_batch_put/ms_total"] == 1100
    assert traffic.metrics["data_plane/kv_batch_put/ms_p50"] == pytest.approx(30, rel=0.05)
    assert traffic.metrics["data_plane/kv_batch_put/ms_p99"] == pytest.approx(1000, rel=0.05)
    assert traffic.metrics["data_plane/bytes/input_ids"] == 240 and traffic.metrics["data_plane/over_read_bytes"] == 28
    assert traffic.metrics["data_plane/driver_share"] == 3 / 500
    assert traffic.metrics["data_plane/live_rows"] == 0 and traffic.metrics["data_plane/peak_rows"] == 8
    assert traffic.stage_bytes == {"advantages": 100, "rollout": 100, "train": 200}


def test_without_counting_there_are_no_shares() -> None:
    traffic = data_plane_metrics([Totals(), Totals()], {"live_rows": 0}, driver_bytes=3, step_seconds=1.0)
    assert traffic.metrics == {"data_plane/live_rows": 0.0} and traffic.stage_bytes == {}


@pytest.mark.parametrize(("peak", "mfu", "of_step"), [(200.0, 0.25, 0.1), (0.0, None, None)])
def test_utilisation_is_known_where_the_peak_is(peak: float, mfu: float | None, of_step: float | None) -> None:
    summary = TrainSummary(
        loss=0.0,
        losses=(0.0,),
        grad_norms=(1.0,),
        learning_rate=1e-3,
        num_tokens=1000,
        total_flops=100e12,
        theoretical_tflops=peak,
        num_ranks=1,
    )
    # A log-probability pass is a third of a train pass: 400 / 3 TFLOP in 20 / 3 s of 200 TFLOP/s.
    speed = training_speed(summary, {"train": 2.0, "prev_logprobs": 0.5, "rollout": 4.0}, step_s=20 / 3)
    assert (speed["train/tflops_per_s"], speed["train/tokens_per_s"], speed.get("train/mfu")) == (50.0, 500.0, mfu)
    assert speed.get("train/step_mfu") == (None if of_step is None else pytest.approx(of_step))
    assert training_speed(summary, {"rollout": 1.0}, step_s=1.0) == {}


def test_pack_metrics_say_how_far_a_plan_is_from_the_best() -> None:
    # Linear cost; ranks of 10 + 1 and 4 + 3 padded tokens per microbatch of one row, rounded up to 2.
    plan = plan_fixed([10, 1, 4, 3], rows_per_microbatch=1, dp_world=2, cost=(1.0, 0.0), pad_multiple=2)
    assert pack_metrics("train", plan) == {
        "train/pack_imbalance": pytest.approx(12 / 10),
        "train/pack_synchronised": pytest.approx((10 + 4) / 10),
        "train/pack_pad_share": pytest.approx(1 - 18 / 20),
        "train/pack_bins": 4.0,
        "train/pack_bins_bound": 4.0,
    }
    assert pack_metrics("logprob", None) == {}
    assert pack_metrics("train", PackPlan(microbatches=(((0,),),), steps=(1,), pad_to=4)) == {}


def test_parts_of_the_loss_are_means_over_the_optimizer_steps() -> None:
    config = load_config(RECIPE)
    sample_stats = SampleStats(
        rewards=np.asarray([1, 0, 1, 1], dtype=np.float32),
        truncated=np.asarray([False, True, False, False]),
        response_lengths=np.asarray([2, 4, 3, 3], dtype=np.int32),
    )
    # Two optimizer steps: what is a sum within one is a mean over both, and means stay what they are.
    summary = TrainSummary(
        loss=0.3,
        losses=(0.2, 0.4),
        grad_norms=(1.0, 3.0),
        metrics={"loss": Sum(0.6), "actor_loss": Sum(0.4), "kl_penalty": Sum(0.2), "reference_kl": Mean(3.0, 6.0)},
        learning_rate=1e-3,
        num_tokens=20,
        total_flops=1e9,
        theoretical_tflops=0.0,
        num_ranks=4,
    )
    keys, tags = ("a_g0", "a_g1", "b_g0", "b_g1"), [{"weight_version": version} for version in (0, 0, 0, -2)]
    meta = KVBatchMeta(partition_id="train", keys=keys, sequence_lengths=(5, 7, 6, 6), tags=tags)
    rolled = RolloutResult(meta=meta, sample_stats=sample_stats, metrics={"reward_timeouts": Sum(2.0)})
    plan = PackPlan(microbatches=(((0,),), ((1,),)), steps=(1,), pad_to=4)
    weights = {"advantages": torch.zeros(2), "sample_mask": torch.ones(2)}
    step = replace(
        begin_step(1, [SampledPrompt(0, 3), SampledPrompt(1, 8)], group_size=2, version=0),
        rolled=rolled,
        scored=score_rows(sample_stats, rolled.group_uids, config.grpo),
        chosen=ChosenRows(rows=(0, 1), meta=meta.subset([0, 1]), plan=plan, **weights),
        train=summary,
        seconds=2.0,
    )
    found = step_metrics(step)
    train = {name: found[f"train/{name}"] for name in ("loss", "actor_loss", "kl_penalty", "reference_kl", "grad_norm")}
    assert train == {"loss": 0.3, "actor_loss": 0.2, "kl_penalty": 0.1, "reference_kl": 0.5, "grad_norm": 2.0}
    assert found["train/num_ranks"] == 4
    assert (found["train/reward"], found["train/rows"], found["rollout/tokens_per_s"]) == (0.75, 2.0, 12.0)
    assert (found["rollout/trivial_group_share"], found["rollout/truncated_share"]) == (0.5, 0.25)
    assert (found["rollout/mean_response_tokens"], found["rollout/reward_timeouts"]) == (3.0, 2.0)
    assert [found[f"rollout/staleness_{which}"] for which in ("min", "max", "mean")] == [0.0, 2.0, 0.5]


def test_the_lag_of_a_batch_is_told_by_its_rows_and_only_where_there_is_one() -> None:
    mixed = staleness_metrics(np.asarray([4, 3, 1, 4]), policy_version=4)
    assert mixed == {"rollout/staleness_min": 0.0, "rollout/staleness_max": 3.0, "rollout/staleness_mean": 1.0}
    assert staleness_metrics(np.asarray([4, 4]), policy_version=4) == {}
    old = staleness_metrics(np.asarray([3, 3]), policy_version=4)
    assert set(old.values()) == {1.0}


def summary_of(num_updates: int) -> TrainSummary:
    each = (0.1,) * num_updates
    return TrainSummary(
        loss=0.1,
        losses=each,
        grad_norms=each,
        learning_rate=1e-3,
        num_tokens=1,
        total_flops=1.0,
        theoretical_tflops=0.0,
        num_ranks=1,
    )


@pytest.mark.parametrize(
    ("num_updates", "from_rollout", "more", "shown"),
    [
        (1, False, {}, None),
        (2, False, {}, 0.25),
        (1, True, {}, 0.25),
        (1, False, {"train/reference_kl": 0.5}, 0.5),
        (2, True, {"train/reference_kl": 0.0}, 0.0),
    ],
)
def test_a_kl_that_is_zero_by_construction_is_not_shown(num_updates, from_rollout, more, shown):
    config = load_config(RECIPE, [f"grpo.use_generation_logprobs_as_prev={str(from_rollout).lower()}"])
    metrics = {"train/policy_kl": 0.25, **more}
    assert informative_kl(summary_of(num_updates), metrics, config.grpo) == shown
    assert informative_kl(None, {}, config.grpo) is None


def test_endings_are_told_with_their_number_reward_and_tokens() -> None:
    found = ending_texts(
        {
            "rollout/ending/env_error": 2.0,
            "rollout/ending/env_error/tokens": 3.0,
            "rollout/ending/answered": 12.0,
            "rollout/ending/answered/reward": 0.5,
            "rollout/ending/answered/tokens": 30.25,
            "rollout/turns": 3.0,
        }
    )
    assert list(found.items()) == [
        ("answered", "12 (reward 0.5, 30.2 tokens)"),
        ("env_error", "2 (left out, 3 tokens)"),
    ]
    assert ending_texts({"rollout/turns": 1.0}) == {}
