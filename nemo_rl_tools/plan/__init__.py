"""`nemo-rl plan`: everything that is known of a run before it starts, and what does not fit.

make_plan -> plan_batches   rows, global batches, microbatches         (the run's own planners)
          -> rank_memory    per pipeline stage: weights ... activations (what the workers allocate)
          -> plan_plane     columns of a step                           (what the stages declare)
          -> plan_nodes     who runs where                              (the run's layout)
          -> stage_bounds   seconds, as lower bounds
          -> balance_of     of an asynchronous run: rates of both sides

The time of a stage is a lower bound: its arithmetic at the peak rate, the bytes that must be read from memory, or the
bytes that must cross the links, whichever is longest; nothing of what makes real runs slower is counted.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from nemo_rl.algorithms.processes import num_engine_bundles
from nemo_rl.config.schema import MasterConfig
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.models.policy.workers.base import USABLE
from nemo_rl.utils.console import bytes_text
from nemo_rl.utils.flops import transformer_flops
from nemo_rl.utils.memory import available_bytes
from nemo_rl_tools.known_models import planned_model_config
from nemo_rl_tools.plan.activations import layer_bytes, scores_bytes
from nemo_rl_tools.plan.memory import (
    EngineMemory,
    RankMemory,
    adapter_slots,
    engine_memory,
    engine_peak,
    host_bytes,
    plan_slots,
    rank_memory,
    teacher_bytes,
)
from nemo_rl_tools.plan.nodes import PLANNED_IDS, PlaneMemory, PlannedNode, Port, plan_nodes, plan_plane, plan_ports
from nemo_rl_tools.plan.setting import FLOAT32_BYTES, GPU, GPUS, Batches, Model, PlanSetting, passes_of, plan_batches
from nemo_rl_tools.plan.weights import local_weights

__all__ = ["FORMAT_VERSION", "Balance", "RunPlan", "StageBound", "make_plan", "stage_bytes"]

TERA = 1e12
USUAL_GPU = "H100-80G"


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
    is_far = setting.config.refit_transport in ("broadcast", "shards") and setting.config.cluster.num_nodes > 1
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
    # Copies of the weights add a sum of shards of gradients, which is small beside their gathers.
    shards = layout.weight_shards
    if shards == 1:
        return 0.0
    inside = sent * (shards - 1) / shards / gpu.link_rate
    # What enters a node once is passed on inside; all its cards take a part.
    groups = min(layout.tp, cluster.gpus_per_node)
    crossing = sent * groups * (1 - 1 / cluster.num_nodes) / (cluster.gpus_per_node * gpu.network_rate)
    # A pipeline's stages may be nodes, as may the ranks of a copy of the weights: then peers are neighbours.
    is_on_one_node = layout.copies > 1 and shards * layout.tp <= cluster.gpus_per_node
    return max(inside, crossing if layout.pp == 1 and not is_on_one_node else 0.0)


FORMAT_VERSION = 1
"""Version of the format of `--json`; raised when a key changes its meaning or goes."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Sizes in bytes, times in seconds."""

    setting: PlanSetting
    batches: Batches
    ranks: tuple[RankMemory, ...]
    """One of each pipeline stage, with an engine where any rank of the stage shares its GPU with one."""
    engine: EngineMemory
    plane: PlaneMemory
    nodes: tuple[PlannedNode, ...]
    ports: tuple[Port, ...]
    hosts: tuple[dict[str, int], ...]
    """Memory of each node by its use."""
    bounds: tuple[StageBound, ...]
    balance: Balance | None
    """Rates of both sides of an asynchronous run; None of a synchronous one, and on CPUs, whose rates are not known."""
    problems: tuple[str, ...]
    """One line for each part that does not fit."""

    @property
    def device_bytes(self) -> int | None:
        """Return the bytes of a GPU that a run can use, or None on CPUs."""
        return int(self.setting.gpu.memory_bytes * USABLE) if self.setting.gpu is not None else None

    @property
    def fits(self) -> bool:
        return not self.problems

    def reading(self) -> str:
        """Return a sentence about the share of the model folder that each process reads when it starts."""
        model, shares = self.setting.model, [min(1.0, rank.read_share) for rank in self.ranks]
        most, least = max(shares), min(shares)
        if least == 1:
            ranks = "every policy rank reads all of it"
        else:
            share = f"{most:.0%}" if f"{most:.0%}" == f"{least:.0%}" else f"{least:.0%} to {most:.0%}"
            # The config may not name the dtype of what is stored.
            dtype = model.config.dtype
            stored = "" if dtype is None else f" ({bytes_text(int(most * model.num_parameters * dtype.itemsize))})"
            ranks = f"a policy rank reads at most {share} of it{stored}"
        engine = (
            "vLLM engines read no weights, they get the trainer's"
            if self.setting.policy.generation.backend == "vllm"
            else "every engine reads all of it"
        )
        return f"model folder: {ranks}, one weight at a time through the node's page cache; {engine}"

    def assumptions(self) -> list[str]:
        """Return the assumptions behind the numbers, besides the recipe."""
        sampling = self.setting.policy.generation
        has_sets = sampling.record_support and sampling.top_k is None
        lines = [
            "all rows are as long as they may be, so a real step needs no more",
            f"top-p {sampling.top_p:.4g} keeps {PLANNED_IDS} tokens, whose sets are recorded" if has_sets else "",
            "tokens spread evenly over experts" if self.setting.model.flops_shape.num_experts else "",
            "" if self.setting.model.has_gated_mlp else "the MLP needs no more than a gated one, as Llama has it",
        ]
        if self.setting.gpu is not None:
            first = self.setting.layers_of(0)[0]
            scores = scores_bytes(self.setting, self.batches.train)
            layer = layer_bytes(self.setting, self.batches.train, first)
            lines.append(
                f"attention runs in a fused kernel, whose layer keeps {bytes_text(layer.attention)}; without one it "
                f"would keep {bytes_text(scores)} of scores besides"
            )
        if self.setting.has_kernels:
            lines.append("Transformer Engine is installed: fused MLPs and norms, and its Adam may be distributed")
        if self.balance is not None:
            lines.append(
                "engines and trainer are equally far from their bounds, and engines are always full; the account of a "
                "run says which side really waits"
            )
        if not self.engine.frees_cache and self.setting.gpu is not None:
            count = self.engine.rows_in_cache(self.batches.row_tokens)
            lines.append(
                f"an engine decodes up to {self.engine.rows} rows together; its cache holds {count} at full length, "
                "and others wait"
            )
        if not self.engine.is_known:
            lines.append("what this engine needs is not known here: it is counted as the embedded one")
        return [line for line in lines if line]

    def as_json(self) -> dict[str, object]:
        setting, gpu = self.setting, self.setting.gpu
        return {
            "version": FORMAT_VERSION,
            "model": {
                "name": setting.policy.model_name,
                "type": setting.model.config.model_type,
                "parameters": setting.model.num_parameters,
            },
            "gpu": None if gpu is None else {**asdict(gpu), "usable_bytes": self.device_bytes},
            "layout": asdict(setting.layout) | {"world_size": setting.layout.world_size},
            "batches": {**asdict(self.batches), "tokens": self.batches.tokens},
            "ranks": [rank.as_json() for rank in self.ranks],
            "engine": asdict(self.engine),
            "data_plane": {**asdict(self.plane), "rows_bytes": self.plane.rows_bytes},
            "nodes": [{**asdict(node), "memory": host} for node, host in zip(self.nodes, self.hosts, strict=True)],
            "reading": self.reading(),
            "ports": [asdict(port) for port in self.ports],
            "bounds": [
                {**asdict(bound), "seconds": bound.seconds, "limited_by": bound.limited_by} for bound in self.bounds
            ],
            "balance": None if self.balance is None else self.balance.as_json(),
            "assumptions": self.assumptions(),
            "problems": list(self.problems),
            "fits": self.fits,
        }


