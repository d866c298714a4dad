"""Four policy workers and two engines in processes of Ray, which refit by shards and may be told to end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.algorithms.teacher import rank_specs
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.job_store import reserve_port
from nemo_rl.distributed.ray_worker_groups import RayPlacement, RayWorkerGroup
from nemo_rl.distributed.worker_groups import Call, Request, WorkerFleet, WorkerGroup, ask
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
from nemo_rl.models.weight_sync.factory import ShardWeightSync, receipt_spec
from tests.helpers.model_families import VLLM_SIZES, write_with_tokenizer
from tests.helpers.shard_faults import build_dying_policy
from tests.helpers.tiny_model import tiny_batch

__all__ = ["CALL_S", "PLACES", "RANKS", "ShardBench", "write_shard_model"]

RANKS, ENGINES = 4, 2
START_S, CALL_S = 400.0, 60.0
BUCKET_BYTES = 40_000
PLACES = ("first", "middle", "last")


def write_shard_model(folder: Path) -> Path:
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


def _fleet(config: PolicyConfig, stack: ExitStack, build: Callable[[EngineSpec], object]) -> WorkerFleet:
    def engine(number: int) -> WorkerGroup:
        group = RayWorkerGroup("generation", world_size=1, placement=RayPlacement(num_cpus=0), first=number)
        group.begin_start(build, [{"spec": EngineSpec(policy=config, number=number)}])
        group.finish_start(timeout_s=START_S)
        return group

    fleet = WorkerFleet([engine(number) for number in range(ENGINES)], start=engine)
    stack.callback(fleet.shutdown)
    return fleet


class ShardBench:
    """A policy and its engines, whose policy is started anew when it was lost."""

    def __init__(self, config: PolicyConfig, stack: ExitStack, *, engine: Callable[[EngineSpec], object]) -> None:
        self._config, self._stack, self.fleet = config, stack, _fleet(config, stack, engine)
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
            sends_adapters=self._config.lora.is_native,
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
