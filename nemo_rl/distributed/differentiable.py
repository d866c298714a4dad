"""Collectives with gradients, for tensor, sequence and context parallel models.

All functions are collective over their group: every rank calls them in the same order, in the forward and in the
backward pass, with tensors of the same shape. Invariant: each is the adjoint of the way its result is used, so that a
gradient is summed over a group exactly once. A group of None means one rank, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx

__all__ = ["copy_to", "gather_along", "reduce_from", "scatter_along"]

Group = dist.ProcessGroup | None

# torch 2.13 renames the two, and warns of the old names.
_NAMES = vars(dist)
_all_gather: Callable[..., object] = _NAMES.get("all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., object] = _NAMES.get("reduce_scatter_single", dist.reduce_scatter_tensor)


def copy_to(value: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the value itself, which every rank holds, before each rank uses it for its part: gradients are summed."""
    if group is None:
        return value
    return _CopyTo.apply(value, group)  # type: ignore[no-untyped-call]


def reduce_from(value: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of every rank's part, which every rank then uses alike: its gradient is each part's gradient."""
    if group is None:
        return value
    return _ReduceFrom.apply(value, group)  # type: ignore[no-untyped-call]


def gather_along(value: torch.Tensor, group: Group, *, dim: int) -> torch.Tensor:
    """Return all ranks' values side by side, before each rank uses the whole for its part: gradients are summed per
    value.
    """
    if group is None:
        return value
    return _GatherAlong.apply(value, group, dim)  # type: ignore[no-untyped-call]


def scatter_along(value: torch.Tensor, group: Group, *, dim: int) -> torch.Tensor:
    """Return this rank's slice of the sum of every rank's part."""
    if group is None:
        return value
    return _ScatterAlong.apply(value, group, dim)  # type: ignore[no-untyped-call]


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # type: ignore[override]
        ctx.group = group  # type: ignore[attr-defined]
        return value.view_as(value)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _sum(grad, ctx.group), None  # type: ignore[attr-defined]


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # type: ignore[override]
        return _sum(value, group)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


class _GatherAlong(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx, value: torch.Tensor, group: dist.ProcessGroup, dim: int
    ) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim  # type: ignore[attr-defined]
        return _gather(value, group, dim)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return _scatter(grad, ctx.group, ctx.dim), None, None  # type: ignore[attr-defined]


class _ScatterAlong(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx, value: torch.Tensor, group: dist.ProcessGroup, dim: int
    ) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim  # type: ignore[attr-defined]
        return _scatter(value, group, dim)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return _gather(grad, ctx.group, ctx.dim), None, None  # type: ignore[attr-defined]


def _sum(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gather(value: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    # The collective works along the first dimension.
    first = value.movedim(dim, 0).contiguous()
    whole = first.new_empty(first.shape[0] * dist.get_world_size(group), *first.shape[1:])
    _all_gather(whole, first, group=group)
    return whole.movedim(0, dim).contiguous()


def _scatter(value: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    first = value.movedim(dim, 0).contiguous()
    size = dist.get_world_size(group)
    if first.shape[0] % size:
        raise ValueError(f"dimension {dim} of {tuple(value.shape)} does not divide by {size} ranks")
    mine = first.new_empty(first.shape[0] // size, *first.shape[1:])
    _reduce_scatter(mine, first, group=group)
    return mine.movedim(0, dim).contiguous()
