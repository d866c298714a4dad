"""Lower bounds of the time of each stage: no run of this recipe with rows of full length is faster on these GPUs.

A stage takes at least as long as its arithmetic at the peak rate, as the bytes that must be read from memory, and as
the bytes that must cross the links, whichever is longest; nothing of what makes real runs slower is counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nemo_rl.cluster.plan.batches import Batches, passes_of
from nemo_rl.cluster.plan.generation import EngineMemory
from nemo_rl.cluster.plan.gpus import GPU
from nemo_rl.cluster.plan.plane import PlaneMemory
from nemo_rl.cluster.plan.setting import FLOAT32_BYTES, Setting
from nemo_rl.cluster.plan.weights import local_weights
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.utils.flops import transformer_flops

__all__ = ["StageBound", "stage_bounds"]

TERA = 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBound:
    """At least so many seconds."""

    stage: str
    arithmetic_s: float
    memory_s: float
    network_s: float

    @property
    def seconds(self) -> float:
        return max(self.arithmetic_s, self.memory_s, self.network_s)

    @property
    def limited_by(self) -> str:
        return max(
            (("arithmetic", self.arithmetic_s), ("memory", self.memory_s), ("network", self.network_s)),
            key=lambda part: part[1],
        )[0]


def stage_bounds(setting: Setting, batches: Batches, engine: EngineMemory, plane: PlaneMemory) -> list[StageBound]:
    """Of a step; empty for CPUs, of whose rates nothing is known."""
    if setting.gpu is None:
        return []
    found = [_rollout(setting, setting.gpu, batches, engine)]
    found += [_pass(setting, setting.gpu, batches, part) for part in passes_of(setting)]
    crossing = plane.step_bytes / setting.gpu.network_rate if setting.config.cluster.num_nodes > 1 else 0.0
    found.append(StageBound(stage="data plane", arithmetic_s=0.0, memory_s=0.0, network_s=crossing))
    is_far = setting.config.refit_transport == "broadcast" and setting.config.cluster.num_nodes > 1
    rate = setting.gpu.network_rate if is_far else setting.gpu.link_rate
    sent = engine.weights / (rate if setting.layout.world_size > 1 else setting.gpu.memory_rate)
    found.append(
        StageBound(stage="refit", arithmetic_s=0.0, memory_s=engine.weights / setting.gpu.memory_rate, network_s=sent)
    )
    return found


def _rollout(setting: Setting, gpu: GPU, batches: Batches, engine: EngineMemory) -> StageBound:
    """Every turn reads the weights that its tokens use, and the cache so far."""
    shape, replicas = setting.model.flops_shape, setting.policy.generation.num_replicas
    turns = min(batches.response_tokens, batches.row_tokens)
    rows = math.ceil(batches.rows / replicas)
    per_token = engine.cache / (engine.rows * batches.row_tokens)
    start = max(0, batches.row_tokens - turns)
    cache = rows * per_token * (turns * start + turns * (turns - 1) / 2)
    precision = setting.policy.generation.precision or setting.policy.precision
    # Experts that no token of a batch chose are not read: only those that one token uses are sure to be.
    used = shape.matmul_flops_per_token / 2 * setting.engine_element_bytes
    weights = math.ceil(rows / engine.rows) * turns * used
    flops = transformer_flops(shape, [batches.row_tokens], with_backward=False) * rows
    # Prompts of a group are run once.
    prompts = transformer_flops(shape, [start], with_backward=False)
    flops -= prompts * (rows - rows / setting.config.grpo.num_generations_per_prompt)
    return StageBound(
        stage="rollout",
        arithmetic_s=flops / (gpu.tflops(precision) * TERA),
        memory_s=(weights + cache) / gpu.memory_rate,
        network_s=0.0,
    )


def _pass(setting: Setting, gpu: GPU, batches: Batches, part: WorkerPass) -> StageBound:
    layout, shape = setting.layout, setting.model.flops_shape
    is_training = part is WorkerPass.TRAIN
    flops = transformer_flops(shape, [batches.row_tokens], with_backward=is_training) * batches.rows
    steps = batches.global_batches if is_training else 1
    microbatches = batches.train_microbatches * steps if is_training else batches.logprob_microbatches
    shared = sum(weight.in_use for weight in local_weights(setting) if not (setting.is_megatron and weight.is_expert))
    if setting.is_megatron:
        # Gradients go to the ranks with the same weights and come back as sums, or as weights.
        sent = 2 * steps * shared * setting.element_bytes if is_training else 0
    else:
        # All weights come before each pass of a microbatch, the gradients go after the last one.
        passes = 2 if is_training else 1
        sent = microbatches * passes * shared * setting.element_bytes + is_training * steps * shared * FLOAT32_BYTES
    used = shape.matmul_flops_per_token / 2 / (layout.tp * layout.pp) * setting.element_bytes
    return StageBound(
        stage=str(part),
        arithmetic_s=flops / (gpu.tflops(setting.policy.precision) * TERA * layout.world_size),
        memory_s=microbatches * used / gpu.memory_rate,
        network_s=_collective_s(setting, gpu, sent),
    )


def _collective_s(setting: Setting, gpu: GPU, sent: float) -> float:
    """Of bytes that each rank gets from its peers of the data and context axes."""
    layout, cluster = setting.layout, setting.config.cluster
    shards = layout.dp * layout.cp
    if shards == 1:
        return 0.0
    inside = sent * (shards - 1) / shards / gpu.link_rate
    # What enters a node once is passed on inside; all its cards take a part.
    groups = min(layout.tp, cluster.gpus_per_node)
    crossing = sent * groups * (1 - 1 / cluster.num_nodes) / (cluster.gpus_per_node * gpu.network_rate)
    # A pipeline's stages may be nodes: then peers are neighbours.
    return max(inside, crossing if layout.pp == 1 else 0.0)
