"""Refits from shard to shard on vLLM: Megatron (ep2 x tp2) to two engines of two ranks, one of which fails or dies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from nemo_rl.config.backends import DTensorConfig, MegatronConfig
from nemo_rl.errors import RefitMismatch
from nemo_rl.models.weight_sync.factory import PayloadWeightSync
from tests.helpers.data_planes import ray_cluster
from tests.helpers.engine_process import NO_VLLM, has_vllm, vllm_policy
from tests.helpers.shard_bench import CALL_S, PLACES, RANKS, ShardBench, write_shard_model
from tests.helpers.shard_faults import FAULTS
from tests.helpers.shard_vllm import VICTIM, build_faulty_vllm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not has_vllm(), reason=NO_VLLM),
]

MEGATRON = {
    "enabled": True,
    "tensor_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": True,
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardBench]:
    folder: Path = write_shard_model(tmp_path_factory.mktemp("shards") / "model")
    config = vllm_policy(
        folder,
        generation={"vllm_cfg": {"kv_cache_gib": 0.05, "tensor_parallel_size": 2}},
        dtensor_cfg=DTensorConfig(enabled=False),
        megatron_cfg=MegatronConfig(**MEGATRON),
    )
    with ray_cluster(imported=("tests.helpers.rank_preload",)), ExitStack() as stack:
        made = ShardBench(config, stack, engine=build_faulty_vllm)
        made.step()
        yield made


def test_each_rank_gets_its_shard_and_engines_hold_what_whole_weights_make(bench: ShardBench) -> None:
    bench.step()
    report, plan = bench.sync.report, bench.sync.plans["weights"]
    assert report is not None and report.receipt is not None
    share = sum(plan.received.values()) / RANKS
    assert max(plan.sent.values()) <= 1.05 * share, plan.sent
    # Norms, the router and heads of queries and keys are whole on both ranks.
    assert max(plan.received.values()) <= 0.53 * report.bytes_dense, plan.received
    by_shards = bench.samples()
    whole = PayloadWeightSync(bench.parties)
    whole.sync(bench.version)
    assert whole.report is not None and whole.report.receipt is not None
    assert report.receipt.weights == whole.report.receipt.weights
    for number, output in bench.samples().items():
        assert torch.equal(output.token_ids, by_shards[number].token_ids)
        assert torch.equal(output.logprobs, by_shards[number].logprobs)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_slice_that_a_rank_loads_wrongly_is_named(bench: ShardBench, fault: str) -> None:
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
def test_an_engine_whose_rank_dies_is_lost_alone_and_comes_back(bench: ShardBench, place: str) -> None:
    rank = bench.sync._first_ranks[1] + VICTIM
    bench.tell_engine(1, "end_at", number=bench.round_of(rank, place))
    began = time.monotonic()
    bench.step()
    assert time.monotonic() - began < CALL_S
    assert bench.fleet.numbers == (0,) and bench.sync.version == bench.version
    bench.step()
    assert bench.fleet.numbers == (0, 1) and bench.sync.version == bench.version
    found = bench.samples()
    assert torch.equal(found[0].token_ids, found[1].token_ids)
