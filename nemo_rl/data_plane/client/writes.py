"""The writing half of a client: reserve capacity, encode chunks, store them, commit. Used by `ledger_client`.

The one invariant: rows become visible by the commit that follows a complete store put, all of them or none.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from nemo_rl.data_plane.address import Handles
from nemo_rl.data_plane.batch_meta import Version
from nemo_rl.data_plane.chunks.columns import FlatColumn
from nemo_rl.data_plane.chunks.tags import TagTable
from nemo_rl.data_plane.client.leases import LeaseKeeper
from nemo_rl.data_plane.client.link import Call, ClientLink, RoomWait, names_of, versions_of
from nemo_rl.data_plane.codec import EncodedChunk, encode_rows
from nemo_rl.data_plane.ledger.ledger import Args
from nemo_rl.errors import CapacityExceeded, DataPlaneError, DataPlaneTimeout

__all__ = ["RowFacts", "RowWriter"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFacts:
    """What a put says about its rows besides their columns."""

    declared: int
    """The declaration that the columns were checked against."""
    keys: list[str]
    lengths: list[int] | None
    """Tokens per row."""
    tags: TagTable | None
    claims: dict[str, dict[str, int]]
    """Task -> key -> the claim under which the row is written."""


class RowWriter:
    """Puts of one client."""

    def __init__(self, link: ClientLink, leases: LeaseKeeper) -> None:
        self._link, self._leases = link, leases

    def write(
        self,
        call: Call,
        partition_id: str,
        columns: Mapping[str, FlatColumn],
        facts: RowFacts,
    ) -> dict[str, Version]:
        """Stores the columns and commits them; returns the family versions. Nothing is left behind when it fails."""
        keys = facts.keys
        chunk_bytes = self._link.store.chunk_bytes or self._link.address.config.chunk_bytes
        with self._link.clock.measure("encode"):
            chunks = encode_rows(columns, num_rows=len(keys), chunk_bytes=chunk_bytes)
        ids = self._link.new_ids(len(chunks))
        column_types = {
            name: [column.dtype, list(column.trailing)] for name, column in columns.items() if column.values is not None
        }
        args: Args = {
            "partition": partition_id,
            "declared": facts.declared,
            "keys": keys,
            "lengths": facts.lengths,
            "tags": None if facts.tags is None else facts.tags.plain(),
            "chunks": [_chunk_record(i, chunk, column_types) for i, chunk in zip(ids, chunks, strict=True)],
            "claims": facts.claims,
            "may_create": any(column.spec.produced_by == "rollout" for column in columns.values()),
        }
        wait = RoomWait(ask=partial(self._link.ask, call), deadline=call.deadline, what=call.what)
        reservation = self._reserve(wait, args, chunks)
        handles: Handles | None = None
        try:
            if chunks:
                payloads = {i: chunk.parts for i, chunk in zip(ids, chunks, strict=True)}
                with self._link.clock.measure("store_put"):
                    handles = self._link.timed(call, lambda: self._link.store.put(payloads, timeout_s=call.left()))
        except DataPlaneError:
            self._unreserve(reservation, wait)
            raise
        try:
            wait.ask = partial(self._link.ask, call, handles=handles)
            reply = wait.granted("commit", {**args, "reservation": reservation})
        except DataPlaneTimeout:
            raise  # the commit may still arrive: rows it makes visible must keep their chunks
        except DataPlaneError:
            self._link.drop(ids)
            self._unreserve(reservation, wait)
            raise
        self._link.drop(names_of(reply["drop"]))
        self._leases.forget_written(partition_id, keys, set(columns))
        self._link.count("put_bytes", sum(chunk.nbytes for chunk in chunks))
        return versions_of(reply)

    def _reserve(self, wait: RoomWait, put: Args, chunks: Sequence[EncodedChunk]) -> int:
        """Waits for capacity before any byte goes to the store, where bytes are limited; 0 where they are not."""
        if self._link.address.config.storage_capacity.bytes is None or not chunks:
            return 0
        args = {name: put[name] for name in ("partition", "declared", "keys")}
        args["nbytes"] = sum(chunk.nbytes for chunk in chunks)
        try:
            reservation = wait.granted("reserve", args)["reservation"]
        except CapacityExceeded:
            self._unreserve(0, wait)
            raise
        assert isinstance(reservation, int), f"malformed reply: {reservation!r}"
        return reservation

    def _unreserve(self, reservation: int, wait: RoomWait) -> None:
        """Gives reserved capacity back; it expires by itself when the ledger cannot be reached."""
        untold_s = wait.untold_s()
        if not reservation and not untold_s:
            return
        try:
            args: Args = {"reservation": reservation, "waited_s": untold_s}
            self._link.notify("unreserve", args)
        except DataPlaneError as error:
            logger.warning("could not give a reservation back: %s", error)


def _chunk_record(chunk_id: str, chunk: EncodedChunk, column_types: Mapping[str, Sequence[object]]) -> Args:
    return {
        "id": chunk_id,
        "family": chunk.family,
        "fields": list(chunk.fields),
        "first": chunk.first,
        "rows": chunk.rows,
        "nbytes": chunk.nbytes,
        "sizes": list(chunk.sizes),
        "row_sizes": dict(chunk.row_sizes),
        "column_types": {name: column_types[name] for name in chunk.fields if name in column_types},
    }
