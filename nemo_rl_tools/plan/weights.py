"""Weights, gradients and optimizer state of one rank: what stays there between passes.

Sizes and splits come from what the workers themselves split by: the style of each module (`models.dtensor`), the table
of weights (`models.megatron`). Invariant: within 2 % of the unique storages of a real rank; counters are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from nemo_rl.errors import ConfigError
from nemo_rl.models.adapters.lora import adapted_layers, adapter_infos
from nemo_rl.models.dtensor.tensor_parallel import plan_of, split_dims
from nemo_rl.models.megatron.convert_table import Weight, weights_of
from nemo_rl.models.vision import family_of, is_in_tower
from nemo_rl_tools.plan.setting import FLOAT32_BYTES, Model, PlanSetting

__all__ = ["NOTHING_GATHERED", "GatheredBytes", "RestMemory", "gathered_weights", "local_weights", "rest_memory"]

ROOT = -1
"""Unit of the weights that belong to no layer: embedding, last norm, head."""
MOMENTS: Mapping[str, int] = {"adam": 2, "adamw": 2, "nadam": 2, "radam": 2, "adamax": 2, "sgd": 1, "rmsprop": 1}
"""Values per weight that an optimizer of this name keeps; one that is not listed is taken to keep two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalWeight:
    """One rank's part of a weight."""

    name: str
    unit: int
    """Number of its layer, or `ROOT`."""
    at_rest: int
    """Elements that the rank keeps between passes."""
    in_use: int
    """Elements that it computes with: FSDP gathers them layer by layer."""
    bytes_at_rest: int
    """Bytes of one element at rest."""
    read: int
    """Elements that the rank reads of the model folder when it starts, at most: rows of a mapped file are read alone,
    columns are not."""
    is_trained: bool = True
    is_expert: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RestMemory:
    """Bytes of one rank between passes."""

    weights: int
    gradients: int
    """Bytes of the gradients of a global batch, when the optimizer steps."""
    summed_gradients: int
    """Bytes of whole gradients that a pass finds of earlier microbatches; 0 where they are sharded after each one."""
    optimizer: int
    optimizer_on_host: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredBytes:
    """Bytes that FSDP adds while a pass runs."""

    root: int
    """Embedding, last norm and head, for the whole pass."""
    layer: int
    """The largest layer; the next one is gathered while it runs."""
    layer_gradients: int
    """Bytes of the gradients of the largest layer, before and while they are shared out."""


NOTHING_GATHERED = GatheredBytes(root=0, layer=0, layer_gradients=0)


def local_weights(setting: PlanSetting, *, stage: int = 0) -> list[LocalWeight]:
    base = list(_of_megatron(setting, stage) if setting.is_megatron else _of_dtensor(setting))
    family = family_of(setting.model.hf.config) if setting.policy.vision.freeze_tower else None
    if family is not None:
        return [replace(weight, is_trained=not is_in_tower(weight.name, family)) for weight in base]
    if not setting.policy.lora.enabled:
        return base
    return [*(replace(weight, is_trained=False) for weight in base), *_adapters(setting, stage)]


def rest_memory(setting: PlanSetting, weights: list[LocalWeight], *, num_microbatches: int) -> RestMemory:
    """Return the memory at rest of a rank with these weights.

    Args:
        num_microbatches: of a global batch on one rank.
    """
    trained = [weight for weight in weights if weight.is_trained]
    gradient = _gradient_bytes(setting)
    whole = sum(weight.in_use for weight in trained) * gradient
    keeps_whole = not setting.is_megatron and setting.policy.dtensor_cfg.gradient_accumulation == "whole"
    state = sum(_state_bytes(setting, weight) for weight in trained)
    on_host = math.floor(state * _offloaded(setting))
    return RestMemory(
        weights=sum(weight.at_rest * weight.bytes_at_rest for weight in weights),
        gradients=sum(weight.at_rest for weight in trained) * gradient,
        summed_gradients=whole if keeps_whole and num_microbatches > 1 else 0,
        optimizer=state - on_host,
        optimizer_on_host=on_host,
    )


