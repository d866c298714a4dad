"""The memory that each GPU and each node must hold, stage by stage of a step.

Stages take turns on a device, so it must hold the largest of them, not their sum: training with engines that sleep,
generation with the policy offloaded, and a refit with the weights of both, before the cache is there. The embedded
engine holds a whole model, and its cache grows with its rows; vLLM divides both among its ranks, and on GPUs takes a
share of each (`gpu_memory_utilization`), of which the cache gets what weights and the largest pass leave.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from nemo_rl.config.generation import KEEPS_WEIGHTS, DeviceSharing
from nemo_rl.config.parts import ENGINE_CAPABILITIES, EngineCapabilities
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.models.adapters.lora import adapted_layers, adapter_infos
from nemo_rl.models.weight_sync.buckets import NUM_SLOTS, WeightSlot, bucket_bytes, most_bucket_bytes
from nemo_rl_tools.plan.activations import PassActivations, pass_activations
from nemo_rl_tools.plan.setting import FLOAT32_BYTES, Batches, PlanSetting, passes_of
from nemo_rl_tools.plan.weights import GatheredBytes, RestMemory, gathered_weights, local_weights, rest_memory

__all__ = [
    "EngineMemory",
    "RankMemory",
    "adapter_slots",
    "engine_memory",
    "engine_peak",
    "host_bytes",
    "plan_slots",
    "rank_memory",
    "teacher_bytes",
]


CONTEXT_BYTES = 768 << 20
"""Bytes of CUDA, cuBLAS and NCCL in one process, on its GPU."""
GIB = 2**30
BATCHED_TOKENS = 16384
"""Tokens of vLLM's largest pass on GPUs of 80 GB, where the recipe says nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """The memory of one rank of an engine, in bytes."""

    is_known: bool
    """False for an engine of which nothing is known here: the numbers are those of the embedded one."""
    rows: int
    """Decoded together by the engine."""
    weights: int
    cache: int
    """Keys and values: of all rows at full length, or what vLLM takes for them."""
    token_bytes: int
    """Keys and values of one token."""
    working: int
    """Bytes while a token is computed, or while prompts are: the larger of both."""
    loading: int
    """Bytes of a layer of which a refit has not brought all weights, whole."""
    ranks: int = 1
    sleep_level: int = 0
    """Level at which it sleeps while the policy trains."""

    @property
    def while_training(self) -> int:
        """Return the bytes that stay on the device while the policy trains."""
        if self.sleep_level:
            return 0
        return self.weights + (0 if self.frees_cache else self.cache)

    @property
    def frees_cache(self) -> bool:
        """Return whether caches end with each request, as in the embedded engine."""
        return self.loading == 0

    def rows_in_cache(self, row_tokens: int) -> int:
        """Return how many rows of so many tokens the cache holds."""
        return self.cache // (self.token_bytes * row_tokens)


def adapter_slots(setting: PlanSetting) -> list[WeightSlot]:
    """Return A and B of every adapter as a refit sends them to engines that serve adapters; none for others."""
    lora = setting.policy.lora
    if not lora.is_native:
        return []
    dtype = setting.policy.generation.precision or setting.policy.precision
    infos = adapter_infos(adapted_layers(setting.model.hf, lora), lora)
    return [WeightSlot(name=name, dtype=dtype, shape=info.shape) for name, info in infos.items()]


def engine_memory(setting: PlanSetting, batches: Batches, *, engines: int | None = None) -> EngineMemory:
    """Return the memory of each rank of an engine.

    Args:
        engines: that share the rows; None: those of the recipe.
    """
    generation, grpo = setting.policy.generation, setting.config.grpo
    prompts = math.ceil(setting.groups_alive / (engines or generation.num_replicas))
    rows = min(generation.max_batch_size, prompts * grpo.num_generations_per_prompt)
    return (_vllm if generation.backend == "vllm" else _embedded)(setting, batches, rows)


