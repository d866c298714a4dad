"""The memory that each GPU and each node must hold, stage by stage of a step.

Stages take turns on a device, so it must hold the largest of them, not their sum. An engine holds a whole model on one
device, also while the policy trains; its cache of keys and values grows with its rows, and prompts of a group are run
once.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from nemo_rl.cluster.plan.activations import PassActivations, pass_activations
from nemo_rl.cluster.plan.batches import Batches, passes_of
from nemo_rl.cluster.plan.setting import FLOAT32_BYTES, PlanSetting
from nemo_rl.cluster.plan.weights import GatheredBytes, RestMemory, gathered_weights, local_weights, rest_memory
from nemo_rl.config.parts import ENGINE_CAPABILITIES, EngineCapabilities
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.models.lora import adapted_layers, adapter_infos
from nemo_rl.models.weight_sync.buckets import MAX_BUCKET_BYTES, WeightSlot, bucket_bytes

__all__ = [
    "PROCESS_BYTES",
    "EngineMemory",
    "RankMemory",
    "adapter_slots",
    "delta_bytes",
    "engine_memory",
    "engine_peak",
    "host_bytes",
    "plan_slots",
    "rank_memory",
    "refit_bytes",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """The memory of one engine, in bytes."""

    is_known: bool
    """False for an engine of which nothing is known here: the numbers are those of the embedded one."""
    rows: int
    """Decoded together."""
    weights: int
    cache: int
    """Keys and values of all rows at full length."""
    working: int
    """Bytes while a token is computed, or while prompts are: the larger of both."""


def engine_memory(setting: PlanSetting, batches: Batches, *, engines: int | None = None) -> EngineMemory:
    """Return the memory of each engine.

    Args:
        engines: that share the rows; None: those of the recipe.
    """
    generation, shape, grpo = setting.policy.generation, setting.model.flops_shape, setting.config.grpo
    group, size = grpo.num_generations_per_prompt, setting.engine_element_bytes
    prompts = math.ceil(setting.groups_alive / (engines or generation.num_replicas))
    rows = min(generation.max_batch_size, prompts * group)
    per_token = 2 * shape.num_kv_heads * shape.head_dim * size
    cache = shape.num_layers * rows * batches.row_tokens * per_token
    # A layer's part is copied when it grows, and spread over the query heads.
    spread = 2 * shape.num_heads * shape.head_dim * size if shape.num_heads > shape.num_kv_heads else 0
    decode = rows * (batches.row_tokens * (per_token + spread) + shape.vocab_size * (size + 3 * FLOAT32_BYTES))
    tokens = math.ceil(rows / group) * batches.prompt_tokens
    width = max(3 * max(shape.mlp_size, shape.dense_mlp_size), 5 * shape.num_heads * shape.head_dim)
    prefill = tokens * (size * (width + 2 * shape.hidden_size) + 2 * FLOAT32_BYTES * shape.hidden_size)
    return EngineMemory(
        is_known=ENGINE_CAPABILITIES.get(generation.backend, EngineCapabilities()).has_planned_memory,
        rows=rows,
        weights=setting.model.num_parameters * size + _versions_alive(setting) * sum(_slot_bytes(setting)),
        cache=cache,
        working=max(decode, prefill),
    )


def _versions_alive(setting: PlanSetting) -> int:
    """Return the number of adapters that an engine holds at most: those that rows may have begun with, the one that
    comes, and the one that is being received."""
    return setting.config.grpo.async_.max_staleness + 2 if setting.config.grpo.async_.takes_stale_rows else 2


def _slot_bytes(setting: PlanSetting) -> list[int]:
    return [slot.num_bytes for slot in adapter_slots(setting)]


def plan_slots(setting: PlanSetting) -> list[WeightSlot]:
    """Return all weights as a refit sends them."""
    dtype = setting.policy.generation.precision or setting.policy.precision
    return [WeightSlot(name=name, dtype=dtype, shape=shape) for name, shape in setting.model.full_weights.items()]


def adapter_slots(setting: PlanSetting) -> list[WeightSlot]:
    """Return A and B of every adapter as a refit sends them to engines that serve adapters; none for others."""
    lora = setting.policy.lora
    if not lora.is_native:
        return []
    dtype = setting.policy.generation.precision or setting.policy.precision
    infos = adapter_infos(adapted_layers(setting.model.hf, lora), lora)
    return [WeightSlot(name=name, dtype=dtype, shape=info.shape) for name, info in infos.items()]


def delta_bytes(setting: PlanSetting, *, ranks: int, engines: int) -> int:
    """Return the bytes of the weights that were sent last on one node, on which deltas build.

    Args:
        ranks: policy workers of the node.
        engines: of the node.
    """
    generation = setting.policy.generation
    if not generation.refit_delta.enabled:
        return 0
    senders = ranks if setting.config.refit_transport == "ipc" else 1
    receivers = engines if ENGINE_CAPABILITIES.get(generation.backend, EngineCapabilities()).takes_full_weights else 0
    return (senders + receivers) * sum(slot.num_bytes for slot in plan_slots(setting))


def refit_bytes(setting: PlanSetting) -> int:
    """Return the bytes of a refit on each rank: a bucket, and the largest weight whole in the policy's dtype and in the
    engine's."""
    slots = plan_slots(setting)
    ratio = setting.policy.generation.refit_buffer_ratio
    bucket = bucket_bytes(slots, free=int(MAX_BUCKET_BYTES / ratio) + 1, ratio=ratio)
    largest = max(math.prod(slot.shape) for slot in slots)
    held = FLOAT32_BYTES if not setting.is_megatron else setting.element_bytes
    return bucket + largest * (held + setting.engine_element_bytes)


