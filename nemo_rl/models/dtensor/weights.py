"""Weights of a sharded model, tensor by tensor: which rank has what, memory for this one's shards, and filling them.

Called by the DTensor engine and its checkpoints; `gather_weights` alone communicates. Invariant: no rank ever holds
more of the model than its shards and, besides, one tensor or those of one exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import PreTrainedModel

from nemo_rl.models.adapters.lora import named_adapters
from nemo_rl.models.hf.files import Box, chunk_of, local_shard
from nemo_rl.models.hf.folder import ModelWeights, WeightSource, open_weights
from nemo_rl.models.hf.loading import load_causal_lm, named_weights
from nemo_rl.torch_private import copy_all

__all__ = [
    "box_of",
    "boxes_of",
    "fill_adapters",
    "fill_shards",
    "gather_weights",
    "hold_as_stored",
    "make_room",
    "name_differences",
    "open_source",
]

ROWS = 0
GATHERED_AT_ONCE = MappingProxyType({"cpu": 64 << 20, "cuda": 256 << 20})
"""Bytes of whole tensors that are gathered together: a GPU waits for the processor at each exchange."""
FIRST_ROW = slice(0, 1)


def name_differences(model: torch.nn.Module, source: WeightSource) -> list[str]:
    """Return names of weights that one side lacks, or that have another whole shape; empty when the source fits the
    model."""
    own = {name: tuple(weight.shape) for name, weight in named_weights(model)}
    given = {name: source.shape(name) for name in source.names()}
    return sorted({name for name, _ in own.items() ^ given.items()})


def open_source(folder: str | Path, model: PreTrainedModel) -> WeightSource:
    """Return the weights of a folder for `model`, read one at a time; whole where only transformers understands the
    names.

    Raises:
        ModelFolderError: the folder is missing, incomplete or unreadable.
    """
    source = open_weights(folder, model.config)
    if not name_differences(model, source):
        return source
    whole = load_causal_lm(folder)
    return ModelWeights(whole, where=source.where)


def hold_as_stored(model: torch.nn.Module, source: WeightSource, dtype: torch.dtype) -> None:
    """Let frozen parameters be held in the dtype that they are computed in, where they are stored in it.

    A float32 copy would hold the same values in twice the memory; trained parameters need it for their small updates.

    Args:
        model: its parameters are on the meta device, and not sharded yet.
        dtype: that the model computes in.
    """
    names = {id(weight): name for name, weight in named_weights(model)}
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None or parameter.requires_grad or parameter.dtype == dtype or not parameter.dim():
                continue
            # A tied parameter is in two modules, and stays one.
            if id(parameter) not in made:
                is_stored_so = source.get(names[id(parameter)], rows=FIRST_ROW).dtype == dtype
                held = torch.nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
                made[id(parameter)] = held if is_stored_so else parameter
            module._parameters[key] = made[id(parameter)]


def make_room(model: torch.nn.Module, device: torch.device) -> None:
    """Give every parameter on the meta device memory for this rank's shard, without values.

    Args:
        model: as `parallelize` left it: what FSDP knows of its parameters follows.
    """
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                # A tied parameter is in two modules, and stays one.
                if id(parameter) not in made:
                    made[id(parameter)] = _with_memory(parameter, device)
                module._parameters[name] = made[id(parameter)]
    # FSDP takes up the parameters of a module anew after every conversion.
    model._apply(lambda tensor: tensor)


def fill_shards(model: torch.nn.Module, source: WeightSource) -> None:
    """Copy this rank's part of every weight; of whole rows no others are read.

    Raises:
        ModelFolderError: a file turned out to be damaged; some weights are filled already.
    """
    rank = dist.get_rank()
    for name, weight in named_weights(model):
        box, whole = box_of(weight, rank=rank), Box.whole(tuple(weight.shape))
        assert box is not None, f"{name} is not on rank {rank}"
        if not box.count:
            continue
        if box.size[:1] == whole.size[:1]:
            given, held = source.get(name), whole
        else:
            held = whole.along(ROWS, box.start[ROWS], box.size[ROWS])
            given = source.get(name, rows=slice(box.start[ROWS], box.start[ROWS] + box.size[ROWS]))
        with torch.no_grad():
            local_shard(weight).copy_(box.of(given, held=held))


def fill_adapters(model: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Copy this rank's part of every adapter tensor, all of which are given whole."""
    rank = dist.get_rank()
    for name, weight in named_adapters(model):
        box, whole = box_of(weight, rank=rank), Box.whole(tuple(weight.shape))
        assert box is not None, f"{name} is not on rank {rank}"
        if box.count:
            with torch.no_grad():
                local_shard(weight).copy_(box.of(values[name], held=whole))


def _with_memory(parameter: torch.nn.Parameter, device: torch.device) -> torch.nn.Parameter:
    # `DTensor.from_local` would move what is to stay on the CPU to the devices of the mesh.
    return torch.nn.Parameter(
        torch.empty_like(parameter.detach(), device=device), requires_grad=parameter.requires_grad
    )


def box_of(weight: torch.Tensor, *, rank: int) -> Box | None:
    """Return the box that a rank has of a weight, or None where it has no part in this rank's mesh.

    The tensor axis is the inner one: it splits first, and FSDP splits what is left.
    """
    if not isinstance(weight, DTensor):
        return Box.whole(tuple(weight.shape))
    return _box(_Sharding.of(weight), rank)