def make_plan(setting: PlanSetting) -> RunPlan:
    """Raise ConfigError where the recipe cannot run in its layout, whatever the memory."""
    batches, nodes = plan_batches(setting), plan_nodes(setting)
    engine, plane = engine_memory(setting, batches), plan_plane(setting, batches)
    with_engine = {device.pp for node in nodes for device in node.devices if device.engine is not None}
    ranks = tuple(
        rank_memory(setting, batches, stage=stage, with_engine=stage in with_engine)
        for stage in range(setting.layout.pp)
    )
    teacher = [] if setting.teacher is None else teacher_bytes(setting.teacher, batches)
    hosts = tuple(
        host_bytes(
            setting,
            [ranks[device.pp] for device in node.devices],
            engine=engine,
            engines=node.engine_ranks,
            others=len(node.others),
            # On CPUs all of a teacher is on the first node; on GPUs this is an upper bound there.
            teacher=teacher if node.number == 0 else (),
        )
        | ({"data plane": plane.held} if node.number == 0 else {})
        for node in nodes
    )
    bounds = stage_bounds(setting, batches, engine, plane)
    return RunPlan(
        setting=setting,
        batches=batches,
        ranks=ranks,
        engine=engine,
        plane=plane,
        nodes=tuple(nodes),
        ports=tuple(plan_ports(setting)),
        hosts=hosts,
        bounds=tuple(bounds),
        balance=balance_of(setting, batches, bounds),
        problems=(
            *_device_problems(setting, ranks),
            *_engine_problems(setting, engine),
            *_cache_problems(setting, engine, batches),
            *_host_problems(setting, hosts),
            *_plane_problems(plane),
        ),
    )