def _embedded(setting: PlanSetting, batches: Batches, rows: int) -> EngineMemory:
    generation, shape, grpo = setting.policy.generation, setting.model.flops_shape, setting.config.grpo
    group, size = grpo.num_generations_per_prompt, setting.engine_element_bytes
    per_token = 2 * shape.num_kv_heads * shape.head_dim * size
    # A layer's part is copied when it grows, and spread over the query heads.
    spread = 2 * shape.num_heads * shape.head_dim * size if shape.num_heads > shape.num_kv_heads else 0
    decode = rows * (batches.row_tokens * (per_token + spread) + shape.vocab_size * (size + 3 * FLOAT32_BYTES))
    return EngineMemory(
        is_known=ENGINE_CAPABILITIES.get(generation.backend, EngineCapabilities()).has_planned_memory,
        rows=rows,
        weights=setting.model.num_parameters * size + _adapter_bytes(setting),
        cache=shape.num_layers * rows * batches.row_tokens * per_token,
        token_bytes=shape.num_layers * per_token,
        working=max(decode, _pass_bytes(setting, math.ceil(rows / group) * batches.prompt_tokens)),
        loading=0,
        sleep_level=setting.config.sleep_level,
    )


def _vllm(setting: PlanSetting, batches: Batches, rows: int) -> EngineMemory:
    sizes, shape, size = setting.policy.generation.vllm_cfg, setting.model.flops_shape, setting.engine_element_bytes
    tensor, stages, count = sizes.tensor_parallel_size, sizes.pipeline_parallel_size, setting.model.num_parameters
    rows = min(rows, sizes.max_num_seqs or rows)
    outer = 2 * shape.vocab_size * shape.hidden_size if stages > 1 else 0
    # Embedding and head lie in the first and in the last stage; a stage is counted as if it had both.
    weights = math.ceil(((count - outer) / stages + outer) / tensor) * size + _adapter_bytes(setting)
    heads, layers = math.ceil(shape.num_kv_heads / tensor), math.ceil(shape.num_layers / stages)
    token_bytes = layers * 2 * heads * shape.head_dim * size
    tokens = sizes.max_num_batched_tokens or BATCHED_TOKENS
    logits = rows * shape.vocab_size * (size + 3 * FLOAT32_BYTES)
    working = logits + _pass_bytes(setting, tokens, shared_by=tensor)
    if setting.gpu is None:
        cache = int(sizes.kv_cache_gib * GIB)
    else:
        cache = int(sizes.gpu_memory_utilization * setting.gpu.memory_bytes) - CONTEXT_BYTES - weights - working
    return EngineMemory(
        is_known=True,
        rows=rows,
        weights=weights,
        cache=max(0, cache),
        token_bytes=token_bytes,
        working=working,
        loading=count * size // shape.num_layers,
        ranks=sizes.num_ranks,
        sleep_level=setting.config.sleep_level,
    )


def _pass_bytes(setting: PlanSetting, tokens: int, *, shared_by: int = 1) -> int:
    shape, size = setting.model.flops_shape, setting.engine_element_bytes
    width = max(3 * max(shape.mlp_size, shape.dense_mlp_size), 5 * shape.num_heads * shape.head_dim) // shared_by
    return tokens * (size * (width + 2 * shape.hidden_size) + 2 * FLOAT32_BYTES * shape.hidden_size)


def _adapter_bytes(setting: PlanSetting) -> int:
    """Return the bytes of the adapters that an engine holds at most: those that rows may have begun with, the one that
    comes, and the one that is being received."""
    section = setting.config.grpo.async_
    alive = section.max_staleness + 2 if section.takes_stale_rows else 2
    return alive * sum(slot.num_bytes for slot in adapter_slots(setting))


def plan_slots(setting: PlanSetting) -> list[WeightSlot]:
    dtype = setting.policy.generation.precision or setting.policy.precision
    return [WeightSlot(name=name, dtype=dtype, shape=shape) for name, shape in setting.model.full_weights.items()]


def delta_bytes(setting: PlanSetting, *, ranks: int, engines: int) -> int:
    """Return the bytes of the weights that were sent last on one node, on which deltas build.

    Args:
        ranks: policy workers of the node.
        engines: ranks of engines of the node, each of which keeps a copy.
    """
    generation = setting.policy.generation
    if not generation.refit_delta.enabled:
        return 0
    senders = ranks if setting.config.refit_transport == "ipc" else 1
    receivers = engines if ENGINE_CAPABILITIES.get(generation.backend, EngineCapabilities()).takes_full_weights else 0
    return (senders + receivers) * sum(slot.num_bytes for slot in plan_slots(setting))


def refit_bytes(setting: PlanSetting) -> int:
    """Return the bytes of a refit on each rank: its buckets, and the largest weight whole in the dtypes of policy and
    engine, unless it goes by shards."""
    slots = plan_slots(setting)
    ratio = setting.policy.generation.refit_buffer_ratio
    most = most_bucket_bytes(on_device=setting.gpu is not None)
    num_slots = 1 if setting.config.refit_transport == "broadcast" else NUM_SLOTS
    bucket = num_slots * bucket_bytes(slots, free=int(most / ratio) + 1, ratio=ratio, most=most)
    if setting.config.refit_transport == "shards":
        return bucket
    largest = max(math.prod(slot.shape) for slot in slots)
    held = FLOAT32_BYTES if not setting.is_megatron else setting.element_bytes
    return bucket + largest * (held + setting.engine_element_bytes)


