"""Tags: small primitives per row, to filter on without fetching. Checked here for metas and for puts.

Kept and sent by column: a dict per row, made for each of many rows, costs more than all the rest of a put.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from operator import itemgetter
from types import MappingProxyType
from typing import Protocol, TypeAlias, TypeVar, overload, runtime_checkable

from nemo_rl.errors import SchemaMismatch

__all__ = ["TagTable", "TagValue", "Tags", "picker", "plain_column"]

TagValue: TypeAlias = str | int | float | bool | None
Tags: TypeAlias = Mapping[str, TagValue]

_T = TypeVar("_T")

_ROWS = frozenset((dict, MappingProxyType))
_PRIMITIVES = frozenset((str, int, float, bool, type(None)))


@runtime_checkable
class _TagNumbers(Protocol):
    """A number or an array of numpy or torch; the ledger's processes import neither torch nor what needs it."""

    ndim: int

    def tolist(self) -> object: ...


class _Absent:
    """The value of a tag in a row that lacks it while others have it."""


_ABSENT = _Absent()


class TagTable(Sequence[Tags]):
    """Tags of rows, checked, that nobody changes any more; equal to any sequence of the same mappings.

    Example:
        >>> table = TagTable.of([{"std": 0.5}, {"std": 2.0, "n": 3}], where="here")
        >>> table[1], table.pick([0])
        (mappingproxy({'std': 2.0, 'n': 3}), TagTable([{'std': 0.5}]))
    """

    __slots__ = ("_columns", "_has_gaps", "_size")

    def __init__(self, columns: Mapping[str, list[TagValue | _Absent]], *, size: int, has_gaps: bool) -> None:
        """Take what `of` or another table has checked; `has_gaps` may be true without need."""
        self._columns, self._size, self._has_gaps = columns, size, has_gaps

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, object]], *, where: str) -> TagTable:
        """Return a copy of tag rows.

        Raises:
            SchemaMismatch: a row that is no mapping, a name that is no string, or a value that is no primitive.
        """
        if isinstance(rows, TagTable):
            return rows
        if not set(map(type, rows)) <= _ROWS:
            for i, row in enumerate(rows):
                if not isinstance(row, Mapping):
                    raise SchemaMismatch(f"{where}: tags of row {i}: expected a mapping of names, got {row!r}")
        names = dict.fromkeys(rows[0]) if rows else {}
        has_gaps = any(map(len(names).__ne__, map(len, rows)))
        columns: dict[str, list[TagValue | _Absent]] = {}
        if not has_gaps:
            try:
                columns = {name: list(map(itemgetter(name), rows)) for name in names}  # type: ignore[arg-type]
            except KeyError:
                has_gaps = True
        if has_gaps:
            names = dict.fromkeys(name for row in rows for name in row)
            columns = {name: [row.get(name, _ABSENT) for row in rows] for name in names}  # type: ignore[misc]
        for name, values in columns.items():
            if type(name) is not str or not set(map(type, values)) <= _PRIMITIVES:
                for i, value in enumerate(values):
                    if value is not _ABSENT:
                        _check(name, value, f"{where}: tag {name!r} of row {i}")
        return cls(columns, size=len(rows), has_gaps=has_gaps)

    @classmethod
    def empty(cls, size: int) -> TagTable:
        """Return rows without tags."""
        return cls({}, size=size, has_gaps=False)

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Tags: ...

    @overload
    def __getitem__(self, index: slice) -> TagTable: ...

    def __getitem__(self, index: int | slice) -> Tags | TagTable:
        if isinstance(index, slice):
            return self.pick(range(self._size)[index])
        at = range(self._size)[index]
        return MappingProxyType({n: v for n, values in self._columns.items() if (v := values[at]) is not _ABSENT})  # type: ignore[misc]

    def __iter__(self) -> Iterator[Tags]:
        return map(self.__getitem__, range(self._size))  # type: ignore[arg-type]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TagTable) and not self._has_gaps and not other._has_gaps:
            return self._size == other._size and self._columns == other._columns
        if not isinstance(other, Sequence):
            return NotImplemented
        return self._size == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash((self._size, *sorted(self._columns)))

    def __repr__(self) -> str:
        return f"TagTable({[dict(row) for row in self]})"

    def __reduce__(self) -> tuple[object, ...]:
        return TagTable.from_plain, (self.plain(), self._size)

    def values_of(self, name: str) -> list[TagValue]:
        """Return one tag's value per row.

        Raises:
            KeyError: a row lacks the tag.
        """
        values = self._columns[name] if self._size else []
        if self._has_gaps and _ABSENT in values:
            raise KeyError(name)
        return values  # type: ignore[return-value]

    def columns(self) -> Iterator[tuple[str, list[bool] | None, list[TagValue]]]:
        """Yield each tag's name, the rows that have it (None: all) and their values."""
        for name, values in self._columns.items():
            there = [value is not _ABSENT for value in values] if self._has_gaps else None
            is_whole = there is None or all(there)
            # The lists are handed out as they are: callers only read.
            yield name, None if is_whole else there, values if is_whole else [v for v in values if v is not _ABSENT]  # type: ignore[misc]

    @classmethod
    def from_columns(cls, parts: Iterable[tuple[str, Sequence[bool] | None, list[TagValue]]], *, size: int) -> TagTable:
        """Build the table from the result of `columns`."""
        columns: dict[str, list[TagValue | _Absent]] = {}
        has_gaps = False
        for name, there, values in parts:
            column: list[TagValue | _Absent] = list(values)
            if there is not None:
                has_gaps, left = True, iter(values)
                column = [next(left) if is_there else _ABSENT for is_there in there]
            columns[name] = column
        return cls(columns, size=size, has_gaps=has_gaps)

    def plain(self) -> dict[str, list[TagValue]] | list[dict[str, TagValue]]:
        """Return one list per tag, ten times as fast to send; a dict per row where rows differ."""
        if self._has_gaps:
            return [dict(row) for row in self]
        return self._columns  # type: ignore[return-value]

    @classmethod
    def from_plain(cls, plain: object, size: int) -> TagTable:
        """Build the table from the result of `plain`."""
        if isinstance(plain, dict):
            return cls(plain, size=size, has_gaps=False)
        assert isinstance(plain, list) and len(plain) == size, f"malformed tags: {plain!r}"
        return cls.of(plain, where="tags")

    def pick(self, indices: Sequence[int]) -> TagTable:
        """Return the rows at `indices`."""
        of_rows = picker(indices)
        columns = {name: list(of_rows(values)) for name, values in self._columns.items()}
        return TagTable(columns, size=len(indices), has_gaps=self._has_gaps)

    def join(self, others: Sequence[TagTable]) -> TagTable:
        parts = [part for part in (self, *others) if len(part)]
        names = dict.fromkeys(name for part in parts for name in part._columns)
        columns: dict[str, list[TagValue | _Absent]] = {
            name: [v for part in parts for v in part._columns.get(name, repeat(_ABSENT, len(part)))] for name in names
        }
        has_gaps = any(part._has_gaps or len(part._columns) != len(names) for part in parts)
        return TagTable(columns, size=sum(map(len, parts)), has_gaps=has_gaps)

    def with_columns(self, columns: Mapping[str, list[TagValue]]) -> TagTable:
        """Added or replaced tags, one value per row."""
        all_columns: dict[str, list[TagValue | _Absent]] = {**self._columns, **columns}  # type: ignore[dict-item]
        return TagTable(all_columns, size=self._size, has_gaps=self._has_gaps)


