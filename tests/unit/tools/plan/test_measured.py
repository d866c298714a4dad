"""A plan gives the memory that real workers allocate, in both engines and along every axis.

At rest the unique storages of the tensors are added up. In a pass every allocation and every free of torch's CPU
allocator is counted, as its profiler reports them: tensors kept for the backward pass, gradients, gathered weights, and
what kernels take for themselves. The least of a few repetitions counts, because a thread of gloo frees what a
collective needed at any later time. The first pass of each kind is not measured: it frees what the one before it has
left in the model's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from nemo_rl.algorithms.grpo import plan_logprobs, plan_train
from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.config.backends import DTensorConfig, MegatronConfig
from nemo_rl.config.generation import GenerationConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.policy import DynamicBatchingConfig, PolicyConfig, SequencePackingConfig
from nemo_rl.config.run import ClusterConfig
from nemo_rl.config.schema import MasterConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.models.head.logits import SUPPORT
from nemo_rl.models.hf.files import local_shard
from nemo_rl.models.policy.interfaces import ENTROPY, UNFILTERED_LOGPROBS, LossOutput, LossScale
from nemo_rl.models.policy.microbatch import Microbatch
from nemo_rl.models.policy.observer import OnBackward, nothing_follows
from nemo_rl.models.policy.routes.worker_replay import OWN_ROUTES
from nemo_rl.models.policy.steps import loss_scales
from nemo_rl.models.policy.workers.base import optimizer_tensors
from nemo_rl.models.policy.workers.dtensor_engine import DTensorEngine
from nemo_rl.models.policy.workers.engine import Engine
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl_tools.known_models import planned_model_config
from nemo_rl_tools.plan.activations import pass_activations
from nemo_rl_tools.plan.setting import Model, PlanSetting, pass_tokens
from nemo_rl_tools.plan.weights import gathered_weights, local_weights, rest_memory
from tests.helpers.gloo import JOB_S, run_ranks
from tests.helpers.tiny_model import tiny_policy, tiny_worker, write_tiny_folder

GRADIENTS = "the gradients are whole"
REPEATS = 12
MEMORY = "[memory]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The memory of one rank in bytes."""

    weights: int
    gradients: int
    """Gradients at the end of the backward pass, before the optimizer's step."""
    optimizer: int
    """Optimizer state after a step."""
    train_peak: int
    """Most that a train step adds to what was there before it, up to the gradients' end."""
    logprob_peak: int


@dataclass(frozen=True, kw_only=True)
class AskingLoss(NLLLoss):
    """The NLL loss with further columns that workers compute, each with its own gradient."""

    asks: tuple[str, ...] = ()
    """Names of `COMPUTED_FIELDS`."""

    @property
    def input_fields(self) -> tuple[str, ...]:
        return (*NLLLoss.input_fields.fget(self), *self.asks)  # type: ignore[attr-defined]

    def __call__(
        self, token_logprobs: torch.Tensor, batch: Mapping[str, torch.Tensor], *, scale: LossScale
    ) -> LossOutput:
        output = NLLLoss.__call__(self, token_logprobs, batch, scale=scale)
        more = sum(batch[name].square().sum() for name in self.asks)
        return replace(output, loss=output.loss + more / scale.valid_tokens)


def equal_rows(num_rows: int, width: int, prompt: int) -> BatchedDataDict:
    """Rows of one length, whose responses follow prompts of one length; recorded sets hold one token each."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(7, 300, (num_rows, width), generator=draw, dtype=torch.int32)
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": torch.full((num_rows,), width),
            "token_mask": (torch.arange(width) >= prompt).expand(num_rows, width).contiguous(),
            "sample_mask": torch.ones(num_rows),
            SUPPORT: torch.ones(num_rows, width - prompt, dtype=torch.uint8),
        }
    )


def measure(
    rank: int, world_size: int, policy: PolicyConfig, rows: tuple[int, int, int], asks: tuple[str, ...] = ()
) -> Measured:
    """(collective) One rank of the policy on `equal_rows(*rows)`, with a loss that asks for these columns."""
    worker = tiny_worker(policy, rank=rank, world_size=world_size)
    try:
        batch = equal_rows(*rows)
        if not policy.generation.record_support:
            del batch[SUPPORT]
        layout = ParallelLayout.of_policy(policy, world_size=world_size)
        return _measure(worker, layout, policy, batch, AskingLoss(asks=asks))
    finally:
        worker.shutdown()


def measure_table(
    rank: int, world_size: int, cases: list[tuple[PolicyConfig, tuple[int, int, int], tuple[str, ...]]]
) -> list[Measured]:
    """(collective) Measure the cases one after the other."""
    return [measure(rank, world_size, *case) for case in cases]


class _Marks:
    """A `PassObserver` that writes into the profile how far a step has come, and counts gradients."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.gradient_bytes = 0

    def parameters(self) -> None:
        pass

    def update(self, number: int) -> None:
        pass

    def pass_of(self, micro: Microbatch, *, backward_follows: bool = False) -> AbstractContextManager[OnBackward]:
        return nullcontext(nothing_follows)

    def logprobs(self, micro: Microbatch, logprobs_nt: torch.Tensor) -> None:
        pass

    def loss(self, micro: Microbatch, output: LossOutput) -> None:
        pass

    def gradients(self) -> None:
        with record_function(GRADIENTS):
            self.gradient_bytes = storage_bytes(_gradients(self._engine))