def gathered_weights(setting: PlanSetting, weights: list[LocalWeight]) -> GatheredBytes:
    """Return the gathered weights of a rank; nothing where no weight is shared between passes."""
    is_alone = setting.gpu is None and setting.layout.world_size == 1 and setting.policy.precision == "float32"
    if setting.is_megatron or is_alone:
        return NOTHING_GATHERED
    units, trained = dict[int, int](), dict[int, int]()
    for weight in weights:
        units[weight.unit] = units.get(weight.unit, 0) + weight.in_use
        trained[weight.unit] = trained.get(weight.unit, 0) + weight.in_use * weight.is_trained
    layer, gradients = (
        max((count for unit, count in counts.items() if unit != ROOT), default=0) for counts in (units, trained)
    )
    size = setting.element_bytes
    return GatheredBytes(
        root=units.get(ROOT, 0) * size, layer=layer * size, layer_gradients=gradients * (size + FLOAT32_BYTES)
    )


# ---- DTensor


def _of_dtensor(setting: PlanSetting) -> Iterator[LocalWeight]:
    """Split over the tensor axis, then shared by FSDP along the first dimension, each part padded to the largest."""
    layout = setting.layout
    split = _dtensor_splits(setting)
    weights = setting.model.full_weights
    units = {name: unit for prefix, unit in setting.model.units.items() for name in weights if name.startswith(prefix)}
    for name, whole in weights.items():
        shape, dim = list(whole), split.get(name)
        if dim is not None:
            if shape[dim] % layout.tp:
                raise ConfigError(
                    f"policy.dtensor_cfg.tensor_parallel_size: {shape[dim]} of {name} do not divide by {layout.tp} "
                    f"ranks; use a divisor of {shape[dim]}"
                )
            shape[dim] //= layout.tp
        rows, rest = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
        at_rest = math.ceil(rows / layout.weight_shards) * rest
        yield LocalWeight(
            name=name,
            unit=units.get(name, ROOT),
            at_rest=at_rest,
            read=at_rest * (layout.tp if dim else 1),
            in_use=rows * rest,
            bytes_at_rest=FLOAT32_BYTES,
            is_expert=".experts." in name,
        )


def _dtensor_splits(setting: PlanSetting) -> Mapping[str, int | None]:
    """Return the dimension along which the tensor axis splits each weight; nothing without such an axis."""
    layout, sizes = setting.layout, setting.policy.dtensor_cfg
    if layout.tp == 1:
        return {}
    custom = sizes.custom_parallel_plan
    plan = plan_of(setting.model.hf, custom=custom, tp=layout.tp, sequence_parallel=layout.sequence_parallel)
    return _splits(setting.model, tuple(plan.items()))


@lru_cache(maxsize=4)
def _splits(model: Model, plan: tuple[tuple[str, str], ...]) -> Mapping[str, int | None]:
    """Return the splits of all weights, cached: a plan of styles names every layer, which takes seconds for a deep
    model."""
    return split_dims(model.hf, dict(plan))


# ---- Megatron


def _of_megatron(setting: PlanSetting, stage: int) -> Iterator[LocalWeight]:
    shape, layers = setting.model.architecture, setting.layers_of(stage)
    freezes = setting.policy.megatron_cfg.freeze_moe_router
    for weight in weights_of(shape):
        is_second = weight.is_copy and setting.layout.pp == 1
        if weight.layer not in layers or is_second:
            continue
        is_bias = weight.local.endswith("expert_bias")
        elements = _elements(setting, weight)
        yield LocalWeight(
            name=weight.local,
            unit=weight.layer if weight.local.startswith("decoder.layers.") else ROOT,
            at_rest=elements,
            # Parts of a split weight are put together before a rank takes its share; of experts only its own are read.
            read=math.prod(weight.shape) // (setting.policy.parallel_sizes.expert if weight.num_experts else 1),
            in_use=elements,
            bytes_at_rest=FLOAT32_BYTES if weight.is_float32 else setting.element_bytes,
            is_trained=not is_bias and not (freezes and ".router." in weight.local),
            is_expert=weight.num_experts > 0,
        )