def picker(indices: Sequence[int]) -> Callable[[Sequence[_T]], tuple[_T, ...]]:
    """Return a function that takes the values at `indices` out of a sequence."""
    return itemgetter(*indices) if len(indices) > 1 else lambda values: tuple([values[i] for i in indices])


def plain_column(name: str, values: object, *, where: str) -> list[TagValue]:
    """Return the values of one tag, one per row: a list, a tensor or an array; their scalars become Python's.

    Raises:
        SchemaMismatch: a string, which would be taken for one value per letter, or values that are no primitives.
    """
    if isinstance(values, _TagNumbers):
        values = values.tolist()
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise SchemaMismatch(f"{where}: tag {name!r}: expected one value per row, got {values!r}")
    plain: list[object] = list(values)
    if type(name) is not str or not set(map(type, plain)) <= _PRIMITIVES:
        plain = [value.tolist() if isinstance(value, _TagNumbers) and value.ndim == 0 else value for value in plain]
        for i, value in enumerate(plain):
            _check(name, value, f"{where}: tag {name!r} of row {i}")
    return plain  # type: ignore[return-value]


def _check(name: object, value: object, at: str) -> None:
    if type(name) is not str or type(value) not in _PRIMITIVES:
        raise SchemaMismatch(
            f"{at}: expected None, str, int, float or bool, got {type(value).__name__}; per-row tensors are columns"
        )