def _measure(
    worker: PolicyWorker, layout: ParallelLayout, policy: PolicyConfig, batch: BatchedDataDict, loss_fn: AskingLoss
) -> Measured:
    engine, marks = worker.engine, _Marks(worker.engine)
    lengths = batch.tensor("input_lengths").tolist()
    plan = plan_train(lengths, [len(lengths)], policy, layout=layout)
    dp = layout.coordinates(worker.rank).dp
    part, own = batch.select_indices(list(plan.rows_of_rank(dp))), plan.for_rank(dp)
    own_lp = plan_logprobs(plan, lengths, policy, layout=layout).for_rank(dp)
    # The first step makes the optimizer's state.
    worker.train(part, loss_fn, plan=own)
    runner = engine.runner(worker.batch_layout(own), OWN_ROUTES, marks)
    [scale] = loss_scales(part, [own.microbatches[0]], is_writer=layout.is_writer(worker.rank))

    def step() -> object:
        return runner.run(part, own.microbatches[0], loss_fn, scale, is_training=True)

    train = [_profiled(step) for _ in range(REPEATS)]
    worker.get_logprobs(part, plan=own_lp)
    logprobs = [_profiled(lambda: worker.get_logprobs(part, plan=own_lp)) for _ in range(REPEATS)]
    return Measured(
        weights=storage_bytes(weight for _, weight in engine.weights()),
        gradients=marks.gradient_bytes,
        optimizer=storage_bytes(tensor for _, tensor in _state(engine)),
        train_peak=min(_peak(events, until=GRADIENTS) for events in train),
        logprob_peak=min(map(_peak, logprobs)),
    )


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the unique storages."""
    storages = [local_shard(tensor.detach()).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _gradients(engine: Engine) -> list[torch.Tensor]:
    if isinstance(engine, DTensorEngine):
        return [weight.grad for weight in engine.model.parameters() if weight.grad is not None]
    return [vars(weight)["main_grad"] for weight in engine.model.module.parameters()]


def _state(engine: Engine) -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(engine, DTensorEngine):
        return optimizer_tensors(engine.optimizer)
    return engine.optimizer.state_tensors()


Events = list[tuple[str, int]]
"""Events in the order of time: name of a mark and 0, or `MEMORY` and bytes, negative when they are freed."""


def _profiled(call: Callable[[], object]) -> Events:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    found = []
    for event in seen.profiler.kineto_results.events():
        if event.name() == MEMORY:
            found.append((event.start_ns(), MEMORY, event.nbytes()))
        elif event.name() == GRADIENTS:
            found.append((event.start_ns(), event.name(), 0))
    return [(name, size) for _, name, size in sorted(found, key=lambda event: event[0])]


def _peak(events: Events, until: str | None = None) -> int:
    held = most = 0
    for name, size in events:
        if name == until:
            break
        held += size
        most = max(most, held)
    return most


pytestmark = [pytest.mark.slow, pytest.mark.timeout(JOB_S)]

AT_REST, IN_PASSES = 0.02, 0.15
"""Relative bounds."""
ROWS, WIDTH, PROMPT, CAP = 4, 256, 64, 512
COMMON = {
    **{"vocab_size": 1280, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16},
    **{"num_key_value_heads": 2, "intermediate_size": 160, "max_position_embeddings": 512},
    **{"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0},
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A worker in a layout."""

    engine: str
    """`dtensor` or `megatron`."""
    family: str = "qwen3"
    settings: Mapping[str, object] = field(default_factory=dict)
    """Keys of the engine's section."""
    is_packed: bool = False
    precision: str = "float32"
    asks: tuple[str, ...] = ()
    """Columns that the loss has computed."""
    generation: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.settings.items()]
        words += ["packed"] if self.is_packed else []
        words += [*self.asks, *self.generation]
        return "-".join([self.engine, self.family, self.precision, *words])


