"""`LedgerClient`: the `DataPlaneClient` that every adapter shares, made of one ledger host and one payload store.

    kv_batch_put: check_columns -> encode_rows -> store.put(chunks) -> ledger "commit"   (rows appear here, at once)
    kv_batch_get: ledger "locate" -> store.get(chunks) -> gather
    get_meta:     ledger "claim", renewed by `leases.LeaseKeeper`, ended by `release` or by writing the task's fields

Built by `factory`. The one invariant: rows are visible only through a ledger commit that follows a complete store put,
so all adapters give the same guarantees.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

from tensordict import TensorDict

from nemo_rl.data_plane.address import DataPlaneAddress
from nemo_rl.data_plane.assembly import assemble
from nemo_rl.data_plane.codec import EncodedChunk, encode_rows
from nemo_rl.data_plane.columns import FlatColumn, check_columns, check_keys, check_tags, token_lengths
from nemo_rl.data_plane.interfaces import Columns, DataPlaneClient, KVBatchMeta, PayloadStore, Tags, TagValue
from nemo_rl.data_plane.leases import LeaseKeeper
from nemo_rl.data_plane.ledger import Args, Reply
from nemo_rl.data_plane.ledger_host import LedgerHost
from nemo_rl.data_plane.schema import (
    FieldSpec,
    resolve_fields,
    spec_from_record,
    spec_to_record,
    stage_of_task,
    writes_of,
)
from nemo_rl.errors import (
    DataPlaneClosed,
    DataPlaneError,
    DataPlaneTimeout,
    KeysNotFound,
    SchemaMismatch,
    name_some,
)

__all__ = ["LedgerClient"]

_T = TypeVar("_T")

logger = logging.getLogger(__name__)

PUT_THREADS = 2
"""Background puts of one client; more would only compete for the same cores."""
READ_ATTEMPTS = 3
"""A read that meets a rewrite between locate and fetch starts over; more rewrites than this are a fault."""
FIRST_POLL_S, LONGEST_POLL_S = 0.002, 0.1
"""A blocking claim asks the ledger again after so long, doubling."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One public call: its deadline, and what an error message says about it."""

    what: str
    deadline: float
    started: float

    def left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.0)


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
        self._host, self._store, self._address, self._on_close = host, store, address, on_close
        self._timeout_s = address.config.timeout_s
        self._client_id = uuid.uuid4().hex[:12]
        self._specs: dict[str, dict[str, FieldSpec]] = {}
        self._leases = LeaseKeeper(renew=self._renew, period_s=address.config.lease_s / 3)
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._num_chunks = 0
        self._is_closed = False
        self._counters = {"put_bytes": 0, "get_bytes": 0, "over_read_bytes": 0}

    @property
    def address(self) -> DataPlaneAddress:
        return self._address

    @property
    def counters(self) -> dict[str, int]:
        """Payload bytes this client put and got, and bytes it read but was not asked for."""
        with self._lock:
            return dict(self._counters)

    # ---- declaration

    def register_partition(
        self,
        partition_id: str,
        fields: Sequence[str | FieldSpec],
        num_samples: int,
        consumer_tasks: Sequence[str],
        grpo_group_size: int | None = None,
    ) -> None:
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
            "task_writes": {task: list(writes_of(stage_of_task(task), rewrites=False)) for task in tasks},
            "group_size": grpo_group_size,
        }
        self._ask(self._begin(f"register_partition({partition_id!r})"), "register", args)
        self._specs[partition_id] = {spec.name: spec for spec in specs}

    def partition_fields(self, partition_id: str) -> tuple[FieldSpec, ...]:
        return tuple(self._schema(self._begin(f"partition_fields({partition_id!r})"), partition_id).values())

    # ---- writing

    def kv_batch_put(
        self, keys: Sequence[str], partition_id: str, fields: Columns, tags: Sequence[Tags] | None = None
    ) -> KVBatchMeta:
        where = f"kv_batch_put to partition {partition_id!r}"
        listed = check_keys(keys, where=where)
        names = list(fields.keys())
        call = self._begin(f"{where}: {len(listed)} rows ({name_some(listed)}), fields {', '.join(map(str, names))}")
        specs = self._schema(call, partition_id)
        columns = check_columns(fields, specs=specs, keys=listed, where=where)
        plain_tags = None if tags is None else check_tags(tags, len(listed), where=where)
        lengths = token_lengths(columns)
        listed_lengths = None if lengths is None else lengths.tolist()
        versions: dict[str, int] = {}
        if listed:
            versions = self._write(call, partition_id, listed, columns, lengths=listed_lengths, tags=plain_tags)
        return KVBatchMeta(
            partition_id=partition_id,
            keys=tuple(listed),
            fields=tuple(columns),
            sequence_lengths=None if listed_lengths is None else tuple(listed_lengths),
            tags=None if plain_tags is None else tuple(plain_tags),
            versions=versions,
        )

    def put_async(
        self, keys: Sequence[str], partition_id: str, fields: Columns, tags: Sequence[Tags] | None = None
    ) -> Future[KVBatchMeta]:
        with self._lock:
            self._check_open()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(max_workers=PUT_THREADS, thread_name_prefix="data-plane-put")
            return self._pool.submit(self.kv_batch_put, keys, partition_id, fields, tags)

    def _write(
        self,
        call: _Call,
        partition_id: str,
        keys: list[str],
        columns: Mapping[str, FlatColumn],
        *,
        lengths: list[int] | None,
        tags: list[dict[str, TagValue]] | None,
    ) -> dict[str, int]:
        chunks = encode_rows(columns, num_rows=len(keys), chunk_bytes=self._address.config.chunk_bytes)
        ids = self._new_ids(len(chunks))
        args: Args = {
            "partition": partition_id,
            "keys": keys,
            "lengths": lengths,
            "tags": tags,
            "chunks": [_chunk_record(i, chunk, columns) for i, chunk in zip(ids, chunks, strict=True)],
            "claims": self._leases.held(partition_id, keys),
            "may_create": any(column.spec.produced_by == "rollout" for column in columns.values()),
        }
        if chunks:
            payloads = {i: chunk.payload for i, chunk in zip(ids, chunks, strict=True)}
            self._timed(call, lambda: self._store.put(payloads, timeout_s=call.left()))
        try:
            reply = self._ask(call, "commit", args)
        except DataPlaneTimeout:
            raise  # the commit may still arrive: rows it makes visible must keep their chunks
        except DataPlaneError:
            self._drop(ids)
            raise
        self._drop(_names(reply["drop"]))
        self._leases.forget_written(partition_id, keys, set(columns))
        self._count("put_bytes", sum(chunk.payload.nbytes for chunk in chunks))
        return _versions(reply)

    # ---- reading

    def kv_batch_get(self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> TensorDict:
        return self._read(keys, partition_id, select_fields, versions={}, stage=None)

    def get_data(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> TensorDict:
        names = meta.fields if select_fields is None else select_fields
        if not names:
            raise SchemaMismatch(f"get_data of partition {meta.partition_id!r}: the meta names no fields; pass them")
        return self._read(meta.keys, meta.partition_id, names, versions=meta.versions, stage=meta.task_name)

    def _read(
        self,
        keys: Sequence[str],
        partition_id: str,
        names: Sequence[str],
        *,
        versions: Mapping[str, int],
        stage: str | None,
    ) -> TensorDict:
        where = f"read of partition {partition_id!r}"
        listed = check_keys(keys, where=where)
        task = f", task {stage!r}" if stage else ""
        call = self._begin(f"{where}{task}: {len(listed)} rows ({name_some(listed)}), fields {', '.join(names)}")
        specs = self._schema(call, partition_id)
        if isinstance(names, str) or not names or len(set(names)) != len(names):
            raise SchemaMismatch(f"{where}: expected a list of distinct fields, got {names!r}")
        unknown = [name for name in names if name not in specs]
        if unknown:
            raise SchemaMismatch(f"{where}: fields {name_some(unknown)} are not declared; declared: {', '.join(specs)}")
        args: Args = {"partition": partition_id, "keys": listed, "fields": list(names), "versions": dict(versions)}
        reply, payloads = self._locate_and_fetch(call, args)
        rows, num_used = assemble([specs[name] for name in names], reply, payloads, num_rows=len(listed))
        num_bytes = sum(payload.nbytes for payload in payloads)
        self._count("get_bytes", num_bytes)
        self._count("over_read_bytes", num_bytes - num_used)
        return rows

    def _locate_and_fetch(self, call: _Call, args: Args) -> tuple[Reply, list[memoryview]]:
        for attempt in range(1, READ_ATTEMPTS + 1):
            reply = self._ask(call, "locate", args)
            try:
                return reply, self._fetch(call, _names(reply["chunks"]))
            except KeysNotFound as error:
                # Rewritten or cleared between the two calls: the ledger's next answer says which.
                if attempt == READ_ATTEMPTS:
                    raise DataPlaneError(
                        f"{call.what}: the ledger names chunks that the store lacks: {error}"
                    ) from error
        raise AssertionError("unreachable")

    def _fetch(self, call: _Call, chunk_ids: list[str]) -> list[memoryview]:
        return self._timed(call, lambda: self._store.get(chunk_ids, timeout_s=call.left())) if chunk_ids else []

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
    ) -> KVBatchMeta:
        limit = self._timeout_s if timeout_s is None else timeout_s
        where = f"get_meta of partition {partition_id!r}, task {task_name!r}, fields {', '.join(required_fields)}"
        call = self._begin(where)
        specs = self._schema(call, partition_id)
        unknown = [name for name in required_fields if name not in specs]
        if unknown or batch_size < 1:
            raise SchemaMismatch(f"{where}: unknown fields {unknown or 'none'}, batch_size {batch_size} (at least 1)")
        args: Args = {
            "partition": partition_id,
            "task": task_name,
            "fields": list(required_fields),
            "batch_size": batch_size,
            "consumer": f"{consumer_id}@{self._client_id}",
        }
        poll_s, give_up = FIRST_POLL_S, call.started + limit
        while True:
            reply = self._ask(self._begin(where), "claim", args)
            if reply["keys"] or not blocking:
                return self._claimed(partition_id, task_name, required_fields, reply)
            if time.monotonic() + poll_s > give_up:
                raise DataPlaneTimeout(
                    f"{where}: nothing to claim for {limit:.1f} s by {consumer_id!r}: {_why(reply)}; "
                    "is the stage that writes these fields alive?"
                )
            time.sleep(poll_s)
            poll_s = min(poll_s * 2, LONGEST_POLL_S)

    def _claimed(self, partition_id: str, task_name: str, fields: Sequence[str], reply: Reply) -> KVBatchMeta:
        keys = _names(reply["keys"])
        if not keys:
            return KVBatchMeta(partition_id=partition_id, keys=(), task_name=task_name, fields=tuple(fields))
        claim_id, tags, lengths = reply["claim"], reply["tags"], reply["lengths"]
        assert isinstance(claim_id, int) and isinstance(tags, list) and isinstance(lengths, list | None)
        self._leases.add(partition_id, task_name, keys, claim_id)
        return KVBatchMeta(
            partition_id=partition_id,
            keys=tuple(keys),
            task_name=task_name,
            fields=tuple(fields),
            sequence_lengths=None if lengths is None else tuple(lengths),
            tags=tuple(tags),
            versions=_versions(reply),
        )

    def release(self, meta: KVBatchMeta) -> None:
        if meta.task_name is None:
            raise SchemaMismatch(f"release: the meta of partition {meta.partition_id!r} names no task; nothing to end")
        keys = list(meta.keys)
        args: Args = {
            "partition": meta.partition_id,
            "task": meta.task_name,
            "keys": keys,
            "claims": self._leases.held(meta.partition_id, keys, task_name=meta.task_name),
        }
        call = self._begin(f"release of partition {meta.partition_id!r}, task {meta.task_name!r}: {name_some(keys)}")
        try:
            self._ask(call, "release", args)
        finally:
            self._leases.forget(meta.partition_id, keys, task_name=meta.task_name)

    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        call = self._begin(f"check_consumption_status of partition {partition_id!r}")
        return bool(self._ask(call, "consumption", {"partition": partition_id, "tasks": list(task_names)})["done"])

    # ---- life cycle

    def kv_list(self, partition_id: str) -> dict[str, dict[str, TagValue]]:
        reply = self._ask(self._begin(f"kv_list({partition_id!r})"), "list", {"partition": partition_id})
        tags = reply["tags"]
        assert isinstance(tags, list)
        return dict(zip(_names(reply["keys"]), tags, strict=True))

    def kv_clear(self, keys: Sequence[str] | None, partition_id: str) -> None:
        if isinstance(keys, str):
            raise SchemaMismatch(f"kv_clear: keys must be a list of strings, got the string {keys!r}")
        listed = None if keys is None else list(keys)
        call = self._begin(f"kv_clear of partition {partition_id!r}")
        reply = self._ask(call, "clear", {"partition": partition_id, "keys": listed})
        self._leases.forget(partition_id, listed)
        self._drop(_names(reply["drop"]))

    def stats(self) -> dict[str, int | float]:
        reply = self._ask(self._begin("stats"), "stats", {})
        return {name: value for name, value in reply.items() if isinstance(value, int | float)}

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            pool, self._pool = self._pool, None
        self._leases.close()
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        with ExitStack() as closing:
            closing.callback(self._on_close)
            closing.callback(self._host.close)
            closing.callback(self._store.close)

    # ---- plumbing

    def _begin(self, what: str) -> _Call:
        self._check_open()
        now = time.monotonic()
        return _Call(what=what, deadline=now + self._timeout_s, started=now)

    def _check_open(self) -> None:
        if self._is_closed:
            raise DataPlaneClosed(f"this client of run {self._address.run_id!r} is closed")

    def _ask(self, call: _Call, op: str, args: Args) -> Reply:
        return self._timed(call, lambda: self._host.call(op, args, timeout_s=call.left()))

    def _timed(self, call: _Call, action: Callable[[], _T]) -> _T:
        """Runs one step of a call; a deadline error names the call, its owner and its age."""
        self._check_open()
        try:
            return action()
        except DataPlaneTimeout as error:
            age = time.monotonic() - call.started
            raise DataPlaneTimeout(
                f"{call.what}: {error}; deadline {self._timeout_s:.1f} s, age {age:.1f} s, "
                f"owner: run {self._address.run_id!r} in process {self._address.process_id}"
            ) from error

    def _schema(self, call: _Call, partition_id: str) -> dict[str, FieldSpec]:
        specs = self._specs.get(partition_id)
        if specs is None:
            records = self._ask(call, "describe", {"partition": partition_id})["fields"]
            assert isinstance(records, list)
            specs = {spec.name: spec for spec in map(spec_from_record, records)}
            self._specs[partition_id] = specs
        return specs

    def _new_ids(self, count: int) -> list[str]:
        with self._lock:
            first = self._num_chunks
            self._num_chunks += count
        return [f"{self._address.run_id}/{self._client_id}/{first + i}" for i in range(count)]

    def _drop(self, chunk_ids: Sequence[str]) -> None:
        """Frees chunks that no row reads any more; the rows are settled already, so a failure is only reported."""
        if not chunk_ids:
            return
        try:
            self._store.drop(chunk_ids, timeout_s=self._timeout_s)
        except DataPlaneError as error:
            logger.warning("could not free %d chunks of run %s: %s", len(chunk_ids), self._address.run_id, error)

    def _renew(self, claims: list[int]) -> list[int]:
        ended = self._host.call("heartbeat", {"claims": list(claims)}, timeout_s=self._timeout_s)["ended"]
        assert isinstance(ended, list)
        return ended

    def _count(self, what: str, num_bytes: int) -> None:
        with self._lock:
            self._counters[what] += num_bytes


def _chunk_record(chunk_id: str, chunk: EncodedChunk, columns: Mapping[str, FlatColumn]) -> Args:
    tensors = [columns[name] for name in chunk.fields if columns[name].values is not None]
    return {
        "id": chunk_id,
        "family": chunk.family,
        "fields": list(chunk.fields),
        "first": chunk.first,
        "rows": chunk.rows,
        "nbytes": chunk.payload.nbytes,
        "layouts": {column.spec.name: [column.dtype, list(column.trailing)] for column in tensors},
    }


def _names(value: object) -> list[str]:
    assert isinstance(value, list), f"malformed reply: {value!r}"
    return value


def _versions(reply: Reply) -> dict[str, int]:
    versions = reply["versions"]
    assert isinstance(versions, dict), f"malformed reply: {reply}"
    return versions


def _why(reply: Reply) -> str:
    """Why a claim got nothing, in words."""
    why = reply["why"]
    assert isinstance(why, dict), f"malformed reply: {reply}"
    holders = [f"{name} holds {rows} rows for {age:.1f} s" for name, rows, age in why["holders"]]
    late = [f"{name} ({rows} rows)" for name, rows in why["not_written"].items()]
    return (
        f"{why['live']} live rows, {why['pending']} unclaimed, {why['done']} done; "
        f"not written yet: {name_some(late) or 'none'}; claims: {name_some(holders) or 'none'}"
    )
