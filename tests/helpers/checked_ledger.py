"""A real ledger whose every reply is checked against the specification, with writers, consumers and a store around it.

`CheckedLedger.do` runs one operation, a plain value: operations name the put or the claim that they use by the label
that an earlier one gave it, and do nothing when there is none, so any part of a history can be run again. The exhaustive
check, the random one and the property test all drive this class.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from nemo_rl.data_plane.ledger.ledger import Ledger
from nemo_rl.data_plane.schema import FIELDS as FIELD_TABLE
from nemo_rl.data_plane.schema import resolve_fields, spec_to_record
from tests.helpers.ledger_rules import demand
from tests.helpers.ledger_specification import LedgerSpecification

Operation: TypeAlias = tuple[str, dict[str, Any]]
"""A method `do_<name>` of `CheckedLedger`, and its arguments, which JSON can carry."""

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
        recover: replaces the ledger by one that was recovered from what it had written down, for the operation
            `recover`. The specification stays as it is, for a recovered ledger is the same ledger.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_bytes: int | None,
        validate: bool = True,
        recover: Callable[[Ledger], Ledger] | None = None,
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

    def do_register(self, partition: str, group_size: int | None, num_samples: int, fields: Sequence[str] = FIELDS) -> None:
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
        if put in self.puts or (under is not None and under not in self.metas):
            return
        meta = self.metas[under] if under is not None else Meta([], {})
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
        self.puts[put] = PendingPut(args)
        self.store |= self.puts[put].chunks

    def do_commit(self, put: str) -> None:
        """Commit what a writer has brought; it gives up when it is refused, and asks again when it has to wait."""
        if put not in self.puts:
            return
        pending = self.puts[put]
        reply = self.ask("commit", **pending.args)
        if "versions" in reply:
            del self.puts[put]
            self.metas[put] = Meta(pending.args["keys"], dict(reply["versions"]))
        elif "blocked" not in reply:
            self.do_abandon(put)

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
        self.metas.pop(who, None)
        if who in self.puts:
            self.torn |= self.puts.pop(who).chunks

    def do_claim(
        self,
        claim: str,
        partition: str,
        task: str,
        fields: Sequence[str],
        count: int,
        groups: Sequence[str] = (),
    ) -> None:
        told = {"fields": list(fields), "batch_size": count, "consumer": claim, "groups": list(groups)}
        reply = self.ask("claim", partition=partition, task=task, **told)
        if reply.get("keys"):
            self.metas[claim] = Meta(reply["keys"], dict(reply["versions"]), task, reply["claim"])

    def do_release(self, claim: str, partition: str, part: Sequence[int | None] = (None, None)) -> None:
        """Release a part of a claim; `part` is a slice of its rows."""
        if claim in self.metas and self.metas[claim].task:
            meta = self.metas[claim]
            keys = meta.keys[slice(*part)]
            held = {meta.task: dict.fromkeys(keys, meta.claim)}
            self.ask("release", partition=partition, task=meta.task, keys=keys, claims=held)

    def do_let_go(self, who: str) -> None:
        """Make a client forget its claim."""
        self.metas.pop(who, None)

    def do_heartbeat(self, claims: Sequence[str]) -> None:
        self.ask("heartbeat", claims=[self.metas[label].claim for label in claims if label in self.metas])

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

    def do_read(self, partition: str, fields: Sequence[str], keys: Sequence[str] = (), meta: str | None = None) -> None:
        """Read rows by key, or by the meta of a put or a claim."""
        if meta is None:
            self.ask("locate", partition=partition, keys=list(keys), fields=list(fields), versions={})
        elif meta in self.metas:
            known = self.metas[meta]
            self.ask("locate", partition=partition, keys=known.keys, fields=list(fields), versions=known.versions)

    def do_pass_time(self, seconds: float) -> None:
        self.now += seconds

    def do_recover(self) -> None:
        """Crash the ledger and recover it."""
        if self.recover is not None:
            self.ledger = self.recover(self.ledger)

    def do_look(self) -> None:
        """Ask for all that can be read without a change: counts, lists, rows with their versions and with older ones."""
        self.ask("stats")
        self.ask("gone", chunks=sorted(self.store))
        for name, partition in self.specification.partitions.items():
            self.ask("list", partition=name)
            self.ask("describe", partition=name)
            rows = partition.rules.rows
            for field in partition.rules.families:
                family = partition.rules.families[field]
                keys = [key for key in reversed(rows) if field in rows[key].cells]
                versions = partition.rules.versions_of(keys, family)
                for known in ({}, {family: versions}, {family: [max(v - 1, 0) for v in versions]}):
                    self.ask("locate", partition=name, keys=keys, fields=[field], versions=known)
                missing = [key for key in rows if field not in rows[key].cells]
                if missing:
                    self.ask("locate", partition=name, keys=missing[:1], fields=[field], versions={})

    # ---- copies

    def save(self) -> bytes:
        """Return the state, for `load`."""
        ledger = {name: value for name, value in vars(self.ledger).items() if name not in NOT_COPIED}
        rest = {name: value for name, value in vars(self).items() if name not in ("ledger", "recover")}
        return pickle.dumps((ledger, rest), protocol=pickle.HIGHEST_PROTOCOL)

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


def run_history(checked: CheckedLedger, history: Iterable[Operation]) -> None:
    for operation in history:
        checked.do(operation)


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