RECOMPUTED, SELECTIVE = {"activation_checkpointing": True}, {"activation_checkpointing": "selective"}
WHOLE_GRADIENTS = {"gradient_accumulation": "whole"}
DTENSOR_TP, DTENSOR_CP = {"tensor_parallel_size": 2, "sequence_parallel": True}, {"context_parallel_size": 2}
MEGATRON_TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
MEGATRON_PP, MEGATRON_EP = {"pipeline_model_parallel_size": 2}, {"expert_model_parallel_size": 2}

ENTROPIES, WHOLE, TOP_P = {"asks": (ENTROPY,)}, {"asks": (UNFILTERED_LOGPROBS,)}, {"generation": {"top_p": 0.8}}
RECORDED = {"generation": {"top_p": 0.8, "record_support": True}}

QUICK = [
    Case(engine="dtensor", is_packed=True, precision="bfloat16", settings=SELECTIVE),
    Case(engine="megatron", settings=MEGATRON_PP, **ENTROPIES),
]
OF_ONE = [
    Case(engine="dtensor", **ENTROPIES),
    Case(engine="dtensor", **TOP_P),
    Case(engine="dtensor", **RECORDED, **WHOLE),
    Case(engine="dtensor", **RECORDED, precision="bfloat16"),
    Case(engine="megatron", **TOP_P, **WHOLE, precision="bfloat16"),
    Case(engine="megatron", **ENTROPIES, precision="bfloat16", is_packed=True),
    Case(engine="dtensor"),
    Case(engine="dtensor", family="llama", is_packed=True),
    Case(engine="dtensor", family="qwen3_moe", settings=RECOMPUTED),
    Case(engine="dtensor", family="qwen3_moe", precision="bfloat16"),
    Case(engine="dtensor", settings=SELECTIVE),
    Case(engine="dtensor", family="qwen3_moe", settings=SELECTIVE),
    Case(engine="megatron"),
    Case(engine="megatron", family="llama", is_packed=True, precision="bfloat16"),
    Case(engine="megatron", family="qwen3_moe", settings=RECOMPUTED),
    Case(engine="megatron", settings={**RECOMPUTED, "recompute_granularity": "selective"}),
    Case(engine="megatron", settings={**RECOMPUTED, "recompute_method": "block", "recompute_num_layers": 3}),
]
OF_TWO = [
    Case(engine="dtensor"),
    Case(engine="dtensor", settings=WHOLE_GRADIENTS),
    Case(engine="dtensor", is_packed=True, precision="bfloat16", settings=RECOMPUTED),
    Case(engine="dtensor", family="qwen3_moe", settings={**DTENSOR_TP, **SELECTIVE}),
    Case(engine="dtensor", settings=DTENSOR_TP),
    Case(engine="dtensor", settings={**DTENSOR_TP, **RECOMPUTED}, is_packed=True, precision="bfloat16"),
    Case(engine="dtensor", family="qwen3_moe", settings=DTENSOR_TP),
    Case(engine="dtensor", settings=DTENSOR_CP),
    Case(engine="dtensor", settings={**DTENSOR_CP, **RECOMPUTED}, is_packed=True),
    Case(engine="megatron", settings=MEGATRON_TP),
    Case(engine="megatron", settings={**MEGATRON_TP, **RECOMPUTED}, is_packed=True, precision="bfloat16"),
    Case(engine="megatron", family="llama", settings=MEGATRON_PP, is_packed=True),
    Case(engine="megatron", settings={**MEGATRON_PP, **RECOMPUTED}),
    Case(engine="megatron", settings=DTENSOR_CP, is_packed=True),
    Case(engine="megatron", family="qwen3_moe", settings=MEGATRON_EP),
    Case(engine="megatron", family="qwen3_moe", settings={**MEGATRON_EP, **RECOMPUTED}, is_packed=True),
    Case(
        engine="megatron", family="qwen3_moe", settings={**MEGATRON_TP, **MEGATRON_EP, "expert_tensor_parallel_size": 1}
    ),
]


def write_model(folder: Path, family: str) -> Path:
    if folder.is_dir():
        return folder
    write_tiny_folder(folder)
    kinds = {
        "qwen3": lambda: Qwen3Config(**COMMON, tie_word_embeddings=True),
        "llama": lambda: LlamaConfig(**COMMON, tie_word_embeddings=False),
        "qwen3_moe": lambda: Qwen3MoeConfig(**COMMON, **EXPERTS, tie_word_embeddings=False),
    }
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(kinds[family]()).save_pretrained(str(folder))
    return folder


