"""The embedded engine: its weights, its cache of keys and values, and what a refit needs.

An engine holds a whole model on one device, also while the policy trains. Its cache grows with its rows; prompts of a
group are run once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nemo_rl.cluster.plan.batches import Batches
from nemo_rl.cluster.plan.setting import FLOAT32_BYTES, Setting
from nemo_rl.config.parts import ENGINE_TRAITS, EngineTraits
from nemo_rl.models.weight_sync.buckets import MAX_BUCKET_BYTES, WeightSlot, bucket_bytes

__all__ = ["EngineMemory", "delta_bytes", "engine_memory", "plan_slots", "refit_bytes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """Bytes of one engine."""

    is_known: bool
    """False for an engine of which nothing is known here: the numbers are those of the embedded one."""
    rows: int
    """Decoded together."""
    weights: int
    cache: int
    """Keys and values of all rows at full length."""
    working: int
    """While a token is computed, or prompts are: whatever is more."""


def engine_memory(setting: Setting, batches: Batches) -> EngineMemory:
    """Of each of the engines."""
    generation, shape = setting.policy.generation, setting.model.flops_shape
    group, size = setting.config.grpo.num_generations_per_prompt, setting.engine_element_bytes
    prompts = math.ceil(setting.config.grpo.num_prompts_per_step / generation.num_replicas)
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
        is_known=ENGINE_TRAITS.get(generation.backend, EngineTraits()).has_planned_memory,
        rows=rows,
        weights=setting.model.num_parameters * size,
        cache=cache,
        working=max(decode, prefill),
    )


def plan_slots(setting: Setting) -> list[WeightSlot]:
    """All weights as a refit sends them."""
    dtype = setting.policy.generation.precision or setting.policy.precision
    return [WeightSlot(name=name, dtype=dtype, shape=shape) for name, shape in setting.model.whole_weights.items()]


def delta_bytes(setting: Setting, *, ranks: int, engines: int) -> int:
    """Of one node: the weights that were sent last, which deltas build on.

    Args:
        ranks: policy workers of the node.
        engines: of the node.
    """
    generation = setting.policy.generation
    if not generation.refit_delta.enabled:
        return 0
    senders = ranks if setting.config.refit_transport == "ipc" else 1
    receivers = engines if ENGINE_TRAITS.get(generation.backend, EngineTraits()).takes_whole_weights else 0
    return (senders + receivers) * sum(slot.num_bytes for slot in plan_slots(setting))


def refit_bytes(setting: Setting) -> int:
    """On each rank: a bucket, and the largest weight whole in the policy's dtype and in the engine's."""
    slots = plan_slots(setting)
    ratio = setting.policy.generation.refit_buffer_ratio
    bucket = bucket_bytes(slots, free=int(MAX_BUCKET_BYTES / ratio) + 1, ratio=ratio)
    largest = max(math.prod(slot.shape) for slot in slots)
    held = FLOAT32_BYTES if not setting.is_megatron else setting.element_bytes
    return bucket + largest * (held + setting.engine_element_bytes)
