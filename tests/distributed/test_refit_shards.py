"""Refits from shard to shard: four policy workers (dp2 x tp2) in processes, two engines, and who dies meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.algorithms.teacher import rank_specs
from nemo_rl.config.backends import DTensorConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.job_store import reserve_port
from nemo_rl.distributed.ray_worker_groups import RayPlacement, RayWorkerGroup
from nemo_rl.distributed.worker_groups import Call, Request, WorkerFleet, WorkerGroup, ask
from nemo_rl.errors import RefitMismatch, WorkerError
from nemo_rl.models.generation.interfaces import (
    EngineSpec,
    GenerationInterface,
    GenerationOutput,
    GenerationRequest,
    SamplingParams,
)
from nemo_rl.models.hf.loading import load_model_config
from nemo_rl.models.policy.workers.launch import WorkerSpec
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.models.weight_sync.base import RefitParties, WeightSync
from nemo_rl.models.weight_sync.factory import PayloadWeightSync, ShardWeightSync, receipt_spec
from tests.helpers.data_planes import ray_cluster
from tests.helpers.model_families import VLLM_SIZES, write_with_tokenizer
from tests.helpers.shard_faults import FAULTS, build_dying_policy, build_faulty_engine
from tests.helpers.tiny_model import tiny_batch, tiny_policy

pytestmark = [pytest.mark.slow, pytest.mark.full]

RANKS, ENGINES = 4, 2
START_S, CALL_S = 400.0, 60.0
BUCKET_BYTES = 40_000
PLACES = ("first", "middle", "last")


def _write_model(folder: Path) -> Path:
    torch.manual_seed(0)
    sizes = {**VLLM_SIZES, "vocab_size": 330, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]}
    config = Qwen3MoeConfig(**sizes, **experts, num_hidden_layers=2, tie_word_embeddings=False)
    return write_with_tokenizer(folder, Qwen3MoeForCausalLM(config))


def _policy(config: PolicyConfig, stack: ExitStack) -> RayWorkerGroup:
    group = RayWorkerGroup("policy", world_size=RANKS, placement=RayPlacement(num_cpus=0))
    stack.callback(group.shutdown)
    address, port = group.rendezvous(reserve_port, timeout_s=START_S)
    specs = [
        WorkerSpec(policy=config, rank=rank, num_steps=10, keep_reference=False, seed=0)
        for rank in rank_specs(RANKS, address, port)
    ]
    group.begin_start(build_dying_policy, [{"spec": spec} for spec in specs])
    group.finish_start(timeout_s=START_S)
    return group


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PolicyConfig:
    folder = _write_model(tmp_path_factory.mktemp("shards") / "model")
    return tiny_policy(folder, dtensor_cfg=DTensorConfig(tensor_parallel_size=2))


@pytest.fixture(scope="module")
def opened(config: PolicyConfig) -> Iterator[tuple[ExitStack, WorkerFleet]]:
    def engine(number: int) -> WorkerGroup:
        group = RayWorkerGroup("generation", world_size=1, placement=RayPlacement(num_cpus=0), first=number)
        group.begin_start(build_faulty_engine, [{"spec": EngineSpec(policy=config, number=number)}])
        group.finish_start(timeout_s=START_S)
        return group

    with ray_cluster(imported=("tests.helpers.rank_preload",)), ExitStack() as stack:
        fleet = WorkerFleet([engine(number) for number in range(ENGINES)], start=engine)
        stack.callback(fleet.shutdown)
        yield stack, fleet


class Bench:
    """A policy and its engines, whose policy is started anew when it was lost."""

    def __init__(self, config: PolicyConfig, stack: ExitStack, fleet: WorkerFleet) -> None:
        self._config, self._stack, self.fleet = config, stack, fleet
        self.version = 0
        self.start_policy()

    def start_policy(self) -> None:
        self.policy = _policy(self._config, self._stack)
        spec = receipt_spec(self._config, load_model_config(self._config.model_name).to_dict())
        assert spec is not None
        self.parties = RefitParties(
            policy=self.policy,
            engines=self.fleet,
            timeout_s=CALL_S,
            max_bucket_bytes=BUCKET_BYTES,
            receipt=replace(spec, every=1),
        )
        self.sync = ShardWeightSync(self.parties, address="127.0.0.1")

    def step(self, sync: WeightSync | None = None) -> None:
        """Take an optimizer step, and bring the new weights into the engines."""
        self.version += 1
        batch = tiny_batch(4, seed=self.version)
        for request in (
            ask(PolicyWorker.prepare_for_training),
            ask(PolicyWorker.train, batch=batch, loss_fn=PolicyLoss(config=LossConfig())),
        ):
            self.policy.run(Call(request=request, stage="train", timeout_s=CALL_S))
        (sync or self.sync).sync(self.version)

    def round_of(self, rank: int, place: str) -> int:
        """Return the number of a rank's first, middle or last round."""
        count = len(self.sync.plans["weights"].of(rank).rounds)
        assert count >= 3, "the rounds of this test are to be told apart"
        return {"first": 0, "middle": count // 2, "last": count - 1}[place]

    def tell_engine(self, engine: int, method: str, **arguments: object) -> None:
        request: Request[None] = Request(method, arguments)
        self.fleet.run({engine: request}, stage="plant", timeout_s=CALL_S)

    def tell_policy(self, rank: int, method: str, **arguments: object) -> None:
        request: Request[None] = Request(method, arguments)
        self.policy.run(Call(request=request, stage="plant", timeout_s=CALL_S, ranks=[rank]))

    def check_no_version(self) -> None:
        """Check that whatever an engine were asked for would be of no version, which a trainer refuses."""
        for output in self.samples().values():
            assert set(output.row_versions) == {-1}

    def samples(self) -> dict[int, GenerationOutput]:
        sampling = SamplingParams(temperature=1.0, max_new_tokens=4, stop_token_ids=())
        asked = GenerationRequest(prompt_ids=((9, 8, 7),), seeds=(1,), sampling=sampling)
        request = ask(GenerationInterface.generate, request=asked)
        return self.fleet.run(request, stage="generation", timeout_s=CALL_S)


@pytest.fixture(scope="module")
def bench(config: PolicyConfig, opened: tuple[ExitStack, WorkerFleet]) -> Bench:
    made = Bench(config, *opened)
    made.step()
    return made


def test_shards_bring_what_whole_weights_bring_and_no_byte_twice(bench: Bench) -> None:
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
def test_a_slice_that_is_not_what_was_sent_is_named(bench: Bench, fault: str) -> None:
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
def test_an_engine_that_dies_is_lost_alone_and_comes_back(bench: Bench, place: str) -> None:
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


def test_an_error_of_a_policy_rank_is_raised_and_reaches_the_engines(bench: Bench) -> None:
    bench.tell_policy(2, "fail_at", number=bench.round_of(2, "middle"))
    with pytest.raises(WorkerError, match="rank 2, stage refit: OSError: the disk of this test is full"):
        bench.step()
    bench.check_no_version()
    bench.start_policy()
    bench.step()
    assert bench.sync.version == bench.version


@pytest.mark.parametrize("place", PLACES)
def test_a_policy_rank_that_dies_is_named_and_nothing_is_sampled(bench: Bench, place: str) -> None:
    bench.tell_policy(3, "end_at", number=bench.round_of(3, place))
    began = time.monotonic()
    with pytest.raises(WorkerError, match="rank 3"):
        bench.step()
    assert time.monotonic() - began < CALL_S and bench.sync.version == -1
    bench.check_no_version()
    bench.start_policy()
    bench.step()
    assert bench.sync.version == bench.version
