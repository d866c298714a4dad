"""Tags: small primitives per row, to filter on without fetching. Checked here for metas and for puts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import TypeAlias

import numpy as np
import torch

from nemo_rl.errors import SchemaMismatch

__all__ = ["PlainTags", "TagValue", "Tags", "by_name", "plain_column", "plain_rows"]

TagValue: TypeAlias = str | int | float | bool | None
Tags: TypeAlias = Mapping[str, TagValue]

_PRIMITIVES = frozenset((str, int, float, bool, type(None)))


class PlainTags(list[dict[str, TagValue]]):
    """Tag rows that were checked, and that nobody changes any more."""


def plain_rows(rows: Sequence[Mapping[str, object]], *, where: str) -> PlainTags:
    """Copies of tag rows; rows that are plain already are given back.

    Raises:
        SchemaMismatch: a name that is no string, or a value that is no primitive.
    """
    if isinstance(rows, PlainTags):
        return rows
    plain = PlainTags([dict(row) for row in rows])  # type: ignore[arg-type]
    kinds = set(map(type, chain.from_iterable(map(dict.values, plain))))
    if not kinds <= _PRIMITIVES or not set(map(type, set().union(*plain))) <= {str}:
        for i, row in enumerate(plain):
            for name, value in row.items():
                _check(name, value, f"{where}: tag {name!r} of row {i}")
    return plain


def by_name(rows: PlainTags) -> dict[str, list[TagValue]] | PlainTags:
    """One list per tag, which crosses a process border ten times as fast; the rows where they have different tags."""
    names = set().union(*rows)
    if sum(map(len, rows)) != len(names) * len(rows):
        return rows
    return {name: list(map(itemgetter(name), rows)) for name in rows[0]} if rows else {}


def plain_column(name: str, values: object, *, where: str) -> list[TagValue]:
    """The values of one tag, one per row: a list, a tensor or an array; their scalars become Python's.

    Raises:
        SchemaMismatch: a string, which would be taken for one value per letter, or values that are no primitives.
    """
    if isinstance(values, torch.Tensor | np.ndarray):
        values = values.tolist()
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise SchemaMismatch(f"{where}: tag {name!r}: expected one value per row, got {values!r}")
    plain = [_as_number(value) for value in values]
    for i, value in enumerate(plain):
        _check(name, value, f"{where}: tag {name!r} of row {i}")
    return plain  # type: ignore[return-value]


def _as_number(value: object) -> object:
    is_scalar = isinstance(value, np.generic) or (isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 0)
    return value.item() if is_scalar else value  # type: ignore[attr-defined]


def _check(name: object, value: object, at: str) -> None:
    if type(name) is not str or type(value) not in _PRIMITIVES:
        raise SchemaMismatch(
            f"{at}: expected None, str, int, float or bool, got {type(value).__name__}; per-row tensors are columns"
        )
