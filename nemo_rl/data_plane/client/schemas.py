"""What one client knows about the declared columns of partitions. Used by `ledger_client`.

The one invariant: a call that fails because its partition was dropped and declared anew is made again with the new
declaration, so a client never has to be informed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from nemo_rl.data_plane.client.link import Call, ClientLink
from nemo_rl.data_plane.ledger.ledger import Reply
from nemo_rl.data_plane.schema import FieldSpec, spec_from_record
from nemo_rl.errors import SchemaMismatch

__all__ = ["Declaration", "SchemaCache"]

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Declaration:
    """Columns of a partition."""

    number: int
    """Which declaration of the ledger it is."""
    specs: Mapping[str, FieldSpec]


class SchemaCache:
    """Declarations by partition; asked of the ledger once, and again when one has changed."""

    def __init__(self, link: ClientLink) -> None:
        self._link = link
        self._known: dict[str, Declaration] = {}

    def learn(self, partition_id: str, specs: Mapping[str, FieldSpec], reply: Reply) -> Declaration:
        """Keeps what the ledger has confirmed."""
        number = reply["declared"]
        assert isinstance(number, int), f"malformed reply: {reply}"
        self._known[partition_id] = Declaration(number=number, specs=specs)
        return self._known[partition_id]

    def forget(self, partition_id: str) -> None:
        """The partition was dropped."""
        self._known.pop(partition_id, None)

    def get(self, call: Call, partition_id: str) -> Declaration:
        """The declaration of a partition."""
        return self._known.get(partition_id) or self._ask(call, partition_id)

    def use(self, call: Call, partition_id: str, action: Callable[[Declaration], _T]) -> _T:
        """Runs `action` with the declaration; once more when it fails and the partition was declared anew."""
        known = self.get(call, partition_id)
        try:
            return action(known)
        except SchemaMismatch:
            fresh = self._ask(call, partition_id)
            if fresh.number == known.number:
                raise
        return action(fresh)

    def _ask(self, call: Call, partition_id: str) -> Declaration:
        reply = self._link.ask(call, "describe", {"partition": partition_id})
        records = reply["fields"]
        assert isinstance(records, list), f"malformed reply: {reply}"
        return self.learn(partition_id, {spec.name: spec for spec in map(spec_from_record, records)}, reply)