PROCESS_BYTES = 800 << 20
"""Bytes of Python, torch and transformers in one process, on its node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes of the device of a policy worker, of one pipeline stage, and of the engine that shares the device."""

    stage: int
    weights: int
    gradients: int
    """Bytes of the gradients at the optimizer's step."""
    summed_gradients: int
    """Bytes of whole gradients while microbatches run; 0 where they are sharded after each one."""
    optimizer: int
    optimizer_on_host: int
    gathered: GatheredBytes
    train: PassActivations
    logprob: PassActivations | None
    """Activations of a log-probability pass, or None for a recipe without one."""
    engine: EngineMemory | None
    """Memory of the engine, or None where none shares the device."""
    refit: int
    fixed: int
    """Bytes of the processes themselves."""
    offloads: bool
    """Weights, gradients and optimizer stay in the node's memory."""
    read_share: float
    """Most bytes of the model folder that the rank reads when it starts."""
    sharing: DeviceSharing = "crowded"
    """The other users of the device, for which tensors leave it between stages."""
    teacher: int = 0
    """Weights of a teacher's rank that shares the device, and most of its pass; 0 without one, or on CPUs."""

    def stages(self) -> dict[str, int]:
        """Return the most bytes on the device in each stage of a step."""
        engine = self.engine
        base, weights = self.fixed, 0 if self.offloads else self.weights
        optimizer = 0 if self.offloads else self.optimizer
        held = 0 if self.offloads else max(self.gradients, self.summed_gradients)
        stays = weights + optimizer if self.sharing == "alone" else 0
        found = {
            "rollout": base + stays + (engine.weights + engine.cache + engine.working if engine is not None else 0)
        }
        refit = base + max(weights, stays) + self.refit
        if engine is not None:
            base += engine.while_training
            # A refit into a sleeping engine comes before its cache.
            refit += max(engine.weights, engine.while_training) + engine.loading
        if self.logprob is not None:
            found["logprobs"] = base + weights + (0 if self.sharing == "crowded" else optimizer) + self.logprob.peak
        if self.teacher:
            found["topk_logits"] = base + weights + self.teacher
        found["train"] = base + weights + optimizer + held + self.train.peak
        found["refit"] = refit
        return found

    @property
    def peak(self) -> int:
        return max(self.stages().values())

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "stages": self.stages(), "peak": self.peak}


def rank_memory(setting: PlanSetting, batches: Batches, *, stage: int, with_engine: bool) -> RankMemory:
    """Return the memory of the ranks of a pipeline stage.

    Args:
        with_engine: an engine shares the device.
    """
    weights = local_weights(setting, stage=stage)
    rest: RestMemory = rest_memory(setting, weights, num_microbatches=batches.train_microbatches)
    gathered = gathered_weights(setting, weights)
    has_logprobs = passes_of(setting) != (WorkerPass.TRAIN,)
    processes = 1 + int(with_engine) + int(setting.teacher is not None)
    return RankMemory(
        stage=stage,
        read_share=sum(weight.read for weight in weights) / sum(map(math.prod, setting.model.full_weights.values())),
        weights=rest.weights,
        gradients=rest.gradients,
        summed_gradients=rest.summed_gradients,
        optimizer=rest.optimizer,
        optimizer_on_host=rest.optimizer_on_host,
        gathered=gathered,
        train=pass_activations(
            setting,
            batches.train,
            stage=stage,
            gathered=gathered,
            num_microbatches=batches.train_microbatches,
            with_gradients=True,
        ),
        logprob=pass_activations(
            setting, batches.logprob, stage=stage, gathered=gathered, num_microbatches=1, with_gradients=False
        )
        if has_logprobs
        else None,
        engine=engine_memory(setting, batches) if with_engine else None,
        refit=refit_bytes(setting),
        fixed=processes * CONTEXT_BYTES if setting.gpu is not None else 0,
        offloads=setting.gpu is not None and not setting.is_megatron and setting.policy.dtensor_cfg.cpu_offload,
        sharing=setting.config.device_sharing if setting.gpu is not None else "crowded",
        teacher=0 if setting.gpu is None or setting.teacher is None else max(teacher_bytes(setting.teacher, batches)),
    )


