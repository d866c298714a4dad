"""`RecordSink`: writes what is seen, whole, to the records of this rank."""

from __future__ import annotations

from collections.abc import Callable

from nemo_rl.errors import UserError
from nemo_rl.models.policy.recording.sight import PassRows, Sight
from nemo_rl.records.selector import Selector
from nemo_rl.records.sites import Direction, SiteKind
from nemo_rl.records.writer import RecordWriter

__all__ = ["RecordSink"]


class RecordSink:
    """`SiteSink` of one call.

    Args:
        on_refusal: called when the disk refuses, after which nothing is written; None raises instead.
    """

    def __init__(
        self, writer: RecordWriter, selector: Selector, *, on_refusal: Callable[[UserError], None] | None = None
    ) -> None:
        self._writer, self._selector, self._on_refusal = writer, selector, on_refusal
        self._tables: dict[int, str] = {}
        self._has_ended = False

    def takes(self, kind: SiteKind, layer: int | None, direction: Direction) -> bool:
        """As in `SiteSink`."""
        return self._selector.takes(kind, layer, direction) or (kind in NAMED and kind in self._selector.kinds())

    def see(self, sight: Sight) -> None:
        """As in `SiteSink`."""
        if self._has_ended:
            return
        try:
            self._write(sight)
        except UserError as error:
            if self._on_refusal is None:
                raise
            self._has_ended = True
            self._on_refusal(error)

    def _write(self, sight: Sight) -> None:
        place = sight.place
        if place.name is not None:
            if sight.is_first and self._selector.takes_parameter(place.name, place.kind):
                self._writer.tensor(place, sight.value, tokens=None)
        elif sight.rows is None:
            self._writer.tensor(place, sight.value, tokens=None)
        else:
            self._writer.tensor(place, sight.tokens(), tokens=self._table(sight.rows), split=sight.split)

    def _table(self, rows: PassRows) -> str:
        """Written once."""
        if rows.number not in self._tables:
            self._tables[rows.number] = self._writer.tokens(rows.table)
        return self._tables[rows.number]


NAMED = (SiteKind.GRAD, SiteKind.PARAM)
"""Sites that are chosen by the names of parameters."""
