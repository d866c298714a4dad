"""Digests of routes: 8 bytes for one token and one layer, the same in every dtype and on every device.

Used by the rollout side, which sends them with the routes, and by every check of the way to the routers. Not
cryptographic: they find mistakes, not forgeries. Imports neither torch nor numpy, works on arrays of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["route_digests"]

# Odd 63-bit constants of splitmix64 (Steele, Lea, Flood 2014), cut to what a signed integer holds.
_LAYER, _ID = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9
_SHIFT = 29
_SHIFT_MASK = (1 << (64 - _SHIFT)) - 1


def route_digests(ids: Any, layers: Sequence[int]) -> Any:
    """Return the digests of the ordered expert ids.

    Args:
        ids: `[..., L, K]` int64, a torch tensor or a numpy array; -1 where a route is missing.
        layers: L numbers of the layers in the model, counted from 0; the same ids in another layer differ.

    Returns:
        `[..., L]` int64 of the same kind.

    Example:
        >>> import numpy as np
        >>> a, b = np.array([[3, 5]]), np.array([[5, 3]])
        >>> bool(route_digests(a, [0]) == route_digests(a, [1])), bool(route_digests(a, [0]) == route_digests(b, [0]))
        (False, False)
    """
    if len(layers) != ids.shape[-2]:
        raise ValueError(f"expected the number of each of {ids.shape[-2]} layers, got {len(layers)}")
    digest = ids[..., 0] * 0
    for i, layer in enumerate(layers):
        # Wrapped to a signed 64-bit integer.
        digest[..., i] = ((layer + 1) * _LAYER + (1 << 63)) % (1 << 64) - (1 << 63)
    for k in range(ids.shape[-1]):
        digest = (digest ^ (ids[..., k] + 2)) * _ID
        # The shift keeps the sign; the mask makes it a logical one.
        digest = digest ^ ((digest >> _SHIFT) & _SHIFT_MASK)
    return digest
