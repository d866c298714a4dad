"""Weights between a Hugging Face model and the ranks that share it in megatron-core, one at a time.

`load_weights` fills a rank from a `WeightSource`; `export_weights` is the source of refits, checkpoints and parity
tests. What goes where is said by `convert_table`. Invariant: loading and exporting changes no bit of a weight, under
any layout, and besides what its caller keeps a rank holds one whole weight at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from nemo_rl.errors import ModelFolderError, name_some
from nemo_rl.models.hf.files import Box
from nemo_rl.models.hf.folder import WeightSource
from nemo_rl.models.hf.loading import ADAPTER_PART
from nemo_rl.models.megatron.architecture import Architecture
from nemo_rl.models.megatron.convert_table import Weight, table_name, weights_of
from nemo_rl.models.megatron.mcore import GPTModel, get_transformer_layer_offset, parallel_state
from nemo_rl.models.megatron.setup import MegatronModel
from nemo_rl.models.megatron.transformer_config import DecoderConfig
from nemo_rl.models.policy.interfaces import TensorInfo

__all__ = [
    "adapter_infos",
    "export_adapter",
    "export_gradients",
    "export_weights",
    "fill_adapters",
    "held_shards",
    "load_weights",
    "weight_infos",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class _WeightGroups:
    """The ranks that share weights with this one."""

    tensor: dist.ProcessGroup
    expert_tensor: dist.ProcessGroup
    expert: dist.ProcessGroup
    pipeline: dist.ProcessGroup

    @classmethod
    def of_rank(cls) -> _WeightGroups:
        return cls(
            tensor=parallel_state.get_tensor_model_parallel_group(),
            expert_tensor=parallel_state.get_expert_tensor_parallel_group(),
            expert=parallel_state.get_expert_model_parallel_group(),
            pipeline=parallel_state.get_pipeline_model_parallel_group(),
        )


def weight_infos(hf_config: PretrainedConfig, dtype: torch.dtype) -> dict[str, TensorInfo]:
    """Return what `export_weights` yields for a model of this precision, in its order; without communication."""
    return {
        part.name: TensorInfo(shape=part.shape, dtype=str(_dtype(weight, dtype)).removeprefix("torch."))
        for weight in weights_of(Architecture.of(hf_config))
        for part in weight.parts
        if not weight.is_copy
    }


def load_weights(model: MegatronModel, source: WeightSource) -> None:
    """Fill this rank's parameters and persistent buffers in place; read only the layers and experts it has.

    Half precision optimizers keep copies of the weights, which they must take anew afterwards.

    Raises:
        ModelFolderError: the source is of another model, incomplete or unreadable; the weights are as they were
            unless a file turned out to be damaged on the way.
    """
    _check_same_model(model.shape, source)
    groups, tensors = _WeightGroups.of_rank(), _tensors(model.module, model.config)
    filled = set[str]()
    for weight in weights_of(model.shape):
        fill = _fill_experts if weight.num_experts else _fill_split
        filled |= fill(weight, tensors, source, groups)
    parameters = {
        name
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.nn.Parameter) and f".{ADAPTER_PART}." not in name
    }
    assert parameters <= filled, f"weights unknown to the table: {name_some(sorted(parameters - filled))}"


def export_weights(model: MegatronModel) -> Iterator[tuple[str, torch.Tensor]]:
    """(collective) Yield every weight, whole, by the name of the Hugging Face module, on this rank's device.

    All ranks iterate to the end, at the same pace. The tensors are contiguous and share no memory with the model. A
    tied head is left out.
    """
    tensors = _tensors(model.module, model.config)
    yield from _export_all(model, weights_of(model.shape), tensors, dtype=model.config.params_dtype)


def held_shards(model: MegatronModel, kind: Literal["weights", "adapter"]) -> Iterator[tuple[str, Box, torch.Tensor]]:
    """Yield the parts of the weights of `export_weights`, or of the tensors of `export_adapter`, that this rank holds:
    name, box and values, which share memory with the model unless they are cast."""
    groups, tensors = _WeightGroups.of_rank(), _tensors(model.module, model.config)
    is_adapter = kind == "adapter"
    for weight in model.adapters if is_adapter else weights_of(model.shape):
        dtype = _dtype(weight, torch.float32 if is_adapter else model.config.params_dtype)
        group = groups.expert_tensor if weight.num_experts else groups.tensor
        count = weight.num_experts // groups.expert.size()
        first = groups.expert.rank() * count
        # A weight that is not one of an expert has no place among them.
        names: dict[str, tuple[int, ...]]
        names = {weight.local.format(expert=expert): (first + expert,) for expert in range(count)} or {weight.local: ()}
        for name, place in names.items():
            if weight.is_copy or name not in tensors:
                continue
            shard = tensors[name].detach()
            for held in weight.held(rank=group.rank(), size=group.size()):
                values = held.local.of(shard, held=Box.whole(tuple(shard.shape))).to(dtype)
                box = Box(start=(*place, *held.box.start), size=(*(1 for _ in place), *held.box.size))
                yield held.part.name, box, values.view(box.size)


def export_gradients(model: MegatronModel) -> Iterator[tuple[str, torch.Tensor]]:
    """(collective) Yield, like `export_weights`, the gradients in float32 once they are complete on every rank; of a
    model with adapters theirs alone.

    Weights without one (frozen, or buffers) have zeros.
    """
    held = _tensors(model.module, model.config)
    tensors = {name: _gradient_of(tensor) for name, tensor in held.items()}
    yield from _export_all(model, model.adapters or weights_of(model.shape), tensors, dtype=torch.float32)


def adapter_infos(model: MegatronModel) -> dict[str, TensorInfo]:
    """Return what `export_adapter` yields, in its order."""
    return {
        part.name: TensorInfo(shape=part.shape, dtype="float32") for weight in model.adapters for part in weight.parts
    }


def export_adapter(model: MegatronModel) -> Iterator[tuple[str, torch.Tensor]]:
    """(collective) Yield, like `export_weights`, A and B of every adapter in float32; B without its scale."""
    yield from _export_all(model, model.adapters, _tensors(model.module, model.config), dtype=torch.float32)


def fill_adapters(model: MegatronModel, values: Mapping[str, torch.Tensor]) -> None:
    """Copy this rank's part of every adapter tensor, all of which are given whole.

    Half precision optimizers keep copies, which they must take anew afterwards.
    """
    group, tensors = _WeightGroups.of_rank().tensor, _tensors(model.module, model.config)
    for weight in model.adapters:
        if weight.local in tensors:
            [part] = weight.parts
            shard = weight.split.shard(values[part.name], rank=group.rank(), size=group.size())
            tensors[weight.local].detach().copy_(shard)


def _gradient_of(tensor: Any) -> torch.Tensor:
    """megatron-core keeps it in its own attribute."""
    if not isinstance(tensor, torch.nn.Parameter) or not tensor.requires_grad:
        return torch.zeros_like(tensor, dtype=torch.float32)
    gradient: torch.Tensor = tensor.main_grad  # type: ignore[attr-defined]
    return gradient.float()


def _export_all(
    model: MegatronModel, weights: Iterable[Weight], tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """(collective) Return whole tensors from each rank's parts of them."""
    groups = _WeightGroups.of_rank()
    stages = range(groups.pipeline.size())
    first_layers = [get_transformer_layer_offset(model.config, pp_rank=stage) for stage in stages]
    for weight in weights:
        if not weight.is_copy:
            stage = bisect_right(first_layers, weight.layer) - 1
            # A separate generator, so that nothing of this weight is left when the next is gathered.
            yield from _export(weight, tensors, groups, stage=stage, dtype=dtype)