def teacher_bytes(setting: PlanSetting, batches: Batches) -> list[int]:
    """Return the bytes of each rank of a teacher while it works: weights, and the most of a log-probability pass.

    Args:
        setting: as the teacher's workers see it.
        batches: of the policy; microbatches of both have as many tokens.
    """
    layout, found = setting.layout, dict[int, int]()
    for stage in range(layout.pp):
        weights = local_weights(setting, stage=stage)
        gathered = gathered_weights(setting, weights)
        activations = pass_activations(
            setting, batches.logprob, stage=stage, gathered=gathered, num_microbatches=1, with_gradients=False
        )
        found[stage] = rest_memory(setting, weights, num_microbatches=1).weights + activations.peak
    return [found[layout.coordinates(rank).pp] for rank in range(layout.world_size)]


def engine_peak(setting: PlanSetting, engine: EngineMemory) -> int:
    """Return the peak of the GPU of a non-colocated engine; it takes buckets of new weights when it does not decode."""
    receiving = refit_bytes(setting) + engine.loading + (0 if engine.frees_cache else engine.cache)
    return CONTEXT_BYTES + engine.weights + max(engine.cache + engine.working, receiving)


def host_bytes(
    setting: PlanSetting,
    ranks: list[RankMemory],
    *,
    engine: EngineMemory,
    engines: int,
    others: int,
    teacher: Sequence[int] = (),
) -> dict[str, int]:
    """Return the bytes of one node, by their use.

    Args:
        ranks: of the node's policy workers.
        engine: what each rank of an engine needs.
        engines: ranks of engines on the node.
        others: further processes of the run there.
        teacher: bytes of each rank of a teacher there.
    """
    size, count = setting.engine_element_bytes, setting.model.num_parameters
    # With several ranks the scheduler of an engine is a process of its own.
    processes = engines + (math.ceil(engines / engine.ranks) if engine.ranks > 1 else 0)
    found = {"processes": (len(ranks) + processes + others) * PROCESS_BYTES}
    if setting.config.loss_fn.reference_policy_kl_penalty > 0 and not setting.policy.lora.enabled:
        # The reference's weights in the dtype of the pass, and the policy's while those are in place.
        held = sum(rank.weights for rank in ranks)
        share = setting.element_bytes / FLOAT32_BYTES if not setting.is_megatron else 1.0
        found["reference weights"] = held + int(held * share)
    if setting.config.checkpointing.enabled and setting.config.checkpointing.async_save is True:
        found["checkpoint being written"] = sum(_copied_bytes(setting, rank) for rank in ranks)
    if deltas := delta_bytes(setting, ranks=len(ranks), engines=engines):
        found["weights sent last, for deltas"] = deltas
    if setting.gpu is None:
        found["policy workers"] = sum(max(rank.stages().values()) for rank in ranks)
        found["engines"] = engines * (engine.weights + engine.cache + engine.working)
        if teacher:
            found["teacher"] = sum(teacher)
        return found
    found["optimizer"] = sum(rank.optimizer_on_host for rank in ranks)
    resting = "offloaded" if any(rank.offloads for rank in ranks) else "policy during rollouts"
    if teacher:
        # On the GPUs for its passes alone.
        found["teacher at rest"] = sum(teacher)
    found[resting] = sum(rank.weights + rank.optimizer + (rank.gradients if rank.offloads else 0) for rank in ranks)
    # Policy workers read their parts tensor by tensor; an engine holds the whole model before it moves to its GPU.
    if setting.policy.generation.backend != "vllm":
        found["reading the model at the start"] = count * size * engines
    if engine.sleep_level == KEEPS_WEIGHTS:
        found["weights of sleeping engines"] = engines * engine.weights
    return found


def _copied_bytes(setting: PlanSetting, rank: RankMemory) -> int:
    """Return the most bytes that a rank holds of a checkpoint that is written beside the training: replicas are copied
    once."""
    state = rank.optimizer + rank.optimizer_on_host if setting.config.checkpointing.save_optimizer else 0
    if setting.policy.lora.enabled:
        # The adapter, which is as large as the gradients of its weights in float32.
        return rank.gradients + state
    if not setting.is_megatron:
        return rank.weights + state
    # An equal part of the Hugging Face folder; megatron-core's format has the weights once more.
    part = setting.model.num_parameters * setting.element_bytes // setting.config.cluster.num_workers
    return part + (rank.weights + state if state else 0)
