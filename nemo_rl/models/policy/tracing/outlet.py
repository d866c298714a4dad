"""Where a `TraceSink` puts parts and tables: straight on the line to the hub, or gathered over many short passes.

Invariant: the hub makes the same pictures of either. Gathering is for decoding, where every pass has one token of each
row, and a message for each of them would be mostly header.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from nemo_rl.tracer.frame import Part, Table, Where
from nemo_rl.tracer.link import HubLink
from nemo_rl.tracer.reducer import WholeTensor

__all__ = ["Gathered", "Outlet", "Straight"]

GATHERED_BYTES = 1 << 20
"""Of values of single tokens; when so many have been gathered, they are sent."""


class Outlet(Protocol):
    """Takes what a sink has made, and never waits."""

    def table(self, table: Table) -> None:
        """Before the parts that refer to it."""

    def part(self, part: Part) -> None:
        """`dropped_before` is filled in when it is sent."""


class Straight:
    """One message each."""

    def __init__(self, link: HubLink) -> None:
        self._link = link

    def table(self, table: Table) -> None:
        """As in `Outlet`."""
        self._link.offer(table.encode())

    def part(self, part: Part) -> None:
        """As in `Outlet`."""
        self._link.offer(replace(part, dropped_before=self._link.dropped).encode())


@dataclass(slots=True)
class _Tokens:
    """Tokens of several tables as one."""

    starts: dict[str, int] = field(default_factory=dict)
    """Name of a table -> its first row in the whole."""
    tables: list[Table] = field(default_factory=list)
    count: int = 0

    def add(self, table: Table) -> None:
        self.starts[table.name] = self.count
        self.tables.append(table)
        self.count += table.tokens.shape[1]

    def whole(self, name: str) -> Table:
        keys: dict[str, int] = {}
        parts = []
        for table in self.tables:
            used, row_R = np.unique(table.tokens[0], return_inverse=True)
            number = np.array([keys.setdefault(table.keys[row], len(keys)) for row in used], dtype=np.int32)
            parts.append(np.stack((number[row_R], *table.tokens[1:])))
        first = self.tables[0]
        return Table(run=first.run, name=name, step=first.step, keys=tuple(keys), tokens=np.concatenate(parts, axis=1))


class Gathered:
    """Merges the parts of whole tensors, and joins those of tokens, until `flush`.

    Args:
        link: gets few messages, at the latest with `flush`.
        name: of tables, unique among those of the phase.
    """

    def __init__(self, link: HubLink, *, name: str) -> None:
        self._straight, self._name = Straight(link), name
        self._wholes: dict[Where, Part] = {}
        self._of_tokens: dict[Where, list[Part]] = {}
        self._tokens = _Tokens()
        self._num_bytes = self._num_tables = 0

    def table(self, table: Table) -> None:
        """As in `Outlet`."""
        self._tokens.add(table)

    def part(self, part: Part) -> None:
        """As in `Outlet`."""
        if part.table is not None:
            self._of_tokens.setdefault(part.where, []).append(part)
            self._num_bytes += part.payload.nbytes
            return
        so_far, reducer = self._wholes.get(part.where), part.where.reducer
        assert isinstance(reducer, WholeTensor), part.where
        if so_far is not None:
            payload = reducer.merge(so_far.payload, part.payload)
            part = replace(part, payload=payload, num_not_finite=so_far.num_not_finite + part.num_not_finite)
        self._wholes[part.where] = part

    def between_passes(self) -> None:
        """No table is open: what has been gathered of tokens is sent if it is much."""
        if self._num_bytes > GATHERED_BYTES:
            self._send_tokens()

    def flush(self) -> None:
        """Sends all that is left. Idempotent."""
        self._send_tokens()
        for part in self._wholes.values():
            self._straight.part(part)
        self._wholes.clear()

    def _send_tokens(self) -> None:
        if self._of_tokens:
            self._num_tables += 1
            name = f"{self._name}.{self._num_tables}"
            self._straight.table(self._tokens.whole(name))
            for parts in self._of_tokens.values():
                self._straight.part(_joined(parts, self._tokens.starts, name))
        self._of_tokens.clear()
        self._tokens, self._num_bytes = _Tokens(), 0


def _joined(parts: Sequence[Part], starts: Mapping[str, int], table: str) -> Part:
    """Parts of one place, which have all of their tables' tokens."""
    rows = [starts[part.table] + np.arange(len(part.payload)) for part in parts if part.table is not None]
    return replace(
        parts[0],
        payload=np.concatenate([part.payload for part in parts]),
        table=table,
        rows=np.concatenate(rows).astype(np.int32),
        num_not_finite=sum(part.num_not_finite for part in parts),
    )
