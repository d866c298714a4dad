"""The reading half of a client: locate rows, fetch their chunks, build columns. Used by `ledger_client`.

`assemble` gives jagged columns, `assemble_padded` a dense batch straight from the chunks, so that each byte is copied
once. Ragged columns of equal row lengths share one offsets tensor, so that torch treats them as one ragged axis. The
one invariant: what is returned was live, whole and of one version at one moment; a read that meets a rewrite or a clear
asks the ledger again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

import numpy as np
import torch

from nemo_rl.data_plane.batch_meta import KVBatchMeta, Version
from nemo_rl.data_plane.chunks.columns import Lengths
from nemo_rl.data_plane.client.keyed_rows import KeyedRowsLink
from nemo_rl.data_plane.client.link import (
    FIRST_POLL_S,
    LONGEST_POLL_S,
    ClientCall,
    ClientLink,
    Declaration,
    names_of,
    plain_versions,
)
from nemo_rl.data_plane.codec import ChunkReader, Run, gather, gather_padded
from nemo_rl.data_plane.interfaces import Parts
from nemo_rl.data_plane.ledger.ledger import Args, Reply
from nemo_rl.data_plane.schema import FieldSpec
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.errors import FieldNotProduced, KeysNotFound, PayloadLost, SchemaMismatch

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["Located", "Read", "RowReader", "assemble", "assemble_padded"]


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
        """Make the read of the rows of a meta, in the versions that the meta knows."""
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
        """The read as errors name it."""
        return f"read of partition {self.partition_id!r}"


@dataclass(kw_only=True, slots=True)
class Located:
    """The chunks of one read, and where its rows are in them."""

    specs: Sequence[FieldSpec]
    """Fields in the order asked for."""
    reply: Reply
    payloads: Sequence[Parts]
    num_rows: int
    readers: list[ChunkReader] = field(init=False)
    runs: dict[str, Sequence[Run]] = field(init=False)

    def __post_init__(self) -> None:
        self.readers = [ChunkReader(payload) for payload in self.payloads]
        placements = self.reply["placements"]
        assert isinstance(placements, list), f"malformed reply: {self.reply}"
        self.runs = {name: placement["runs"] for placement in placements for name in placement["fields"]}

    @property
    def num_bytes(self) -> int:
        """Bytes that the store has moved."""
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


def assemble_padded(located: Located, *, pad_values: Mapping[str, float], pad_to: int | None = None) -> BatchedDataDict:
    """Return the columns as a dense batch; see `DataPlaneClient.get_padded`."""
    batch = BatchedDataDict()
    for spec in located.specs:
        runs = located.runs[spec.name]
        if spec.is_ragged:
            width = pad_to if spec.is_token_aligned else None
            pad = pad_values.get(spec.name, 0.0)
            batch[spec.name] = gather_padded(spec, readers=located.readers, runs=runs, pad=pad, width=width)
            continue
        column = gather(spec, readers=located.readers, runs=runs)
        rows = column.values if column.objects is None else column.objects
        assert rows is not None
        batch[spec.name] = rows
    return batch


def _nest_shared(values: torch.Tensor, lengths: Lengths, known: list[tuple[Lengths, torch.Tensor]]) -> torch.Tensor:
    for other, offsets in known:
        if np.array_equal(other, lengths):
            return torch.nested.nested_tensor_from_jagged(values, offsets)
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    known.append((lengths, torch.from_numpy(starts)))
    return torch.nested.nested_tensor_from_jagged(values, known[-1][1])


Adopt: TypeAlias = "Callable[[ClientCall, str, Declaration, Sequence[str], Sequence[str] | None], bool]"
"""Takes over fields (of these keys, or of all rows) that another program has written; False when there are none."""

LOST_AFTER_S = 1.0
"""A chunk that the ledger names and the store lacks for so long is lost: its producer died before it was reachable."""


class RowReader:
    """Reads of one client."""

    def __init__(self, link: ClientLink, keyed: KeyedRowsLink | None = None, adopt: Adopt | None = None) -> None:
        self._link, self._keyed, self._adopt = link, keyed, adopt

    def read(self, call: ClientCall, read: Read[_T], declaration: Declaration) -> _T:
        """Fetch the chunks of the rows; return what `read.build` makes of them."""
        declaration.check_declared(read.fields, where=read.where)
        specs = [declaration.specs[name] for name in read.fields]
        args: Args = {
            "partition": read.partition_id,
            "keys": read.keys,
            "fields": list(read.fields),
            "versions": plain_versions(read.versions),
            "declared": declaration.number,
        }
        before: list[str] = []
        lost_after, poll_s = 0.0, FIRST_POLL_S
        while True:
            reply = (
                self._link.ask(call, "locate", args) if self._adopt is None else self._locate(call, args, declaration)
            )
            chunk_ids = names_of(reply["chunks"])
            try:
                payloads: list[Parts] = []
                if reply.get("keyed"):
                    reply, payloads = self._fetch_keyed(call, read, specs, args, reply)
                elif chunk_ids:
                    handles = reply.get("handles", {})
                    assert isinstance(handles, dict), f"malformed reply: {reply}"
                    with self._link.clock.measure("store_get"), self._link.errors_of(call):
                        payloads = self._link.store.get(chunk_ids, timeout_s=call.left(), handles=handles)
                    self._check_live(call, chunk_ids)
                with self._confirmed_errors(chunk_ids), self._link.clock.measure("build"):
                    located = Located(specs=specs, reply=reply, payloads=payloads, num_rows=len(read.keys))
                    rows = read.build(located)
                self._link.store.confirm(chunk_ids)
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
            else:
                self._link.count("get_bytes", located.num_bytes)
                self._link.count("over_read_bytes", located.num_bytes - located.num_bytes_used)
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

    def _fetch_keyed(
        self, call: ClientCall, read: Read[_T], specs: Sequence[FieldSpec], args: Args, reply: Reply
    ) -> tuple[Reply, list[Parts]]:
        """Fetch cells under the rows' keys, and chunks; return reply and payloads as if all were chunks."""
        handles = reply.get("handles", {})
        assert self._keyed is not None and isinstance(handles, dict), f"malformed reply: {reply}"
        fetched = self._keyed.fetch(call, read, specs, reply, handles)
        self._keyed.check_same(call, args, reply)
        return fetched

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
