"""The compact form in which keys, lengths and tags cross process borders.

`KVBatchMeta` pickles itself with `pack_rows`; its size is what the client's meter counts. Group uids are sent once,
integers at their smallest width, tags by column: a constant once, few distinct values as one byte per row. What comes
back equals what went in, types included.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter, eq
from pathlib import PurePath
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from nemo_rl.data_plane.chunks.tags import Tags, TagTable, TagValue
from nemo_rl.data_plane.keys import MARK, index_of, key_of, keys_of_groups

__all__ = ["Counted", "Packed", "message_bytes", "object_bytes", "pack_rows", "unpack_rows"]

Packed: TypeAlias = tuple[object, ...]

_DOUBLE = struct.Struct("<d")
_INT_RANGES = tuple((kind, int(np.iinfo(kind).min), int(np.iinfo(kind).max)) for kind in ("u1", "<u2", "<u4", "<i8"))
_MOST_DISTINCT = 256
"""Values that one byte can number."""


def pack_rows(keys: Sequence[str], lengths: Sequence[int] | None, tags: Sequence[Tags] | None) -> Packed:
    """Return the compact form: plain tuples, strings and bytes.

    Example:
        >>> unpack_rows(pack_rows(("a_g0", "a_g1"), (3, 5), ({"w": 1}, {"w": 1})))
        (('a_g0', 'a_g1'), (3, 5), TagTable([{'w': 1}, {'w': 1}]))
    """
    return (
        _pack_keys(keys),
        None if lengths is None else _pack_ints(lengths),
        None if tags is None else _pack_tags(TagTable.of(tags, where="tags")),
    )


def unpack_rows(
    packed: Packed,
) -> tuple[tuple[str, ...], tuple[int, ...] | None, TagTable | None]:
    """Return keys, lengths and tags out of the compact form."""
    keys, lengths, tags = packed
    unpacked = _unpack_keys(_tuple(keys))
    return (
        unpacked,
        None if lengths is None else tuple(_unpack_ints(_tuple(lengths))),
        None if tags is None else _unpack_tags(_tuple(tags), len(unpacked)),
    )


class Counted(ABC):
    """Knows the bytes of its own message."""

    __slots__ = ()

    @abstractmethod
    def num_bytes(self) -> int: ...


def message_bytes(value: object) -> int:
    """About the bytes that `value` takes in a message between processes, without making the message.

    Strings, bytes, tensors and arrays count in full, numbers and marks as a pickle has them; a `Counted` says it
    itself.

    Raises:
        TypeError: a type that no message of ours has.
    """
    return _SIZERS[type(value)](value)


_EACH = 3
"""Bytes around a container or a string."""
_EACH_OBJECT = 12
"""Bytes around the fields of a dataclass; the name of its class, sent once, is not counted."""
_EACH_NUMBER: Mapping[type, int] = {type(None): 1, bool: 1, float: 9}
_INT_LIMITS = ((1 << 8, 2), (1 << 16, 3), (1 << 31, 5), (1 << 63, 10))

_Sizer: TypeAlias = Callable[[Any], int]


class _Sizers(dict[type, _Sizer]):
    """Type -> what counts its values: a step's messages have a million values of a few types."""

    def __missing__(self, kind: type) -> _Sizer:
        sizer = self[kind] = _sizer_of(kind)
        return sizer


_SIZERS = _Sizers()


def _sizer_of(kind: type) -> _Sizer:
    if issubclass(kind, Counted):
        return kind.num_bytes
    if is_dataclass(kind) and not issubclass(kind, tuple | Mapping):
        return _dataclass_sizer([each.name for each in fields(kind)])
    for kinds, sizer in _OF_KINDS:
        if issubclass(kind, kinds):
            return sizer
    raise TypeError(f"message_bytes: expected plain values, arrays or dataclasses, got {kind.__name__}")


def _int_sizer(value: int) -> int:
    return _int_bytes(abs(value))


