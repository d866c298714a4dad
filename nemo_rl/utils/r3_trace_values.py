"""Tensors as trace records hold them: shape, dtype, hash, a preview, and 8 bytes for each token and layer.

Used by `nemo_rl.utils.r3_trace`. Arrays are distinguished by what they can do, not by their type: imports neither torch
nor numpy.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from nemo_rl.routes.digest import route_digests

__all__ = ["as_array", "describe", "describe_routes", "encode", "row_of", "token_digests"]

PREVIEW_VALUES = 16
MAX_ID_VALUES = 1 << 16
"""Up to so many ids a record holds them with their digests, so that a report can show them."""


@runtime_checkable
class _Tensor(Protocol):
    """The methods that a torch tensor has and a numpy array has not."""

    dtype: Any

    def detach(self) -> Any: ...


def as_array(values: Any) -> Any:
    """Return a numpy array of a torch tensor on any device, or of a numpy array; bfloat16 becomes float32, without
    loss."""
    if not isinstance(values, _Tensor):
        return values
    tensor: Any = values.detach().cpu()
    return (tensor.float() if "bfloat16" in str(values.dtype) else tensor).numpy()


def row_of(column: Any, index: int) -> Any:
    """Return the row `index` of a padded array, of a nested tensor, or of a sequence of arrays, as a numpy array."""
    return as_array(column[index])


def encode(array: Any, dtype: str) -> dict[str, object]:
    """Return all values of a numpy array, little-endian as `dtype` says."""
    raw = base64.b64encode(array.astype(dtype).tobytes()).decode()
    return {"b64": raw, "dtype": dtype, "shape": list(array.shape)}


def describe(array: Any, *, with_preview: bool = True) -> dict[str, object]:
    """Return the shape, dtype, sha256 of the bytes, extremes; the first values on request. `array` is numpy,
    any shape."""
    fields: dict[str, object] = {
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
    }
    if array.size and array.dtype.kind in "iu":
        fields |= {"min": int(array.min()), "max": int(array.max())}
    if with_preview:
        fields["preview"] = array.reshape(-1)[:PREVIEW_VALUES].tolist()
    return fields


def describe_routes(routes: Any) -> dict[str, object]:
    """Return the fields that every record of routes has besides its own.

    Args:
        routes: `[S, L, K]` of any integer dtype, numpy; -1 where a route is missing.

    Returns:
        `digests`, and `ids` where they are few.
    """
    fields: dict[str, object] = {"digests": encode(token_digests(routes), "<i8")}
    if routes.size <= MAX_ID_VALUES:
        fields["ids"] = encode(routes, "<i4")
    return fields


def token_digests(routes: Any) -> Any:
    """Return `[S, L]` int64 of `[S, L, K]` integers, numpy.

    The number of the layer stays out of the digest and next to it: so routes that a wrong layer map has put into
    another layer can be recognised there.
    """
    return route_digests(routes.astype("int64"), _no_layers(routes.shape[1]))


def _no_layers(num: int) -> Sequence[int]:
    return [0] * num
