"""Weights of a sharded model, tensor by tensor: memory for this rank's shards alone, filled from a source.

Called by the DTensor engine and its checkpoints; no function communicates. Invariant: no rank ever holds more of the
model than its shards and one tensor besides.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import PreTrainedModel

from nemo_rl.models.hf_folder import ALL_ROWS, ModelWeights, WeightSource, open_weights
from nemo_rl.models.loading import load_causal_lm, named_weights
from nemo_rl.models.local_shard import local_shard

__all__ = ["fill_shards", "make_room", "name_differences", "open_source"]

ROWS = 0


def name_differences(model: torch.nn.Module, source: WeightSource) -> list[str]:
    """Names of weights that one side lacks, or that have another whole shape; empty when the source fits the model."""
    own = {name: tuple(weight.shape) for name, weight in named_weights(model)}
    given = {name: source.shape(name) for name in source.names()}
    return sorted({name for name, _ in own.items() ^ given.items()})


def open_source(folder: str | Path, model: PreTrainedModel) -> WeightSource:
    """The weights of a folder for `model`, read one at a time; whole where only transformers understands the names.

    Raises:
        ModelFolderError: the folder is missing, incomplete or unreadable.
    """
    source = open_weights(folder, model.config)
    if not name_differences(model, source):
        return source
    whole = load_causal_lm(folder)
    return ModelWeights(whole, where=source.where)


def make_room(model: torch.nn.Module, device: torch.device) -> None:
    """Gives every parameter on the meta device memory for this rank's shard, without values.

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
    """Copies this rank's part of every weight; of whole rows no others are read.

    Raises:
        ModelFolderError: a file turned out to be damaged; some weights are filled already.
    """
    for name, weight in named_weights(model):
        if not weight.dim():
            local_shard(weight).data.copy_(source.get(name))
            continue
        index = _cut(torch.arange(weight.shape[ROWS]), weight, lambda dim: dim == ROWS)
        rows = slice(int(index[0]), int(index[-1]) + 1) if len(index) else slice(0, 0)
        given = source.get(name, rows=ALL_ROWS if len(index) == weight.shape[ROWS] else rows)
        with torch.no_grad():
            local_shard(weight).copy_(_cut(given, weight, lambda dim: dim != ROWS))


def _with_memory(parameter: torch.nn.Parameter, device: torch.device) -> torch.nn.Parameter:
    local = torch.empty_like(local_shard(parameter.detach()), device=device)
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        local = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
    return torch.nn.Parameter(local, requires_grad=parameter.requires_grad)


def _cut(full: torch.Tensor, weight: torch.Tensor, wanted: Callable[[int], bool]) -> torch.Tensor:
    """This rank's part of a tensor along the wanted dimensions of `weight`.

    The tensor axis is the inner one: it splits first, and FSDP splits what is left.
    """
    if not isinstance(weight, DTensor):
        return full
    mesh = weight.device_mesh
    for axis in reversed(range(mesh.ndim)):
        placement = weight.placements[axis]
        if isinstance(placement, Shard | _StridedShard) and wanted(placement.dim):
            chunks = full.chunk(mesh.size(axis), dim=placement.dim)
            place = mesh.get_local_rank(axis)
            empty = full.narrow(placement.dim, 0, 0)
            full = chunks[place] if place < len(chunks) else empty
    return full
