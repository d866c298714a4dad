"""The writing half of a client: reserve capacity, encode chunks, store them, commit. Used by `ledger_client`.

The one invariant: rows become visible by the commit that follows a complete store put, all of them or none.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from nemo_rl.data_plane.address import Handles
from nemo_rl.data_plane.batch_meta import KVBatchMeta, Version
from nemo_rl.data_plane.chunks.columns import FlatColumn, check_columns, check_tags, token_lengths
from nemo_rl.data_plane.chunks.tags import Tags
from nemo_rl.data_plane.client.leases import LeaseRenewer
from nemo_rl.data_plane.client.link import ClientCall, ClientLink, Declaration, RoomWait, names_of, versions_of
from nemo_rl.data_plane.codec import EncodedChunk, encode_rows
from nemo_rl.data_plane.interfaces import Columns
from nemo_rl.data_plane.ledger.ledger import Args
from nemo_rl.errors import CapacityExceeded, DataPlaneError, DataPlaneTimeout, LedgerLost

__all__ = ["PutRequest", "RowWriter"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PutRequest:
    """One put, as the caller of the client asked for it."""

    keys: Sequence[str]
    partition_id: str
    fields: Columns
    """The columns, one row per key."""
    tags: Sequence[Tags] | None
    """Tags per row, or None where the put sets none."""
    claimed: KVBatchMeta | None
    """The meta under whose claims the rows are written, or None for the claims that the client holds."""

    @property
    def where(self) -> str:
        """The put as errors name it."""
        return f"kv_batch_put to partition {self.partition_id!r}"


class RowWriter:
    """Puts of one client."""

    def __init__(self, link: ClientLink, leases: LeaseRenewer) -> None:
        self._link, self._leases = link, leases

    def write(self, call: ClientCall, put: PutRequest, declaration: Declaration) -> KVBatchMeta:
        """Check the columns, store and commit them; return the meta of the rows. A failed put leaves nothing behind."""
        keys = list(put.keys)
        with self._link.clock.measure("encode"):
            columns = check_columns(put.fields, specs=declaration.specs, keys=keys, where=put.where)
        tags = None if put.tags is None else check_tags(put.tags, len(keys), where=put.where)
        found = token_lengths(columns)
        lengths = None if found is None else found.tolist()
        versions: dict[str, Version] = {}
        if keys:
            args: Args = {
                "partition": put.partition_id,
                "declared": declaration.number,
                "keys": keys,
                "lengths": lengths,
                "tags": None if tags is None else tags.plain(),
                "claims": self._leases.claims_of(put.partition_id, keys, put.claimed),
                "may_create": any(column.spec.produced_by == "rollout" for column in columns.values()),
            }
            versions = self._store(call, columns, args)
            self._leases.forget_written(put.partition_id, keys, set(columns))
        return KVBatchMeta(
            partition_id=put.partition_id,
            keys=tuple(keys),
            fields=tuple(columns),
            sequence_lengths=None if lengths is None else tuple(lengths),
            tags=tags,
            versions=versions,
        )

    def _store(self, call: ClientCall, columns: Mapping[str, FlatColumn], put: Args) -> dict[str, Version]:
        """Store the chunks of the columns, then commit them; return the family versions."""
        chunk_bytes = self._link.store.chunk_bytes or self._link.address.config.chunk_bytes
        with self._link.clock.measure("encode"):
            chunks = encode_rows(columns, num_rows=len(names_of(put["keys"])), chunk_bytes=chunk_bytes)
        ids = self._link.new_ids(len(chunks))
        column_types = {
            name: [column.dtype, list(column.trailing)] for name, column in columns.items() if column.values is not None
        }
        records = [_chunk_record(i, chunk, column_types) for i, chunk in zip(ids, chunks, strict=True)]
        args: Args = {**put, "chunks": records}
        wait = RoomWait(ask=partial(self._link.ask, call), deadline=call.deadline, what=call.what)
        reservation = self._reserve(wait, args, chunks)
        handles: Handles | None = None
        try:
            if chunks:
                payloads = {i: chunk.parts for i, chunk in zip(ids, chunks, strict=True)}
                with self._link.clock.measure("store_put"), self._link.errors_of(call):
                    handles = self._link.store.put(payloads, timeout_s=call.left())
        except DataPlaneError:
            self._unreserve(reservation, wait)
            raise
        try:
            wait.ask = partial(self._link.ask, call, handles=handles)
            reply = wait.granted("commit", {**args, "reservation": reservation})
        except (DataPlaneTimeout, LedgerLost):
            raise  # the commit may still count: rows it makes visible must keep their chunks
        except DataPlaneError:
            self._link.drop(ids)
            self._unreserve(reservation, wait)
            raise
        self._link.drop(names_of(reply["drop"]))
        self._link.count("put_bytes", sum(chunk.nbytes for chunk in chunks))
        return versions_of(reply)

    def _reserve(self, wait: RoomWait, put: Args, chunks: Sequence[EncodedChunk]) -> int:
        """Wait for capacity before any byte goes to the store, where bytes are limited; 0 where they are not."""
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
        """Give reserved capacity back; it expires by itself when the ledger cannot be reached."""
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
