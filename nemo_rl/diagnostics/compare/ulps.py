"""Differences counted in units in the last place: how many values that a dtype can hold lie between two."""

from __future__ import annotations

import torch

__all__ = ["ULP_BUCKETS", "ulp_counts", "ulp_dtype"]

ULP_BUCKETS = ("0", "1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", ">64")
_UPPER = (0, 1, 2, 4, 8, 16, 32, 64)
_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
CHUNK = 1 << 22
"""Values at once: 32 MiB for each temporary."""


def ulp_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype | None:
    """The narrower one, in which both are counted; None where there is no such thing."""
    if a == b or a.itemsize != b.itemsize:
        narrower = a if a.itemsize <= b.itemsize else b
        return narrower if narrower in _INTEGERS and a.is_floating_point and b.is_floating_point else None
    return None


def ulp_counts(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...] | None:
    """Pairs of finite values in each of `ULP_BUCKETS`; None where dtypes have no common units.

    Example:
        >>> one = torch.ones(2, dtype=torch.bfloat16)
        >>> ulp_counts(one, one + torch.tensor([0.0, 2**-7]))[:3]
        (1, 1, 0)
    """
    dtype = ulp_dtype(a.dtype, b.dtype)
    if dtype is None:
        return None
    total = torch.zeros(len(ULP_BUCKETS), dtype=torch.int64)
    upper = torch.tensor(_UPPER)
    for part_a, part_b in zip(a.reshape(-1).split(CHUNK), b.reshape(-1).split(CHUNK), strict=True):
        narrow_a, narrow_b = part_a.to(dtype), part_b.to(dtype)
        is_finite = narrow_a.isfinite() & narrow_b.isfinite()
        distance = (_ordinal(narrow_a[is_finite]) - _ordinal(narrow_b[is_finite])).abs()
        total += torch.bucketize(distance, upper).bincount(minlength=len(ULP_BUCKETS))
    return tuple(total.tolist())


def _ordinal(value: torch.Tensor) -> torch.Tensor:
    """Neighbouring values of the dtype have neighbouring numbers; both zeros have 0."""
    bits = value.view(_INTEGERS[value.dtype]).to(torch.int64)
    magnitude = bits & ((1 << (8 * value.dtype.itemsize - 1)) - 1)
    return torch.where(bits < 0, -magnitude, magnitude)
