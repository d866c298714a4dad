"""Lower bounds of the seconds of each stage, and of both sides of an asynchronous run.

The time of a stage is its arithmetic at the peak rate, the bytes that must be read from memory, or the bytes that must
cross the links, whichever is longest; nothing of what makes real runs slower is counted.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from nemo_rl.cluster.plan.memory import EngineMemory, adapter_slots, engine_memory, plan_slots
from nemo_rl.cluster.plan.nodes import PlaneMemory
from nemo_rl.cluster.plan.setting import FLOAT32_BYTES, GPU, Batches, PlanSetting, passes_of
from nemo_rl.cluster.plan.weights import local_weights
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.utils.flops import transformer_flops

__all__ = ["Balance", "StageBound", "balance_of", "stage_bounds"]

TERA = 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBound:
    """A lower bound of the seconds of one stage."""

    stage: str
    arithmetic_s: float
    memory_s: float
    network_s: float

    @property
    def seconds(self) -> float:
        return max(self.arithmetic_s, self.memory_s, self.network_s)

    @property
    def limited_by(self) -> str:
        parts = {"arithmetic": self.arithmetic_s, "memory": self.memory_s, "network": self.network_s}
        return max(parts, key=lambda part: parts[part])


def stage_bounds(setting: PlanSetting, batches: Batches, engine: EngineMemory, plane: PlaneMemory) -> list[StageBound]:
    """Return the bounds of the stages of a step; empty for CPUs, whose rates are not known."""
    if setting.gpu is None:
        return []
    found = [_rollout(setting, setting.gpu, batches, engine, engines=setting.policy.generation.num_replicas)]
    if setting.teacher is not None:
        found.append(_pass(setting.teacher, setting.gpu, batches, WorkerPass.TOPK_LOGITS))
    found += [_pass(setting, setting.gpu, batches, part) for part in passes_of(setting)]
    crossing = plane.step_bytes / setting.gpu.network_rate if setting.config.cluster.num_nodes > 1 else 0.0
    found.append(StageBound(stage="data plane", arithmetic_s=0.0, memory_s=0.0, network_s=crossing))
    is_far = setting.config.refit_transport == "broadcast" and setting.config.cluster.num_nodes > 1
    rate = setting.gpu.network_rate if is_far else setting.gpu.link_rate
    # Engines that serve adapters have the base from the first refit on.
    size = sum(slot.num_bytes for slot in adapter_slots(setting) or plan_slots(setting))
    sent = size / (rate if setting.layout.world_size > 1 else setting.gpu.memory_rate)
    found.append(StageBound(stage="refit", arithmetic_s=0.0, memory_s=size / setting.gpu.memory_rate, network_s=sent))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """Seconds of both sides of an asynchronous run for the rows of one step, and tokens in a second, of full rows.

    Engines and trainer work at the same time, so a step takes as long as the slower side, and then the refit. Both
    sides are taken at the bounds of `plan`: peak arithmetic, memory and links. Invariant: engines are as full as the
    lookahead L allows, that is with the rows of 1 + L steps, since the run starts groups as fast as it trains them.
    """

    engines: int
    """Engines of the recipe."""
    generation_s: float
    training_s: float
    """Seconds of all passes of the policy workers and of the data plane."""
    refit_s: float
    engine_tokens_s: float
    """Response tokens in a second of one engine."""
    training_tokens_s: float
    """Tokens of rows, prompts included, in a second of all policy workers."""
    balanced_engines: int | None
    """Fewest engines that keep up with the trainer; None where no number of them does."""
    least_generation_s: float
    """Seconds of sampling with one group on each engine, which more engines do not shorten."""

    @property
    def binding(self) -> str:
        """Return the side that a step waits for."""
        return "engines" if self.generation_s > self.training_s else "trainer"

    @property
    def idle_share(self) -> float:
        """Return the share of a step, without its refit, in which the other side waits."""
        slower = max(self.generation_s, self.training_s)
        return 1 - min(self.generation_s, self.training_s) / slower if slower else 0.0

    @property
    def step_s(self) -> float:
        return max(self.generation_s, self.training_s) + self.refit_s

    @property
    def advice(self) -> str:
        """Return what would balance the sides."""
        if self.balanced_engines is None:
            return (
                f"no number of engines keeps up: the turns of a row take {self.least_generation_s:.2f} s, the trainer "
                f"{self.training_s:.2f} s; raise grpo.async.lookahead (and max_staleness), or take fewer policy workers"
            )
        if self.balanced_engines == self.engines:
            return f"{self.engines} engines keep up with the trainer, and fewer would not"
        other = "policy.generation.num_replicas, or give GPUs to the other side"
        return f"{self.balanced_engines} engines would keep up with the trainer, got {self.engines}; change {other}"

    def as_json(self) -> dict[str, object]:
        derived = ("binding", "idle_share", "step_s", "advice")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def balance_of(setting: PlanSetting, batches: Batches, bounds: list[StageBound]) -> Balance | None:
    """Return the balance of an asynchronous run on GPUs, else None."""
    gpu = setting.gpu
    if gpu is None or not setting.config.grpo.async_.takes_stale_rows:
        return None

    def generation_s(engines: int) -> float:
        engine = engine_memory(setting, batches, engines=engines)
        return _rollout(setting, gpu, batches, engine, engines=engines).seconds

    engines, most_engines = setting.policy.generation.num_replicas, setting.groups_alive
    stages = {bound.stage: bound.seconds for bound in bounds}
    refit_s, _ = stages.pop("refit"), stages.pop("rollout")
    training_s, seconds = sum(stages.values()), generation_s(min(engines, most_engines))
    keeps_up = (count for count in range(1, most_engines + 1) if generation_s(count) <= training_s)
    return Balance(
        engines=engines,
        generation_s=seconds,
        training_s=training_s,
        refit_s=refit_s,
        engine_tokens_s=batches.rows * min(batches.response_tokens, batches.row_tokens) / seconds / engines,
        training_tokens_s=batches.tokens / training_s,
        balanced_engines=next(keeps_up, None),
        least_generation_s=generation_s(most_engines),
    )


def _rollout(setting: PlanSetting, gpu: GPU, batches: Batches, engine: EngineMemory, *, engines: int) -> StageBound:
    """Return the bound of the rollout: every turn reads the weights that its tokens use, and the cache so far.

    A turn of an asynchronous engine has rows of several steps, which share what is read.
    """
    shape, is_continuous = setting.model.flops_shape, setting.config.grpo.async_.takes_stale_rows
    turns = min(batches.response_tokens, batches.row_tokens)
    rows = batches.rows / min(engines, setting.groups_alive) if is_continuous else math.ceil(batches.rows / engines)
    per_token = engine.token_bytes
    start = max(0, batches.row_tokens - turns)
    cache = rows * per_token * (turns * start + turns * (turns - 1) / 2)
    precision = setting.policy.generation.precision or setting.policy.precision
    # Experts that no token of a batch chose are not read: only those that one token uses are sure to be.
    used = shape.matmul_flops_per_token / 2 * setting.engine_element_bytes / engine.ranks
    fills = rows / engine.rows
    weights = (fills if is_continuous else math.ceil(fills)) * turns * used
    flops = transformer_flops(shape, [batches.row_tokens], with_backward=False) * rows
    # Prompts of a group are run once.
    prompts = transformer_flops(shape, [start], with_backward=False)
    flops -= prompts * (rows - rows / setting.config.grpo.num_generations_per_prompt)
    return StageBound(
        stage="rollout",
        arithmetic_s=flops / (gpu.tflops(precision) * TERA * engine.ranks),
        memory_s=(weights + cache) / gpu.memory_rate,
        network_s=0.0,
    )


def _pass(setting: PlanSetting, gpu: GPU, batches: Batches, part: WorkerPass) -> StageBound:
    layout, shape = setting.layout, setting.model.flops_shape
    is_training = part is WorkerPass.TRAIN
    trains_weights = not setting.policy.lora.enabled
    row = transformer_flops(shape, [batches.row_tokens], with_backward=is_training, trains_weights=trains_weights)
    flops = row * batches.rows
    steps = batches.global_batches if is_training else 1
    microbatches = batches.train_microbatches * steps if is_training else batches.logprob_microbatches
    held = [weight for weight in local_weights(setting) if not (setting.is_megatron and weight.is_expert)]
    shared, trained = sum(weight.in_use for weight in held), sum(weight.in_use for weight in held if weight.is_trained)
    if setting.is_megatron:
        # Gradients go to the ranks with the same weights and come back as sums, or as weights.
        sent = 2 * steps * trained * setting.element_bytes if is_training else 0
    else:
        # All weights come before each pass of a microbatch, the gradients go after the last one.
        passes = 2 if is_training else 1
        sent = microbatches * passes * shared * setting.element_bytes + is_training * steps * trained * FLOAT32_BYTES
    used = shape.matmul_flops_per_token / 2 / (layout.tp * layout.pp) * setting.element_bytes
    return StageBound(
        stage=str(part),
        arithmetic_s=flops / (gpu.tflops(setting.policy.precision) * TERA * layout.world_size),
        memory_s=microbatches * used / gpu.memory_rate,
        network_s=_collective_s(setting, gpu, sent),
    )


def _collective_s(setting: PlanSetting, gpu: GPU, sent: float) -> float:
    """Return the seconds for bytes that each rank gets from its peers of the data and context axes."""
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
