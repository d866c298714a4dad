"""The nodes of a run, with the processes, ports and data plane on them, in numbers of columns and bytes.

Ranks lie in the order of the run's layout, as many on a node as it has workers; engines share the first GPUs, as many
as they have ranks, or stand apart on GPUs or nodes of their own; the driver's node has everything else. The columns are
those that the stages of the run declare. Invariant: within 2 % of the bytes that a ledger counts, for rows of the
planned lengths; sampling masks are counted as no smaller than they may be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from nemo_rl.algorithms.losses.policy_loss import build_loss
from nemo_rl.algorithms.processes import cpus_per_bundle, logical_cpus, num_clients, num_engine_bundles, other_cpus
from nemo_rl.algorithms.stages.columns import StageColumns, extras_of, stage_columns, written_fields
from nemo_rl.data_plane.schema import FIELDS, ROUTE_FIELDS, FieldSpec
from nemo_rl.data_plane.store_kinds import kind_named
from nemo_rl.distributed.layout import engine_places
from nemo_rl.models.head.logits import BEFORE_STEPS, SUPPORT
from nemo_rl.models.policy.interfaces import TOPK_IDS, TOPK_LOGPROBS
from nemo_rl.routes.shape import RouteShape, bits_per_id, route_dtype
from nemo_rl_tools.plan.setting import Batches, PlanSetting

__all__ = ["PLANNED_IDS", "Device", "PlaneMemory", "PlannedNode", "Port", "plan_nodes", "plan_plane", "plan_ports"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A GPU, or the share of a CPU that one policy worker has."""

    number: int
    rank: int
    pp: int
    dp: int
    cp: int
    tp: int
    engine: int | None
    """Number of the engine of which a rank takes turns with the policy's here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedNode:
    """One machine of the run, with the processes on it."""

    number: int
    devices: tuple[Device, ...]
    engines: tuple[int, ...]
    """Numbers of all engines here, those on their own GPUs included."""
    others: tuple[str, ...]
    """Further processes."""
    cpus: int
    """Logical CPUs that its processes ask Ray for."""
    engine_ranks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """A port on which a process of the run listens."""

    who: str
    node: int = 0
    port: int | None = None
    """The number of the port, or None for a free one that is taken at the start."""
    set_by: str = ""
    """The key that fixes it; empty where there is none."""


def plan_nodes(setting: PlanSetting) -> list[PlannedNode]:
    cluster, layout = setting.config.cluster, setting.layout
    per_node = cluster.num_workers // cluster.num_nodes
    engines, has_gpus = setting.policy.generation.num_replicas, cluster.gpus_per_node > 0
    apart = _non_colocated_engines(setting)
    ranks_each = setting.policy.generation.ranks_per_engine
    places = engine_places(engines, ranks=ranks_each, gpus_per_node=max(1, per_node)) if has_gpus and not apart else []
    engine_of = {rank: number for number, place in enumerate(places) for rank in place}
    apart_ranks = dict.fromkeys(apart, num_engine_bundles(setting.config) // max(1, len(apart)))
    nodes = []
    for number in sorted({*range(cluster.num_nodes), *apart}):
        is_first, has_workers = number == 0, number < cluster.num_nodes
        ranks = range(number * per_node, (number + 1) * per_node) if has_workers else range(0)
        devices = tuple(
            Device(number=local, rank=rank, pp=at.pp, dp=at.dp, cp=at.cp, tp=at.tp, engine=engine_of.get(rank))
            for local, (rank, at) in enumerate((rank, layout.coordinates(rank)) for rank in ranks)
        )
        on_gpus = tuple(device.engine for device in devices if device.engine is not None)
        placed = tuple(dict.fromkeys(on_gpus)) if has_gpus else tuple(range(engines)) if is_first else ()
        nodes.append(
            PlannedNode(
                number=number,
                devices=devices,
                engines=apart.get(number, ()) if apart else placed,
                others=_others(setting) if is_first else (),
                cpus=(_cpus(setting, is_first=is_first) if has_workers else 0) + apart_ranks.get(number, 0),
                engine_ranks=apart_ranks.get(number, 0) if apart else len(on_gpus) or len(placed) * ranks_each,
            )
        )
    return nodes


def _non_colocated_engines(setting: PlanSetting) -> dict[int, tuple[int, ...]]:
    """Return the numbers of the engines by node, where they share nothing with the policy workers; empty
    where they do."""
    config = setting.config
    count, colocated = num_engine_bundles(config), config.policy.generation.colocated
    if not count:
        return {}
    first = config.cluster.num_nodes if colocated.num_nodes else 0
    nodes = colocated.num_nodes or config.cluster.num_nodes
    each, ranks = count // nodes, count // config.policy.generation.num_replicas
    # An engine over several nodes is named on each of them.
    return {
        first + place: tuple(dict.fromkeys(bundle // ranks for bundle in range(place * each, (place + 1) * each)))
        for place in range(nodes)
    }


def _cpus(setting: PlanSetting, *, is_first: bool) -> int:
    config = setting.config
    if config.cluster.launcher == "local":
        return 0
    each = config.cluster.num_workers // config.cluster.num_nodes * cpus_per_bundle(config)
    if config.cluster.num_nodes == 1:
        return logical_cpus(config) - num_engine_bundles(config)
    return each + (other_cpus(config) if is_first else 0)


def _others(setting: PlanSetting) -> tuple[str, ...]:
    """Return the processes of the driver's node besides policy workers and engines."""
    config = setting.config
    if config.cluster.launcher == "local":
        return ("driver",)
    plane = config.active_data_plane
    kind = kind_named(plane.impl or "noop")
    found = ["driver", "rollout worker", *["teacher worker"] * config.num_teacher_workers]
    host = plane.ledger_host or kind.ledger_host
    found += ["ledger"] if host == "ray_actor" else []
    found += ["references"] if plane.ledger.recovery == "journal" and kind.needs_ledger_actor(plane) else []
    if plane.impl == "transfer_queue" and not plane.is_guest_of_queue:
        found += ["TransferQueue controller", *["storage unit"] * plane.num_storage_units]
    if plane.starts_mooncake:
        found += ["Mooncake master"] if plane.mooncake.master_address is None else []
        found += ["Mooncake holder"] if plane.mooncake.segment_owner == "holder" else []
    for env in config.envs.values():
        found += ["scoring process"] * (env.num_workers if env.name != "sort" else 0)
    return tuple(found)


