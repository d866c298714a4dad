"""Hashes of tokens by row and position: the same in every layout, so that ranks draw the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

__all__ = ["mix", "token_hashes"]

GOLDEN, FIRST, SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
"""Constants of splitmix64 (Steele, Lea, Flood 2014)."""


def mix(values: np.ndarray) -> np.ndarray:
    """splitmix64 of uint64 values, element by element."""
    with np.errstate(over="ignore"):
        mixed = values + GOLDEN
        mixed = (mixed ^ (mixed >> np.uint64(30))) * FIRST
        mixed = (mixed ^ (mixed >> np.uint64(27))) * SECOND
        return mixed ^ (mixed >> np.uint64(31))


def token_hashes(keys: Sequence[str], row_R: np.ndarray, position_R: np.ndarray) -> np.ndarray:
    """`[R]` uint64.

    Args:
        keys: of the rows.
        row_R: `[R]` index into `keys`.
        position_R: `[R]` position in the row.
    """
    of_key = np.array([int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") for key in keys], "u8")
    if not len(row_R):
        return np.zeros(0, "u8")
    return mix(of_key[row_R] ^ mix(position_R.astype("u8")))
