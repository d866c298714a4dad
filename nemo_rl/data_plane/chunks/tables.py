"""Recognises tensordict's types without importing tensordict, which costs a process as much as torch does.

A value can only be one of them where tensordict is loaded already. Only what makes a table imports it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from tensordict import NonTensorData, NonTensorStack, TensorDictBase

__all__ = ["is_object_stack", "is_object_value", "is_table"]


def is_table(value: object) -> TypeGuard[TensorDictBase]:
    """Whether it is a TensorDict of any kind."""
    return _is_kind(value, "TensorDictBase")


def is_object_value(value: object) -> TypeGuard[NonTensorData]:
    """Whether it is the NonTensorData that a TensorDict holds in place of an object."""
    return _is_kind(value, "NonTensorData")


def is_object_stack(value: object) -> TypeGuard[NonTensorStack]:
    """Whether it is an object column, one NonTensorData per row."""
    return _is_kind(value, "NonTensorStack")


def _is_kind(value: object, name: str) -> bool:
    loaded = sys.modules.get("tensordict")
    # While another thread imports it, the module lacks its names.
    kind = vars(loaded).get(name) if loaded is not None else None
    return kind is not None and isinstance(value, kind)
