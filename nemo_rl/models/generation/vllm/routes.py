"""Routes as vLLM returns them, made into those of a request.

Called by `VllmEngine`. vLLM returns one row of ids for every token that was fed, over all layers of the model, out of a
store that is zero where nothing was written. Invariant: a row that no router can have chosen is marked as missing, and
never read as expert 0. Shapes: T tokens with a route, L layers with experts, A all layers, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from nemo_rl.routes.places import RecordedRoutes
from nemo_rl.routes.shape import MISSING, RouteShape, route_dtype

__all__ = ["join_routes"]


def join_routes(rows_TAK: Sequence[np.ndarray], shape: RouteShape) -> RecordedRoutes:
    """All rows of a request.

    Args:
        rows_TAK: of each row, from its first prompt token on.
    """
    lengths = torch.tensor([len(row) for row in rows_TAK], dtype=torch.int64)
    layers, dtype = list(shape.layers), route_dtype(shape.num_experts)
    # Signed, because unsigned ids of 16 bits are few operations' dtype.
    parts = [torch.from_numpy(row[:, layers].astype(np.int32)) for row in rows_TAK]
    ids = torch.cat(parts) if parts else torch.zeros(0, len(layers), shape.top_k, dtype=torch.int32)
    is_missing = _impossible(ids, shape)
    if bool(is_missing.any()):
        ids[is_missing] = MISSING
        dtype = torch.int16
    return RecordedRoutes(ids=ids.to(dtype), starts=torch.zeros_like(lengths), lengths=lengths, shape=shape)


def _impossible(ids_TLK: torch.Tensor, shape: RouteShape) -> torch.Tensor:
    """`[T]` bool: the experts of a token differ from each other, in every layer."""
    ranked = ids_TLK.sort(dim=-1).values
    is_double = (ranked[..., 1:] == ranked[..., :-1]).any(-1)
    is_unknown = (ids_TLK >= shape.num_experts).any(-1)
    return (is_double | is_unknown).any(-1)
