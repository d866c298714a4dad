"""The ledger's rules about puts: what a commit is refused for, what is reserved, and who has to wait for capacity.

Called by `ledger.py` only, before anything changes. A put that can never fit is refused; one that does not fit now gets
what it waits for, and the client asks again until its deadline. Nothing is ever evicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from nemo_rl.data_plane.ledger import claims as claim_rules
from nemo_rl.data_plane.ledger.state import Chunk, Partition, RowPiece
from nemo_rl.errors import CapacityExceeded, KeysNotFound, SchemaMismatch, name_some

__all__ = ["Capacity", "ColumnTypes", "Demand", "Reservation", "check_present", "check_put", "is_any_written"]


TOTALS = (
    *("live_rows", "live_bytes", "stored_bytes", "live_chunks", "peak_rows", "peak_bytes", "peak_chunks"),
    *("blocked_s", "num_reservations"),
)
"""Fields of `Capacity` that change, besides the reservations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The rows and bytes that one put needs."""

    num_keys: int
    new_rows: int
    nbytes: int
    reservation: int = 0
    """The reservation under which it comes; 0 when it has none."""

    @classmethod
    def of(cls, partition: Partition, keys: Sequence[str], *, nbytes: int, reservation: int = 0) -> Demand:
        new_rows = len(keys) - sum(map(partition.rows.__contains__, keys))
        return cls(num_keys=len(keys), new_rows=new_rows, nbytes=nbytes, reservation=reservation)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """Capacity reserved for a put whose bytes are on their way to the store."""

    partition: str
    rows: int
    nbytes: int
    expires: float


@dataclass(slots=True)
class Capacity:
    """Limits, live totals and their highest marks, reservations."""

    rows: int
    nbytes: int | None
    partitions: Mapping[str, Partition]
    lease_s: float
    live_rows: int = 0
    live_bytes: int = 0
    """Bytes of live rows and of the headers of their chunks, to which the limit applies."""
    stored_bytes: int = 0
    """Bytes of whole chunks: cleared rows stay in the store until the last row of their chunk goes."""
    live_chunks: int = 0
    peak_rows: int = 0
    peak_bytes: int = 0
    peak_chunks: int = 0
    blocked_s: float = 0.0
    """Seconds that puts have waited for capacity, all clients together."""
    reserved: dict[int, Reservation] = field(default_factory=dict)
    num_reservations: int = 0

    def reserve(self, partition: Partition, demand: Demand, *, now: float) -> int:
        """Reserve capacity; it is given back by `end`, or by itself after the lease time."""
        self.num_reservations += 1
        self.reserved[self.num_reservations] = Reservation(
            partition=partition.name, rows=demand.new_rows, nbytes=demand.nbytes, expires=now + self.lease_s
        )
        return self.num_reservations

    def end(self, reservation: int) -> None:
        self.reserved.pop(reservation, None)

    def lacks_capacity(self, partition: Partition, demand: Demand, *, now: float) -> str | None:
        """Return the reason for which a put has to wait, or None.

        Raises:
            CapacityExceeded: it would not fit into an empty data plane either.
        """
        self._check_can_ever_fit(partition, demand)
        self.reserved = {i: reservation for i, reservation in self.reserved.items() if reservation.expires > now}
        others = [reservation for i, reservation in self.reserved.items() if i != demand.reservation]
        reserved_here = sum(reservation.rows for reservation in others if reservation.partition == partition.name)
        reserved_rows = sum(reservation.rows for reservation in others)
        reasons: list[str] = []
        if len(partition.rows) + reserved_here + demand.new_rows > partition.num_samples:
            reasons.append(
                f"{demand.new_rows} new rows with {len(partition.rows)} live ones{_reserved(reserved_here)} are "
                f"more than the num_samples = {partition.num_samples} declared for the partition"
            )
        if self.live_rows + reserved_rows + demand.new_rows > self.rows:
            reasons.append(
                f"{demand.new_rows} new rows with {self.live_rows} live ones{_reserved(reserved_rows)} are more "
                f"than data_plane.storage_capacity.rows = {self.rows}"
            )
        reserved_bytes = sum(reservation.nbytes for reservation in others)
        if self.nbytes is not None and self.live_bytes + reserved_bytes + demand.nbytes > self.nbytes:
            reasons.append(
                f"{demand.nbytes} new bytes with {self.live_bytes} live ones{_reserved(reserved_bytes)} are more "
                f"than data_plane.storage_capacity.bytes = {self.nbytes}"
            )
        return f"{'; '.join(reasons)}; {self._oldest(now)}" if reasons else None

    def attach(self, partition: Partition, chunk: Chunk) -> None:
        self.live_bytes += chunk.nbytes
        self.stored_bytes += chunk.nbytes
        self.live_chunks += 1
        partition.nbytes += chunk.nbytes
        held = partition.field_bytes
        for name, size in chunk.sizes.items():
            held[name] = held.get(name, 0) + size

    def shrink(self, partition: Partition, piece: RowPiece) -> None:
        """Count cells that are gone from a chunk that lives on."""
        chunk = piece.chunk
        for name in piece.fields:
            size = chunk.size_of(name, piece.at)
            chunk.live[name] -= size
            partition.field_bytes[name] -= size
            partition.nbytes -= size
            self.live_bytes -= size

    def detach(self, partition: Partition, chunk: Chunk) -> None:
        """Count a chunk whose last row is gone."""
        self.live_bytes -= chunk.live_bytes
        self.stored_bytes -= chunk.nbytes
        self.live_chunks -= 1
        partition.nbytes -= chunk.live_bytes
        for name, size in chunk.live.items():
            partition.field_bytes[name] -= size

    def mark(self, partition: Partition) -> None:
        """Keep the highest marks; called when an operation has changed the totals."""
        self.peak_rows = max(self.peak_rows, self.live_rows)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.peak_chunks = max(self.peak_chunks, self.live_chunks)
        partition.peak_rows = max(partition.peak_rows, len(partition.rows))
        partition.peak_bytes = max(partition.peak_bytes, partition.nbytes)

    def extend(self, *, lost_at: float, until: float) -> None:
        """Let reservations that were good at `lost_at` last until `until`."""
        for i, reservation in self.reserved.items():
            if reservation.expires > lost_at:
                self.reserved[i] = replace(reservation, expires=max(reservation.expires, until))

    def dump(self, *, now: float) -> dict[str, object]:
        """Return the totals and what is reserved now, as plain values; limits come from the config."""
        reserved = [
            [i, reservation.partition, reservation.rows, reservation.nbytes, reservation.expires]
            for i, reservation in self.reserved.items()
            if reservation.expires > now
        ]
        return {**{name: getattr(self, name) for name in TOTALS}, "reserved": reserved}

    def load(self, dumped: object) -> None:
        """Take over what `dump` returned."""
        assert isinstance(dumped, dict), f"malformed capacity: {dumped!r}"
        for name in TOTALS:
            setattr(self, name, dumped[name])
        self.reserved = {
            i: Reservation(partition=partition, rows=rows, nbytes=nbytes, expires=expires)
            for i, partition, rows, nbytes, expires in dumped["reserved"]
        }

    def stats(self, now: float) -> dict[str, object]:
        """Return everything as JSON-like values."""
        ages = [now - put_at for p in self.partitions.values() if (put_at := p.oldest_put()) is not None]
        return {
            "live_rows": self.live_rows,
            "live_bytes": self.live_bytes,
            "stored_bytes": self.stored_bytes,
            "live_chunks": self.live_chunks,
            "peak_rows": self.peak_rows,
            "peak_bytes": self.peak_bytes,
            "peak_chunks": self.peak_chunks,
            "reserved_bytes": sum(
                reservation.nbytes for reservation in self.reserved.values() if reservation.expires > now
            ),
            "blocked_put_s": self.blocked_s,
            "oldest_row_age_s": max(ages, default=0.0),
            "partitions": {name: _partition_stats(p, now) for name, p in self.partitions.items()},
        }

    def limits(self, now: float) -> dict[str, object]:
        """Return the limits, and the bytes that are reserved by partition."""
        reserved = dict.fromkeys(self.partitions, 0)
        for reservation in self.reserved.values():
            if reservation.expires > now:
                reserved[reservation.partition] = reserved.get(reservation.partition, 0) + reservation.nbytes
        return {"capacity_rows": self.rows, "capacity_bytes": self.nbytes, "reserved": reserved}

    def _check_can_ever_fit(self, partition: Partition, demand: Demand) -> None:
        where = f"partition {partition.name!r}: can never fit"
        if demand.num_keys > partition.num_samples:
            raise CapacityExceeded(
                f"{where}: {demand.num_keys} rows in one put are more than the num_samples = {partition.num_samples} "
                "declared; put fewer rows at a time or register with a larger num_samples"
            )
        if demand.num_keys > self.rows:
            raise CapacityExceeded(
                f"{where}: {demand.num_keys} rows in one put are more than data_plane.storage_capacity.rows = "
                f"{self.rows}; put fewer rows at a time or raise it"
            )
        if self.nbytes is not None and demand.nbytes > self.nbytes:
            raise CapacityExceeded(
                f"{where}: {demand.nbytes} bytes in one put are more than data_plane.storage_capacity.bytes = "
                f"{self.nbytes}; put fewer rows at a time or raise it"
            )

    def _oldest(self, now: float) -> str:
        oldest = [(put_at, p.name) for p in self.partitions.values() if (put_at := p.oldest_put()) is not None]
        if not oldest:
            return "no row is live"
        put_at, name = min(oldest)
        return f"the oldest live row is {now - put_at:.1f} s old, in partition {name!r}"


def _reserved(amount: int) -> str:
    return f" and {amount} reserved for other puts" if amount else ""


def _partition_stats(partition: Partition, now: float) -> dict[str, object]:
    put_at = partition.oldest_put()
    return {
        "rows": len(partition.rows),
        "bytes": partition.nbytes,
        "peak_rows": partition.peak_rows,
        "peak_bytes": partition.peak_bytes,
        "oldest_row_age_s": 0.0 if put_at is None else now - put_at,
        "fields": {name: size for name, size in partition.field_bytes.items() if size},
    }


ColumnTypes: TypeAlias = dict[str, tuple[str, tuple[int, ...]]]
"""Field -> dtype and trailing dims."""
Keys: TypeAlias = Sequence[str]
Record: TypeAlias = Mapping[str, object]


def check_put(partition: Partition, keys: Keys, put: Record, typed: Sequence[Record], *, now: float) -> ColumnTypes:
    """Check a put, with `column_types` in its `typed` records, against the partition; return the types it settles."""
    column_types = _check_column_types(partition, keys, typed, put["lengths"])
    claim_rules.check_held(partition, keys, claim_rules.parse(put["claims"]), now=now)
    if not put["may_create"]:
        check_present(partition, keys)
    return column_types


def check_present(partition: Partition, keys: Keys) -> None:
    if not all(map(partition.rows.__contains__, keys)):
        missing = [key for key in keys if key not in partition.rows]
        raise KeysNotFound(
            f"partition {partition.name!r}: {len(missing)} of {len(keys)} rows do not exist (never put, or cleared): "
            f"{name_some(missing)}"
        )


def is_any_written(partition: Partition, keys: Keys, chunks: Sequence[Record]) -> bool:
    """Return whether a cell that a put would write has a value already."""
    for record in chunks:
        family, fields = record["family"], record["fields"]
        assert isinstance(family, str) and isinstance(fields, list), f"malformed chunk record: {record}"
        column = partition.columns[family]
        if any(column.has(key, frozenset((name,))) for name in fields for key in keys):
            return True
    return False


def _check_column_types(partition: Partition, keys: Keys, typed: Sequence[Record], lengths: object) -> ColumnTypes:
    """dtype, trailing dims and lengths must agree with what the partition already holds."""
    where = f"partition {partition.name!r}"
    if isinstance(lengths, list):
        for key, length in zip(keys, lengths, strict=True):
            row = partition.rows.get(key)
            if row is not None and row.length is not None and row.length != length:
                raise SchemaMismatch(f"{where}: row {key!r} has {row.length} tokens, got a column with {length}")
    settled: ColumnTypes = {}
    for record in typed:
        column_types = record["column_types"]
        assert isinstance(column_types, dict)
        for name, (dtype, trailing) in column_types.items():
            column_type = (dtype, tuple(trailing))
            before = partition.column_types.get(name)
            if before is not None and before != column_type:
                raise SchemaMismatch(
                    f"{where}: field {name!r} holds {before[0]} rows with trailing dims {list(before[1])}, "
                    f"got {dtype} with {list(trailing)}"
                )
            settled[name] = column_type
    return settled