CONTEXT_BYTES = 768 << 20
"""Bytes of CUDA, cuBLAS and NCCL in one process, on its GPU."""
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
    """While microbatches run: FSDP keeps whole gradients until the last one."""
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

    def stages(self) -> dict[str, int]:
        """Return the most bytes on the device in each stage of a step."""
        engine = self.engine.weights if self.engine is not None else 0
        base, weights = self.fixed + engine, 0 if self.offloads else self.weights
        optimizer = 0 if self.offloads else self.optimizer
        held = 0 if self.offloads else max(self.gradients, self.summed_gradients)
        found = {"rollout": base + (self.engine.cache + self.engine.working if self.engine is not None else 0)}
        if self.logprob is not None:
            found["logprobs"] = base + weights + self.logprob.peak
        found["train"] = base + weights + optimizer + held + self.train.peak
        found["refit"] = base + weights + self.refit
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
    processes = 2 if with_engine else 1
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
    )


def engine_peak(setting: PlanSetting, engine: EngineMemory) -> int:
    """Return the peak of the GPU of a non-colocated engine; it takes buckets of new weights when it does not decode."""
    return CONTEXT_BYTES + engine.weights + max(engine.cache + engine.working, refit_bytes(setting))


def host_bytes(
    setting: PlanSetting, ranks: list[RankMemory], *, engine: EngineMemory, engines: int, others: int
) -> dict[str, int]:
    """Return the bytes of one node, by their use.

    Args:
        ranks: of the node's policy workers.
        engine: what each engine needs.
        engines: on the node.
        others: further processes of the run there.
    """
    size, count = setting.engine_element_bytes, setting.model.num_parameters
    found = {"processes": (len(ranks) + engines + others) * PROCESS_BYTES}
    if setting.config.loss_fn.reference_policy_kl_penalty > 0 and not setting.policy.lora.enabled:
        # The reference's weights, and the policy's while those are in place.
        found["reference weights"] = 2 * sum(rank.weights for rank in ranks)
    if setting.config.checkpointing.enabled and setting.config.checkpointing.async_save:
        found["checkpoint being written"] = sum(_copied_bytes(setting, rank) for rank in ranks)
    if deltas := delta_bytes(setting, ranks=len(ranks), engines=engines):
        found["weights sent last, for deltas"] = deltas
    if setting.gpu is None:
        found["policy workers"] = sum(max(rank.stages().values()) for rank in ranks)
        found["engines"] = engines * (engine.weights + engine.cache + engine.working)
        return found
    found["optimizer"] = sum(rank.optimizer_on_host for rank in ranks)
    resting = "offloaded" if any(rank.offloads for rank in ranks) else "policy during rollouts"
    found[resting] = sum(rank.weights + rank.optimizer + (rank.gradients if rank.offloads else 0) for rank in ranks)
    # Policy workers read their parts tensor by tensor; an engine holds the whole model before it moves to its GPU.
    found["reading the model at the start"] = count * size * engines
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
