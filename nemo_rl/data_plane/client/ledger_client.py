"""`LedgerClient`: the `DataPlaneClient` that every adapter shares, made of one ledger host and one payload store.

    kv_batch_put: check_columns -> encode_rows -> store.put(chunks) -> ledger "commit"   (rows appear here, at once)
    kv_batch_get: ledger "locate" -> store.get(chunks) -> gather
    get_meta:     ledger "claim", renewed by `leases.LeaseRenewer`, ended by `release` or by writing the task's fields

Built by `factory`. The one invariant: rows are visible only through a ledger commit that follows a complete store put,
so all adapters give the same guarantees.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from nemo_rl.data_plane.address import DataPlaneAddress
from nemo_rl.data_plane.batch_meta import KVBatchMeta
from nemo_rl.data_plane.chunks.columns import check_keys
from nemo_rl.data_plane.chunks.tags import Tags, TagTable, TagValue
from nemo_rl.data_plane.client.keyed_rows import KeyedRowsLink
from nemo_rl.data_plane.client.link import (
    FIRST_POLL_S,
    LONGEST_POLL_S,
    ClientCall,
    ClientLink,
    Declaration,
    LeaseRenewer,
    SchemaCache,
    names_of,
    stage_context,
    versions_of,
)
from nemo_rl.data_plane.client.meter import REPORT_TIMEOUT_S, CountReporter, Meter
from nemo_rl.data_plane.client.operation_counts import Totals
from nemo_rl.data_plane.client.reads import Read, RowReader, assemble, assemble_padded
from nemo_rl.data_plane.client.writes import PutRequest, RowWriter
from nemo_rl.data_plane.interfaces import Columns, DataPlaneClient, PayloadStore
from nemo_rl.data_plane.ledger.host import LedgerHost
from nemo_rl.data_plane.ledger.ledger import Args, Reply
from nemo_rl.data_plane.schema import (
    FieldSpec,
    resolve_fields,
    spec_to_record,
    stage_of_task,
    writes_that_end_claims,
)
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.errors import (
    DataPlaneTimeout,
    KeysNotFound,
    SchemaMismatch,
    name_some,
)
from nemo_rl.utils.deadlines import awake_s

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["LedgerClient"]

logger = logging.getLogger(__name__)

PUT_THREADS = 2
"""Background puts of one client; more would only compete for the same cores."""


class LedgerClient(DataPlaneClient):
    """A ledger and a payload store behind the data plane's contract."""

    def __init__(
        self,
        *,
        host: LedgerHost,
        store: PayloadStore,
        address: DataPlaneAddress,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._reporter = CountReporter(self._report_counts)
        self._meter = Meter(address.config.observability, on_count=self._reporter.note)
        self._link, self._on_close = ClientLink(host=host, store=store, address=address), on_close
        self._schemas = SchemaCache(self._link)
        self._leases = LeaseRenewer(renew=self._renew, period_s=address.config.lease_s / 3)
        self._keyed = None if store.rows is None else KeyedRowsLink(self._link, store.rows)
        self._writer = RowWriter(self._link, self._leases, self._keyed)
        self._reader = RowReader(self._link, self._schemas, self._keyed, None if self._keyed is None else self._adopt)
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    @property
    def address(self) -> DataPlaneAddress:
        return self._link.address

    @property
    def counters(self) -> dict[str, int]:
        return self._link.counters

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of this client's calls by part: `encode`, `store_put`, `ledger`, `store_get`, `build`."""
        return self._link.clock.snapshot()

    def stage(self, name: str) -> AbstractContextManager[None]:
        return stage_context(name)

    def snapshot(self, *, reset: bool = False) -> Totals:
        return self._meter.totals(over_read_bytes=self.counters["over_read_bytes"], reset=reset)

    # ---- declaration

    def register_partition(
        self,
        partition_id: str,
        fields: Sequence[str | FieldSpec],
        num_samples: int,
        consumer_tasks: Sequence[str],
        grpo_group_size: int | None = None,
    ) -> None:
        for what, names in (("fields", fields), ("consumer_tasks", consumer_tasks)):
            if isinstance(names, str):
                raise SchemaMismatch(f"partition {partition_id!r}: {what}: expected a list, got {names!r}")
        specs = resolve_fields(fields)
        if num_samples < 1 or (grpo_group_size is not None and grpo_group_size < 1):
            raise SchemaMismatch(
                f"partition {partition_id!r}: num_samples and grpo_group_size must be at least 1, "
                f"got {num_samples} and {grpo_group_size}"
            )
        tasks = list(dict.fromkeys(consumer_tasks))
        args: Args = {
            "partition": partition_id,
            "fields": [spec_to_record(spec) for spec in specs],
            "num_samples": num_samples,
            "tasks": tasks,
            "task_writes": {task: list(writes_that_end_claims(stage_of_task(task))) for task in tasks},
            "group_size": grpo_group_size,
        }
        with self._meter.measure("register_partition", partition_id):
            reply = self._link.ask(self._link.begin(f"register_partition({partition_id!r})"), "register", args)
        self._schemas.learn(partition_id, {spec.name: spec for spec in specs}, reply)

    def add_fields(self, partition_id: str, fields: Sequence[FieldSpec]) -> None:
        records = [spec_to_record(spec) for spec in resolve_fields(fields, may_shadow=True)]
        with self._meter.measure("add_fields", partition_id):
            call = self._link.begin(f"add_fields({partition_id!r})")
            self._link.ask(call, "add_fields", {"partition": partition_id, "fields": records})
        self._schemas.forget(partition_id)

    def partition_fields(self, partition_id: str) -> tuple[FieldSpec, ...]:
        call = self._link.begin(f"partition_fields({partition_id!r})")
        return tuple(self._schemas.get(call, partition_id).specs.values())

    # ---- writing

    def kv_batch_put(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: Columns,
        tags: Sequence[Tags] | None = None,
        *,
        claimed: KVBatchMeta | None = None,
    ) -> KVBatchMeta:
        put = PutRequest(keys=keys, partition_id=partition_id, fields=fields, tags=tags, claimed=claimed)
        return self._put("kv_batch_put", put)

    def _put(self, operation: str, put: PutRequest) -> KVBatchMeta:
        with self._meter.measure(
            operation, put.partition_id, rows=len(put.keys), fields=map(str, put.fields.keys())
        ) as cost:
            checked = replace(put, keys=check_keys(put.keys, where=put.where))
            call = self._link.begin(
                f"{put.where}: {len(checked.keys)} rows ({name_some(checked.keys)}), "
                f"fields {', '.join(map(str, put.fields.keys()))}"
            )
            meta = self._schemas.use(call, put.partition_id, partial(self._writer.write, call, checked))
            cost.add_columns(put.fields)
            cost.add_rows(meta.keys, meta.sequence_lengths, meta.tags)
        return meta

    def put_async(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: Columns,
        tags: Sequence[Tags] | None = None,
        *,
        claimed: KVBatchMeta | None = None,
    ) -> Future[KVBatchMeta]:
        with self._lock:
            self._link.check_open()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(max_workers=PUT_THREADS, thread_name_prefix="data-plane-put")
            context = copy_context()  # the stage of the caller
            put = PutRequest(keys=keys, partition_id=partition_id, fields=fields, tags=tags, claimed=claimed)
            return self._pool.submit(context.run, self._put, "put_async", put)

    # ---- reading

    def kv_batch_get(self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> TensorDict:
        with self._meter.measure("kv_batch_get", partition_id, rows=len(keys), fields=select_fields) as cost:
            rows = self._reader.read(Read(keys=keys, partition_id=partition_id, fields=select_fields, build=assemble))
            cost.add_columns(rows)
            cost.add_rows(keys)
        return rows

    def get_data(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> TensorDict:
        names = meta.fields if select_fields is None else select_fields
        with self._meter.measure("get_data", meta.partition_id, rows=len(meta), fields=names) as cost:
            rows = self._reader.read(Read.of_meta(meta, names, build=assemble))
            cost.add_columns(rows)
            cost.add_rows(meta.keys)
        return rows

    def get_padded(
        self,
        meta: KVBatchMeta,
        select_fields: Sequence[str],
        *,
        pad_values: Mapping[str, float],
        pad_to: int | None = None,
        jagged: Collection[str] = (),
    ) -> BatchedDataDict:
        build = partial(assemble_padded, pad_values=pad_values, pad_to=pad_to, jagged=jagged)
        with self._meter.measure("get_data", meta.partition_id, rows=len(meta), fields=select_fields) as cost:
            rows = self._reader.read(Read.of_meta(meta, select_fields, build=build))
            per_token = {spec.name for spec in self.partition_fields(meta.partition_id) if spec.is_token_aligned}
            cost.add_padded(rows, meta.sequence_lengths, per_token - set(jagged))
            cost.add_rows(meta.keys)
        return rows

    # ---- claims

    def get_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        *,
        consumer_id: str,
        blocking: bool = True,
        timeout_s: float | None = None,
        groups: Sequence[str] = (),
    ) -> KVBatchMeta:
        where = f"get_meta of partition {partition_id!r}, task {task_name!r}, fields {', '.join(required_fields)}"
        if batch_size < 1 or isinstance(required_fields, str):
            raise SchemaMismatch(
                f"{where}: expected a list of fields and a batch_size of at least 1, got {required_fields!r} and "
                f"{batch_size}"
            )
        limit = (self._link.timeout_s if timeout_s is None else timeout_s) if blocking else None
        args: Args = {
            "partition": partition_id,
            "task": task_name,
            "fields": list(required_fields),
            "batch_size": batch_size,
            "consumer": f"{consumer_id}@{self._link.label}",
        }
        if groups:
            args["groups"] = list(groups)

        def ask(declaration: Declaration) -> Reply:
            declaration.check_declared(required_fields, where=where)
            call, claim = self._link.begin(where), {**args, "declared": declaration.number}
            reply = self._link.ask(call, "claim", claim)
            if not reply["keys"] and self._adopt(call, partition_id, declaration, required_fields, None):
                reply = self._link.ask(call, "claim", claim)
            return reply

        with self._meter.measure("get_meta", partition_id, fields=required_fields) as cost:
            reply = self._wait_for_rows(self._link.begin(where), partition_id, ask, consumer_id, limit)
            meta = self._claimed(partition_id, task_name, required_fields, reply)
            cost.rows = len(meta)
            cost.add_rows(meta.keys, meta.sequence_lengths, meta.tags)
        return meta

    def _wait_for_rows(
        self,
        call: ClientCall,
        partition_id: str,
        ask: Callable[[Declaration], Reply],
        consumer_id: str,
        limit: float | None,
    ) -> Reply:
        """Ask until there are rows; past `limit` seconds it is an error, and None asks once."""
        poll_s = FIRST_POLL_S
        while True:
            reply = self._schemas.use(call, partition_id, ask)
            if reply["keys"] or limit is None:
                return reply
            if awake_s() + poll_s > call.started + limit:
                raise DataPlaneTimeout(
                    f"{call.what}: nothing to claim for {limit:.1f} s by {consumer_id!r}: {_why(reply)}; "
                    "is the stage that writes these fields alive?"
                )
            time.sleep(poll_s)
            poll_s = min(poll_s * 2, LONGEST_POLL_S)

    def _claimed(self, partition_id: str, task_name: str, fields: Sequence[str], reply: Reply) -> KVBatchMeta:
        keys = names_of(reply["keys"])
        if not keys:
            return KVBatchMeta(partition_id=partition_id, keys=(), task_name=task_name, fields=tuple(fields))
        claim_id, lengths = reply["claim"], reply["lengths"]
        assert isinstance(claim_id, int) and isinstance(lengths, list | None)
        self._leases.add(partition_id, task_name, keys, claim_id)
        return KVBatchMeta(
            partition_id=partition_id,
            keys=tuple(keys),
            task_name=task_name,
            fields=tuple(fields),
            sequence_lengths=None if lengths is None else tuple(lengths),
            tags=TagTable.from_plain(reply["tags"], len(keys)),
            versions=versions_of(reply),
            claims=(claim_id,) * len(keys),
        )

    def _adopt(
        self,
        call: ClientCall,
        partition_id: str,
        declaration: Declaration,
        fields: Sequence[str],
        keys: Sequence[str] | None,
    ) -> bool:
        """Commit what other programs have written of fields that the ledger lacks; False when there is nothing."""
        if self._keyed is None:
            return False
        found = self._keyed.foreign(call, partition_id, declaration, fields, keys)
        for columns in found:
            with suppress(KeysNotFound):  # cleared since
                self._writer.adopt(call, partition_id, declaration, columns)
        return bool(found)

    def release(self, meta: KVBatchMeta) -> None:
        with self._meter.measure("release", meta.partition_id, rows=len(meta)) as cost:
            self._release(meta)
            cost.add_rows(meta.keys)

    def _release(self, meta: KVBatchMeta) -> None:
        if meta.task_name is None:
            raise SchemaMismatch(f"release: the meta of partition {meta.partition_id!r} names no task; nothing to end")
        keys = list(meta.keys)
        claims = self._leases.claims_of(meta.partition_id, keys, meta)
        args: Args = {"partition": meta.partition_id, "task": meta.task_name, "keys": keys, "claims": claims}
        call = self._link.begin(
            f"release of partition {meta.partition_id!r}, task {meta.task_name!r}: {name_some(keys)}"
        )
        try:
            self._link.ask(call, "release", args)
        finally:
            self._leases.forget_claims(meta.partition_id, meta.task_name, claims.get(meta.task_name, {}))

    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        call = self._link.begin(f"check_consumption_status of partition {partition_id!r}")
        if isinstance(task_names, str):
            raise SchemaMismatch(f"{call.what}: expected a list of tasks, got {task_names!r}")
        args: Args = {"partition": partition_id, "tasks": list(task_names)}
        with self._meter.measure("check_consumption_status", partition_id):
            return bool(self._link.ask(call, "consumption", args)["done"])

    # ---- life cycle

    def kv_list(self, partition_id: str) -> dict[str, dict[str, TagValue]]:
        with self._meter.measure("kv_list", partition_id) as cost:
            call = self._link.begin(f"kv_list({partition_id!r})")
            reply = self._link.ask(call, "list", {"partition": partition_id})
            keys = names_of(reply["keys"])
            tags = TagTable.from_plain(reply["tags"], len(keys))
            cost.rows = len(keys)
            cost.add_rows(keys, None, tags)
        return dict(zip(keys, map(dict, tags), strict=True))

    def kv_clear(self, keys: Sequence[str] | None, partition_id: str, *, reason: str = "") -> int:
        if isinstance(keys, str):
            raise SchemaMismatch(f"kv_clear: keys must be a list of strings, got the string {keys!r}")
        listed = None if keys is None else list(keys)
        with self._meter.measure("kv_clear", partition_id, rows=len(listed or ())) as cost:
            call = self._link.begin(f"kv_clear of partition {partition_id!r}")
            reply = self._link.ask(call, "clear", {"partition": partition_id, "keys": listed, "reason": reason})
            cost.rows = self._cleared(call, partition_id, listed, reply)
            cost.add_rows(listed)
        return cost.rows

    def drop_partition(self, partition_id: str, *, reason: str = "") -> int:
        with self._meter.measure("drop_partition", partition_id) as cost:
            call = self._link.begin(f"drop_partition({partition_id!r})")
            reply = self._link.ask(call, "forget", {"partition": partition_id, "reason": reason})
            self._schemas.forget(partition_id)
            cost.rows = self._cleared(call, partition_id, None, reply)
        return cost.rows

    def _cleared(self, call: ClientCall, partition_id: str, keys: list[str] | None, reply: Reply) -> int:
        """Let go of the claims and chunks of rows that the ledger has cleared; return how many it were."""
        self._leases.forget(partition_id, keys)
        self._link.drop(names_of(reply["drop"]))
        if self._keyed is not None:
            self._keyed.free(partition_id, reply)
        # A writer that died between its put and its commit has left chunks that no ledger knows.
        abandoned = self._link.store.abandoned(self._link.address.config.lease_s)
        if abandoned:
            self._link.drop(names_of(self._link.ask(call, "gone", {"chunks": abandoned})["chunks"]))
        rows = reply["rows"]
        assert isinstance(rows, int), f"malformed reply: {reply}"
        return rows

    def row_owners(self, partition_id: str) -> dict[str, str]:
        with self._meter.measure("row_owners", partition_id):
            call = self._link.begin(f"row_owners({partition_id!r})")
            reply = self._link.ask(call, "list", {"partition": partition_id})
        return dict(zip(names_of(reply["keys"]), names_of(reply["owners"]), strict=True))

    def stats(self) -> dict[str, object]:
        with self._meter.measure("stats"):
            return self._link.ask(self._link.begin("stats"), "stats", {})

    def close(self) -> None:
        if not self._link.end():
            return
        with self._lock:
            pool, self._pool = self._pool, None
        self._leases.close()
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        self._reporter.close()
        try:
            with self._meter.measure("close"):
                self._link.close()
        finally:
            self._on_close()

    def _report_counts(self, is_last: bool) -> None:
        totals = self._meter.lifetime_totals(over_read_bytes=self.counters["over_read_bytes"])
        self._link.notify("report", {"totals": totals.to_plain(), "is_last": is_last}, timeout_s=REPORT_TIMEOUT_S)

    def _renew(self, claims: list[int]) -> list[int]:
        ended = self._link.notify("heartbeat", {"claims": list(claims)})["ended"]
        assert isinstance(ended, list)
        return ended


def _why(reply: Reply) -> str:
    """Return the reason for which a claim got nothing, in words."""
    why = reply["why"]
    assert isinstance(why, dict), f"malformed reply: {reply}"
    groups = [f"{uid} ({what})" for uid, what in why["groups"]]
    groups += [f"{rest} more"] if (rest := why["num_groups"] - len(groups)) else []
    waiting = f"; groups that wait: {', '.join(groups)}" if groups else ""
    holders = [f"{name} holds {rows} rows for {age:.1f} s" for name, rows, age in why["holders"]]
    late = [f"{name} ({rows} rows)" for name, rows in why["not_written"].items()]
    return (
        f"{why['live']} live rows, {why['pending']} unclaimed, {why['done']} done; "
        f"not written yet: {name_some(late) or 'none'}; claims: {name_some(holders) or 'none'}{waiting}"
    )
