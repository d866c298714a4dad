"""`KeyedRows`: rows whose columns the store keeps under the rows' own keys, where a place can be written once only.

Called by `ledger.py` only, for stores that have a `ColumnStore`. A put announces itself (`begin`) before its bytes go
to the store and is told which families it may write in place: those that no put has ever touched for these rows. All
others go to chunks, so no reader ever meets a value that is being replaced. The one invariant: a row is freed in the
store only when it is cleared and no announced put of it is under way, and it is not written again before it is freed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from nemo_rl.data_plane.ledger.state import Partition

__all__ = ["KeyedRows", "lacking"]

FREE_AGAIN_S = 60.0
"""A row that was handed out to be freed, without an answer, is handed out again after so long: its client has died."""


@dataclass(frozen=True, slots=True)
class _PutUnderWay:
    keys: Sequence[str]
    expires: float
    """Seconds of the host's clock at which it counts as dead."""


@dataclass(slots=True)
class KeyedRows:
    """The puts under way and the rows left in the store, of one partition. It outlives the partition's declaration."""

    _touched: dict[str, set[str]] = field(default_factory=dict)
    """Field -> rows where a put of this run has written it, or was about to, since they were last freed."""
    _puts: dict[int, _PutUnderWay] = field(default_factory=dict)
    _busy: Counter[str] = field(default_factory=Counter)
    """Announced puts of each row."""
    _leaving: dict[str, float] = field(default_factory=dict)
    """Rows that are cleared, but not freed yet -> when they are handed out to be freed."""
    _num_puts: int = 0

    def begin(
        self,
        live: Collection[str],
        keys: Sequence[str],
        families: Mapping[str, Sequence[str]],
        *,
        now: float,
        lasts_s: float,
    ) -> dict[str, object]:
        """Announce a put: the families that it may write in place, or `blocked`.

        Args:
            live: rows of the partition.
            families: family -> fields that the put writes.
            lasts_s: seconds after which the put counts as dead.
        """
        self.expire(live, now)
        waiting = sum(map(self._leaving.__contains__, keys))
        if waiting:
            return {"blocked": f"{waiting} rows are still being freed", "free": self.due(now)}
        in_place = [
            family
            for family, fields in families.items()
            if all(self._touched.setdefault(name, set()).isdisjoint(keys) for name in fields)
        ]
        for family in in_place:
            self.touch(families[family], keys)
        self._num_puts += 1
        self._puts[self._num_puts] = _PutUnderWay(keys, now + lasts_s)
        self._busy.update(keys)
        return {"put": self._num_puts, "in_place": in_place}

    def touch(self, fields: Iterable[str], keys: Sequence[str]) -> None:
        """Never write these again in place, nor take them for another program's."""
        for name in fields:
            self._touched.setdefault(name, set()).update(keys)

    def is_under_way(self, put: int) -> bool:
        return put in self._puts

    def end(self, put: int, live: Collection[str], now: float) -> None:
        """The put writes nothing any more; those of its rows that do not live are freed."""
        announced = self._puts.pop(put, None)
        if announced is None:
            return
        self._busy.subtract(announced.keys)
        for key in announced.keys:
            if self._busy[key]:
                continue
            del self._busy[key]
            if key in live:
                self._leaving.pop(key, None)  # cleared and made anew by a put that was under way
            else:
                self._leaving[key] = now

    def clear(self, live: Collection[str], keys: Iterable[str], now: float) -> list[str]:
        """The rows are gone; those that a put still writes are freed when it ends. Return what is due."""
        self.expire(live, now)
        self._leaving.update((key, inf if key in self._busy else now) for key in keys)
        return self.due(now)

    def due(self, now: float) -> list[str]:
        if not self._leaving:
            return []
        keys = [key for key, due in self._leaving.items() if due <= now]
        self._leaving.update(dict.fromkeys(keys, now + FREE_AGAIN_S))
        return keys

    def freed(self, keys: Sequence[str]) -> None:
        """The store has nothing of these rows any more."""
        confirmed = {key for key in keys if self._leaving.get(key, inf) < inf}
        for key in confirmed:
            del self._leaving[key]
        for touched in self._touched.values():
            touched.difference_update(confirmed)

    def strangers(self, live: Collection[str], keys: Iterable[str]) -> list[str]:
        return [key for key in keys if key not in live and key not in self._busy and key not in self._leaving]

    def untouched(self, name: str, keys: Iterable[str]) -> list[str]:
        """Return the rows where no put of this run has written the field, so that another program may have."""
        touched = self._touched.get(name, set())
        return [key for key in keys if key not in touched]

    def expire(self, live: Collection[str], now: float) -> None:
        """End the announced puts whose writers must have died."""
        for put in [number for number, announced in self._puts.items() if announced.expires <= now]:
            self.end(put, live, now)


def lacking(
    partition: Partition, keyed: KeyedRows, fields: Sequence[str], keys: Sequence[str] | None
) -> dict[str, list[str]]:
    """Return field -> live rows that lack it and where only another program can have written it."""
    rows = list(partition.rows) if keys is None else [key for key in keys if key in partition.rows]
    found: dict[str, list[str]] = {}
    for name in fields:
        column = partition.columns[partition.specs[name].family]
        wanted = frozenset((name,))
        late = keyed.untouched(name, [key for key in rows if not column.has(key, wanted)])
        if late:
            found[name] = late
    return found
