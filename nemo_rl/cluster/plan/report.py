"""A plan for people: tables on a terminal, plain lines elsewhere."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.table import Table

from nemo_rl.cluster.plan.batches import Balance
from nemo_rl.cluster.plan.memory import RankMemory
from nemo_rl.cluster.plan.plan import RunPlan
from nemo_rl.utils.console import bytes_text

__all__ = ["refusal", "show_plan"]


def show_plan(plan: RunPlan, console: Console) -> None:
    """Print everything."""
    console.print(Group(*_parts(plan)))


def refusal(plan: RunPlan, change: tuple[str, str] | None) -> str:
    """Return one message: what does not fit, and the cheapest change that would.

    Args:
        change: its overrides and what it costs; None where no single one is enough.
    """
    what = "; ".join(plan.problems)
    if change is None:
        return (
            f"this recipe does not fit: {what}. No single change that was tried fits; combine smaller token caps, "
            "activation checkpointing and more parallelism, or take larger GPUs (--gpu)"
        )
    return f"this recipe does not fit: {what}. The cheapest change that fits: {change[0]} ({change[1]})"


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
    parts: list[RenderableType] = [head, plan.reading(), "", _where(plan), "", _batches(plan), ""]
    parts += [_memory(plan), ""]
    parts += [_hosts(plan), "", _plane(plan), ""]
    if plan.bounds:
        parts += [_times(plan), ""]
    if plan.balance is not None:
        parts += [_sides(plan.balance), plan.balance.advice, ""]
    ports = ", ".join(f"{port.who}: {port.port or 'a free port'}" for port in plan.ports)
    parts += [f"ports on node 0: {ports or 'none'}"]
    parts += [f"assumed: {line}" for line in plan.assumptions()]
    parts.append("fits" if plan.fits else "does not fit: " + "; ".join(plan.problems))
    return parts


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    return table


def _where(plan: RunPlan) -> Table:
    table = Table(title="Who runs where", title_justify="left", box=None, pad_edge=False)
    for column in ("nodes", "policy ranks", "engines", "others"):
        table.add_column(column, overflow="fold")

    def likeness(number: int) -> tuple[object, ...]:
        node = plan.nodes[number]
        return len(node.devices), len(node.engines), node.others

    for _, same in groupby(range(len(plan.nodes)), key=likeness):
        numbers = list(same)
        first, last = plan.nodes[numbers[0]], plan.nodes[numbers[-1]]
        ranks = f"{first.devices[0].rank}-{last.devices[-1].rank}" if first.devices else "none"
        ranks += f", {len(first.devices)} on each" if first.devices and len(numbers) > 1 else ""
        engines = f"{first.engines[0]}-{last.engines[-1]}" if first.engines else "none"
        names = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
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
    table = _table(title, "what", *_stage_names(plan))
    rows = [_rank_rows(rank) for rank in plan.ranks]
    for name in rows[0]:
        table.add_row(name, *(bytes_text(row[name]) for row in rows))
    for stage in plan.ranks[0].stages():
        table.add_row(f"needed: {stage}", *(bytes_text(rank.stages()[stage]) for rank in plan.ranks), style="bold")
    return table


def _stage_names(plan: RunPlan) -> list[str]:
    return ["bytes"] if len(plan.ranks) == 1 else [f"PP {rank.stage}" for rank in plan.ranks]


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
