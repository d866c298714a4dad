"""`nemo-rl plan`: everything that is known of a run before it starts, and what does not fit.

make_plan -> plan_batches   rows, global batches, microbatches         (the run's own planners)
          -> rank_memory    per pipeline stage: weights ... activations (what the workers allocate)
          -> plan_plane     columns of a step                           (what the stages declare)
          -> plan_nodes     who runs where                              (the run's layout)
          -> stage_bounds   seconds, as lower bounds
          -> balance_of     of an asynchronous run: rates of both sides
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from nemo_rl.algorithms.cpu_needs import num_engine_bundles
from nemo_rl.cluster.plan.activations import layer_bytes, scores_bytes
from nemo_rl.cluster.plan.memory import (
    EngineMemory,
    RankMemory,
    engine_memory,
    engine_peak,
    host_bytes,
    rank_memory,
    teacher_bytes,
)
from nemo_rl.cluster.plan.nodes import PLANNED_IDS, PlaneMemory, PlannedNode, Port, plan_nodes, plan_plane, plan_ports
from nemo_rl.cluster.plan.setting import Batches, PlanSetting, plan_batches
from nemo_rl.cluster.plan.times import Balance, StageBound, balance_of, stage_bounds
from nemo_rl.utils.console import bytes_text
from nemo_rl.utils.memory import available_bytes

__all__ = ["FORMAT_VERSION", "RunPlan", "make_plan"]

FORMAT_VERSION = 1
"""Version of the format of `--json`; raised when a key changes its meaning or goes."""
USABLE = 0.96
"""Usable share of a GPU's memory: the rest is lost between blocks of torch's allocator."""


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
        shares = [min(1.0, rank.read_share) for rank in self.ranks]
        most, least = max(shares), min(shares)
        if least == 1:
            ranks = "every policy rank reads all of it"
        else:
            share = f"{most:.0%}" if f"{most:.0%}" == f"{least:.0%}" else f"{least:.0%} to {most:.0%}"
            ranks = f"a policy rank reads at most {share} of it{self._stored_bytes(most)}"
        engine = (
            "vLLM engines read no weights, they get the trainer's"
            if self.setting.policy.generation.backend == "vllm"
            else "every engine reads all of it"
        )
        return f"model folder: {ranks}, one weight at a time through the node's page cache; {engine}"

    def _stored_bytes(self, share: float) -> str:
        """Return the stored bytes of the weights, or nothing where the config does not name their dtype."""
        dtype = self.setting.model.config.dtype
        if dtype is None:
            return ""
        return f" ({bytes_text(int(share * self.setting.model.num_parameters * dtype.itemsize))})"

    def assumptions(self) -> list[str]:
        """Return the assumptions behind the numbers, besides the recipe."""
        lines = [
            "all rows are as long as they may be, so a real step needs no more",
            self._sets(),
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

    def _sets(self) -> str:
        generation = self.setting.policy.generation
        if not generation.record_support or generation.top_k is not None:
            return ""
        return f"top-p {generation.top_p:.4g} keeps {PLANNED_IDS} tokens, whose sets are recorded"

    def as_json(self) -> dict[str, object]:
        """Return every number of the plan."""
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
    """Return the problems of non-colocated engines with GPUs of their own."""
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
