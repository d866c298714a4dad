"""The shape of the routes of a token of a model: layers, experts, dtypes. Needs nothing but torch.

Read wherever routes are recorded, carried or replayed; `columns` makes columns of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = [
    "MAX_EXPERTS",
    "MISSING",
    "RouteShape",
    "bits_per_id",
    "bound_bits_per_token",
    "dummy_route",
    "route_dtype",
]

MISSING = -1
"""Every id of a token without a route, in decoded routes."""
MAX_EXPERTS = 32767
"""Most experts of a layer: their ids fit int16."""
UINT8_EXPERTS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteShape:
    """The shape of the routes of one token of a model.

    Example:
        >>> shape = RouteShape(layers=(1, 2), top_k=2, num_experts=8)
        >>> bound_bits_per_token(shape)
        12
    """

    layers: tuple[int, ...]
    """Numbers of the layers with routed experts, ascending, counted from 0 over all layers of the model."""
    top_k: int
    num_experts: int


def route_dtype(num_experts: int) -> torch.dtype:
    """Return the dtype of ids on the wire: uint8 up to 256 experts, int16 above."""
    return torch.uint8 if num_experts <= UINT8_EXPERTS else torch.int16


def dummy_route(top_k: int) -> torch.Tensor:
    """Return `[K]` int16: a valid route for tokens whose route is never used (the last of a row, padding)."""
    return torch.arange(top_k, dtype=torch.int16)


def bits_per_id(num_experts: int) -> int:
    """Return ceil(log2 E), at least 1."""
    return max(1, (num_experts - 1).bit_length())


def bound_bits_per_token(shape: RouteShape) -> int:
    """Return ceil(log2 E) * L * K."""
    return bits_per_id(shape.num_experts) * len(shape.layers) * shape.top_k
