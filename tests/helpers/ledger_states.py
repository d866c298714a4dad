"""The state of a checked ledger as a plain value: two histories with equal values have the same future.

The value has the whole state of the ledger and that of its specification. Names and numbers that only tell things apart
are replaced: claims and chunks are numbered as they are met, versions count from the partition's first one, times from
now, and what is over is over, however long. Clients are sorted, so it does not matter which of them did what.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, TypeAlias

from nemo_rl.data_plane.ledger import state
from nemo_rl.data_plane.ledger.capacity import Capacity, Reservation
from nemo_rl.data_plane.ledger.ledger import Ledger
from tests.helpers.checked_ledger import CheckedLedger
from tests.helpers.ledger_rules import PartitionRules, RowState

Plain: TypeAlias = Any
"""Tuples, lists, numbers, strings, None."""

IN_THE_VALUE: Mapping[type, str] = {
    Ledger: "_partitions _chunks _claims _first_versions _capacity",
    state.Partition: "name specs num_samples group_size tasks rows columns tags groups column_types nbytes field_bytes "
    "top_version first_version cleared",
    state.FamilyColumn: "whole split",
    state.SplitRow: "version pieces",
    state.Chunk: "chunk_id nbytes fields rows sizes row_sizes version cells live",
    state.Row: "length",
    state.LedgerGroup: "keys put",
    state.TaskCursor: "writes pending leases done",
    state.ClaimLease: "claim_id expires keys has_expired",
    Capacity: "rows nbytes live_rows live_bytes stored_bytes live_chunks reserved",
    Reservation: "partition rows nbytes expires",
}
LEFT_OUT: Mapping[type, str] = {
    # The run, settings, functions; counters whose numbers are only compared for equality.
    # Rows under their own keys: no operation of the histories announces one.
    # Handles of chunks: no operation of the histories brings one. Leases that have expired: a count.
    Ledger: "run_id _lease_s _validate _record _ops _num_claims _num_declared _keyed _handles num_expired",
    # What readers need besides a payload; the ledger hands it out as it came.
    state.Chunk: "form is_keyed",
    # What only texts and counts show: labels, ages, highest marks. The order of `rows` stands for `num_put`.
    state.Partition: "declaration declared num_put peak_rows peak_bytes added",
    state.Row: "sequence owner put_at history",
    state.ClaimLease: "consumer_id taken",
    Capacity: "partitions lease_s peak_rows peak_bytes peak_chunks blocked_s num_reservations",
}


def check_attributes(ledger: Ledger) -> None:
    """Raise when a record of the ledger has an attribute that nobody has decided about."""
    for kind, names in IN_THE_VALUE.items():
        has = set(vars(ledger)) if kind is Ledger else {field.name for field in dataclasses.fields(kind)}
        known = {*names.split(), *LEFT_OUT.get(kind, "").split()}
        assert has == known, (
            f"{kind.__name__} has {sorted(has ^ known)} more or less than tests/helpers/ledger_states.py knows: name a "
            "new attribute in IN_THE_VALUE and add it to the value, or name it in LEFT_OUT with the reason"
        )


def digest(checked: CheckedLedger, clients: tuple[str, ...]) -> bytes:
    """Return 16 bytes that tell the states of a ledger apart."""
    return hashlib.blake2b(repr(_StateReader(checked).value(clients)).encode(), digest_size=16).digest()


class _Numbers(dict[Any, int]):
    """Numbers in the order in which names are met, from 1."""

    def __missing__(self, name: object) -> int:
        self[name] = len(self) + 1
        return self[name]


class _StateReader:
    """Reads one state; chunks and claims have the same numbers in all of its parts."""

    def __init__(self, checked: CheckedLedger) -> None:
        self._checked, self._ledger = checked, checked.ledger
        self._chunks, self._claims = _Numbers(), _Numbers()
        capacity = self._ledger._capacity
        self._reserved = {
            number: (kept.partition, kept.rows, kept.nbytes, self._left(kept.expires))
            for number, kept in capacity.reserved.items()
            if kept.expires > checked.now
        }
        self._promised = {
            number: (*kept[:3], self._left(kept[3]))
            for number, kept in checked.specification.reservations.items()
            if kept[3] > checked.now
        }

    def value(self, clients: tuple[str, ...]) -> Plain:
        ledger, capacity, specification = self._ledger, self._ledger._capacity, self._checked.specification
        partitions = [self._partition(partition) for partition in ledger._partitions.values()]
        claims = [
            (self._claims[number], partition, task, sorted(lease.keys), self._left(lease.expires), lease.has_expired)
            for number, (partition, task, lease) in ledger._claims.items()
            if lease.keys  # one without rows is as good as none
        ]
        counts = (capacity.live_rows, capacity.live_bytes, capacity.stored_bytes, capacity.live_chunks)
        rules = [self._rules(partition.rules, name) for name, partition in specification.partitions.items()]
        highest = [(name, self._highest(name, versions)) for name, versions in specification.highest.items()]
        known = sorted(map(repr, (self._client(who) for who in clients)))
        owned = {put.args.get("reservation", 0) for put in self._checked.puts.values()}
        abandoned = [
            sorted(kept for number, kept in reserved.items() if number not in owned)
            for reserved in (self._reserved, self._promised)
        ]
        return partitions, sorted(claims), counts, rules, highest, known, abandoned, bool(self._checked.torn)

    def _partition(self, partition: state.Partition) -> Plain:
        base = partition.first_version - 1
        chunks: dict[int, Plain] = {}
        rows = []
        for key, row in partition.rows.items():
            cells: list[Plain] = []
            for column in partition.columns.values():
                whole, split = column.whole.get(key), column.split.get(key)
                pieces = [] if split is None else split.pieces
                pieces = pieces if whole is None else [state.RowPiece(*whole, whole[0].fields)]
                cells.append((split and split.version - base, [self._piece(p, chunks, base) for p in pieces]))
            rows.append((key, row.length, cells, [(n, v[key]) for n, v in partition.tags.items() if key in v]))
        tasks = []
        for task in partition.tasks.values():
            leases = [
                (key, self._claims[lease.claim_id], self._left(lease.expires), lease.has_expired)
                for key in partition.rows
                if (lease := task.leases.get(key)) is not None
            ]
            done = [(key, self._claim(task.done[key])) for key in partition.rows if key in task.done]
            tasks.append((list(task.pending), leases, done))
        return (
            (partition.name, partition.group_size, partition.num_samples, partition.nbytes),
            (rows, list(chunks.items()), tasks),
            [(uid, list(group.keys), sorted(group.put)) for uid, group in partition.groups.items()],
            sorted(partition.column_types.items()),
            sorted((name, size) for name, size in partition.field_bytes.items() if size),
            partition.top_version - base,
            # 0 says that nothing was written.
            sorted((key, version and version - base) for key, version in partition.cleared.items()),
        )

    def _piece(self, piece: state.RowPiece, chunks: dict[int, Plain], base: int) -> Plain:
        chunk, number = piece.chunk, self._chunks[piece.chunk.chunk_id]
        if number not in chunks:
            sizes = (chunk.nbytes, sorted(chunk.sizes.items()), sorted(chunk.live.items()), list(chunk.row_sizes))
            chunks[number] = (chunk.rows, chunk.version - base, chunk.cells, sizes)
        return number, piece.at, sorted(piece.fields)

    def _rules(self, rules: PartitionRules, name: str) -> Plain:
        base = self._ledger._partitions[name].first_version - 1
        return (
            [
                (key, row.length, self._cells(row), sorted((family, v - base) for family, v in row.versions.items()))
                for key, row in rules.rows.items()
            ],
            sorted((*at, self._claims[claim], self._left(ends)) for at, (claim, ends) in rules.leases.items()),
            sorted((*at, self._claim(claim)) for at, claim in rules.done.items()),
            sorted((uid, sorted(put)) for uid, put in rules.put_keys.items()),
        )

    def _cells(self, row: RowState) -> Plain:
        return sorted((name, self._chunks[chunk], at) for name, (chunk, at) in row.cells.items())

    def _highest(self, name: str, versions: Mapping[tuple[str, str], int]) -> Plain:
        """Return the highest versions that the next one of a partition, declared or not, is not above already."""
        partition = self._ledger._partitions.get(name)
        first = self._ledger._first_versions.get(name, 1) if partition is None else partition.first_version
        return sorted((*at, version - first) for at, version in versions.items() if version >= first)

    def _client(self, who: str) -> Plain:
        checked = self._checked
        if who in checked.crashed:
            return ("crashed",)
        put, meta = checked.puts.get(who), checked.claims.get(who)
        pending: Plain = None
        if put is not None:
            number = put.args.get("reservation", 0)
            claims = [(t, sorted((k, self._claim(c)) for k, c in h.items())) for t, h in put.args["claims"].items()]
            fields = [chunk["fields"] for chunk in put.args["chunks"]]
            pending = (put.args["keys"], fields, claims, self._reserved.get(number), self._promised.get(number))
        held = None if meta is None else (meta.task, meta.keys, self._claim(meta.claim))
        return pending, held

    def _claim(self, number: int) -> int:
        """Return the number of a claim that some row or lease knows; all others are alike."""
        return self._claims.get(number, 0) if number else -1

    def _left(self, ends: float) -> float:
        return max(ends - self._checked.now, 0.0)
