"""A real ledger whose every reply is checked against the specification, with writers, consumers and a store around it.

`CheckedLedger.do` runs one operation, a plain value. Operations name the put or the claim that they use by the label
that an earlier one gave it, and do nothing when there is none, so that any part of a history can be run again. The
exhaustive check, the random one and the property test all drive this class.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from nemo_rl.data_plane.ledger import state
from nemo_rl.data_plane.ledger.ledger import Ledger
from nemo_rl.data_plane.schema import FIELDS as FIELD_TABLE
from nemo_rl.data_plane.schema import FieldSpec, resolve_fields, spec_to_record
from tests.helpers.ledger_rules import demand
from tests.helpers.ledger_specification import LedgerSpecification

Operation: TypeAlias = tuple[str, dict[str, Any]]
"""A method `do_<name>` of `CheckedLedger`, and its arguments, which JSON can carry."""

Recover: TypeAlias = Callable[[Ledger], Ledger]
"""Replaces a ledger by one that was recovered from what it had written down."""

LEASE_S = 10.0
HEADER_BYTES = 5
FIELDS = ("input_ids", "token_mask", "sample_mask", "prev_logprobs")
FAMILIES = {name: FIELD_TABLE[name].family for name in FIELDS}
"""The first two travel in one family, the others in families of their own."""
WRITES = {"prev_lp": ["prev_logprobs", "squared_probs"], "train": []}
"""Task -> what it writes; the partitions here do not declare the last one."""
NOT_COPIED = ("_ops", "_record")
"""Attributes of a ledger that hold no state."""


@dataclass
class PendingPut:
    """A put whose bytes are in the store."""

    args: dict[str, Any]
    """The commit that is to come."""
    under: str | None
    """Label of the claim under which it is written."""

    @property
    def chunks(self) -> set[str]:
        return {chunk["id"] for chunk in self.args["chunks"]}


@dataclass
class Meta:
    """Rows with the versions that somebody knows of them, and the claim under which that one has them, if any."""

    keys: list[str]
    versions: dict[str, int | list[int]]
    task: str = ""
    claim: int = 0


class CheckedLedger:
    """A ledger, its specification, and what clients remember.

    Args:
        validate: whether the ledger checks its own invariants after each request.
        recover: what the operation `recover` does. The specification stays as it is, for a recovered ledger is the
            same ledger.
    """

    def __init__(
        self, *, max_rows: int, max_bytes: int | None, validate: bool = True, recover: Recover | None = None
    ) -> None:
        self.ledger = Ledger(
            run_id="r", capacity_rows=max_rows, capacity_bytes=max_bytes, lease_s=LEASE_S, validate=validate
        )
        self.recover = recover
        self.specification = LedgerSpecification(max_rows=max_rows, max_bytes=max_bytes, lease_s=LEASE_S)
        self.now = 0.0
        self.store: set[str] = set()
        self.torn: set[str] = set()
        """Chunks in the store whose writer crashed before its commit."""
        self.puts: dict[str, PendingPut] = {}
        self.metas: dict[str, Meta] = {}
        """Metas that puts returned."""
        self.claims: dict[str, Meta] = {}
        self.crashed: set[str] = set()
        self.num_chunks = 0

    def do(self, operation: Operation) -> None:
        """Run one operation and check its replies.

        Raises:
            Difference: a reply, or what became of the store, is not what the rules say.
        """
        name, arguments = operation
        getattr(self, f"do_{name}")(**arguments)
        expected = self.specification.chunks.keys() | self.torn
        expected = expected.union(*(put.chunks for put in self.puts.values()))
        demand(self.store == expected, f"the store has {self.store ^ expected} too much or too few")

    def ask(self, op: str, **args: Any) -> dict[str, Any]:
        """Send one request; the chunks that its reply drops leave the store."""
        reply = self.ledger.handle({"run": "r", "op": op, "args": args}, now=self.now)
        self.specification.follow(op, args, self.now, plain_reply(reply))
        result = reply.get("ok", {})
        for chunk in result.get("drop", ()):
            self.store.remove(chunk)
        return result

    # ---- operations

    def do_register(
        self, partition: str, group_size: int | None, num_samples: int, fields: Sequence[str] = FIELDS
    ) -> None:
        records = [spec_to_record(spec) for spec in resolve_fields(fields)]
        told = {"fields": records, "num_samples": num_samples, "tasks": list(WRITES), "task_writes": WRITES}
        self.ask("register", partition=partition, group_size=group_size, **told)

    def do_forget(self, partition: str) -> None:
        self.ask("forget", partition=partition)

    def do_store(
        self,
        put: str,
        partition: str,
        keys: Sequence[str],
        fields: Sequence[str],
        size: int = 10,
        is_ragged: bool = False,
        rows_per_chunk: int = 100,
        lengths: Sequence[int] | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
        dtype: str | None = None,
        under: str | None = None,
    ) -> None:
        """Reserve capacity where bytes are limited, and bring the chunks of a put into the store.

        Args:
            put: label of the writer, which has one put at a time.
            size: bytes of a row of a field; a ragged one has a byte more with each row.
            under: label of the claim under which the rows are written.
        """
        if put in self.puts or (under is not None and under not in self.claims):
            return
        meta = self.claims[under] if under is not None else Meta([], {})
        held = {meta.task: dict.fromkeys(meta.keys, meta.claim)} if meta.task else {}
        args = {
            "partition": partition,
            "who": put,
            "keys": list(keys) or list(meta.keys),
            "lengths": None if lengths is None else list(lengths),
            "tags": None if tags is None else [dict(row) for row in tags],
            "claims": held,
            "may_create": any(name != "prev_logprobs" for name in fields),
        }
        args["chunks"] = self._chunk_records(len(args["keys"]), fields, size, is_ragged, rows_per_chunk, dtype)
        if self.specification.max_bytes is not None:
            nbytes = sum(chunk["nbytes"] for chunk in args["chunks"])
            reply = self.ask("reserve", partition=partition, keys=args["keys"], nbytes=nbytes, waited_s=0.5)
            if "reservation" not in reply:
                return
            args["reservation"] = reply["reservation"]
        self.puts[put] = PendingPut(args, under)
        self.store |= self.puts[put].chunks

    def do_commit(self, put: str, is_last: bool = False) -> None:
        """Commit what a writer has brought; it gives up when it is refused, and asks again when it has to wait.

        Args:
            is_last: whether the writer then forgets the claim under which it was.
        """
        if put not in self.puts:
            return
        pending = self.puts[put]
        reply = self.ask("commit", **pending.args)
        if "versions" in reply:
            del self.puts[put]
            self.metas[put] = Meta(pending.args["keys"], dict(reply["versions"]))
        elif "blocked" not in reply:
            self.do_abandon(put)
        if is_last and put not in self.puts:
            self.claims.pop(pending.under, None)

    def do_put(self, put: str, **arguments: Any) -> None:
        self.do_store(put, **arguments)
        self.do_commit(put)
        self.do_abandon(put)

    def do_abandon(self, put: str) -> None:
        """Give up a put that is not committed."""
        if put in self.puts:
            pending = self.puts.pop(put)
            self.store -= pending.chunks
            self.ask("unreserve", reservation=pending.args.get("reservation", 0), waited_s=0.25)

    def do_crash(self, who: str) -> None:
        """End a client: its put is torn, its reservation and its claim run out."""
        self.crashed.add(who)
        self.claims.pop(who, None)
        if who in self.puts:
            self.torn |= self.puts.pop(who).chunks

    def do_claim(
        self, claim: str, partition: str, task: str, fields: Sequence[str], count: int, groups: Sequence[str] = ()
    ) -> None:
        told = {"fields": list(fields), "batch_size": count, "consumer": claim, "groups": list(groups)}
        reply = self.ask("claim", partition=partition, task=task, **told)
        if reply.get("keys"):
            self.claims[claim] = Meta(reply["keys"], dict(reply["versions"]), task, reply["claim"])

    def do_release(
        self,
        claim: str,
        partition: str,
        part: Sequence[int | None] = (None, None),
        others: Sequence[str] = (),
        is_last: bool = False,
    ) -> None:
        """Release a part of a claim, a slice of its rows.

        Args:
            others: rows that are released with them, but not under this claim.
            is_last: whether the holder then forgets the claim.
        """
        if claim in self.claims:
            meta = self.claims[claim]
            keys = meta.keys[slice(*part)]
            held = {meta.task: dict.fromkeys(keys, meta.claim)}
            keys = [*keys, *(key for key in others if key not in meta.keys)]
            self.ask("release", partition=partition, task=meta.task, keys=keys, claims=held)
            if is_last:
                del self.claims[claim]

    def do_heartbeat(self, claims: Sequence[str]) -> None:
        self.ask("heartbeat", claims=[self.claims[label].claim for label in claims if label in self.claims])

    def do_consumption(self, partition: str, tasks: Sequence[str]) -> None:
        self.ask("consumption", partition=partition, tasks=list(tasks))

    def do_clear(self, partition: str, keys: Sequence[str] | None) -> None:
        """Clear rows; as a client does, free the chunks that no ledger knows, too."""
        self.ask("clear", partition=partition, keys=None if keys is None else list(keys))
        if self.torn:
            gone = self.ask("gone", chunks=sorted(self.torn))["chunks"]
            demand(set(gone) == self.torn, "what was never committed is gone")
            self.store -= self.torn
            self.torn = set()

    def do_describe(self, partition: str) -> None:
        self.ask("describe", partition=partition)

    def do_read(self, partition: str, fields: Sequence[str], keys: Sequence[str] = (), meta: str | None = None) -> None:
        """Read rows by key, or by the meta of a put or a claim."""
        if meta is None:
            self.ask("locate", partition=partition, keys=list(keys), fields=list(fields), versions={})
        elif (known := self.claims.get(meta) or self.metas.get(meta)) is not None:
            self.ask("locate", partition=partition, keys=known.keys, fields=list(fields), versions=known.versions)

    def do_pass_time(self, seconds: float) -> None:
        self.now += seconds

    def do_recover(self) -> None:
        """Crash the ledger and recover it."""
        if self.recover is not None:
            self.ledger = self.recover(self.ledger)

    def do_look(self) -> None:
        """Ask for all that can be read without a change: counts, lists, rows by their versions and by older ones."""
        validate, self.ledger._validate = self.ledger._validate, False  # nothing changes that could break
        self.ask("stats")
        self.ask("gone", chunks=sorted(self.store))
        for name, partition in self.specification.partitions.items():
            self.ask("list", partition=name)
            rows, families = partition.rules.rows, partition.rules.families
            for field in families:
                keys = [key for key in reversed(rows) if field in rows[key].cells]
                told = {"partition": name, "fields": [field]}
                if keys:
                    versions = partition.rules.versions_of(keys, families[field])
                    self.ask("locate", keys=keys, versions={families[field]: versions}, **told)
                    self.ask("locate", keys=keys, versions={families[field]: [v - 1 for v in versions]}, **told)
                if 0 < len(keys) < len(rows):
                    self.ask("locate", keys=list(rows), versions={}, **told)
        self.ledger._validate = validate

    # ---- copies

    def save(self) -> bytes:
        """Return the state, for `load`."""
        ledger = {name: value for name, value in vars(self.ledger).items() if name not in NOT_COPIED}
        rest = {name: value for name, value in vars(self).items() if name not in ("ledger", "recover")}
        kept = io.BytesIO()
        pickler = pickle.Pickler(kept, protocol=pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = {
            # Declared fields are the same in all states.
            FieldSpec: lambda spec: (_declared_field, (spec.name,)),
            memoryview: lambda view: (_row_sizes, (view.tobytes(),)),
        }
        pickler.dump((ledger, rest))
        return kept.getvalue()

    def load(self, saved: bytes) -> None:
        ledger, rest = pickle.loads(saved)
        vars(self.ledger).update(ledger)
        vars(self).update(rest)

    def _chunk_records(
        self, num_rows: int, fields: Sequence[str], size: int, is_ragged: bool, rows_per_chunk: int, dtype: str | None
    ) -> list[dict[str, Any]]:
        """Return the chunks of a put: its families, each cut into spans of rows."""
        records = []
        for family in dict.fromkeys(FAMILIES[name] for name in fields):
            names = [name for name in fields if FAMILIES[name] == family]
            for first in range(0, num_rows, rows_per_chunk):
                rows = range(first, min(first + rows_per_chunk, num_rows))
                row_bytes = [size + at * is_ragged for at in rows]
                table = np.array(row_bytes, dtype=np.uint64).tobytes()
                self.num_chunks += 1
                records.append(
                    {
                        "id": f"c{self.num_chunks}",
                        "family": family,
                        "fields": names,
                        "first": first,
                        "rows": len(rows),
                        "nbytes": HEADER_BYTES + len(names) * sum(row_bytes),
                        "sizes": [sum(row_bytes)] * len(names),
                        "row_sizes": dict.fromkeys(names, table) if is_ragged else {},
                        "column_types": {} if dtype is None else {name: [dtype, []] for name in names},
                    }
                )
        return records


@contextmanager
def few_cleared_keys_remembered() -> Iterator[None]:
    """Make ledgers forget the versions of cleared keys from the second key on, instead of after very many."""
    before, state.MAX_REMEMBERED_KEYS = state.MAX_REMEMBERED_KEYS, 1
    try:
        yield
    finally:
        state.MAX_REMEMBERED_KEYS = before


@dataclass(frozen=True, kw_only=True)
class FoundDifference:
    """A history at whose end ledger and specification differ."""

    limits: dict[str, Any]
    """`max_rows` and `max_bytes` of the `CheckedLedger`."""
    history: list[Operation]
    problem: str
    found_after: str
    """What was tried until it was found."""

    def __str__(self) -> str:
        """Return lines that `tests.helpers.ledger_random` reads."""
        first = {"limits": self.limits, "problem": self.problem, "found_after": self.found_after}
        return "\n".join(map(json.dumps, [first, *self.history]))


def problem_of(
    history: Iterable[Operation], limits: Mapping[str, Any], *, validate: bool, recover: Recover | None = None
) -> str | None:
    """Return the difference that a history shows on a fresh ledger; None when it shows none."""
    checked = CheckedLedger(**limits, validate=validate, recover=recover)
    try:
        for operation in history:
            checked.do(operation)
    except Exception as error:  # noqa: BLE001 - whatever else the ledger raises is a difference too
        return f"{type(error).__name__}: {error}"
    return None


def plain_reply(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a reply with everything by row, as the specification says it."""
    result = reply.get("ok")
    if not isinstance(result, dict):
        return reply
    shown = dict(result)
    num_rows = len(shown.get("keys", ()))
    if "tags" in shown and isinstance(shown["tags"], dict):
        shown["tags"] = [{name: values[i] for name, values in shown["tags"].items()} for i in range(num_rows)]
    if "versions" in shown and "claim" in shown:
        shown["versions"] = {
            family: [version] * num_rows if isinstance(version, int) else version
            for family, version in shown["versions"].items()
        }
    if "drop" in shown:
        shown["drop"] = sorted(shown["drop"])
    if "placements" in shown:
        shown["cells"] = _cells(shown)
        shown["column_types"] = {name: [dtype, list(dims)] for name, (dtype, dims) in shown["column_types"].items()}
    return {"ok": shown | {"blocked": "blocked" in shown}}


def _declared_field(name: str) -> FieldSpec:
    return FIELD_TABLE[name]


def _row_sizes(table: bytes) -> memoryview:
    return memoryview(table).cast("Q")


def _cells(located: Mapping[str, Any]) -> dict[str, list[tuple[str, int]]]:
    """Field -> chunk and index of each row."""
    cells = {}
    for placement in located["placements"]:
        places = [
            (located["chunks"][chunk], at)
            for chunk, first, count in placement["runs"]
            for at in range(first, first + count)
        ]
        cells |= dict.fromkeys(placement["fields"], places)
    return cells