def plan_ports(setting: PlanSetting) -> Iterator[Port]:
    """List the listening ports; a port without a number is free whenever the machine has one."""
    config = setting.config
    if config.cluster.launcher == "local":
        return
    plane = config.active_data_plane
    if config.cluster.address is None:
        yield Port(who="Ray (metadata, object store, workers)")
    yield Port(who="rendezvous of the policy ranks")
    if config.refit_transport in ("broadcast", "shards"):
        yield Port(who="rendezvous of the refit")
    if plane.impl == "transfer_queue" and not plane.is_guest_of_queue:
        yield Port(who="TransferQueue controller and storage units")
    if plane.starts_mooncake:
        given = plane.mooncake.master_address
        number = int(given.rpartition(":")[2]) if given else None
        key = "data_plane.mooncake.master_address" if given else ""
        yield Port(who="Mooncake master", port=number, set_by=key)
    if config.diagnostics.tracer.enabled:
        port = config.diagnostics.tracer.port or None
        yield Port(who="tracer hub", port=port, set_by="diagnostics.tracer.port")


BITS = 8
ROLLOUT_STAGES = ("rollout", "score")
PLANNED_IDS = 64
"""Planned ids of a set that top-p alone keeps. It may have any size: sharp distributions have 6 at 0.8, 90 to 200 at
0.95."""
LARGER_DISTANCES = ((1 << 7) - BEFORE_STEPS, (1 << 14) - BEFORE_STEPS, (1 << 21) - BEFORE_STEPS)
"""Distances between ids of a set, from which a number of `nemo_rl.models.head.logits` takes a byte more."""
CHUNK_HEADER_BYTES, COLUMN_BYTES, LENGTH_BYTES = 36, 12, 4
"""Bytes of a chunk's header, of each column in it besides its name, and of a row's length (`nemo_rl.data_plane.codec`).
"""
OBJECT_BYTES = 256
"""Planned for one JSON-like value of an extra column; the true size is only known when it is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaneMemory:
    """Bytes of one step in the data plane, with rows of full length."""

    store: str
    clients: int
    rows: int
    """Most rows at one time: with dynamic sampling, and in an asynchronous run, more than a step trains."""
    columns: Mapping[str, int]
    """Bytes of each column over all rows that have it."""
    headers: int
    """Bytes of the headers of chunks."""
    reserved: int
    """Bytes that the store sets aside for rows; 0 for a store that takes memory as it needs it."""
    step_bytes: int
    """Bytes of the rows that a step trains."""
    room: int | None
    """Bytes that may be live at one time; None: no limit."""
    limited_by: str
    """The key that sets `room`; empty without a limit."""

    @property
    def rows_bytes(self) -> int:
        return sum(self.columns.values()) + self.headers

    @property
    def held(self) -> int:
        """Return the bytes on all nodes together."""
        return max(self.reserved, self.rows_bytes)


def plan_plane(setting: PlanSetting, batches: Batches) -> PlaneMemory:
    plane = setting.config.active_data_plane
    clients, kind = num_clients(setting.config), kind_named(plane.impl or "noop")
    room, key = plane.storage_capacity.bytes, "data_plane.storage_capacity.bytes"
    if plane.starts_mooncake and plane.mooncake.master_address is None:
        owners = clients if plane.mooncake.segment_owner == "producer" else 1
        segments = owners * plane.mooncake.segment_bytes
        if room is None or segments < room:
            room, key = segments, "data_plane.mooncake.segment_bytes"
    specs = _specs(setting)
    sizes, alive = row_bytes(setting, batches.row_tokens), _rows_alive(setting, batches)
    # Rows that wait have what the rollout knows; what workers compute is of the rows that are trained.
    drawn = {name for stage in _stages(setting) if stage.name in ROLLOUT_STAGES for name in stage.writes}
    columns = {name: (alive if name in drawn else batches.rows) * size for name, size in sizes.items()}
    trained = {name: batches.rows * size for name, size in sizes.items()}
    return PlaneMemory(
        store=plane.impl or "noop",
        clients=clients,
        rows=alive,
        columns=columns,
        headers=_header_bytes(columns, specs, rows=alive, chunk_bytes=plane.chunk_bytes),
        step_bytes=sum(trained.values())
        + _header_bytes(trained, specs, rows=batches.rows, chunk_bytes=plane.chunk_bytes),
        reserved=kind.reserved_bytes(plane, clients),
        room=room,
        limited_by=key if room is not None else "",
    )


def _rows_alive(setting: PlanSetting, batches: Batches) -> int:
    """Return the most rows at one time; an asynchronous run has no sampling rounds."""
    grpo = setting.config.grpo
    return batches.rows * setting.steps_alive if grpo.async_.takes_stale_rows else grpo.rows_alive


def row_bytes(setting: PlanSetting, tokens: int) -> dict[str, int]:
    """Return the bytes of a row of so many tokens, by column."""
    specs = _specs(setting)
    return {name: _column_bytes(setting, specs[name], tokens) for name in written_fields(_stages(setting))}


def _specs(setting: PlanSetting) -> Mapping[str, FieldSpec]:
    return {**FIELDS, **{spec.name: spec for spec in extras_of(_stages(setting))}}


def _stages(setting: PlanSetting) -> tuple[StageColumns, ...]:
    return stage_columns(setting.config, build_loss(setting.config.loss_fn, setting.config.grpo))


def _header_bytes(columns: Mapping[str, int], specs: Mapping[str, FieldSpec], *, rows: int, chunk_bytes: int) -> int:
    """Return the bytes of the headers of all chunks: kinds, columns, and the lengths of rows that differ."""
    families: dict[str, list[FieldSpec]] = {}
    for name in columns:
        families.setdefault(specs[name].family, []).append(specs[name])
    total = 0
    for members in families.values():
        chunks = math.ceil(sum(columns[spec.name] for spec in members) / chunk_bytes)
        described = sum(len(spec.name) + len(spec.dtypes[0] if spec.dtypes else "") + COLUMN_BYTES for spec in members)
        tables = len({spec.dims[0] for spec in members if spec.is_ragged})
        total += chunks * (CHUNK_HEADER_BYTES + described) + rows * LENGTH_BYTES * tables
    return total


def _column_bytes(setting: PlanSetting, spec: FieldSpec, tokens: int) -> int:
    if spec.name == SUPPORT:
        return min(setting.policy.longest_response, tokens) * _set_bytes(setting)
    if spec.name not in FIELDS:
        if spec.is_object:
            return OBJECT_BYTES
        sizes = (size if isinstance(size, int) else tokens if at == 0 else 1 for at, size in enumerate(spec.dims))
        return _itemsize(spec.dtypes[0]) * math.prod(sizes)
    if spec.name in (TOPK_IDS, TOPK_LOGPROBS):
        num_events = setting.config.loss_fn.distillation.top_k + (spec.name == TOPK_LOGPROBS)
        return tokens * num_events * _itemsize(spec.dtypes[0])
    if spec.name not in ROUTE_FIELDS:
        size = _itemsize(spec.dtypes[0])
        return size * (tokens if spec.is_token_aligned else 1)
    shape = _route_shape(setting)
    bits = len(shape.layers) * shape.top_k * bits_per_id(shape.num_experts)
    per_token = {
        "routed_experts": len(shape.layers) * shape.top_k * route_dtype(shape.num_experts).itemsize,
        "routed_experts_bits": -(-bits // BITS),
        "routed_experts_digests": len(shape.layers) * _itemsize("int64"),
    }
    # A bit for every token without a route.
    return tokens * per_token[spec.name] if spec.name in per_token else -(-tokens // BITS)


def _set_bytes(setting: PlanSetting) -> int:
    """Return the most bytes of a sampling mask: every distance takes a byte, and only so many fit the vocabulary
    that take more."""
    vocab, top_k = setting.model.flops_shape.vocab_size, setting.policy.generation.top_k
    others = min(PLANNED_IDS if top_k is None else top_k, vocab) - 1
    others = min(others, vocab - 1 - others)
    return 1 + others + sum(min(others, vocab // least) for least in LARGER_DISTANCES)


def _itemsize(dtype: str) -> int:
    kind = torch.empty(0, dtype=vars(torch)[dtype])
    return kind.element_size()


def _route_shape(setting: PlanSetting) -> RouteShape:
    shape = setting.model.flops_shape
    layers = tuple(range(shape.num_dense_layers, shape.num_layers))
    return RouteShape(layers=layers, top_k=setting.model.top_k, num_experts=shape.num_experts)
