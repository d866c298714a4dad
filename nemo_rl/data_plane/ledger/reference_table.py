"""Who keeps Ray objects alive: references by chunk id, in the ledger's actor. Used by `host_ray`.

Producers send references without waiting, so one may arrive after its chunk was read for, or even freed: the order in
which `hold` and `let_go` arrive does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["Place", "ReferenceTable"]

Place = tuple[object, int]
"""The reference of an object, and which of its chunks."""


class ReferenceTable:
    """References of live chunks. Not thread-safe: the actor's calls come one at a time.

    Example:
        >>> table = ReferenceTable()
        >>> table.let_go(["late"])
        >>> table.hold({"late": ("ref", 0), "live": ("ref", 1)})
        >>> table.lend(["late", "live"])
        {'live': ('ref', 1)}
    """

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}
        self._freed_early: set[str] = set()
        """Chunks that were freed before their reference came."""

    def hold(self, places: Mapping[str, Place]) -> None:
        """Keeps references until their chunks are freed."""
        for chunk_id, place in places.items():
            if chunk_id in self._freed_early:
                self._freed_early.discard(chunk_id)
            else:
                self._places[chunk_id] = place

    def lend(self, chunk_ids: Sequence[str]) -> dict[str, Place]:
        """Those of the references that are here."""
        return {chunk_id: self._places[chunk_id] for chunk_id in chunk_ids if chunk_id in self._places}

    def let_go(self, chunk_ids: Sequence[str]) -> None:
        """The chunks are freed; an object goes with its last reference."""
        for chunk_id in chunk_ids:
            if self._places.pop(chunk_id, None) is None:
                self._freed_early.add(chunk_id)

    def __len__(self) -> int:
        return len(self._places)