def boxes_of(weight: torch.Tensor, *, world_size: int) -> Sequence[Box | None]:
    """Return the boxes that make up a weight, by the rank that gives each; None where it has a copy of another's, or
    nothing.

    Where a weight is on several meshes the one of rank 0 gives it.
    """
    if not isinstance(weight, DTensor):
        return [Box.whole(tuple(weight.shape)), *[None] * (world_size - 1)]
    return _boxes(_Sharding.of(weight), world_size)


@dataclass(frozen=True, slots=True)
class _Sharding:
    """Shape and sharding of a weight, by which its boxes are kept: most weights share it with that of another layer."""

    shape: tuple[int, ...]
    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    @classmethod
    def of(cls, weight: DTensor) -> _Sharding:
        return cls(tuple(weight.shape), weight.device_mesh, weight.placements)


def _box(sharding: _Sharding, rank: int) -> Box | None:
    box, places = Box.whole(sharding.shape), _places_of(sharding.mesh, rank)
    if places is None:
        return None
    for axis in reversed(range(sharding.mesh.ndim)):
        placement = sharding.placements[axis]
        if isinstance(placement, Shard | _StridedShard):
            count = sharding.mesh.size(axis)
            box = box.along(placement.dim, *chunk_of(box.size[placement.dim], place=places[axis], count=count))
    return box


@lru_cache(maxsize=256)
def _boxes(sharding: _Sharding, world_size: int) -> Sequence[Box | None]:
    if _places_of(sharding.mesh, 0) is None:
        return [None] * world_size
    found: list[Box | None] = []
    for rank in range(world_size):
        box, places = _box(sharding, rank), _places_of(sharding.mesh, rank) or []
        is_copy = any(
            place for place, at in zip(places, sharding.placements, strict=False) if isinstance(at, Replicate)
        )
        found.append(None if is_copy or box is None or not box.count else box)
    return found


def gather_weights(
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    device: torch.device,
    dtypes: Mapping[str, torch.dtype],
) -> Iterator[tuple[str, torch.Tensor]]:
    """(collective over all ranks) Yield whole tensors on the device, many of them from one exchange.

    At most `GATHERED_AT_ONCE` bytes of whole tensors are in memory at a time, or one that is larger, and as many that
    are on their way.

    Args:
        dtypes: of weights that every rank casts before they are exchanged; the others stay as they are.
    """
    batch, held = list[tuple[str, torch.Tensor]](), 0
    dtype = last = torch.float32
    for name, weight in weights:
        dtype = dtypes.get(name, weight.dtype)
        size = weight.numel() * dtype.itemsize
        if batch and (held + size > GATHERED_AT_ONCE[device.type] or dtype != last):
            yield from _gathered(batch, device, last)
            batch, held = [], 0
        batch.append((name, weight))
        held, last = held + size, dtype
    yield from _gathered(batch, device, dtype)


@torch.no_grad()
def _local_parts(batch: Sequence[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
    # Without gradients a local part is an attribute, else a step of autograd.
    return [local_shard(weight).detach() for _, weight in batch]


def _gathered(
    batch: Sequence[tuple[str, torch.Tensor]], device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    own = _local_parts(batch)
    if size == 1 or not batch:
        if any(part.dtype != dtype for part in own):
            cast = _views(torch.empty(sum(part.numel() for part in own), dtype=dtype, device=device), own)
            copy_all(cast, own)
            own = cast
        yield from ((name, part.to(device)) for (name, _), part in zip(batch, own, strict=True))
        return
    boxes = [boxes_of(weight, world_size=size) for _, weight in batch]
    counts = [sum(box.count for each in boxes if (box := each[peer]) is not None) for peer in range(size)]
    given = [part for part, each in zip(own, boxes, strict=True) if each[rank] is not None]
    sent = torch.zeros(max(counts), dtype=dtype, device=device)
    copy_all(_views(sent, given), given)
    parts = torch.empty(size, max(counts), dtype=dtype, device=device)
    dist.all_gather_into_tensor(parts.view(-1), sent)
    wholes = [torch.empty(tuple(weight.shape), dtype=dtype, device=device) for _, weight in batch]
    starts, targets, sources = [0] * size, list[torch.Tensor](), list[torch.Tensor]()
    for whole, each in zip(wholes, boxes, strict=True):
        for peer, box in enumerate(each):
            if box is not None:
                end = starts[peer] + box.count
                targets.append(box.of(whole, held=Box.whole(tuple(whole.shape))))
                sources.append(parts[peer, starts[peer] : end].view(box.size))
                starts[peer] = end
    copy_all(targets, sources)
    yield from ((name, whole) for (name, _), whole in zip(batch, wholes, strict=True))


def _views(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return parts of a flat tensor, end to end, in the shapes of others."""
    ends = list(accumulate(part.numel() for part in like))
    return [flat[end - part.numel() : end].view(part.shape) for end, part in zip(ends, like, strict=True)]


def _places_of(mesh: DeviceMesh, rank: int) -> list[int] | None:
    """Return the places of a rank along each axis of this rank's mesh, or None outside of it."""
    places: list[list[int]] = (mesh.mesh == rank).nonzero().tolist()
    return places[0] if places else None
