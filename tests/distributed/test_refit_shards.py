"""Refits from shard to shard: four policy workers (dp2 x tp2) in processes, two engines, and who dies meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from nemo_rl.config.backends import DTensorConfig, LoraConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.errors import RefitMismatch, WorkerError
from nemo_rl.models.weight_sync.factory import PayloadWeightSync
from tests.helpers.data_planes import ray_cluster
from tests.helpers.shard_bench import CALL_S, PLACES, RANKS, ShardBench, write_shard_model
from tests.helpers.shard_faults import FAULTS, build_faulty_engine
from tests.helpers.tiny_model import tiny_policy

pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PolicyConfig:
    folder = write_shard_model(tmp_path_factory.mktemp("shards") / "model")
    return tiny_policy(folder, dtensor_cfg=DTensorConfig(tensor_parallel_size=2))


@pytest.fixture(scope="module")
def stack() -> Iterator[ExitStack]:
    with ray_cluster(imported=("tests.helpers.rank_preload",)), ExitStack() as opened:
        yield opened


@pytest.fixture(scope="module")
def bench(config: PolicyConfig, stack: ExitStack) -> ShardBench:
    made = ShardBench(config, stack, engine=build_faulty_engine)
    made.step()
    return made


def test_shards_bring_what_whole_weights_bring_and_no_byte_twice(bench: ShardBench) -> None:
    bench.step()
    report, plan = bench.sync.report, bench.sync.plans["weights"]
    assert report is not None and report.receipt is not None
    assert report.bytes_sent == report.bytes_dense
    share = sum(plan.received.values()) / RANKS
    assert max(plan.sent.values()) <= 1.05 * share
    assert set(plan.received.values()) == {report.bytes_dense}, "an embedded engine takes whole weights"
    assert len(plan.rounds) > 3
    whole = PayloadWeightSync(bench.parties)
    whole.sync(bench.version)
    assert whole.report is not None and whole.report.receipt is not None
    assert report.receipt.weights == whole.report.receipt.weights


@pytest.mark.parametrize("fault", FAULTS)
def test_a_slice_that_is_not_what_was_sent_is_named(bench: ShardBench, fault: str) -> None:
    bench.tell_engine(1, "plant", fault=fault)
    try:
        with pytest.raises(
            RefitMismatch, match=f"engine 1 of 2: 1 of .* weights .* {FAULTS[fault][0]} has other values"
        ):
            bench.step()
    finally:
        bench.tell_engine(1, "plant", fault=None)
    assert bench.sync.version == -1
    bench.step()
    assert bench.sync.version == bench.version


@pytest.mark.parametrize("place", PLACES)
def test_an_engine_that_dies_is_lost_alone_and_comes_back(bench: ShardBench, place: str) -> None:
    first = bench.sync._first_ranks[1]
    bench.tell_engine(1, "end_at", number=bench.round_of(first, place))
    began = time.monotonic()
    bench.step()
    assert time.monotonic() - began < CALL_S
    assert bench.fleet.numbers == (0,) and bench.sync.version == bench.version
    bench.step()
    assert bench.fleet.numbers == (0, 1) and bench.sync.version == bench.version
    found = bench.samples()
    assert torch.equal(found[0].token_ids, found[1].token_ids)


def test_an_error_of_a_policy_rank_is_raised_and_reaches_the_engines(bench: ShardBench) -> None:
    bench.tell_policy(2, "fail_at", number=bench.round_of(2, "middle"))
    with pytest.raises(WorkerError, match="rank 2, stage refit: OSError: the disk of this test is full"):
        bench.step()
    bench.check_no_version()
    bench.start_policy()
    bench.step()
    assert bench.sync.version == bench.version


@pytest.mark.parametrize("place", PLACES)
def test_a_policy_rank_that_dies_is_named_and_nothing_is_sampled(bench: ShardBench, place: str) -> None:
    bench.tell_policy(3, "end_at", number=bench.round_of(3, place))
    began = time.monotonic()
    with pytest.raises(WorkerError, match="rank 3"):
        bench.step()
    assert time.monotonic() - began < CALL_S and bench.sync.version == -1
    bench.check_no_version()
    bench.start_policy()
    bench.step()
    assert bench.sync.version == bench.version


def test_an_adapter_comes_by_shards_beside_the_one_in_use(config: PolicyConfig, stack: ExitStack) -> None:
    lora = LoraConfig(enabled=True, rank=4, targets=["q_proj", "o_proj", "down_proj"])
    bench = ShardBench(config.model_copy(update={"lora": lora}), stack, engine=build_faulty_engine)
    bench.step()
    bench.step()
    report = bench.sync.report
    assert report is not None and report.receipt is not None and report.num_adapters == 2
    adapter = bench.sync.plans["adapter"]
    assert report.bytes_sent == sum(slot.num_bytes for slot in adapter.slots)
    assert set(adapter.received.values()) == {report.bytes_sent}
