"""The writing half of a client: reserve capacity, encode chunks, store them, commit. Used by `ledger_client`.

The one invariant: rows become visible by the commit that follows a complete store put, all of them or none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from nemo_rl.data_plane.address import Handles
from nemo_rl.data_plane.batch_meta import KVBatchMeta, Version
from nemo_rl.data_plane.chunks.columns import FlatColumn, check_columns, check_tags, column_types, token_lengths
from nemo_rl.data_plane.chunks.tags import Tags, TagTable
from nemo_rl.data_plane.client.keyed_rows import ForeignColumns, KeyedRowsLink
from nemo_rl.data_plane.client.link import (
    ClientCall,
    ClientLink,
    Declaration,
    LeaseRenewer,
    RoomWait,
    names_of,
    versions_of,
)
from nemo_rl.data_plane.codec import ChunkForm, EncodedChunk, encode_rows
from nemo_rl.data_plane.interfaces import Columns, Parts
from nemo_rl.data_plane.keys import chunk_in_blocks
from nemo_rl.data_plane.ledger.ledger import Args, Reply
from nemo_rl.errors import CapacityExceeded, DataPlaneError, DataPlaneTimeout, LedgerLost

__all__ = ["PutRequest", "RowWriter"]

logger = logging.getLogger(__name__)

BESIDE_BYTES = 4 << 20
"""Checksums of at least so many bytes are made in their own thread, which holds no lock meanwhile."""

Flat: TypeAlias = Mapping[str, FlatColumn]
Names: TypeAlias = Collection[str]
ColumnTypes: TypeAlias = Mapping[str, Sequence[object]]
"""Field -> dtype and trailing dims."""


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
        return f"kv_batch_put to partition {self.partition_id!r}"


class RowWriter:
    """Puts of one client."""

    def __init__(self, link: ClientLink, leases: LeaseRenewer, keyed: KeyedRowsLink | None = None) -> None:
        self._link, self._leases, self._keyed = link, leases, keyed

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
            store = self._store if self._keyed is None else partial(self._put_keyed, tags)
            versions = versions_of(store(call, columns, args))
            self._leases.forget_written(put.partition_id, keys, set(columns))
        return KVBatchMeta(
            partition_id=put.partition_id,
            keys=tuple(keys),
            fields=tuple(columns),
            sequence_lengths=None if lengths is None else tuple(lengths),
            tags=tags,
            versions=versions,
        )

    def adopt(self, call: ClientCall, partition_id: str, declaration: Declaration, found: ForeignColumns) -> None:
        """Commit columns that another program has written, as a copy that it cannot change any more."""
        assert self._keyed is not None
        lengths = token_lengths(found.columns)
        args: Args = {
            "partition": partition_id,
            "declared": declaration.number,
            "keys": found.keys,
            "lengths": None if lengths is None else lengths.tolist(),
            "tags": None,
            "claims": {},
            "may_create": False,
            "if_absent": True,
            "who": self._keyed.others,
        }
        reply = self._store(call, found.columns, args, op="commit_keyed")
        self._keyed.free(partition_id, reply)

    def _put_keyed(self, tags: TagTable | None, call: ClientCall, columns: Flat, args: Args) -> Reply:
        """Store and commit a put; families that are new to its rows are written under the rows' keys."""
        assert self._keyed is not None
        announced, keys = self._keyed.announce(call, args, columns), names_of(args["keys"])
        here = {name: column for name, column in columns.items() if column.spec.family in announced.in_place}
        apart = {name: column for name, column in columns.items() if name not in here}
        is_last = not apart
        try:
            if here or (tags is not None and not columns):
                self._keyed.write(call, announced, keys, here, tags)
            args |= {"put": announced.number, "is_last": is_last, "in_place": sorted(announced.in_place)}
            reply = self._store(call, columns, args, announced.in_place, "commit_keyed")
        except DataPlaneTimeout:
            raise  # it may still arrive; it ends by itself
        except DataPlaneError:
            self._keyed.end(announced)
            raise
        if not is_last:
            self._keyed.publish(call, announced, keys, apart, None if here else tags)
            self._keyed.end(announced)
        self._keyed.free(announced.partition, reply)
        return reply

    def _store(self, call: ClientCall, columns: Flat, put: Args, in_place: Names = (), op: str = "commit") -> Reply:
        """Store the chunks of the columns, but for families `in_place`, then commit; return the ledger's reply."""
        store, config = self._link.store, self._link.address.config
        with self._link.clock.measure("encode"):
            chunks = encode_rows(
                columns,
                num_rows=len(names_of(put["keys"])),
                chunk_bytes=store.chunk_bytes or config.chunk_bytes,
                block_bytes=store.block_bytes,
                has_checksums=config.has_checksums,
            )
        types, ids = column_types(columns), self._new_ids(chunks)
        payloads: dict[str, Parts] = {}
        for name, chunk in zip(ids, chunks, strict=True):
            payloads |= chunk.payloads(name) if chunk.family not in in_place else {}
        wait = RoomWait(ask=partial(self._link.ask, call), deadline=call.deadline, what=call.what)
        reservation = self._reserve(wait, put, chunks)
        handles: Handles | None = None
        try:
            with _forms_of(chunks) as forms:
                if payloads:
                    with self._link.clock.measure("store_put"), self._link.errors_of(call):
                        handles = self._link.store.put(payloads, timeout_s=call.left())
        except DataPlaneError:
            self._unreserve(reservation, wait)
            raise
        try:
            wait.ask = partial(self._link.ask, call, handles=handles)
            records = [_chunk_record(i, c, f, types) for i, c, f in zip(ids, chunks, forms(), strict=True)]
            reply = wait.granted(op, {**put, "chunks": records, "reservation": reservation})
        except (DataPlaneTimeout, LedgerLost):
            raise  # the commit may still count: rows it makes visible must keep their chunks
        except DataPlaneError:
            self._link.drop([name for name, c in zip(ids, chunks, strict=True) if c.family not in in_place])
            self._unreserve(reservation, wait)
            raise
        self._link.drop(names_of(reply["drop"]))
        self._link.count("put_bytes", sum(chunk.nbytes for chunk in chunks))
        return reply

    def _new_ids(self, chunks: Sequence[EncodedChunk]) -> list[str]:
        """Return fresh ids for chunks; they say how many blocks there are."""
        return [
            chunk_in_blocks(name, chunk.num_blocks) if chunk.num_blocks else name
            for name, chunk in zip(self._link.new_ids(len(chunks)), chunks, strict=True)
        ]

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


@contextmanager
def _forms_of(chunks: Sequence[EncodedChunk]) -> Iterator[Callable[[], list[ChunkForm]]]:
    """Yield a call that gives the forms of the chunks; checksums of much are made while the block runs."""
    if sum(chunk.nbytes for chunk in chunks if chunk.has_checksums) < BESIDE_BYTES:
        forms = [chunk.form() for chunk in chunks]
        yield lambda: forms
        return
    with ThreadPoolExecutor(1, thread_name_prefix="checksums") as pool:
        yield pool.submit(lambda: [chunk.form() for chunk in chunks]).result


def _chunk_record(chunk_id: str, chunk: EncodedChunk, form: ChunkForm, types: ColumnTypes) -> Args:
    return {
        **({"form": form} if form else {}),
        "id": chunk_id,
        "family": chunk.family,
        "fields": list(chunk.fields),
        "first": chunk.first,
        "rows": chunk.rows,
        "nbytes": chunk.nbytes,
        "sizes": list(chunk.sizes),
        "row_sizes": dict(chunk.row_sizes),
        "column_types": {name: types[name] for name in chunk.fields if name in types},
    }
