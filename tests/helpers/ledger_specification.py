"""What the ledger must reply to each request: declarations, puts, capacity, reads, claims, clears and counts.

`LedgerSpecification.follow` takes a request, the time and the ledger's reply, raises `Difference` when the reply is
not allowed, and moves on. It is slow and plain: nothing is kept that can be counted anew. Numbers that the ledger is
free to choose (versions, claims, reservations, declarations) are taken from the reply, once they are seen to be new.
`ledger_rules` has the rules of rows, versions, claims and groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from nemo_rl.errors import CapacityExceeded, DataPlaneError, PartitionNotFound, SchemaMismatch
from tests.helpers.ledger_rules import Difference, PartitionRules, demand

Args: TypeAlias = Mapping[str, Any]
"""Arguments of a request."""
Expected: TypeAlias = dict[str, object]
"""Parts of a reply, as `plain_reply` shows them, that the rules determine."""
COUNTS = ("rows", "bytes", "chunks")


class Given(dict[str, Any]):
    """The reply to a request that the rules allow; what it does not say is a difference."""

    def __missing__(self, name: str) -> object:
        raise Difference(f"expected {name!r} in the reply: nothing forbids the request")


@dataclass
class ChunkState:
    """A header and the cells of some rows; the rest of a field's bytes counts as long as the chunk lives."""

    nbytes: int
    header: int
    cells: dict[str, list[int]]
    """Field -> bytes of each row."""
    rest: dict[str, int]
    """Field -> bytes that rows of one size leave over."""


@dataclass
class PartitionState:
    declaration: Mapping[str, object]
    declared: int
    rules: PartitionRules
    num_samples: int
    column_types: dict[str, object] = field(default_factory=dict)
    """Field -> dtype and trailing dims, settled by its first put."""
    peaks: dict[str, int] = field(default_factory=lambda: {"peak_rows": 0, "peak_bytes": 0})


