"""Chunks in the storage units of a run's own TransferQueue: `write_values`, `read_values` and `drop_values`.

Used by `transfer_queue`. A storage unit keeps values by a number, which TransferQueue's controller gives to each row.
The ledger knows every chunk, so a chunk's number is made from its id, and no call asks the controller: it would take
three more round trips to learn nothing new. Numbers are never used twice. Also here: the form in which a chunk passes
TransferQueue's sockets with the fewest copies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from nemo_rl.data_plane.interfaces import Parts
from nemo_rl.data_plane.keys import chunk_tag

__all__ = ["FIELD", "Value", "as_parts", "as_value", "drop_values", "read_values", "write_values"]

Value: TypeAlias = bytes | list[bytes | np.ndarray]
"""A chunk as one value of TransferQueue."""

FIELD = "payload"
"""Name of the field that holds chunks."""
INLINE_BYTES = 64 << 10
"""Smaller parts are sent inside TransferQueue's message: a frame of its own costs 20 us on each side."""


def as_value(parts: Parts) -> Value:
    """Return a chunk as TransferQueue takes it: small parts as bytes in its message, large ones as frames of their own,
    which are not copied on the way into the socket and out of it."""
    if sum([part.nbytes for part in parts]) < INLINE_BYTES:
        return b"".join(parts)
    return [bytes(part) if part.nbytes < INLINE_BYTES else np.frombuffer(part, dtype=np.uint8) for part in parts]


def as_parts(value: Any) -> Parts:
    """Return a value that was read as the parts of a chunk."""
    return [memoryview(part) for part in (value if isinstance(value, list) else [value])]


async def write_values(manager: Any, values: Mapping[str, Value]) -> None:
    """Put chunks into their units.

    Args:
        manager: the storage manager of TransferQueue's client.
        values: by the ids under which they are stored.
    """
    rows = list(values.values())

    def write(unit: str, group: Any) -> Coroutine[Any, Any, Any]:
        fields = {FIELD: [rows[position] for position in group.batch_positions]}
        call = partial(manager._put_to_single_storage_unit, group.global_indexes, fields, target_storage_unit=unit)
        return _tried("put", manager, unit, group, call)

    await _in_each_unit(manager, list(values), write)


async def read_values(manager: Any, stored_ids: Sequence[str]) -> list[Any]:
    """Get chunks in the order asked for; the error of a unit that lacks one says so."""
    values: list[Any] = [None] * len(stored_ids)

    async def read(unit: str, group: Any) -> None:
        call = partial(manager._get_from_single_storage_unit, group.global_indexes, [FIELD], target_storage_unit=unit)
        _, found = await _tried("get", manager, unit, group, call)
        for position, value in zip(group.batch_positions, found[FIELD], strict=True):
            values[position] = value

    await _in_each_unit(manager, stored_ids, read)
    return values


async def drop_values(manager: Any, stored_ids: Sequence[str]) -> None:
    """Free chunks; unknown ones are ignored."""

    def drop(unit: str, group: Any) -> Coroutine[Any, Any, Any]:
        found: Coroutine[Any, Any, Any] = manager._clear_single_storage_unit(
            group.global_indexes, target_storage_unit=unit
        )
        return found

    await _in_each_unit(manager, stored_ids, drop)


async def _in_each_unit(manager: Any, stored_ids: Sequence[str], call: Any) -> None:
    # 63 bits: a unit is chosen by the remainder, and messages carry signed numbers.
    groups = manager._group_by_hash([chunk_tag(stored) >> 1 for stored in stored_ids])
    await asyncio.gather(*(call(unit, group) for unit, group in groups.items()))


def _tried(what: str, manager: Any, unit: str, group: Any, call: Any) -> Coroutine[Any, Any, Any]:
    found: Coroutine[Any, Any, Any] = manager._request_with_retry(
        what, unit, f"chunks={len(group.global_indexes)}", call
    )
    return found