def _elements(setting: PlanSetting, weight: Weight) -> int:
    sizes = setting.policy.parallel_sizes
    ranks = sizes.expert_tensor if weight.num_experts else sizes.tensor
    elements = math.prod(weight.shape) // (ranks if weight.split.dim is not None else 1)
    return elements // sizes.expert if weight.num_experts else elements


# ---- adapters


def _adapters(setting: PlanSetting, stage: int) -> Iterator[LocalWeight]:
    """Yield A and B of the layers that this rank holds, split as these are: B along the outputs of a layer that is
    split along them, A along the inputs of one that is split along those."""
    model, lora, layout = setting.model, setting.policy.lora, setting.layout
    layers = adapted_layers(model.hf, lora)
    infos = adapter_infos(layers, lora)
    units = {
        layer.name: unit for prefix, unit in model.units.items() for layer in layers if layer.name.startswith(prefix)
    }
    if setting.is_megatron:
        held = setting.layers_of(stage)
        units = {name: unit for name, unit in units.items() if unit in held}
    splits = _megatron_splits(setting) if setting.is_megatron else _dtensor_splits(setting)
    shards = 1 if setting.is_megatron else layout.weight_shards
    for name, info in infos.items():
        layer, matrix = name.removesuffix(".weight").rsplit(".", 1)
        if setting.is_megatron and layer not in units:
            continue
        shape, dim = list(info.shape), splits.get(f"{layer}.weight", splits.get(layer))
        # Experts are split whole, along their own dimension.
        split = None if dim is None else (dim if len(shape) == 3 or (dim == 0) == (matrix == "lora_B") else None)
        if split is not None:
            shape[split] = shape[split] // layout.tp
        rows, rest = shape[0], math.prod(shape[1:])
        at_rest = math.ceil(rows / shards) * rest
        yield LocalWeight(
            name=name,
            unit=units.get(layer, ROOT),
            at_rest=at_rest,
            read=0,
            in_use=rows * rest,
            bytes_at_rest=setting.element_bytes if setting.is_megatron else FLOAT32_BYTES,
        )


def _megatron_splits(setting: PlanSetting) -> Mapping[str, int | None]:
    """Return the dimension along which the tensor axis splits each weight, by its Hugging Face name."""
    if setting.layout.tp == 1:
        return {}
    return {part.name: weight.split.dim for weight in weights_of(setting.model.architecture) for part in weight.parts}


# ---- both


def _gradient_bytes(setting: PlanSetting) -> int:
    if not setting.is_megatron:
        return FLOAT32_BYTES
    in_float32 = setting.policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32
    return FLOAT32_BYTES if in_float32 else setting.element_bytes


def _state_bytes(setting: PlanSetting, weight: LocalWeight) -> int:
    """Return the bytes of moments in float32, and of float32 weights where the model's are not."""
    if not setting.is_megatron:
        name = setting.policy.optimizer.name.rpartition(".")[2].lower()
        kwargs = setting.policy.optimizer.kwargs
        kept = 0 if name == "sgd" and not kwargs.get("momentum") else MOMENTS.get(name, 2)
        return weight.at_rest * kept * FLOAT32_BYTES
    section = setting.policy.megatron_cfg.optimizer
    kept = MOMENTS[section.optimizer] if section.optimizer == "adam" or section.sgd_momentum else 0
    kept += setting.element_bytes < FLOAT32_BYTES
    return math.ceil(weight.at_rest / _optimizer_ranks(setting, is_expert=weight.is_expert)) * kept * FLOAT32_BYTES


def _optimizer_ranks(setting: PlanSetting, *, is_expert: bool) -> int:
    optimizer, layout, sizes = setting.policy.megatron_cfg.optimizer, setting.layout, setting.policy.parallel_sizes
    if not optimizer.is_distributed(has_fused_adam=setting.has_kernels):
        return 1
    if not is_expert:
        return layout.dp * layout.cp
    return layout.world_size // (layout.pp * sizes.expert * sizes.expert_tensor)


def _offloaded(setting: PlanSetting) -> float:
    optimizer = setting.policy.megatron_cfg.optimizer
    return optimizer.optimizer_offload_fraction if setting.is_megatron and optimizer.optimizer_cpu_offload else 0.0