def _str_bytes(value: str) -> int:
    return _EACH + (len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass")))


def _bytes_bytes(value: bytes) -> int:
    return _EACH + len(value)


def _array_bytes(value: np.ndarray | np.generic | torch.Tensor) -> int:
    return _EACH + value.nbytes


def _text_bytes(value: Enum | PurePath) -> int:
    return _EACH + len(str(value))


def _container_bytes(value: Collection[object]) -> int:
    return _EACH + _sum_of(value)


def _mapping_bytes(value: Mapping[object, object]) -> int:
    return _EACH + _sum_of(value.keys()) + _sum_of(value.values())


def object_bytes(values: Iterable[object]) -> int:
    """Return the bytes of an object with these fields."""
    return _EACH_OBJECT + sum(map(message_bytes, values))


def _dataclass_sizer(names: Sequence[str]) -> _Sizer:
    if len(names) < 2:
        return lambda value: _EACH_OBJECT + sum(message_bytes(getattr(value, name)) for name in names)
    get, sizers = attrgetter(*names), _SIZERS
    return lambda value: _EACH_OBJECT + sum([sizers[type(each)](each) for each in get(value)])


_OF_KINDS: tuple[tuple[Any, _Sizer], ...] = (
    (list | tuple | set | frozenset | range, _container_bytes),
    (Mapping, _mapping_bytes),
    (bytes, _bytes_bytes),
    (np.ndarray | np.generic | torch.Tensor, _array_bytes),
    (Enum | PurePath, _text_bytes),
    (bool | type(None), lambda _: 1),
    (int, _int_sizer),
    (float, lambda _: 9),
    (str, _str_bytes),
)
"""Types, the narrower ones first, with what counts the values of a type."""


def _sum_of(values: Collection[object]) -> int:
    """Return the bytes of all values; those of one plain type, the usual case, are added up without a look at each."""
    kinds = set(map(type, values))
    if len(kinds) == 1:
        [kind] = kinds
        if kind is int:
            return len(values) * _int_bytes(max(map(abs, values)))  # type: ignore[arg-type]
        if kind is str:
            joined = "".join(values)  # type: ignore[arg-type]
            characters = len(joined) if joined.isascii() else len(joined.encode("utf-8", "surrogatepass"))
            return len(values) * _EACH + characters
        if kind in _EACH_NUMBER:
            return len(values) * _EACH_NUMBER[kind]
        return sum(map(_SIZERS[kind], values))
    sizers = _SIZERS
    return sum([sizers[type(value)](value) for value in values])


def _int_bytes(value: int) -> int:
    for limit, size in _INT_LIMITS:
        if value < limit:
            return size
    return 3 + value.bit_length() // 8


def _pack_keys(keys: Sequence[str]) -> Packed:
    of_rows, marks, digits = zip(*[key.rpartition(MARK) for key in keys], strict=True) if keys else ((), (), ())
    # Few distinct ones: those of the rows of a group.
    indices = {each: index_of(each) for each in set(digits)}
    if not keys or None in indices.values() or not all(marks):
        return ("keys", tuple(keys))
    uids = tuple(dict.fromkeys(of_rows))
    per_group, rest = divmod(len(keys), len(uids))
    if not rest and all(map(eq, keys, (key_of(uid, i) for uid in uids for i in range(per_group)))):
        return ("groups", uids, per_group)
    numbers = {uid: i for i, uid in enumerate(uids)}
    places = [[numbers[uid] for uid in of_rows], [indices[each] or 0 for each in digits]]
    return ("rows", uids, *map(_pack_ints, places))


def _unpack_keys(packed: Packed) -> tuple[str, ...]:
    kind = packed[0]
    if kind == "keys":
        return _strings(packed[1])
    uids = _strings(packed[1])
    if kind == "groups":
        per_group = packed[2]
        assert isinstance(per_group, int)
        return keys_of_groups(uids, per_group)
    numbers, indices = _unpack_ints(_tuple(packed[2])), _unpack_ints(_tuple(packed[3]))
    return tuple(key_of(uids[number], i) for number, i in zip(numbers, indices, strict=True))


def _pack_ints(values: Sequence[int]) -> Packed:
    low, high = min(values, default=0), max(values, default=0)
    for kind, least, most in _INT_RANGES:
        if least <= low and high <= most:
            return (kind, np.array(values, dtype=kind).tobytes())
    return ("big", tuple(values))


def _unpack_ints(packed: Packed) -> list[int]:
    kind, content = packed
    if kind == "big":
        return [int(value) for value in _tuple(content)]  # type: ignore[call-overload]
    assert isinstance(kind, str) and isinstance(content, bytes)
    values: list[int] = np.frombuffer(content, dtype=kind).tolist()
    return values


def _pack_tags(tags: TagTable) -> Packed:
    return tuple(
        (name, None if there is None else np.packbits(there).tobytes(), _pack_values(values))
        for name, there, values in tags.columns()
    )


def _unpack_tags(packed: Packed, num_rows: int) -> TagTable:
    return TagTable.from_columns((_unpack_column(_tuple(column), num_rows) for column in packed), size=num_rows)


def _unpack_column(column: Packed, num_rows: int) -> tuple[str, list[bool] | None, list[TagValue]]:
    name, bitmap, content = column
    assert isinstance(name, str) and isinstance(bitmap, bytes | None), f"malformed packed rows: {name!r}, {bitmap!r}"
    there, count = None, num_rows
    if bitmap is not None:
        there = np.unpackbits(np.frombuffer(bitmap, dtype=np.uint8), count=num_rows).astype(bool).tolist()
        count = sum(there)
    return name, there, _unpack_values(_tuple(content), count)


def _identity(value: TagValue) -> tuple[type, object]:
    """Distinguish 1, 1.0 and True, and 0.0 from -0.0; NaN equals itself."""
    return type(value), _DOUBLE.pack(value) if isinstance(value, float) else value


def _identities(values: Sequence[TagValue], kinds: set[type]) -> Sequence[object]:
    """Return what tells the values apart; see `_identity`."""
    if kinds == {float}:
        return memoryview(array("d", cast("Sequence[float]", values))).cast("B").cast("q").tolist()
    return values if len(kinds) == 1 else [_identity(value) for value in values]


def _pack_values(values: Sequence[TagValue]) -> Packed:
    kinds = set(map(type, values))
    identities = _identities(values, kinds)
    numbers = {identity: number for number, identity in enumerate(dict.fromkeys(identities))}
    if len(numbers) == 1:
        return ("same", values[0])
    if len(numbers) <= _MOST_DISTINCT and len(numbers) < len(values):
        rows = bytes(map(numbers.__getitem__, identities))
        return ("few", tuple(values[rows.index(number)] for number in range(len(numbers))), rows)
    if kinds == {float}:
        wide = np.array(values, dtype="<f8")
        with np.errstate(all="ignore"):  # values that do not fit are found by the comparison
            narrow = wide.astype("<f4")
        is_exact = bool((narrow.astype("<f8").view("<i8") == wide.view("<i8")).all())
        return ("<f4", narrow.tobytes()) if is_exact else ("<f8", wide.tobytes())
    if kinds == {int}:
        return ("ints", _pack_ints([value for value in values if isinstance(value, int)]))
    return ("values", tuple(values))


def _unpack_values(packed: Packed, count: int) -> list[TagValue]:
    kind, content = packed[0], packed[1]
    if kind == "same":
        return [content] * count  # type: ignore[list-item]
    if kind == "few":
        numbers, distinct = packed[2], _tuple(content)
        assert isinstance(numbers, bytes)
        return [distinct[i] for i in numbers]  # type: ignore[misc]
    if kind == "ints":
        return list(_unpack_ints(_tuple(content)))
    if kind == "values":
        return list(_tuple(content))  # type: ignore[arg-type]
    assert isinstance(kind, str) and isinstance(content, bytes)
    floats: list[TagValue] = np.frombuffer(content, dtype=kind).tolist()
    return floats


def _tuple(value: object) -> Packed:
    assert isinstance(value, tuple), f"malformed packed rows: {value!r}"
    return value


def _strings(value: object) -> tuple[str, ...]:
    return _tuple(value)  # type: ignore[return-value]
