"""Causal attention of sequences that lie end to end in one row: one operation per layer, whatever their lengths are.

Called by `varlen_attention`. On a CPU it is an operation of this project, `nrl::segment_attention`, which runs torch's
fused kernel over one run of equal lengths after the other; on CUDA in half precision it is torch's `varlen_attn`. Both
are opaque to `torch.compile`, and lengths are tensors, so a compiled layer serves every packing. Invariant: neither
waits for the device. Shapes: n rows, s positions of a row, g sequences, H query heads, G key heads, D head dimension.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

__all__ = ["MOST_HEAD_DIM", "segment_attention", "varlen_on_device"]

MOST_HEAD_DIM = 256
"""Largest head dimension of the kernel behind `varlen_attn`."""
_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""torch 2.13 takes fewer key heads than query heads, 2.11 does not."""
_aten = torch.ops.aten


def varlen_on_device(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    *,
    most: int,
    window: int,
    scale: float | None,
) -> torch.Tensor:
    """Return `[1, s, H, D]` on CUDA, in bfloat16 or float16, differentiable.

    Args:
        query: `[1, H, s, D]`; key and value `[1, G, s, D]`.
        ends: `[g + 1]` int32: first position of each sequence, and s.
        most: a number that no length exceeds.
        window: tokens that a token sees, itself included; 0 means all earlier ones.
    """
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    options: dict[str, Any] = {"scale": scale, "window_size": (window - 1, 0)}
    if _TAKES_GROUPS:
        options["enable_gqa"] = True
    elif q.shape[1] != k.shape[1]:
        k, v = (heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1) for heads in (k, v))
    found: Any = varlen_attn(q, k, v, ends, ends, most, most, **options)
    return found[None]


@torch.library.custom_op("nrl::segment_attention", mutates_args=(), device_types="cpu")
def segment_attention(  # noqa: PLR0917 - the arguments of a kernel
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    window: int,
    is_chunked: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention `[n, s, H, D]`, and `[n, s, H]` float: the logarithm of the sum of each query's exponentiated
    scores, for the backward pass.

    Args:
        query: `[n, H, s, D]`; key and value `[n, G, s, D]`.
        ends: as in `varlen_on_device`; the same in each of the n rows.
        window: as there.
        is_chunked: sequences are cut into runs of `window` tokens, and a token sees its own run only.
    """
    outputs, sums = [], []
    for start, count, length in _runs(ends):
        q, k, v = (_sequences(heads, start, count, length, query.shape[1]) for heads in (query, key, value))
        mask = _mask(length, window, is_chunked, q)
        found, log_sum = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        outputs.append(_to_row(found, query.shape))
        sums.append(_to_row(log_sum[..., None], query.shape)[..., 0])
    return torch.cat(outputs, dim=1), torch.cat(sums, dim=1)


@torch.library.custom_op("nrl::segment_attention_backward", mutates_args=(), device_types="cpu")
def _backward_op(  # noqa: PLR0917 - the arguments of a kernel
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    found: torch.Tensor,
    log_sum: torch.Tensor,
    ends: torch.Tensor,
    window: int,
    is_chunked: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, groups = query.shape[1], key.shape[1]
    parts: tuple[list[torch.Tensor], ...] = ([], [], [])
    for start, count, length in _runs(ends):
        q, k, v = (_sequences(each, start, count, length, heads) for each in (query, key, value))
        back, out = (_sequences(each.transpose(1, 2), start, count, length, heads) for each in (grad, found))
        sums = _sequences(log_sum.transpose(1, 2)[..., None], start, count, length, heads)[..., 0]
        mask = _mask(length, window, is_chunked, q)
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            back, q, k, v, out, sums, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        parts[0].append(_to_row(grads[0], query.shape))
        for into, each in zip(parts[1:], grads[1:], strict=True):
            # Each key head has served H / G query heads.
            summed = each if groups == heads else each.unflatten(1, (groups, -1)).sum(2)
            into.append(_to_row(summed, key.shape))
    dq, dk, dv = (torch.cat(part, dim=1).transpose(1, 2) for part in parts)
    return dq, dk, dv


def _runs(ends: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield first position, number and length of neighbouring sequences of one length."""
    places = ends.tolist()
    start = 0
    for length, same in groupby(stop - first for first, stop in pairwise(places)):
        count = len(list(same))
        yield start, count, length
        start += count * length


def _sequences(heads: torch.Tensor, start: int, count: int, length: int, num_heads: int) -> torch.Tensor:
    """Return `[n * count, H, length, D]` of `[n, H or G, s, D]`."""
    part = heads[:, :, start : start + count * length].unflatten(2, (count, length)).transpose(1, 2).flatten(0, 1)
    repeat = num_heads // part.shape[1]
    return part if repeat == 1 else part.repeat_interleave(repeat, dim=1)


def _to_row(part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return `[n, count * length, H, D]` of `[n * count, H, length, D]`."""
    return part.transpose(1, 2).unflatten(0, (shape[0], -1)).flatten(1, 2)


def _mask(length: int, window: int, is_chunked: bool, query: torch.Tensor) -> torch.Tensor | None:
    """Return `[length, length]`: what is added to the scores; None where every earlier token is seen."""
    if not 0 < window < length:
        return None
    place = torch.arange(length)
    near = place[:, None] // window == place // window if is_chunked else place[:, None] - place < window
    is_seen = (place[:, None] >= place) & near
    return torch.zeros(length, length, dtype=query.dtype).masked_fill_(~is_seen, float("-inf"))


@segment_attention.register_fake
def _shapes(query: torch.Tensor, _: torch.Tensor, value: torch.Tensor, *__: object) -> tuple[torch.Tensor, ...]:
    n, heads, s, _dim = query.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty(n, s, heads, value.shape[3]), query.new_empty(n, s, heads, dtype=dtype)


@_backward_op.register_fake
def _shapes_of_gradients(_: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, ...]:
    return tuple(each.new_empty(each.transpose(1, 2).shape).transpose(1, 2) for each in inputs[:3])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, ends, ctx.window, ctx.is_chunked, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, ends)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    grads = _backward_op(grad, *ctx.saved_tensors, ctx.window, ctx.is_chunked, ctx.scale)
    return *grads, None, None, None, None


segment_attention.register_autograd(_backward, setup_context=_keep)
