"""The command `nemo-rl plan`: the plan of a recipe as tables, or its refusal with the cheapest change that would fit.

Candidates are planned one by one, cheapest first: fewer rows decoded together and a smaller token cap (the same work in
more passes), recomputation (about a third more arithmetic), other splits over the same GPUs (more communication), state
in the node's memory, fewer engines (slower rollouts), more room in the data plane, more nodes. Of one kind the smallest
change comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table

from nemo_rl.config.load import load_config
from nemo_rl.config.rules.policy import packing_decided
from nemo_rl.errors import ConfigError, ResourceError
from nemo_rl.utils.console import bytes_text
from nemo_rl_tools.known_models import planned_model_config
from nemo_rl_tools.plan import Balance, RunPlan, make_plan
from nemo_rl_tools.plan.memory import RankMemory
from nemo_rl_tools.plan.setting import GPU, GPUS, Model, PlanSetting, gpu_named

__all__ = ["changes_of", "plan_recipe", "planned_gpu", "show_plan"]

FACTORS = (2, 4, 8)
CPU_OFFLOADED = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanChange:
    """One change, as overrides of the command line."""

    overrides: tuple[str, ...]
    cost: str
    """The cost of the change, in a word or two."""


def cheapest_change(plan: RunPlan, replan: Callable[[tuple[str, ...]], RunPlan]) -> PlanChange | None:
    """Return the first candidate that fits; None where none does.

    Args:
        replan: of the same recipe with further overrides.
    """
    for change in changes_of(plan.setting):
        # The rules of the recipe, or the model, may not allow it.
        with suppress(ConfigError):
            if replan(change.overrides).fits:
                return change
    return None


def changes_of(setting: PlanSetting) -> Iterator[PlanChange]:
    """Yield all candidates, the cheapest first."""
    yield from _smaller_batches(setting)
    yield from _recomputation(setting)
    yield from _splits(setting)
    yield from _offloads(setting)
    yield from _fewer_engines(setting)
    yield from _more_room(setting)
    nodes = setting.config.cluster.num_nodes
    for factor in FACTORS:
        yield PlanChange(overrides=nodes_overrides(nodes * factor), cost="more machines")


def nodes_overrides(count: int) -> tuple[str, ...]:
    """Return the overrides for so many machines; several are nodes of a running Ray."""
    return (f"cluster.num_nodes={count}", *(["cluster.address=auto"] if count > 1 else []))


def _smaller_batches(setting: PlanSetting) -> Iterator[PlanChange]:
    policy = setting.policy
    most = policy.generation.max_batch_size
    while most > 1:
        most //= 2
        yield PlanChange(overrides=(f"policy.generation.max_batch_size={most}",), cost="more rounds of decoding")
    for name, section in (("sequence_packing", policy.sequence_packing), ("dynamic_batching", policy.dynamic_batching)):
        if not section.is_on:
            continue
        train, logprob = section.train_mb_tokens, section.logprob_mb_tokens
        floor = policy.max_total_sequence_length
        while max(train, logprob) > floor:
            train, logprob = max(floor, train // 2), max(floor, logprob // 2)
            caps = (f"policy.{name}.train_mb_tokens={train}", f"policy.{name}.logprob_mb_tokens={logprob}")
            yield PlanChange(overrides=caps, cost="more microbatches")
    if not policy.sequence_packing.is_on and not policy.dynamic_batching.enabled:
        rows = policy.train_micro_batch_size
        while rows > 1:
            rows //= 2
            yield PlanChange(overrides=(f"policy.train_micro_batch_size={rows}",), cost="more microbatches")


def _recomputation(setting: PlanSetting) -> Iterator[PlanChange]:
    key = f"{setting.policy.parallel_section}.activation_checkpointing"
    if setting.is_megatron:
        if not setting.policy.megatron_cfg.activation_checkpointing:
            yield PlanChange(overrides=(f"{key}=true",), cost="a third more arithmetic")
        return
    mode = setting.policy.dtensor_cfg.activation_checkpointing
    if mode == "none":
        yield PlanChange(overrides=(f"{key}=selective",), cost="norms and activations computed again")
    if mode != "full":
        yield PlanChange(overrides=(f"{key}=full",), cost="a third more arithmetic")


def _splits(setting: PlanSetting) -> Iterator[PlanChange]:
    sizes, section = setting.policy.parallel_sizes, setting.policy.parallel_section
    sequence = f"{section}.sequence_parallel=true"
    if sizes.tensor > 1 and not sizes.sequence_parallel:
        yield PlanChange(overrides=(sequence,), cost="other communication")
    model = "_model" if setting.is_megatron else ""
    axes = [("context_parallel_size", sizes.context), (f"tensor{model}_parallel_size", sizes.tensor)]
    if setting.is_megatron:
        axes = [("expert_model_parallel_size", sizes.expert), *axes, ("pipeline_model_parallel_size", sizes.pipeline)]
        if sizes.expert_tensor > 1:
            yield PlanChange(overrides=(f"{section}.expert_tensor_parallel_size=1",), cost="other communication")
    for name, size in axes:
        for factor in FACTORS:
            more: tuple[str, ...] = (f"{section}.{name}={size * factor}",)
            if name.startswith("tensor") and sizes.tensor == 1:
                more += (sequence,)
            yield PlanChange(overrides=more, cost="more communication")


def _offloads(setting: PlanSetting) -> Iterator[PlanChange]:
    if not setting.is_megatron:
        if not setting.policy.dtensor_cfg.cpu_offload:
            offload = ("policy.dtensor_cfg.cpu_offload=true",)
            yield PlanChange(overrides=offload, cost="weights cross to the GPU each pass")
        return
    if not setting.policy.megatron_cfg.optimizer.optimizer_cpu_offload:
        optimizer = "policy.megatron_cfg.optimizer"
        both = (f"{optimizer}.optimizer_cpu_offload=true", f"{optimizer}.optimizer_offload_fraction={CPU_OFFLOADED}")
        yield PlanChange(overrides=both, cost="the optimizer steps on CPUs")


def _fewer_engines(setting: PlanSetting) -> Iterator[PlanChange]:
    count = setting.policy.generation.num_replicas
    while count > 1:
        count //= 2
        yield PlanChange(overrides=(f"policy.generation.num_replicas={count}",), cost="slower rollouts")


def _more_room(setting: PlanSetting) -> Iterator[PlanChange]:
    plane = setting.config.active_data_plane
    sizes = {"mooncake.segment_bytes": plane.mooncake.segment_bytes} if plane.starts_mooncake else {}
    if plane.storage_capacity.bytes is not None:
        sizes["storage_capacity.bytes"] = plane.storage_capacity.bytes
    for factor in FACTORS:
        for name, size in sizes.items():
            yield PlanChange(overrides=(f"data_plane.{name}={size * factor}",), cost="memory of the node")


def plan_recipe(
    recipe: Path,
    *,
    overrides: tuple[str, ...] = (),
    gpu: str | None = None,
    nodes: int | None = None,
    model_config: Path | None = None,
) -> tuple[RunPlan, ResourceError | None]:
    """Return the plan, and what to raise where it does not fit.

    Raises:
        ConfigError: the recipe is wrong, or cannot run in its layout; the GPU is not known.
        ModelFolderError: the model is neither here nor known.
    """
    overrides += () if nodes is None else nodes_overrides(nodes)
    config = load_config(recipe, overrides)
    device = planned_gpu(gpu, config.cluster.gpus_per_node)
    model = Model(planned_model_config(config.policy.model_name, given=model_config))

    taught_by = config.loss_fn.distillation.teacher.model_name
    teacher = None if taught_by is None else Model(planned_model_config(taught_by, given=None))

    def plan_of(further: tuple[str, ...] = ()) -> RunPlan:
        # Whether the model packs is found out where a run starts.
        config = packing_decided(load_config(recipe, (*overrides, *further)), fits=lambda _: True)
        taught = None if teacher is None else PlanSetting(config=config.as_teacher, model=teacher, gpu=device)
        return make_plan(PlanSetting(config=config, model=model, gpu=device, teacher=taught))

    plan = plan_of()
    if plan.fits:
        return plan, None
    found = cheapest_change(plan, plan_of)
    what = "; ".join(plan.problems)
    if found is None:
        return plan, ResourceError(
            f"this recipe does not fit: {what}. No single change that was tried fits; combine smaller token caps, "
            "activation checkpointing and more parallelism, or take larger GPUs (--gpu)"
        )
    text = f"{' '.join(found.overrides)} ({found.cost})"
    return plan, ResourceError(f"this recipe does not fit: {what}. The cheapest change that fits: {text}")


def planned_gpu(name: str | None, count: int) -> GPU | None:
    """Return the GPU of that name, None for a recipe of CPUs; raise ConfigError where name and recipe differ."""
    if name is None:
        if count:
            raise ConfigError(
                f"--gpu: cluster.gpus_per_node is {count}; expected the name of the GPU, one of {', '.join(GPUS)}"
            )
        return None
    found = gpu_named(name)
    if not count:
        raise ConfigError(
            f"--gpu: expected a recipe with GPUs, but cluster.gpus_per_node is 0, so {found.name} would not be used; "
            "set it, or leave --gpu out"
        )
    return found


def show_plan(plan: RunPlan, console: Console) -> None:
    console.print(Group(*_parts(plan)))


def _parts(plan: RunPlan) -> list[RenderableType]:
    setting = plan.setting
    device = setting.gpu.name if setting.gpu is not None else "CPU"
    worker = "Megatron" if setting.is_megatron else "DTensor"
    layout = setting.layout
    axes = " x ".join(
        f"{name} {size}" for name, size in (("PP", layout.pp), ("DP", layout.dp), ("CP", layout.cp), ("TP", layout.tp))
    )
    head = (
        f"{setting.policy.model_name}: {setting.model.num_parameters:,} parameters, {worker} worker, {axes} = "
        f"{layout.world_size} ranks on {len(plan.nodes)} x {device} node(s)"
    )
    parts: list[RenderableType] = [head, plan.reading(), ""]
    for table in (_where, _batches, _memory, _hosts, _plane):
        parts += [table(plan), ""]
    if plan.bounds:
        parts += [_times(plan), ""]
    if plan.balance is not None:
        parts += [_sides(plan.balance), plan.balance.advice, ""]
    ports = ", ".join(f"{port.who}: {port.port or 'a free port'}" for port in plan.ports)
    parts += [f"ports on node 0: {ports or 'none'}"]
    parts += [f"assumed: {line}" for line in plan.assumptions()]
    parts.append("fits" if plan.fits else "does not fit: " + "; ".join(plan.problems))
    return parts


def _table(title: str, *columns: str, has_numbers: bool = True) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number and has_numbers else "left", overflow="fold")
    return table


def _where(plan: RunPlan) -> Table:
    table = _table("Who runs where", "nodes", "policy ranks", "engines", "others", has_numbers=False)
    for _, same in groupby(plan.nodes, key=lambda node: (len(node.devices), len(node.engines), node.others)):
        first, *more = same
        last = more[-1] if more else first
        ranks = f"{first.devices[0].rank}-{last.devices[-1].rank}" if first.devices else "none"
        ranks += f", {len(first.devices)} on each" if first.devices and more else ""
        engines = f"{first.engines[0]}-{last.engines[-1]}" if first.engines else "none"
        names = f"{first.number}-{last.number}" if more else str(first.number)
        table.add_row(names, ranks, engines, ", ".join(_counted(first.others)) or "none")
    return table


def _counted(names: tuple[str, ...]) -> list[str]:
    return [name if names.count(name) == 1 else f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]


def _batches(plan: RunPlan) -> Table:
    batches, table = plan.batches, _table("A step", "what", "number")
    for name, value in (
        ("rows", batches.rows),
        ("tokens of a row, at most", batches.row_tokens),
        ("tokens, at most", batches.tokens),
        ("global batches", batches.global_batches),
        ("rows of a global batch", batches.global_batch_rows),
        ("rows of it on a data-parallel rank", batches.rows_per_rank),
        ("microbatches of it on a rank", batches.train_microbatches),
        ("tokens of a training microbatch on a rank", batches.train.tokens),
        ("tokens of a log-probability microbatch on a rank", batches.logprob.tokens),
    ):
        table.add_row(name, f"{value:,}")
    return table


def _memory(plan: RunPlan) -> Table:
    room = plan.device_bytes
    title = "Memory of a worker" if room is None else f"Memory of a GPU, {bytes_text(room)} to use"
    table = _table(title, "what", *(["bytes"] if len(plan.ranks) == 1 else [f"PP {rank.stage}" for rank in plan.ranks]))
    rows = [_rank_rows(rank) for rank in plan.ranks]
    for name in rows[0]:
        table.add_row(name, *(bytes_text(row[name]) for row in rows))
    for stage in plan.ranks[0].stages():
        table.add_row(f"needed: {stage}", *(bytes_text(rank.stages()[stage]) for rank in plan.ranks), style="bold")
    return table


def _rank_rows(rank: RankMemory) -> dict[str, int]:
    engine = rank.engine
    return {
        "weights": rank.weights,
        "gradients": rank.gradients,
        "gradients, whole, while microbatches run": rank.summed_gradients,
        "optimizer": rank.optimizer,
        "weights gathered for a pass": rank.gathered.root + 2 * rank.gathered.layer,
        "activations of a microbatch": rank.train.layers + rank.train.head,
        "logits of a microbatch": rank.train.logits,
        "most of a training pass": rank.train.peak,
        "most of a log-probability pass": rank.logprob.peak if rank.logprob is not None else 0,
        "engine: weights": engine.weights if engine is not None else 0,
        "engine: keys and values": engine.cache if engine is not None else 0,
        "engine: while it decodes": engine.working if engine is not None else 0,
        "engine: while the policy trains": engine.while_training if engine is not None else 0,
        "engine: a layer that is being loaded": engine.loading if engine is not None else 0,
        **({"teacher: weights and the most of its pass": rank.teacher} if rank.teacher else {}),
        "refit: bucket and a whole weight": rank.refit,
        "CUDA and NCCL": rank.fixed,
    }


def _hosts(plan: RunPlan) -> Table:
    table = _table("Memory of a node", "what", "node 0", *(["each other node"] if len(plan.nodes) > 1 else []))
    last = plan.hosts[-1]
    for name, count in plan.hosts[0].items():
        others = [bytes_text(last.get(name, 0))] if len(plan.nodes) > 1 else []
        table.add_row(name, bytes_text(count), *others)
    return table


def _plane(plan: RunPlan) -> Table:
    plane = plan.plane
    table = _table(f"Data plane: {plane.store}, {plane.clients} clients", "column", f"bytes of {plane.rows} rows")
    for name, count in plane.columns.items():
        table.add_row(name, bytes_text(count))
    table.add_row("headers of chunks", bytes_text(plane.headers))
    table.add_row("together", bytes_text(plane.rows_bytes), style="bold")
    if plane.reserved:
        table.add_row("set aside by the store", bytes_text(plane.reserved))
    return table


def _times(plan: RunPlan) -> Table:
    table = _table("At least so many seconds (bounds, not estimates)", "stage", "seconds", "because of")
    for bound in plan.bounds:
        table.add_row(bound.stage, f"{bound.seconds:.2f}", bound.limited_by)
    if plan.balance is None:
        table.add_row("step", f"{sum(bound.seconds for bound in plan.bounds):.2f}", "", style="bold")
    else:
        table.add_row("step", f"{plan.balance.step_s:.2f}", f"the {plan.balance.binding}, and the refit", style="bold")
    return table


def _sides(balance: Balance) -> Table:
    table = _table("Both sides of an asynchronous step, at their bounds", "side", "seconds", "tokens/s", "waits")
    waits = {balance.binding: "never"}
    for side, seconds, rate in (
        ("engines", balance.generation_s, f"{balance.engine_tokens_s:,.0f} each"),
        ("trainer", balance.training_s, f"{balance.training_tokens_s:,.0f}"),
    ):
        table.add_row(side, f"{seconds:.2f}", rate, waits.get(side, f"{balance.idle_share:.0%}"))
    return table
