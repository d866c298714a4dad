"""The reading half of a client: locate rows, fetch their chunks, build columns. Used by `ledger_client`.

`assemble` gives jagged columns, `assemble_padded` a dense batch straight from the chunks, so that each byte is copied
once. Ragged columns of equal row lengths share one offsets tensor, so that torch treats them as one ragged axis. The
one invariant: what is returned was live, whole and of one version at one moment; a read that meets a rewrite or a clear
asks the ledger again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

import numpy as np
import torch

from nemo_rl.data_plane.address import Handles
from nemo_rl.data_plane.batch_meta import KVBatchMeta, Version
from nemo_rl.data_plane.chunks.columns import Lengths, check_keys
from nemo_rl.data_plane.chunks.reader import ChecksumError, ChunkReader, Run, blocks_of_runs, gather, gather_padded
from nemo_rl.data_plane.client.keyed_rows import KeyedRowsLink
from nemo_rl.data_plane.client.link import (
    FIRST_POLL_S,
    LONGEST_POLL_S,
    ClientCall,
    ClientLink,
    Declaration,
    SchemaCache,
    names_of,
    plain_versions,
)
from nemo_rl.data_plane.codec import ChunkForm
from nemo_rl.data_plane.interfaces import Parts
from nemo_rl.data_plane.keys import block_ids, owner_of
from nemo_rl.data_plane.ledger.ledger import Args, Reply
from nemo_rl.data_plane.schema import FieldSpec
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.errors import (
    DataPlaneError,
    FieldNotProduced,
    KeysNotFound,
    PayloadCorrupt,
    PayloadLost,
    SchemaMismatch,
    name_some,
)
from nemo_rl.torch_private import jagged_view

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["Read", "RowReader", "assemble", "assemble_padded"]


logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Read(Generic[_T]):
    """One read, as the caller of the client asked for it."""

    keys: Sequence[str]
    partition_id: str
    fields: Sequence[str]
    """Names of the columns, in the order in which they are returned."""
    build: Callable[[Located], _T]
    """Makes the result of the fetched chunks."""
    versions: Mapping[str, Version] = field(default_factory=dict)
    """Family -> the version that its rows must have; families that are not named may have any."""
    task_name: str | None = None
    """Task under whose claim the rows are read, for errors; None outside every task."""

    @classmethod
    def of_meta(cls, meta: KVBatchMeta, fields: Sequence[str], *, build: Callable[[Located], _T]) -> Read[_T]:
        if not fields:
            raise SchemaMismatch(f"get_data of partition {meta.partition_id!r}: the meta names no fields; pass them")
        return cls(
            keys=meta.keys,
            partition_id=meta.partition_id,
            fields=fields,
            build=build,
            versions=meta.versions,
            task_name=meta.task_name,
        )

    @property
    def where(self) -> str:
        return f"read of partition {self.partition_id!r}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadPlaces:
    """The places of the rows of one read, as the ledger gives them."""

    chunk_ids: list[str]
    forms: list[ChunkForm]
    runs: dict[str, Sequence[Run]]
    """Field -> its rows, in their order."""
    handles: Handles
    blocks: list[Sequence[int]]
    """Chunk -> the blocks that hold its rows; block 0 of a chunk that is stored whole."""

    @classmethod
    def of_reply(cls, reply: Reply) -> ReadPlaces:
        chunk_ids, placements, handles = names_of(reply["chunks"]), reply["placements"], reply.get("handles", {})
        forms = reply.get("forms", [{}] * len(chunk_ids))
        assert isinstance(placements, list) and isinstance(forms, list), f"malformed reply: {reply}"
        assert isinstance(handles, dict), f"malformed reply: {reply}"
        of_chunk: dict[int, list[Run]] = {}
        for run in (run for placement in placements for run in placement["runs"]):
            of_chunk.setdefault(run[0], []).append(run)
        return cls(
            chunk_ids=chunk_ids,
            forms=forms,
            runs={name: placement["runs"] for placement in placements for name in placement["fields"]},
            handles=handles,
            blocks=[
                blocks_of_runs(of_chunk[number], np.frombuffer(form["cuts"], dtype=np.uint32).tolist())
                if "cuts" in form
                else (0,)
                for number, form in enumerate(forms)
            ],
        )

    def stored_ids(self) -> list[str]:
        found: list[str] = []
        for chunk_id, blocks in zip(self.chunk_ids, self.blocks, strict=True):
            stored = block_ids(chunk_id)
            found += [stored[block] for block in blocks]
        return found

    def readers(self, payloads: Sequence[Parts]) -> list[ChunkReader]:
        """Return a reader of each chunk, over the payloads of `stored_ids`."""
        left = iter(payloads)
        return [
            ChunkReader({block: next(left) for block in blocks}, form, chunk_id)
            for chunk_id, form, blocks in zip(self.chunk_ids, self.forms, self.blocks, strict=True)
        ]

    def keys_in(self, chunk_id: str, field_name: str, keys: Sequence[str]) -> list[str]:
        """Return those of the keys whose rows of a field (empty: of any) lie in a chunk."""
        number, found = self.chunk_ids.index(chunk_id), dict[str, None]()
        for name, runs in self.runs.items():
            at = 0
            for chunk, _, count in runs:
                if chunk == number and field_name in ("", name):
                    found.update(dict.fromkeys(keys[at : at + count]))
                at += count
        return list(found)


@dataclass(kw_only=True, slots=True)
class Located:
    """The chunks of one read, and where its rows are in them."""

    specs: Sequence[FieldSpec]
    """Fields in the order asked for."""
    places: ReadPlaces
    payloads: Sequence[Parts]
    num_rows: int
    readers: list[ChunkReader] = field(init=False)

    def __post_init__(self) -> None:
        self.readers = self.places.readers(self.payloads)

    @property
    def runs(self) -> dict[str, Sequence[Run]]:
        """Field -> its rows, in their order."""
        return self.places.runs

    @property
    def num_bytes(self) -> int:
        """Bytes of the payloads."""
        return sum(part.nbytes for payload in self.payloads for part in payload)

    @property
    def num_bytes_used(self) -> int:
        """Bytes of the columns asked for."""
        return sum(reader.num_bytes_used for reader in self.readers)


def assemble(located: Located) -> TensorDict:
    """Return the columns in the order asked for, in memory of their own."""
    from tensordict import NonTensorData, NonTensorStack, TensorDict  # noqa: PLC0415 - see `chunks.ragged`

    rows = TensorDict({}, batch_size=[located.num_rows])
    offsets: list[tuple[Lengths, torch.Tensor]] = []
    for spec in located.specs:
        column = gather(spec, readers=located.readers, runs=located.runs[spec.name])
        if column.objects is not None:
            rows.set(spec.name, NonTensorStack(*[NonTensorData(value) for value in column.objects]))
            continue
        assert column.values is not None
        if column.lengths is not None:
            rows.set(spec.name, _nest_shared(column.values, column.lengths, offsets))
        else:
            rows.set(spec.name, column.values)
    return rows


def assemble_padded(
    located: Located, *, pad_values: Mapping[str, float], pad_to: int | None = None, jagged: Collection[str] = ()
) -> BatchedDataDict:
    """Return the columns as a dense batch; see `DataPlaneClient.get_padded`."""
    batch = BatchedDataDict()
    offsets: list[tuple[Lengths, torch.Tensor]] = []
    for spec in located.specs:
        runs = located.runs[spec.name]
        if spec.is_ragged and spec.name not in jagged:
            width = pad_to if spec.is_token_aligned else None
            pad = pad_values.get(spec.name, 0.0)
            batch[spec.name] = gather_padded(spec, readers=located.readers, runs=runs, pad=pad, width=width)
            continue
        column = gather(spec, readers=located.readers, runs=runs)
        rows = column.values if column.objects is None else column.objects
        assert rows is not None
        if column.lengths is not None and isinstance(rows, torch.Tensor):
            rows = _nest_shared(rows, column.lengths, offsets)
        batch[spec.name] = rows
    return batch


def _nest_shared(values: torch.Tensor, lengths: Lengths, known: list[tuple[Lengths, torch.Tensor]]) -> torch.Tensor:
    for other, offsets in known:
        if np.array_equal(other, lengths):
            return jagged_view(values, offsets)
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    known.append((lengths, torch.from_numpy(starts)))
    return jagged_view(values, known[-1][1])


Adopt: TypeAlias = "Callable[[ClientCall, str, Declaration, Sequence[str], Sequence[str] | None], bool]"
"""Takes over fields (of these keys, or of all rows) that another program has written; False when there are none."""

LOST_AFTER_S = 1.0
"""A chunk that the ledger names and the store lacks for so long is lost: its producer died before it was reachable."""


class RowReader:
    """Reads of one client."""

    def __init__(
        self,
        link: ClientLink,
        schemas: SchemaCache,
        keyed: KeyedRowsLink | None = None,
        adopt: Adopt | None = None,
    ) -> None:
        self._link, self._schemas, self._keyed, self._adopt = link, schemas, keyed, adopt

    def read(self, read: Read[_T]) -> _T:
        """Check what is asked for, fetch the chunks of the rows, and return what `read.build` makes of them."""
        checked = replace(read, keys=check_keys(read.keys, where=read.where))
        task = f", task {read.task_name!r}" if read.task_name else ""
        call = self._link.begin(
            f"{read.where}{task}: {len(checked.keys)} rows ({name_some(checked.keys)}), fields {', '.join(read.fields)}"
        )
        if isinstance(read.fields, str) or not read.fields or len(set(read.fields)) != len(read.fields):
            raise SchemaMismatch(f"{read.where}: expected a list of distinct fields, got {read.fields!r}")
        known = self._schemas.get(call, read.partition_id)
        try:
            return self._built(call, checked, known)
        except SchemaMismatch:
            fresh = self._schemas.ask(call, read.partition_id)
            if fresh == known:
                raise
        return self._built(call, checked, fresh)

    def _built(self, call: ClientCall, read: Read[_T], declaration: Declaration) -> _T:
        declaration.check_declared(read.fields, where=read.where)
        specs = [declaration.specs[name] for name in read.fields]
        args: Args = {
            "partition": read.partition_id,
            "keys": read.keys,
            "fields": list(read.fields),
            "versions": plain_versions(read.versions),
            "declared": declaration.number,
        }
        store, before = self._link.store, list[str]()
        lost_after, poll_s = 0.0, FIRST_POLL_S
        while True:
            reply = (
                self._link.ask(call, "locate", args) if self._adopt is None else self._locate(call, args, declaration)
            )
            places = ReadPlaces.of_reply(reply)
            chunk_ids, stored_ids = places.chunk_ids, places.stored_ids()
            try:
                if self._keyed is not None and reply.get("keyed"):
                    found, payloads = self._keyed.fetch(call, args, specs, reply, places.handles)
                    self._keyed.check_same(call, args, reply)
                    places = ReadPlaces.of_reply(found)
                else:
                    with self._link.clock.measure("store_get"), self._link.errors_of(call):
                        timeout_s, handles = call.left(), places.handles
                        payloads = store.get(stored_ids, timeout_s=timeout_s, handles=handles) if stored_ids else []
                    self._check_live(call, chunk_ids)
                with self._confirmed_errors(stored_ids), self._link.clock.measure("build"):
                    located = Located(specs=specs, places=places, payloads=payloads, num_rows=len(read.keys))
                    rows = read.build(located)
                store.confirm(stored_ids)
            except KeysNotFound as error:
                # Rewritten or cleared since the ledger's answer: its next one says which, or names other chunks. When
                # it names the same ones, what reaches them may still be on its way from their producer.
                if chunk_ids != before:
                    before, lost_after = chunk_ids, time.monotonic() + min(LOST_AFTER_S, call.left() / 2)
                elif time.monotonic() > lost_after:
                    raise PayloadLost(
                        f"{call.what}: the ledger names chunks that the store lacks: {error}; age {call.age():.1f} s"
                    ) from error
                else:
                    time.sleep(poll_s)
                    poll_s = min(poll_s * 2, LONGEST_POLL_S)
            except ChecksumError as error:
                raise self._corrupt(call, read, places, error) from error
            else:
                used = located.num_bytes_used
                moved = used if store.is_mapped else located.num_bytes
                self._link.count("get_bytes", moved)
                self._link.count("over_read_bytes", moved - used)
                return rows

    def _locate(self, call: ClientCall, args: Args, declaration: Declaration) -> Reply:
        """Ask where the rows are; fields that another program has written since are taken over first."""
        try:
            return self._link.ask(call, "locate", args)
        except FieldNotProduced:
            keys, fields = names_of(args["keys"]), names_of(args["fields"])
            if self._adopt is None or not self._adopt(call, str(args["partition"]), declaration, fields, keys):
                raise
        return self._link.ask(call, "locate", args)

    def _corrupt(self, call: ClientCall, read: Read[_T], places: ReadPlaces, error: ChecksumError) -> PayloadCorrupt:
        """Return the error that names rows, field and hop; the chunk is read once more to tell the hop."""
        number, store = places.chunk_ids.index(error.chunk_id), self._link.store
        stored, blocks = block_ids(error.chunk_id), places.blocks[number]
        hop = f"in the store, or on the way to it from {owner_of(error.chunk_id)}"
        try:
            found = store.get([stored[block] for block in blocks], timeout_s=call.left(), handles=places.handles)
            again = ChunkReader(dict(zip(blocks, found, strict=True)), places.forms[number], error.chunk_id)
            if error.field_name:
                again.check_column(error.field_name)
            hop = f"on the way from the store to {self._link.label}: a second read was right"
        except (ChecksumError, DataPlaneError) as second:
            logger.debug("a second read of chunk %s is wrong too: %s", error.chunk_id, second)
        what = f"field {error.field_name!r}" if error.field_name else f"fields {', '.join(read.fields)}"
        keys = places.keys_in(error.chunk_id, error.field_name, read.keys)
        return PayloadCorrupt(
            f"{call.what}: {what} of rows {name_some(keys)}: the bytes are not those that were put: {error}, in chunk "
            f"{error.chunk_id}; changed {hop}; test the memory and the network of these machines"
        )

    @contextmanager
    def _confirmed_errors(self, chunk_ids: list[str]) -> Iterator[None]:
        """Ask the store on an error inside whether the bytes are still those of the chunks.

        Where a chunk was freed and its memory overwritten since it was fetched, anything can be wrong with its bytes.
        """
        try:
            yield
        except Exception:
            self._link.store.confirm(chunk_ids)
            raise

    def _check_live(self, call: ClientCall, chunk_ids: list[str]) -> None:
        """Check, where a store reuses memory, that no chunk was freed, and maybe overwritten, while it was fetched."""
        if not chunk_ids or not self._link.store.reuses_memory:
            return
        gone = names_of(self._link.ask(call, "gone", {"chunks": chunk_ids})["chunks"])
        if gone:
            raise KeysNotFound(f"{len(gone)} of {len(chunk_ids)} chunks were freed while they were read")