def _export(
    weight: Weight, tensors: Mapping[str, torch.Tensor], groups: _WeightGroups, *, stage: int, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """(collective) Yield the parts of a weight that a pipeline stage has."""
    dtype = _dtype(weight, dtype)
    if stage == groups.pipeline.rank():
        gather = _gather_experts if weight.num_experts else _gather_split
        whole = gather(weight, tensors, groups).to(dtype)
    else:
        device = next(iter(tensors.values())).device
        whole = torch.empty(weight.shape, dtype=dtype, device=device)
    if groups.pipeline.size() > 1:
        dist.broadcast(whole, group=groups.pipeline, group_src=stage)
    for part, tensor in zip(weight.parts, weight.unpack(whole), strict=True):
        yield part.name, tensor


def _dtype(weight: Weight, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if weight.is_float32 else dtype


def _tensors(module: GPTModel, config: DecoderConfig) -> dict[str, torch.Tensor]:
    """Return this rank's parameters and buffers by the names of the table."""
    first = get_transformer_layer_offset(config)
    held = (*module.named_parameters(), *module.named_buffers())
    return {table_name(name, first_layer=first): tensor for name, tensor in held}


def _check_same_model(shape: Architecture, source: WeightSource) -> None:
    expected = {part.name: part.shape for weight in weights_of(shape) for part in weight.parts}
    names = source.names()
    missing = [name for name in expected if name not in names]
    unknown = sorted(names - expected.keys())
    problems = []
    if missing:
        problems.append(f"{len(missing)} weights are missing ({name_some(missing)})")
    if unknown:
        problems.append(f"{len(unknown)} weights are unknown ({name_some(unknown)})")
    problems += [
        f"{name}: expected shape {list(wanted)}, got {list(source.shape(name))}"
        for name, wanted in expected.items()
        if name in names and source.shape(name) != wanted
    ]
    if problems:
        raise ModelFolderError(
            f"{source.where}: not the weights of this {shape.model_type!r} model: {name_some(problems)}; check that "
            "its config.json belongs to its weights, and that policy.model_name is the model they were trained from"
        )


def _fill_split(
    weight: Weight, tensors: Mapping[str, torch.Tensor], source: WeightSource, groups: _WeightGroups
) -> set[str]:
    if weight.local not in tensors:
        return set()
    packed = weight.pack([source.get(part.name) for part in weight.parts])
    shard = weight.split.shard(packed, rank=groups.tensor.rank(), size=groups.tensor.size())
    _fill(tensors[weight.local], shard, weight)
    return {weight.local}


def _fill_experts(
    weight: Weight, tensors: Mapping[str, torch.Tensor], source: WeightSource, groups: _WeightGroups
) -> set[str]:
    """Fill the parts of a weight like `_fill_split`, expert by expert."""
    count = weight.num_experts // groups.expert.size()
    names = [weight.local.format(expert=expert) for expert in range(count)]
    if names[0] not in tensors:
        return set()
    for place, name in enumerate(names, start=groups.expert.rank() * count):
        whole = source.get(weight.parts[0].name, rows=slice(place, place + 1))[0]
        shard = weight.split.shard(whole, rank=groups.expert_tensor.rank(), size=groups.expert_tensor.size())
        _fill(tensors[name], shard, weight)
    return set(names)


def _fill(target: torch.Tensor, value: torch.Tensor, weight: Weight) -> None:
    assert target.shape == value.shape, f"{weight.local}: the model has {target.shape}, the table says {value.shape}"
    if weight.is_float32 and target.dtype is not torch.float32:
        # A model in half precision is made by a cast of all there is.
        target.data = target.data.float()
    target.detach().copy_(value)


def _gather_split(weight: Weight, tensors: Mapping[str, torch.Tensor], groups: _WeightGroups) -> torch.Tensor:
    shard = tensors[weight.local].detach()
    if weight.split.dim is None or groups.tensor.size() == 1:
        return shard.clone()
    return weight.split.join(_gather(shard, groups.tensor))


def _gather_experts(weight: Weight, tensors: Mapping[str, torch.Tensor], groups: _WeightGroups) -> torch.Tensor:
    """Gather a weight expert by expert, so that besides the result there is little more than one of each rank."""
    whole = tensors[weight.local.format(expert=0)].new_empty(weight.shape)
    of_ranks = whole.unflatten(0, (groups.expert.size(), -1))
    for expert in range(of_ranks.shape[1]):
        shard = tensors[weight.local.format(expert=expert)].detach()
        joined = weight.split.join(_gather(shard, groups.expert_tensor))
        of_ranks[:, expert] = _gather(joined, groups.expert)
    return whole


def _gather(shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return all ranks' tensors, `[size, ...]`; on one rank without a copy."""
    if group.size() == 1:
        return shard.unsqueeze(0)
    gathered = shard.new_empty((group.size(), *shard.shape))
    dist.all_gather_into_tensor(gathered.view(-1), shard.contiguous().view(-1), group=group)
    return gathered
