"""Jagged tensors: rows of unequal lengths laid end to end, with offsets. Needs torch alone.

Used wherever columns are ragged: the data plane, routes, rollouts, workers. Invariant: rows differ in their first dim
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from nemo_rl.errors import SchemaMismatch, name_some
from nemo_rl.torch_private import jagged_parts, jagged_view

__all__ = ["lengths_of", "nest", "offsets_of", "stack_or_nest", "values_of"]


def nest(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return a jagged nested tensor over rows laid end to end: values `[sum(lengths), ...]`, lengths `[N]`."""
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, dim=0, out=offsets[1:])
    return jagged_view(values, offsets)


def offsets_of(nested: torch.Tensor) -> torch.Tensor:
    """Return `[N + 1]` int64 row offsets of a jagged nested tensor."""
    offsets: torch.Tensor = cast("Any", nested).offsets()
    return offsets


def lengths_of(nested: torch.Tensor) -> torch.Tensor:
    """Return `[N]` int64 row lengths of a nested tensor."""
    parts = jagged_parts(nested)
    if parts is not None:
        return parts[1].diff()
    return torch.tensor([row.shape[0] for row in nested.unbind()], dtype=torch.int64)


def values_of(nested: torch.Tensor) -> torch.Tensor:
    """Return `[sum(lengths), ...]`: the rows of a nested tensor laid end to end, without holes.

    Raises:
        SchemaMismatch: rows that differ in more than their first dim.
    """
    parts = jagged_parts(nested)
    if parts is not None:
        return parts[0]
    return _lay_end_to_end(list(nested.unbind()))


def stack_or_nest(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the rows of one shape stacked, others as a jagged nested tensor; no rows give an empty tensor.

    Raises:
        SchemaMismatch: rows that differ in more than their first dim.
    """
    if not rows:
        return torch.empty(0)
    if all(row.shape == rows[0].shape for row in rows):
        return torch.stack(list(rows))
    return nest(_lay_end_to_end(rows), torch.tensor([row.shape[0] for row in rows], dtype=torch.int64))


def _lay_end_to_end(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    trailing = {tuple(row.shape[1:]) for row in rows}
    if len(trailing) != 1 or len({row.dim() for row in rows}) != 1 or rows[0].dim() == 0:
        raise SchemaMismatch(
            f"expected rows that differ in their first dim only, got shapes "
            f"{name_some(list(row.shape) for row in rows)}; pad the other dims"
        )
    return torch.cat(list(rows))