@dataclass
class LedgerSpecification:
    """A ledger of dicts."""

    max_rows: int
    max_bytes: int | None
    lease_s: float
    partitions: dict[str, PartitionState] = field(default_factory=dict)
    chunks: dict[str, ChunkState] = field(default_factory=dict)
    """Chunks that a live row is read from."""
    reservations: dict[int, tuple[str, int, int, float]] = field(default_factory=dict)
    """Number -> partition, rows, bytes, time at which it ends."""
    highest: dict[str, dict[tuple[str, str], int]] = field(default_factory=dict)
    """Partition -> highest versions; they outlive its declaration."""
    last: dict[str, int] = field(default_factory=lambda: {"claim": 0, "reservation": 0, "declared": 0})
    """Highest number of each kind."""
    peaks: dict[str, int] = field(default_factory=lambda: {f"peak_{name}": 0 for name in COUNTS})
    waited_s: float = 0.0

    def follow(self, op: str, args: Args, now: float, reply: Mapping[str, Any]) -> None:
        """Check the reply to one request, and do what the request does.

        Raises:
            Difference: the rules do not allow this reply.
        """
        got = reply["error"]["kind"] if "error" in reply else "no error"
        try:
            expected = getattr(self, f"_{op}")(args, now, Given(reply.get("ok", {})))
        except DataPlaneError as refusal:
            demand(got == type(refusal).__name__, f"{op}: expected {type(refusal).__name__}: {refusal}; got {got}")
            return
        demand("error" not in reply, f"{op}: expected no error, got {reply}")
        for name, value in expected.items():
            found = reply["ok"].get(name)
            demand(found == value, f"{op}: {name}: expected {value!r}, got {found!r}")

    # ---- declaration

    def _register(self, args: Args, now: float, given: Given) -> Expected:
        """A partition is declared once: the same declaration again changes nothing, and another one is refused."""
        names = ("partition", "fields", "num_samples", "tasks", "task_writes", "group_size")
        declaration = {name: args[name] for name in names}
        known = self.partitions.get(args["partition"])
        if known is not None:
            if known.declaration != declaration:
                raise SchemaMismatch("declared otherwise")
            return {"declared": known.declared}
        families = {record["name"]: record["family"] for record in args["fields"]}
        rules = PartitionRules(
            families=families,
            # No task waits for a column that the partition lacks.
            writes={task: set(args["task_writes"][task]) & families.keys() for task in args["tasks"]},
            group_size=args["group_size"],
            lease_s=self.lease_s,
            highest=self.highest.setdefault(args["partition"], {}),
        )
        number = self._new("declared", given)
        self.partitions[args["partition"]] = PartitionState(declaration, number, rules, args["num_samples"])
        return {}

    def _describe(self, args: Args, now: float, given: Given) -> Expected:
        partition = self._partition(args)
        return {**partition.declaration, "declared": partition.declared}

    def _forget(self, args: Args, now: float, given: Given) -> Expected:
        """Dropping a partition clears it and ends its declaration."""
        expected = self._clear({**args, "keys": None}, now, given)
        del self.partitions[args["partition"]]
        return expected

    # ---- writing and capacity

    def _reserve(self, args: Args, now: float, given: Given) -> Expected:
        """Capacity is reserved before the bytes go to the store; a reservation ends by itself after a lease."""
        partition = self._partition(args)
        self.waited_s += args.get("waited_s", 0.0)
        if self._has_to_wait(partition, args, args["nbytes"], now):
            return {"blocked": True}
        new_rows = sum(key not in partition.rules.rows for key in args["keys"])
        number = self._new("reservation", given)
        self.reservations[number] = (args["partition"], new_rows, args["nbytes"], now + self.lease_s)
        return {}

    def _unreserve(self, args: Args, now: float, given: Given) -> Expected:
        """A writer that gives up gives its reservation back."""
        self.waited_s += args.get("waited_s", 0.0)
        self.reservations.pop(args["reservation"], None)
        return {}

    def _commit(self, args: Args, now: float, given: Given) -> Expected:
        """A put becomes visible as a whole, or is refused and changes nothing, or is told to wait."""
        partition, keys, chunks = self._partition(args), args["keys"], args["chunks"]
        rules = partition.rules
        self.waited_s += args.get("waited_s", 0.0)
        types = [item for chunk in chunks for item in chunk["column_types"].items()]
        rules.check_declared([name for chunk in chunks for name in chunk["fields"]])
        if any(partition.column_types.get(name, column_type) != column_type for name, column_type in types):
            raise SchemaMismatch("a column has another type")
        told = {name: args[name] for name in ("lengths", "claims", "may_create")}
        rules.check_put(keys, **told, now=now)
        if self._has_to_wait(partition, args, sum(chunk["nbytes"] for chunk in chunks), now):
            return {"blocked": True}
        self.reservations.pop(args.get("reservation", 0), None)
        partition.column_types |= dict(types)
        cells: dict[str, list[object]] = {name: [None] * len(keys) for chunk in chunks for name in chunk["fields"]}
        for chunk in chunks:
            self.chunks[chunk["id"]] = _chunk_state(chunk)
            for name in chunk["fields"]:
                for at in range(chunk["rows"]):
                    cells[name][chunk["first"] + at] = (chunk["id"], at)
        rules.check_versions(keys, list(cells), given["versions"])
        new = [key for key in keys if key not in rules.rows]
        rules.put(keys, cells, given["versions"])
        for i, key in enumerate(keys):
            row = rules.rows[key]
            row.tags |= args["tags"][i] if args["tags"] else {}
            row.length = args["lengths"][i] if args["lengths"] else row.length
            if key in new:
                row.owner, row.put_at = args["who"], now
        dropped = self._drop()
        self.peaks = _raised(self.peaks, self._count())
        partition.peaks = _raised(partition.peaks, self._count(partition))
        return {"blocked": False, "drop": dropped}

    def _has_to_wait(self, partition: PartitionState, args: Args, nbytes: int, now: float) -> bool:
        """A put that is larger than a limit is refused. It waits when it does not fit beside what is live and what
        others have reserved. Limits are rows of the partition, and rows and bytes of all partitions.
        """
        keys, max_bytes = args["keys"], float("inf") if self.max_bytes is None else self.max_bytes
        if len(keys) > min(partition.num_samples, self.max_rows) or nbytes > max_bytes:
            raise CapacityExceeded("it can never fit")
        own, live = args.get("reservation", 0), self._count()
        others = [kept for number, kept in self.reservations.items() if number != own and kept[3] > now]
        new = sum(key not in partition.rules.rows for key in keys)
        here = len(partition.rules.rows) + sum(kept[1] for kept in others if kept[0] == args["partition"])
        return (
            here + new > partition.num_samples
            or live["rows"] + sum(kept[1] for kept in others) + new > self.max_rows
            or live["bytes"] + sum(kept[2] for kept in others) + nbytes > max_bytes
        )

    def _clear(self, args: Args, now: float, given: Given) -> Expected:
        """Clearing skips rows that do not exist."""
        return {"rows": self._partition(args).rules.clear(args["keys"]), "drop": self._drop()}

    # ---- reading

    def _locate(self, args: Args, now: float, given: Given) -> Expected:
        """A read is told, for each field and row, the chunk and the index that the latest put gave them."""
        partition, fields = self._partition(args), args["fields"]
        partition.rules.check_read(args["keys"], fields, args["versions"])
        types = {name: partition.column_types[name] for name in fields if name in partition.column_types}
        cells = {name: [partition.rules.rows[key].cells[name] for key in args["keys"]] for name in fields}
        return {"cells": cells, "column_types": types}

    def _gone(self, args: Args, now: float, given: Given) -> Expected:
        """Chunks that no live row is read from, also those that were never committed."""
        return {"chunks": [chunk for chunk in args["chunks"] if chunk not in self.chunks]}

    def _list(self, args: Args, now: float, given: Given) -> Expected:
        rows = self._partition(args).rules.rows.values()
        names = list(self._partition(args).rules.rows)
        return {"keys": names, "tags": [row.tags for row in rows], "owners": [row.owner for row in rows]}

    # ---- claims

    def _claim(self, args: Args, now: float, given: Given) -> Expected:
        """A claim has a number of its own, and tells lengths, tags and versions of its rows."""
        rules = self._rules_for(args, [args["task"]])
        fields, groups = args["fields"], args.get("groups", ())
        keys = rules.claimable(args["task"], fields, args["batch_size"], groups=groups, now=now)
        if not keys or given["keys"] != keys:
            return {"keys": keys}
        rules.lease(args["task"], keys, self._new("claim", given), now)
        rows = [rules.rows[key] for key in keys]
        return {
            "lengths": None if None in [row.length for row in rows] else [row.length for row in rows],
            "tags": [row.tags for row in rows],
            "versions": {rules.families[name]: rules.versions_of(keys, rules.families[name]) for name in fields},
            "lease_s": self.lease_s,
        }

    def _release(self, args: Args, now: float, given: Given) -> Expected:
        rules = self._rules_for(args, [args["task"]])
        rules.release(args["task"], args["keys"], args["claims"].get(args["task"], {}), now)
        return {}

    def _heartbeat(self, args: Args, now: float, given: Given) -> Expected:
        """A heartbeat tells which claims have ended: all of their rows are done, cleared or handed on."""
        each = [[p.rules.renew(claim, now) for p in self.partitions.values()] for claim in args["claims"]]
        return {"ended": [claim for claim, renewed in zip(args["claims"], each, strict=True) if not any(renewed)]}

    def _consumption(self, args: Args, now: float, given: Given) -> Expected:
        rules = self._rules_for(args, args["tasks"])
        return {"done": all(rules.is_consumed(task, now) for task in args["tasks"])}

    # ---- counts

    def _stats(self, args: Args, now: float, given: Given) -> Expected:
        ages = {name: _age(p, now) for name, p in self.partitions.items()}
        counts = {name: self._count(p) | p.peaks for name, p in self.partitions.items()}
        return {
            **{f"live_{name}": count for name, count in self._count().items() if name in COUNTS},
            **self.peaks,
            "stored_bytes": sum(chunk.nbytes for chunk in self.chunks.values()),
            "reserved_bytes": sum(nbytes for _, _, nbytes, ends in self.reservations.values() if ends > now),
            "blocked_put_s": self.waited_s,
            "oldest_row_age_s": max(ages.values(), default=0.0),
            "partitions": {name: counts[name] | {"oldest_row_age_s": ages[name]} for name in counts},
        }

    def _count(self, partition: PartitionState | None = None) -> dict[str, Any]:
        """Count rows, and the bytes of their cells and of the headers of chunks that have one; of all partitions, or of
        one, then also by field.
        """
        asked = self.partitions.values() if partition is None else (partition,)
        rows = [row for p in asked for row in p.rules.rows.values()]
        fields: dict[str, int] = {}
        cells = [(name, *place) for row in rows for name, place in row.cells.items()]
        for name, chunk, at in cells:
            fields[name] = fields.get(name, 0) + self.chunks[chunk].cells[name][at]
        chunks = [self.chunks[chunk] for chunk in {chunk for _, chunk, _ in cells}]
        for name, rest in [item for chunk in chunks for item in chunk.rest.items()]:
            fields[name] = fields.get(name, 0) + rest
        counts = {"rows": len(rows), "bytes": sum(fields.values()) + sum(chunk.header for chunk in chunks)}
        by_field = {name: size for name, size in fields.items() if size}
        return counts | ({"chunks": len(chunks)} if partition is None else {"fields": by_field})

    def _drop(self) -> list[str]:
        """Forget chunks that no live row is read from; return their ids."""
        rows = [row for p in self.partitions.values() for row in p.rules.rows.values()]
        gone = self.chunks.keys() - {chunk for row in rows for chunk, _ in row.cells.values()}
        self.chunks = {chunk: state for chunk, state in self.chunks.items() if chunk not in gone}
        return sorted(gone)

    # ---- look-ups

    def _new(self, kind: str, given: Given) -> int:
        number = given[kind]
        demand(number > self.last[kind], f"expected a new {kind} number, got {number}")
        self.last[kind] = number
        return number

    def _partition(self, args: Args) -> PartitionState:
        """A request of a client that knows an earlier declaration is refused."""
        partition = self.partitions.get(args["partition"])
        if partition is None:
            raise PartitionNotFound("not declared")
        if args.get("declared", partition.declared) != partition.declared:
            raise SchemaMismatch("declared anew since")
        return partition

    def _rules_for(self, args: Args, tasks: list[str]) -> PartitionRules:
        rules = self._partition(args).rules
        if not rules.writes.keys() >= set(tasks):
            raise SchemaMismatch("no such task")
        return rules


def _chunk_state(record: Args) -> ChunkState:
    sizes = dict(zip(record["fields"], record["sizes"], strict=True))
    cells = {name: [size // record["rows"]] * record["rows"] for name, size in sizes.items()}
    cells |= {name: np.frombuffer(table, np.uint64).tolist() for name, table in record["row_sizes"].items()}
    rest = {name: size - sum(cells[name]) for name, size in sizes.items()}
    return ChunkState(record["nbytes"], record["nbytes"] - sum(record["sizes"]), cells, rest)


def _raised(peaks: Mapping[str, int], counts: Mapping[str, Any]) -> dict[str, int]:
    return {name: max(peak, counts[name.removeprefix("peak_")]) for name, peak in peaks.items()}


def _age(partition: PartitionState, now: float) -> float:
    """Return the age of the oldest row; rows are in the order of their first put."""
    return now - next(iter(partition.rules.rows.values())).put_at if partition.rules.rows else 0.0
