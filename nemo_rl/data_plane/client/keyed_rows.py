"""`KeyedRowsLink`: a client's dealings with a store that keeps columns under the rows' keys (`ColumnStore`).

Used by `writes`, `reads` and `ledger_client`; the ledger's half is `ledger.keyed_rows`. A put is announced before its
bytes are sent, cells under keys are read back as chunks that every reader knows, and columns that another program has
written are copied into chunks of ours once they have passed the checks of a put. The one invariant: nothing that
another program does to a row changes a value that the ledger has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl.data_plane.chunks.columns import FlatColumn, check_columns, column_types
from nemo_rl.data_plane.chunks.reader import Run
from nemo_rl.data_plane.chunks.tags import Tags
from nemo_rl.data_plane.client.link import (
    FIRST_POLL_S,
    LONGEST_POLL_S,
    ClientCall,
    ClientLink,
    Declaration,
    names_of,
)
from nemo_rl.data_plane.codec import EncodedChunk, encode_rows
from nemo_rl.data_plane.interfaces import ColumnStore, Handles, Parts
from nemo_rl.data_plane.ledger.ledger import Args, Reply
from nemo_rl.data_plane.schema import FieldSpec
from nemo_rl.errors import DataPlaneError, DataPlaneTimeout, KeysNotFound, PayloadLost, SchemaMismatch, name_some

__all__ = ["ForeignColumns", "KeyedRowsLink"]

logger = logging.getLogger(__name__)

WHOLE = 1 << 62
"""Chunk size, in bytes, that gives one chunk per family."""
PUT_OVERTIME_S = 30.0
"""A put that was sent before its deadline may reach the store for so long."""
STRANGERS_S = 10.0
"""Rows of other programs are looked for at most once in so many seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnnouncedPut:
    """A put that the ledger knows of."""

    partition: str
    number: int
    in_place: frozenset[str]
    """Families that are written under the rows' keys; the others go to chunks first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignColumns:
    """Columns of some rows that another program has written, checked like a put."""

    keys: list[str]
    columns: dict[str, FlatColumn]


@dataclass(slots=True)
class _Fetch:
    positions: list[int]
    """Index of each row in the read."""
    specs: list[FieldSpec]
    sizes: dict[str, Sequence[int]]


class KeyedRowsLink:
    """The `ColumnStore` of one client, with its ledger."""

    def __init__(self, link: ClientLink, rows: ColumnStore) -> None:
        self._link, self._rows = link, rows
        self._strangers: dict[str, tuple[float, int]] = {}
        """Partition -> when it was last searched for rows of other programs, and how many there were."""

    @property
    def others(self) -> str:
        """Name a client of another program, for messages."""
        return self._rows.others

    # ---- writing

    def announce(self, call: ClientCall, put: Args, columns: Mapping[str, FlatColumn]) -> AnnouncedPut:
        """Tell the ledger about a put; wait while its rows are still being freed."""
        families: dict[str, list[str]] = {}
        for name, column in columns.items():
            families.setdefault(column.spec.family, []).append(name)
        apart = {column.spec.family for column in columns.values() if not self._rows.takes(column)}
        checked = ("partition", "declared", "keys", "lengths", "claims", "may_create")
        args: Args = {name: put[name] for name in checked}
        args |= {"families": {family: names for family, names in families.items() if family not in apart}}
        args |= {"column_types": column_types(columns)}
        partition, poll_s = str(put["partition"]), FIRST_POLL_S
        while True:
            reply = self._link.ask(call, "begin", {**args, "lasts_s": call.left() + PUT_OVERTIME_S})
            self.free(partition, reply)
            if "blocked" not in reply:
                number, in_place = reply["put"], names_of(reply["in_place"])
                assert isinstance(number, int), f"malformed reply: {reply}"
                return AnnouncedPut(partition=partition, number=number, in_place=frozenset(in_place))
            if call.left() < poll_s:
                raise DataPlaneTimeout(f"{call.what}: {reply['blocked']}; age {call.age():.1f} s")
            time.sleep(poll_s)
            poll_s = min(poll_s * 2, LONGEST_POLL_S)

    def write(
        self,
        call: ClientCall,
        announced: AnnouncedPut,
        keys: Sequence[str],
        columns: Mapping[str, FlatColumn],
        tags: Sequence[Tags] | None,
    ) -> None:
        with self._link.clock.measure("store_put"), self._link.errors_of(call):
            self._rows.put(announced.partition, keys, columns, tags, timeout_s=call.left())

    def publish(
        self,
        call: ClientCall,
        announced: AnnouncedPut,
        keys: Sequence[str],
        columns: Mapping[str, FlatColumn],
        tags: Sequence[Tags] | None,
    ) -> None:
        """Show other programs columns that the ledger has in chunks by now; a failure is only reported."""
        taken = {name: column for name, column in columns.items() if self._rows.takes(column)}
        try:
            self.write(call, announced, keys, taken, tags)
        except DataPlaneError as error:
            logger.warning("%s: %s does not see fields %s: %s", call.what, self.others, name_some(columns), error)

    def end(self, announced: AnnouncedPut) -> None:
        """The put writes nothing any more; what it left of rows that do not live is freed."""
        try:
            reply = self._link.notify("end", {"partition": announced.partition, "put": announced.number})
            self.free(announced.partition, reply)
        except DataPlaneError as error:
            logger.warning("could not end an announced put: %s", error)

    def free(self, partition_id: str, reply: Reply) -> None:
        """Free the rows that a reply names, and confirm it; a failure leaves them to a later call."""
        keys = names_of(reply.get("free", []))
        if not keys:
            return
        try:
            self._rows.drop(partition_id, keys, timeout_s=self._link.timeout_s)
            self._link.notify("freed", {"partition": partition_id, "keys": keys})
        except DataPlaneError as error:
            logger.warning("could not free %d rows of partition %r: %s", len(keys), partition_id, error)

    # ---- reading

    def fetch(
        self, call: ClientCall, args: Args, specs: Sequence[FieldSpec], reply: Reply, handles: Handles
    ) -> tuple[Reply, list[Parts]]:
        """Return the reply of `locate` to `args`, and its payloads, as if all of its cells were in chunks."""
        chunk_ids, keyed = names_of(reply["chunks"]), reply.get("keyed", [])
        assert isinstance(keyed, list), f"malformed reply: {reply}"
        apart = [i for i in range(len(chunk_ids)) if i not in set(keyed)]
        payloads = self._chunks(call, [chunk_ids[i] for i in apart], handles)
        numbers = {old: new for new, old in enumerate(apart)}
        placements = reply["placements"]
        assert isinstance(placements, list), f"malformed reply: {reply}"
        fetches = _plan_fetches(placements, {spec.name: spec for spec in specs}, set(keyed))
        first_of: dict[str, int] = {}
        for fetch in fetches:
            for chunk in self._rows_as_chunks(call, args, fetch):
                first_of.update(dict.fromkeys(chunk.fields, len(payloads)))
                payloads.append(chunk.parts)
        moved = [_with_runs(placement, numbers, first_of) for placement in placements]
        forms = reply.get("forms", [{}] * len(chunk_ids))
        assert isinstance(forms, list), f"malformed reply: {reply}"
        num_fetched = len(payloads) - len(apart)
        found: Reply = {
            **reply,
            "chunks": [*(chunk_ids[i] for i in apart), *[""] * num_fetched],
            "forms": [*(forms[i] for i in apart), *[{}] * num_fetched],
            "placements": moved,
        }
        return found, payloads

    def check_same(self, call: ClientCall, args: Args, before: Reply) -> None:
        """Check that the ledger still has every row where it was: TransferQueue gives the place of a cleared row away.

        Raises:
            KeysNotFound: a row was cleared or rewritten while it was read.
        """
        after = self._link.ask(call, "locate", args)
        if any(after.get(what) != before.get(what) for what in ("chunks", "placements", "keyed")):
            raise KeysNotFound("rows were cleared or rewritten while they were read")

    def _chunks(self, call: ClientCall, chunk_ids: list[str], handles: Handles) -> list[Parts]:
        if not chunk_ids:
            return []
        with self._link.clock.measure("store_get"), self._link.errors_of(call):
            return self._link.store.get(chunk_ids, timeout_s=call.left(), handles=handles)

    def _rows_as_chunks(self, call: ClientCall, args: Args, fetch: _Fetch) -> list[EncodedChunk]:
        wanted, partition_id = names_of(args["keys"]), str(args["partition"])
        keys = [wanted[at] for at in fetch.positions]
        with self._link.clock.measure("store_get"), self._link.errors_of(call):
            found = self._rows.get(partition_id, keys, fetch.specs, sizes=fetch.sizes, timeout_s=call.left())
        specs = {spec.name: spec for spec in fetch.specs}
        columns = check_columns(found, specs=specs, keys=keys, where=call.what)
        chunks = encode_rows(columns, num_rows=len(keys), chunk_bytes=WHOLE)
        for chunk in chunks:
            _check_sizes(call, chunk, keys, fetch.sizes, self.others)
        return chunks

    # ---- columns of other programs

    def foreign(
        self,
        call: ClientCall,
        partition_id: str,
        declaration: Declaration,
        fields: Sequence[str],
        keys: Sequence[str] | None = None,
    ) -> list[ForeignColumns]:
        """Return the columns of `fields` that other programs have written while the ledger lacks them.

        Raises:
            SchemaMismatch: such a column has another dtype, dims or lengths than the partition declares.
        """
        args: Args = {"partition": partition_id, "declared": declaration.number, "fields": list(fields)}
        reply = self._link.ask(call, "lacking", {**args, "keys": None if keys is None else list(keys)})
        lacking = reply["fields"]
        assert isinstance(lacking, dict), f"malformed reply: {reply}"
        if not lacking:
            return []
        with self._link.errors_of(call):
            written = self._rows.written(partition_id, lacking, timeout_s=call.left())
        self._report_strangers(call, partition_id)
        together: dict[tuple[str, ...], list[str]] = {}
        for name, rows in written.items():
            together.setdefault(tuple(rows), []).append(name)
        found = [self._checked(call, partition_id, declaration, rows, names) for rows, names in together.items()]
        return [one for one in found if one is not None]

    def _checked(
        self, call: ClientCall, partition_id: str, declaration: Declaration, rows: Sequence[str], names: Sequence[str]
    ) -> ForeignColumns | None:
        specs = {name: declaration.specs[name] for name in names}
        where = f"partition {partition_id!r}, what {self.others} has written"
        try:
            with self._link.clock.measure("store_get"), self._link.errors_of(call):
                given = self._rows.get(partition_id, rows, list(specs.values()), sizes=None, timeout_s=call.left())
        except KeysNotFound:
            return None  # cleared since
        except SchemaMismatch as error:
            raise SchemaMismatch(f"{where}: {error}") from error
        return ForeignColumns(keys=list(rows), columns=check_columns(given, specs=specs, keys=rows, where=where))

    def _report_strangers(self, call: ClientCall, partition_id: str) -> None:
        """Warn about rows that only another program has made: they are ignored."""
        now = time.monotonic()
        searched, known = self._strangers.get(partition_id, (-STRANGERS_S, 0))
        if now - searched < STRANGERS_S:
            return
        with self._link.errors_of(call):
            keys = self._rows.keys(partition_id, timeout_s=call.left())
        found = names_of(self._link.ask(call, "strangers", {"partition": partition_id, "keys": keys})["keys"])
        self._strangers[partition_id] = (now, len(found))
        if len(found) > known:
            logger.warning(
                "partition %r: ignoring %d rows that %s has made and this run does not know: %s",
                partition_id,
                len(found),
                self.others,
                name_some(found),
            )


def _plan_fetches(
    placements: Sequence[Mapping[str, Any]], specs: Mapping[str, FieldSpec], keyed: Collection[int]
) -> list[_Fetch]:
    fetches: dict[tuple[int, ...], _Fetch] = {}
    for placement in placements:
        positions: list[int] = []
        at = 0
        for number, _, count in placement["runs"]:
            if number in keyed:
                positions += range(at, at + count)
            at += count
        if not positions:
            continue
        fetch = fetches.setdefault(tuple(positions), _Fetch(positions=positions, specs=[], sizes={}))
        fetch.specs += [specs[name] for name in placement["fields"]]
        fetch.sizes |= placement["sizes"]
    return list(fetches.values())


def _with_runs(placement: Mapping[str, Any], numbers: Mapping[int, int], first_of: Mapping[str, int]) -> Args:
    own = first_of.get(placement["fields"][0], -1)
    runs: list[Run] = []
    fetched = 0
    for number, first, count in placement["runs"]:
        if number in numbers:
            runs.append([numbers[number], first, count])
        else:
            runs.append([own, fetched, count])
            fetched += count
    return {"fields": placement["fields"], "runs": runs}


def _check_sizes(
    call: ClientCall, chunk: EncodedChunk, keys: Sequence[str], sizes: Mapping[str, Sequence[int]], others: str
) -> None:
    """Check that each cell has the bytes that the ledger knows."""
    for name, total in zip(chunk.fields, chunk.sizes, strict=True):
        table = chunk.row_sizes.get(name)
        found = [total // chunk.rows] * chunk.rows if table is None else memoryview(table).cast("Q").tolist()
        wrong = [i for i, (a, b) in enumerate(zip(found, sizes[name], strict=True)) if a != b]
        if wrong:
            at = wrong[0]
            raise PayloadLost(
                f"{call.what}: field {name!r} of {name_some(keys[i] for i in wrong)} has {found[at]} bytes in the "
                f"store where this run wrote {sizes[name][at]}: {others} has overwritten it; let it write columns "
                "that the run does not"
            )
