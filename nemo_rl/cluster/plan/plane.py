"""The data plane of a step: which columns, how many bytes, and what a store sets aside for them.

The columns are those that the stages of the run declare. Invariant: within 2 % of the bytes that a ledger counts, for
rows of the planned lengths; sampling masks are counted as no smaller than they may be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nemo_rl.algorithms.cpu_needs import num_clients
from nemo_rl.algorithms.losses.policy_loss import build_loss
from nemo_rl.algorithms.stages.columns import StageColumns, extras_of, stage_columns, written_fields
from nemo_rl.cluster.plan.batches import Batches
from nemo_rl.cluster.plan.setting import PlanSetting
from nemo_rl.data_plane.schema import FIELDS, ROUTE_FIELDS, FieldSpec
from nemo_rl.data_plane.store_kinds import kind_named
from nemo_rl.models.policy.interfaces import TOPK_IDS, TOPK_LOGPROBS
from nemo_rl.models.support import BEFORE_STEPS, SUPPORT
from nemo_rl.routes.shape import RouteShape, bits_per_id, route_dtype

__all__ = ["PLANNED_IDS", "PlaneMemory", "plan_plane", "row_bytes"]

BITS = 8
ROLLOUT_STAGES = ("rollout", "score")
PLANNED_IDS = 64
"""Planned ids of a set that top-p alone keeps. It may have any size: sharp distributions have 6 at 0.8, 90 to 200 at
0.95."""
LARGER_DISTANCES = ((1 << 7) - BEFORE_STEPS, (1 << 14) - BEFORE_STEPS, (1 << 21) - BEFORE_STEPS)
"""Distances between ids of a set, from which a number of `nemo_rl.models.support` takes a byte more."""
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
    """Return the memory of the store that the run starts."""
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
    return stage_columns(setting.config, build_loss(setting.config))


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
        return tokens * setting.config.loss_fn.distillation.top_k * _itemsize(spec.dtypes[0])
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
