"""vLLM engines of refits by shards, one of whose ranks ends, or loads something else, where a test says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from nemo_rl.models.generation.interfaces import EngineSpec
from nemo_rl.models.generation.vllm import start
from nemo_rl.models.generation.vllm.worker import build_vllm_worker
from nemo_rl.models.hf.files import Box
from nemo_rl.models.weight_sync.shard_loader import ShardLoader
from nemo_rl.models.weight_sync.shard_transport import ShardReceiver
from tests.helpers.shard_faults import FAULTS, end_at

__all__ = ["FaultyRank", "build_faulty_vllm"]

VICTIM = 1
"""Rank of an engine."""
Parts = Mapping[Box, torch.Tensor]


def _swap_halves(parts: Parts) -> Parts:
    gate, up = parts
    return {gate: parts[up], up: parts[gate]}


def _lose_an_expert(parts: Parts) -> Parts:
    found = {box: part.clone() for box, part in parts.items()}
    for part in found.values():
        part[3] = 0.0
    return found


def _shift_rows(parts: Parts) -> Parts:
    return {box: part.roll(1, dims=0) for box, part in parts.items()}


DAMAGES: dict[str, Callable[[Parts], Parts]] = dict(
    zip(FAULTS, (_swap_halves, _lose_an_expert, _shift_rows), strict=True)
)
_fill = ShardLoader._fill


class FaultyRank:
    """What the extension of vLLM's workers can do besides; mixed in by `build_faulty_vllm`."""

    rank: int

    def end_at(self, number: int) -> None:
        if self.rank == VICTIM:
            end_at(ShardReceiver, "_finish", number)

    def plant(self, fault: str | None) -> None:
        if self.rank != VICTIM:
            return

        def damaged(loader: ShardLoader, target: torch.Tensor, view: Any, tensors: Parts) -> None:
            is_hit = fault is not None and view.name == FAULTS[fault][0]
            _fill(loader, target, view, DAMAGES[fault](tensors) if is_hit and fault is not None else tensors)

        ShardLoader._fill = damaged  # type: ignore[method-assign]


def build_faulty_vllm(spec: EngineSpec) -> object:
    """Start one engine whose ranks have `FaultyRank`."""
    start.EXTENSION = "tests.helpers.shard_vllm_extension.FaultyExtension"
    worker: Any = build_vllm_worker(spec)
    for method, argument in (("end_at", "number"), ("plant", "fault")):
        setattr(worker, method, partial(_on_ranks, worker, method, argument))
    return worker


def _on_ranks(worker: Any, method: str, argument: str, **arguments: object) -> None:
    worker._rpc(method, arguments[argument])
