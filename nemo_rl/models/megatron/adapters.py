"""Adapters of a Megatron rank: their part of A and B beside a linear layer, and their arithmetic.

Called by `setup.build_model` before gradient buffers are made. Invariant: as in `models.lora`, y = x W^T + (x A^T)
(s B)^T, in every layout. megatron-core fuses projections that have adapters of their own: their results are laid into
the rows of the fused layer. What is split over tensor ranks lies as in this table (s tokens, r rank, t tensor ranks):

    layer      x                            A              x A^T                         B
    column     [s, in]                      [r, in]        [s, r]                        [out / t, r]
    column*    [s / t, in]                  [r, in], part  [s / t, r], gathered          [out / t, r]
    row        [s, in / t]                  [r, in / t]    [s, r], summed                [out, r]
    row*       [s, in / t]                  [r, in / t]    [s, r], summed and scattered  [out, r], part

* with sequence parallelism. The gradient of a "part" is summed over the tensor ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl.config.backends import LoraConfig
from nemo_rl.models.adapters.lora import AdaptedLayer, Adapter
from nemo_rl.models.hf.loading import ADAPTER_PART
from nemo_rl.models.megatron.architecture import Architecture
from nemo_rl.models.megatron.convert_table import AdaptedLinear, Weight, adapted_linears, projection_of, table_name
from nemo_rl.models.megatron.mcore import (
    GPTModel,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    get_transformer_layer_offset,
    make_sharded_tensors_for_checkpoint,
    parallel_state,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from nemo_rl.models.megatron.transformer_config import DecoderConfig

__all__ = ["LinearAdapters", "attach_parallel_adapters"]

HEAD = "output_layer"
"""The layer that gets all positions, whether or not there is sequence parallelism."""


class LinearAdapters(torch.nn.Module):
    """This rank's part of the adapters of one linear layer, a child for each adapted projection."""

    def __init__(self, linear: AdaptedLinear, lora: LoraConfig, *, config: DecoderConfig, device: torch.device) -> None:
        super().__init__()
        self._linear = linear
        self._group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
        self._is_chunked = bool(config.sequence_parallel) and linear.module != HEAD
        """True where the layer passes on a part of the tokens."""
        size = self._group.size()
        for layer in linear.layers:
            if layer is not None:
                a, b = linear.tensors(layer, rank=lora.rank, size=size)
                adapter = Adapter(_part_shape(a, size), _part_shape(b, size), lora, device=device)
                self.add_module(projection_of(layer), adapter.to(config.params_dtype))
                _mark(adapter.A, a, is_partial=self._is_chunked and not linear.splits_inputs)
                _mark(adapter.B, b, is_partial=self._is_chunked and linear.splits_inputs)

    @property
    def is_on(self) -> bool:
        """Return whether the layer computes with its adapters."""
        return all(adapter.is_on for adapter in self._adapters())

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return `[s, n, out]` of this rank of the layer's input `[s, n, in]`."""
        narrow = torch.cat([self._narrow(adapter, value) for adapter in self._adapters()], dim=-1)
        found = self._exchanged(narrow).chunk(len(self._modules), dim=-1)
        wide = iter([self._widen(adapter, part) for adapter, part in zip(self._adapters(), found, strict=True)])
        return self._laid_out([next(wide) if layer is not None else None for layer in self._linear.layers])

    def factors(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return u and s B of a layer with one projection, whose result is u (s B)^T."""
        [adapter] = self._adapters()
        return self._exchanged(self._narrow(adapter, value)), self._scaled(adapter)

    def sharded_tensors(self, prefix: str, offsets: Sequence[tuple[int, int, int]], groups: Any) -> dict[str, Any]:
        """Return the places of A and B in the whole, in megatron-core's terms."""
        size = self._group.size()
        tensors = [
            weight
            for layer in self._linear.layers
            if layer is not None
            for weight in self._linear.tensors(layer, rank=1, size=size)
        ]
        axes = {weight.local.partition(f".{ADAPTER_PART}.")[2]: weight.split.dim for weight in tensors}
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {name: axis for name, axis in axes.items() if axis is not None},
            offsets,
            tp_group=self._group,
            dp_cp_group=groups,
        )

    # Private parts.

    def _adapters(self) -> list[Adapter]:
        return list(self._modules.values())  # type: ignore[arg-type]

    def _narrow(self, adapter: Adapter, value: torch.Tensor) -> torch.Tensor:
        if adapter.dropout and self.training:
            # Ranks that hold the same inputs drop the same ones, and others draw for themselves.
            has_own = self._is_chunked or self._linear.splits_inputs
            with get_cuda_rng_tracker().fork() if has_own else nullcontext():
                value = torch.nn.functional.dropout(value, adapter.dropout)
        return torch.nn.functional.linear(value, adapter.A)

    def _exchanged(self, narrow: torch.Tensor) -> torch.Tensor:
        """Return `x A^T` of all positions or inputs that the next product needs."""
        if self._group.size() == 1:
            return narrow
        if self._linear.splits_inputs:
            reduce = (
                reduce_scatter_to_sequence_parallel_region
                if self._is_chunked
                else reduce_from_tensor_model_parallel_region
            )
            return reduce(narrow, group=self._group)  # type: ignore[no-any-return]
        spread = gather_from_sequence_parallel_region if self._is_chunked else copy_to_tensor_model_parallel_region
        return spread(narrow, group=self._group)  # type: ignore[no-any-return]

    def _widen(self, adapter: Adapter, narrow: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(narrow, self._scaled(adapter))

    def _scaled(self, adapter: Adapter) -> torch.Tensor:
        weight: torch.Tensor = adapter.B
        if self._linear.shares_rows(self._group.size()):
            # Each rank uses some of the rows: the gradient of all is the sum over the ranks.
            weight = copy_to_tensor_model_parallel_region(weight, group=self._group)
        return weight * adapter.scale

    def _laid_out(self, wide: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return the results in the order of the fused layer's rows."""
        if len(wide) == 1:
            [only] = wide
            assert only is not None
            return only
        weight, size = self._linear.weight, self._group.size()
        shares = self._linear.shares_rows(size)
        some = next(result for result in wide if result is not None)
        dim = some.dim() - 1
        rows = [part.shape[0] if shares else part.shape[0] // size for part in weight.parts]
        results = [
            some.new_zeros(*some.shape[:-1], count) if result is None else result
            for result, count in zip(wide, rows, strict=True)
        ]
        if not shares:
            return self._linear.on_rank(size).pack(results, dim=dim)
        packed = weight.pack(results, dim=dim)
        return replace(weight.split, dim=dim).shard(packed, rank=self._group.rank(), size=size)


def attach_parallel_adapters(
    module: GPTModel,
    layers: Sequence[AdaptedLayer],
    lora: LoraConfig,
    *,
    shape: Architecture,
    config: DecoderConfig,
) -> None:
    """Freeze this rank's part of the model and give its layers their adapters, whose values are not set yet."""
    module.requires_grad_(False)
    first = get_transformer_layer_offset(config)
    owners = {
        table_name(name, first_layer=first): module.get_submodule(name.rpartition(".")[0])
        for name, _ in module.named_parameters()
    }
    for linear in adapted_linears(shape, layers):
        owner: Any = owners.get(linear.weight.local)
        if owner is not None:
            adapters = LinearAdapters(linear, lora, config=config, device=owner.weight.device)
            owner.add_module(ADAPTER_PART, adapters)
            owner.forward = _added(owner.forward, adapters)
            owner.sharded_state_dict = _sharded(owner.sharded_state_dict, adapters)
    if module.pre_process:
        module.embedding.register_forward_hook(_begin_gradients)


def _begin_gradients(_: torch.nn.Module, __: object, hidden: torch.Tensor) -> None:
    """Let gradients reach the layers: recomputed ones have none where no input has, and neither has a stage of the
    pipeline whose result has none."""
    if torch.is_grad_enabled():
        hidden.requires_grad_()


def _added(forward: Callable[..., tuple[Any, Any]], adapters: LinearAdapters) -> Callable[..., tuple[Any, Any]]:
    def with_adapters(value: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        result, bias = forward(value, *args, **kwargs)
        return (result + adapters(value) if adapters.is_on else result), bias

    return with_adapters


def _sharded(describe: Callable[..., dict[str, Any]], adapters: LinearAdapters) -> Callable[..., dict[str, Any]]:
    """megatron-core takes what it does not know for copies of the same on every tensor rank."""

    def with_adapters(
        prefix: str = "", sharded_offsets: Sequence[tuple[int, int, int]] = (), metadata: Any = None
    ) -> dict[str, Any]:
        own = f"{prefix}{ADAPTER_PART}."
        found = describe(prefix, sharded_offsets, metadata)
        found = {name: place for name, place in found.items() if not name.startswith(own)}
        return found | adapters.sharded_tensors(own, sharded_offsets, metadata["dp_cp_group"])

    return with_adapters


def _part_shape(weight: Weight, size: int) -> tuple[int, ...]:
    whole = torch.empty(weight.shape, device="meta")
    return tuple(weight.split.shard(whole, rank=0, size=size).shape)


def _mark(parameter: Any, weight: Weight, *, is_partial: bool) -> None:
    """Mark a parameter for megatron-core; of a partial one each tensor rank has the gradient of its own tokens."""
    parameter.sequence_parallel = is_partial
    if weight.split.dim is not None:
        # The gradient norm counts the parts of all tensor ranks.
        parameter.tensor_model_parallel, parameter.partition_dim = True, weight.split.dim
        parameter.partition_stride = 1