def policy_of(case: Case, folder: Path) -> PolicyConfig:
    caps = {"enabled": True, "train_mb_tokens": CAP, "logprob_mb_tokens": CAP}
    batching: dict[str, object] = {"dynamic_batching": DynamicBatchingConfig(**caps)}
    if case.is_packed:
        batching = {"sequence_packing": SequencePackingConfig(**caps)}
    is_megatron = case.engine == "megatron"
    sections = {
        "dtensor_cfg": DTensorConfig(enabled=not is_megatron, **({} if is_megatron else case.settings)),
        "megatron_cfg": MegatronConfig(enabled=is_megatron, **(case.settings if is_megatron else {})),
    }
    more = {"generation": GenerationConfig(**case.generation)}
    model = write_model(folder / case.family, case.family)
    return tiny_policy(model, precision=case.precision, max_total_sequence_length=WIDTH, **batching, **sections, **more)


def ratios(case: Case, policy: PolicyConfig, measured: list[Measured]) -> dict[str, float]:
    """Return planned / measured of passes; each pipeline stage by its largest rank: that is what must fit."""
    of_passes = {}
    loss = LossConfig(
        entropy_coefficient=0.1 if ENTROPY in case.asks else 0.0,
        reference_policy_kl_penalty=0.1 if UNFILTERED_LOGPROBS in case.asks else 0.0,
    )
    config = MasterConfig(policy=policy, loss_fn=loss, cluster=ClusterConfig(cpu_workers_per_node=len(measured)))
    setting = PlanSetting(config=config, model=Model(planned_model_config(policy.model_name)), gpu=None)
    number = len(plan_train([WIDTH] * ROWS, [ROWS], policy, layout=setting.layout).microbatches[0])
    tokens = pass_tokens(setting, tokens=CAP, width=WIDTH, predicted=WIDTH - PROMPT, is_packed=case.is_packed)
    for stage in range(setting.layout.pp):
        found = [one for rank, one in enumerate(measured) if setting.layout.coordinates(rank).pp == stage]
        weights = local_weights(setting, stage=stage)
        rest, gathered = rest_memory(setting, weights, num_microbatches=number), gathered_weights(setting, weights)
        # What a pass finds of earlier microbatches.
        held = max(rest.summed_gradients, rest.gradients) if number > 1 and not setting.is_megatron else 0
        expected = {"weights": rest.weights, "gradients": rest.gradients, "optimizer": rest.optimizer}
        for name, count in expected.items():
            largest = max(getattr(one, name) for one in found)
            assert count == pytest.approx(largest, rel=AT_REST), f"{case}: stage {stage}: {name}"
        for name, with_gradients in (("train_peak", True), ("logprob_peak", False)):
            planned = pass_activations(
                setting, tokens, stage=stage, gathered=gathered, num_microbatches=number, with_gradients=with_gradients
            ).peak + (held if with_gradients else 0)
            largest = max(getattr(one, name) for one in found)
            of_passes[f"{case}: stage {stage}: {name}"] = planned / largest
    return of_passes


def compare(cases: list[Case], world_size: int, folder: Path) -> None:
    policies = [policy_of(case, folder) for case in cases]
    table = [(policy, (ROWS, WIDTH, PROMPT), case.asks) for case, policy in zip(cases, policies, strict=True)]
    by_rank = run_ranks(world_size, measure_table, world_size, table, timeout_s=JOB_S / 3)
    found: dict[str, float] = {}
    for number, (case, policy) in enumerate(zip(cases, policies, strict=True)):
        found |= ratios(case, policy, [of_rank[number] for of_rank in by_rank])
    print("planned / measured", *(f"{ratio:.3f} {name}" for name, ratio in found.items()), sep="\n")
    assert not {name: ratio for name, ratio in found.items() if abs(ratio - 1.0) > IN_PASSES}


def test_a_plan_gives_the_memory_of_two_ranks(tmp_path: Path) -> None:
    compare(QUICK, 2, tmp_path)


@pytest.mark.full
def test_a_plan_gives_the_memory_of_one_rank_in_every_way_to_run(tmp_path: Path) -> None:
    compare(OF_ONE, 1, tmp_path)


@pytest.mark.full
def test_a_plan_gives_the_memory_of_two_ranks_along_every_axis(tmp_path: Path) -> None:
    compare(OF_TWO, 2, tmp_path)