def stage_bytes(config: MasterConfig) -> dict[str, int]:
    """Return the most bytes on a GPU in each stage of a step, over all pipeline stages; which GPU it is decides only
    what vLLM takes.

    Raises:
        NemoRLError: the recipe or its model cannot be planned.
    """
    model = Model(planned_model_config(config.policy.model_name))
    ranks = make_plan(PlanSetting(config=config, model=model, gpu=GPUS[USUAL_GPU])).ranks
    return {name: max(rank.stages()[name] for rank in ranks) for name in ranks[0].stages()}


def _device_problems(setting: PlanSetting, ranks: tuple[RankMemory, ...]) -> list[str]:
    if setting.gpu is None:
        return []
    room = int(setting.gpu.memory_bytes * USABLE)
    worst = max(ranks, key=lambda rank: rank.peak)
    if worst.peak <= room:
        return []
    stages = worst.stages()
    stage = max(stages, key=lambda name: stages[name])
    where = f" of pipeline stage {worst.stage}" if len(ranks) > 1 else ""
    return [f"{stage}: a GPU{where} needs {bytes_text(worst.peak)}, {setting.gpu.name} has {bytes_text(room)} to use"]


def _engine_problems(setting: PlanSetting, engine: EngineMemory) -> list[str]:
    """Return the problems of non-colocated engines with their own GPUs."""
    if setting.gpu is None or not num_engine_bundles(setting.config):
        return []
    needed, room = engine_peak(setting, engine), int(setting.gpu.memory_bytes * USABLE)
    if needed <= room:
        return []
    return [f"an engine's GPU needs {bytes_text(needed)}, {setting.gpu.name} has {bytes_text(room)} to use"]


def _cache_problems(setting: PlanSetting, engine: EngineMemory, batches: Batches) -> list[str]:
    """Return the problem of a cache that holds no row at full length."""
    if engine.rows_in_cache(batches.row_tokens):
        return []
    key = "kv_cache_gib" if setting.gpu is None else "gpu_memory_utilization"
    return [
        f"policy.generation.vllm_cfg.{key} leaves {bytes_text(engine.cache)} for keys and values, and a row of "
        f"{batches.row_tokens:,} tokens takes {bytes_text(engine.token_bytes * batches.row_tokens)}"
    ]


def _host_problems(setting: PlanSetting, hosts: tuple[dict[str, int], ...]) -> list[str]:
    """Return the problems of CPU workers on this machine; other machines are not known."""
    if setting.gpu is not None or len(hosts) > 1 or setting.config.cluster.address is not None:
        return []
    needed, have = sum(hosts[0].values()), available_bytes()
    return [] if needed <= have else [f"this machine needs {bytes_text(needed)} of memory, {bytes_text(have)} are free"]


def _plane_problems(plane: PlaneMemory) -> list[str]:
    if plane.room is None or plane.rows_bytes <= plane.room:
        return []
    return [
        f"data plane: {plane.rows} rows have {bytes_text(plane.rows_bytes)}, {plane.limited_by} leaves room for "
        f"{bytes_text(plane.room)}"
    ]
