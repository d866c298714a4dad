"""The ledger: the single source of truth about rows. A pure state machine without I/O, threads or clocks.

A host (`host`, `host_ray`, `host_socket`) serialises the calls and passes `now`. Requests and replies are plain values
that msgpack carries, so one dispatcher, `Ledger.handle`, serves all hosts. Every operation checks everything before it
changes anything: a refused commit leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from nemo_rl.data_plane.ledger import claims as claim_rules
from nemo_rl.data_plane.ledger.capacity import Capacity, Demand, check_present, check_put, is_any_written
from nemo_rl.data_plane.ledger.claims import KeyedRows, form, lacking, locate, number, records, seconds, text, texts
from nemo_rl.data_plane.ledger.events import EventSink, Recorder, explain_row
from nemo_rl.data_plane.ledger.journal import (
    declared_partition,
    dump_chunk,
    dump_claims,
    dump_partition,
    load_chunk,
    load_claims,
    load_partition,
    load_scalars,
)
from nemo_rl.data_plane.ledger.state import (
    Chunk,
    ClaimLease,
    FamilyColumn,
    Partition,
    RowPiece,
    TaskCursor,
    check_invariants,
)
from nemo_rl.data_plane.schema import spec_from_record
from nemo_rl.errors import (
    DataPlaneClosed,
    DataPlaneError,
    DataPlaneTimeout,
    PartitionNotFound,
    SchemaMismatch,
    name_some,
    to_record,
)

__all__ = ["Args", "Ledger", "Reply"]

Args: TypeAlias = dict[str, object]
"""Plain values only: None, bool, int, float, str, bytes, list and dict with string keys."""
Reply: TypeAlias = dict[str, object]

DECLARATION = ("partition", "fields", "num_samples", "tasks", "task_writes", "group_size")
"""Arguments of a `register` request that must be the same when it is repeated."""


class Ledger:
    """Rows, versions, cursors, leases, tags, capacity and statistics of one run.

    Example:
        >>> ledger = Ledger(run_id="r", capacity_rows=10, capacity_bytes=None, lease_s=30.0)
        >>> ledger.handle({"run": "r", "op": "stats", "args": {}}, now=0.0)["ok"]["live_rows"]
        0
    """

    def __init__(
        self,
        *,
        run_id: str,
        capacity_rows: int,
        capacity_bytes: int | None,
        lease_s: float,
        on_event: EventSink | None = None,
        validate: bool = False,
    ) -> None:
        self.run_id = run_id
        self._lease_s = lease_s
        self._validate = validate
        self._partitions: dict[str, Partition] = {}
        self._chunks: dict[str, Chunk] = {}
        self._claims: dict[int, tuple[str, str, ClaimLease]] = {}
        self._keyed: dict[str, KeyedRows] = {}
        self._handles: dict[str, object] = {}
        """Chunk id -> what readers need to reach it, for stores that have such a thing."""
        self.num_expired = 0
        """Leases that were found to be over: with `blocked_s`, all that a request without success can change."""
        self._num_claims = 0
        self._num_declared = 0
        self._first_versions: dict[str, int] = {}
        self._record = Recorder(on_event)
        self._capacity = Capacity(
            rows=capacity_rows, nbytes=capacity_bytes, partitions=self._partitions, lease_s=lease_s
        )
        self._ops: Mapping[str, Callable[[Args, float], Reply]] = {
            "register": self._register,
            "describe": self._describe,
            "add_fields": self._add_fields,
            "reserve": self._reserve,
            "unreserve": self._unreserve,
            "begin": self._begin,
            "end": self._end,
            "freed": self._freed,
            "commit": self._commit,
            "commit_keyed": self._commit_keyed,
            "lacking": self._lacking,
            "strangers": self._strangers,
            "locate": self._locate,
            "gone": lambda args, now: {"chunks": [i for i in texts(args, "chunks") if i not in self._chunks]},
            "claim": self._claim,
            "release": self._release,
            "heartbeat": self._heartbeat,
            "consumption": self._consumption,
            "list": self._list,
            "explain": self._explain,
            "clear": self._clear,
            "forget": self._forget,
            "stats": lambda args, now: self._capacity.stats(now),
            "waited": self._waited,
            "extend": self._extend,
            "inspect": self._inspect,
        }

    def handle(self, request: Mapping[str, object], *, now: float) -> Reply:
        """Serve one request `{"run", "op", "args"}`; the reply is `{"ok": ...}` or `{"error": record}`.

        Args:
            now: monotonic seconds of the host.
        """
        try:
            if request["run"] != self.run_id:
                raise DataPlaneClosed(
                    f"this ledger serves run {self.run_id!r}, the call is of run {request['run']!r}, which has ended; "
                    "build a new client"
                )
            args = request["args"]
            assert isinstance(args, dict), "args must be a dict"
            reply = self._ops[str(request["op"])](args, now)
            self._carry_handles(request, reply)
        except DataPlaneError as error:
            return {"error": to_record(error)}
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
            return {"error": to_record(DataPlaneError(f"the ledger could not serve {request.get('op')!r}: {error!r}"))}
        finally:
            if self._validate:
                check_invariants(self._partitions, self._chunks)
        return {"ok": reply}

    @property
    def blocked_s(self) -> float:
        """Seconds that puts have waited for capacity."""
        return self._capacity.blocked_s

    def _carry_handles(self, request: Mapping[str, object], reply: Reply) -> None:
        brought = request.get("handles")
        if isinstance(brought, dict) and "versions" in reply:
            self._handles.update(brought)
        if not self._handles:
            return
        for chunk_id in reply.get("drop", ()):  # type: ignore[attr-defined]
            self._handles.pop(chunk_id, None)
        if request["op"] == "locate":
            found = {chunk_id: self._handles.get(chunk_id) for chunk_id in reply["chunks"]}  # type: ignore[attr-defined]
            reply["handles"] = {chunk_id: handle for chunk_id, handle in found.items() if handle is not None}

    # ---- what outlives the process

    def dump(self, *, now: float) -> Args:
        """Return everything as plain values, for `load` of another ledger; histories of rows are left out, since the
        event log has them.
        """
        numbers = {chunk_id: number for number, chunk_id in enumerate(self._chunks)}
        return {
            "chunks": [dump_chunk(chunk) for chunk in self._chunks.values()],
            "partitions": [dump_partition(partition, numbers) for partition in self._partitions.values()],
            "claims": dump_claims(self._claims),
            "num_claims": self._num_claims,
            "num_declared": self._num_declared,
            "first_versions": dict(self._first_versions),
            "capacity": self._capacity.dump(now=now),
            "handles": dict(self._handles),
        }

    def load(self, dumped: Args) -> None:
        """Take over what `dump` returned; this ledger must be fresh."""
        chunks = [load_chunk(record) for record in records(dumped, "chunks")]
        self._chunks.update({chunk.chunk_id: chunk for chunk in chunks})
        self._claims.update(load_claims(dumped["claims"]))
        leases = {i: lease for i, (_, _, lease) in self._claims.items()}
        for record in records(dumped, "partitions"):
            declaration = record["declaration"]
            assert isinstance(declaration, dict), f"malformed partition: {record}"
            partition = declared_partition(declaration, declared=number(record, "declared"), first_version=1)
            load_partition(partition, record, chunks=chunks, leases=leases)
            self._partitions[partition.name] = partition
        self._num_claims, self._num_declared = number(dumped, "num_claims"), number(dumped, "num_declared")
        load_scalars(self._first_versions, dumped["first_versions"])
        load_scalars(self._handles, dumped["handles"])
        self._capacity.load(dumped["capacity"])

    def _waited(self, args: Args, now: float) -> Reply:
        """Count the seconds of a put that was told to wait: the only change that such a request makes."""
        self._capacity.blocked_s += seconds(args, "waited_s")
        return {}

    def _extend(self, args: Args, now: float) -> Reply:
        """Give the claims and reservations that were good at `lost_at` a full lease from now."""
        lost_at, until = seconds(args, "lost_at"), now + self._lease_s
        for _, _, lease in self._claims.values():
            if not lease.has_expired and lease.expires > lost_at:
                lease.expires = max(lease.expires, until)
        self._capacity.extend(lost_at=lost_at, until=until)
        return {}

    # ---- declaration

    def _register(self, args: Args, now: float) -> Reply:
        name = text(args, "partition")
        declaration = {what: args[what] for what in DECLARATION}
        existing = self._partitions.get(name)
        if existing is not None:
            differ = [what for what, value in existing.declaration.items() if declaration[what] != value]
            if differ:
                raise SchemaMismatch(
                    f"partition {name!r} is registered with another declaration: {', '.join(differ)} differ; "
                    "use the same declaration, drop_partition first, or another partition id"
                )
            return {"declared": existing.declared}
        partition = declared_partition(
            declaration, declared=self._num_declared + 1, first_version=self._first_versions.get(name, 1)
        )
        self._num_declared += 1
        self._first_versions.pop(name, None)
        self._partitions[name] = partition
        self._record("register", args, (), now, fields=list(partition.specs))
        return {"declared": self._num_declared}

    def _describe(self, args: Args, now: float) -> Reply:
        partition = self._partition(args)
        fields = [*records(partition.declaration, "fields"), *partition.added]
        return {**partition.declaration, "fields": fields, "declared": partition.declared}

    def _add_fields(self, args: Args, now: float) -> Reply:
        """Declare further columns; the declaration that `register` repeats stays as it was."""
        partition = self._partition(args)
        specs = {str(record["name"]): (spec_from_record(record), record) for record in records(args, "fields")}
        differ = [name for name, (spec, _) in specs.items() if partition.specs.get(name, spec) != spec]
        if differ:
            raise SchemaMismatch(
                f"partition {partition.name!r}: fields {name_some(differ)} are declared in another way; declared: "
                f"{name_some(str(partition.specs[name]) for name in differ)}"
            )
        for name, (spec, record) in specs.items():
            if name not in partition.specs:
                partition.specs[name] = spec
                partition.added.append(record)
                partition.columns.setdefault(spec.family, FamilyColumn())
        return {}

    def _forget(self, args: Args, now: float) -> Reply:
        """Clear a partition and its declaration; its versions go on when it is declared anew."""
        partition = self._partition(args)
        reply = self._clear({**args, "keys": None}, now)
        self._first_versions[partition.name] = partition.first_version
        del self._partitions[partition.name]
        return reply

    # ---- writing

    def _reserve(self, args: Args, now: float) -> Reply:
        """Capacity for a put before its bytes go to the store: a reservation, or `blocked`."""
        partition, keys = self._partition(args), texts(args, "keys")
        self._capacity.blocked_s += seconds(args, "waited_s")
        demand = Demand.of(partition, keys, nbytes=number(args, "nbytes"))
        blocked = self._capacity.lacks_capacity(partition, demand, now=now)
        if blocked is not None:
            return {"blocked": blocked}
        return {"reservation": self._capacity.reserve(partition, demand, now=now)}

    def _unreserve(self, args: Args, now: float) -> Reply:
        self._capacity.blocked_s += seconds(args, "waited_s")
        self._capacity.end(number(args, "reservation"))
        return {}

    def _begin(self, args: Args, now: float) -> Reply:
        """Announce a put to a store that keeps columns under the rows' keys; one that its commit would refuse is
        refused here, before other programs can see any of it."""
        partition, keys, families = self._partition(args), texts(args, "keys"), args["families"]
        assert isinstance(families, dict), f"families: expected a dict, got {families!r}"
        check_put(partition, keys, args, [args], now=now)
        keyed = self._keyed.setdefault(partition.name, KeyedRows())
        return keyed.begin(partition.rows, keys, families, now=now, lasts_s=seconds(args, "lasts_s"))

    def _end(self, args: Args, now: float) -> Reply:
        """An announced put writes nothing any more."""
        name = text(args, "partition")
        partition, keyed = self._partitions.get(name), self._keyed[name]
        keyed.end(number(args, "put"), () if partition is None else partition.rows, now)
        return {"free": keyed.due(now)}

    def _freed(self, args: Args, now: float) -> Reply:
        """The caller has freed rows that a reply has named under `free`."""
        self._keyed[text(args, "partition")].freed(texts(args, "keys"))
        return {}

    def _lacking(self, args: Args, now: float) -> Reply:
        """Fields that another program may have written while the ledger lacks them."""
        partition, keys = self._partition(args), args["keys"]
        assert keys is None or isinstance(keys, list), f"keys: expected a list, got {keys!r}"
        keyed = self._keyed.setdefault(partition.name, KeyedRows())
        return {"fields": lacking(partition, keyed, texts(args, "fields"), keys), "live": len(partition.rows)}

    def _strangers(self, args: Args, now: float) -> Reply:
        partition = self._partition(args)
        keyed = self._keyed.setdefault(partition.name, KeyedRows())
        return {"keys": keyed.strangers(partition.rows, texts(args, "keys"))}

    def _commit(self, args: Args, now: float) -> Reply:
        """Make a put visible, or answer `blocked` when it does not fit now."""
        partition, keys = self._partition(args), texts(args, "keys")
        chunks = records(args, "chunks")
        self._capacity.blocked_s += seconds(args, "waited_s")
        written = partition.by_family(name for record in chunks for name in texts(record, "fields"))
        column_types = check_put(partition, keys, args, chunks, now=now)
        nbytes = sum([number(record, "nbytes") for record in chunks])
        reservation = args.get("reservation", 0)
        assert isinstance(reservation, int)
        demand = Demand.of(partition, keys, nbytes=nbytes, reservation=reservation)
        blocked = self._capacity.lacks_capacity(partition, demand, now=now)
        if blocked is not None:
            return {"blocked": blocked}

        self._capacity.end(reservation)
        partition.column_types.update(column_types)
        self._put_rows(partition, keys, args, now)
        versions = partition.next_versions(keys, written)
        partition.top_version = max(partition.top_version, *versions.values(), 0)
        dropped: list[str] = []
        for record in chunks:
            dropped += self._attach(partition, keys, record, version=versions[text(record, "family")])
        fields = frozenset().union(*written.values())
        claim_rules.finish_written(partition, keys, fields)
        self._capacity.mark(partition)
        if self._record.is_on:
            self._record("commit", args, keys, now, rows=partition.rows, fields=sorted(fields), nbytes=nbytes)
        return {"versions": versions, "drop": dropped}

    def _commit_keyed(self, args: Args, now: float) -> Reply:
        """Commit a put to a store that keeps columns under the rows' keys, announced (`put`) or of another program's
        columns (`if_absent`)."""
        partition, keys, put = self._partition(args), texts(args, "keys"), args.get("put", 0)
        keyed, chunks = self._keyed[partition.name], records(args, "chunks")
        assert isinstance(put, int), f"put: expected an integer, got {put!r}"
        if args.get("if_absent") and is_any_written(partition, keys, chunks):
            self._capacity.end(number(args, "reservation"))
            return {"versions": {}, "drop": [record["id"] for record in chunks]}
        if put and not keyed.is_under_way(put):
            raise DataPlaneTimeout(
                f"partition {partition.name!r}: a put took longer than it had announced, so its rows may be freed"
            )
        in_place = texts(args, "in_place") if put else ()
        marked = [{**record, "keyed": record["family"] in in_place} for record in chunks]
        reply = self._commit({**args, "chunks": marked}, now)
        if "blocked" not in reply:
            keyed.touch({name for record in chunks for name in texts(record, "fields")}, keys)
            if put and args.get("is_last"):
                keyed.end(put, partition.rows, now)
            reply["free"] = keyed.due(now)
        return reply

    def _put_rows(self, partition: Partition, keys: Sequence[str], args: Args, now: float) -> None:
        rows, owner = partition.rows, str(args.get("who", ""))
        before = len(rows)
        for key in keys:
            if key not in rows:
                partition.add_row(key, owner=owner, now=now)
        self._capacity.live_rows += len(rows) - before
        lengths = args["lengths"]
        if isinstance(lengths, list):
            for key, length in zip(keys, lengths, strict=True):
                rows[key].length = length
        partition.put_tags(keys, args["tags"])

    def _attach(self, partition: Partition, keys: Sequence[str], record: Args, *, version: int) -> list[str]:
        """Point rows at a new chunk; return chunks that lost their last row."""
        chunk_id, first, count = text(record, "id"), number(record, "first"), number(record, "rows")
        fields, sizes, row_sizes = texts(record, "fields"), record["sizes"], record["row_sizes"]
        assert isinstance(sizes, list) and isinstance(row_sizes, dict), f"malformed chunk record: {record}"
        chunk = Chunk(
            chunk_id=chunk_id,
            nbytes=number(record, "nbytes"),
            fields=frozenset(fields),
            rows=count,
            sizes=dict(zip(fields, sizes, strict=True)),
            row_sizes={name: memoryview(table).cast("Q") for name, table in row_sizes.items()},
            version=version,
            form=form(record),
            is_keyed=bool(record.get("keyed", False)),
        )
        self._chunks[chunk_id] = chunk
        self._capacity.attach(partition, chunk)
        left = partition.columns[text(record, "family")].attach(keys[first : first + count], chunk)
        return self._let_go(partition, left)

    def _let_go(self, partition: Partition, left: Sequence[RowPiece]) -> list[str]:
        """Settle that these cells are gone; return the ids of chunks that nobody reads now."""
        chunks = {piece.chunk: None for piece in left}
        for piece in left:
            piece.chunk.cells -= len(piece.fields)
        for piece in left:
            # Cells of a chunk that is gone as a whole are counted with it.
            if piece.chunk.cells:
                self._capacity.shrink(partition, piece)
        return self._drop(partition, [chunk for chunk in chunks if not chunk.cells])

    def _drop(self, partition: Partition, chunks: Sequence[Chunk]) -> list[str]:
        """Forget chunks; return the ids of those that are payloads of their own."""
        for chunk in chunks:
            self._capacity.detach(partition, chunk)
            del self._chunks[chunk.chunk_id]
        return [chunk.chunk_id for chunk in chunks if not chunk.is_keyed]

    def _clear(self, args: Args, now: float) -> Reply:
        partition = self._partition(args)
        keys = list(partition.rows if args["keys"] is None else dict.fromkeys(texts(args, "keys")))
        gone = [key for key in keys if key in partition.rows]
        if gone and self._record.is_on:
            self._record("clear", args, gone, now, reason=args.get("reason", ""))
        dropped: list[str] = []
        if len(gone) == len(partition.rows):
            dropped = self._drop(partition, partition.remove_all())
        else:
            for key in gone:
                dropped += self._let_go(partition, partition.remove_row(key))
        partition.forget_cleared()
        self._capacity.live_rows -= len(gone)
        self._claims = {i: claim for i, claim in self._claims.items() if claim[2].keys}
        keyed = self._keyed.get(partition.name)
        return {"rows": len(gone), "drop": dropped, "free": keyed.clear(partition.rows, gone, now) if keyed else []}

    # ---- reading

    def _locate(self, args: Args, now: float) -> Reply:
        partition, keys, fields = self._partition(args), texts(args, "keys"), texts(args, "fields")
        check_present(partition, keys)
        expected = args["versions"]
        assert isinstance(expected, dict)
        reply = locate(partition, keys, fields, expected=expected)
        if self._record.is_on:
            self._record("read", args, keys, now, rows=partition.rows, fields=fields)
        return reply

    def _list(self, args: Args, now: float) -> Reply:
        partition = self._partition(args)
        rows = partition.rows
        return {
            "keys": list(rows),
            "tags": partition.tags_of(list(rows)),
            "owners": [row.owner for row in rows.values()],
        }

    def _explain(self, args: Args, now: float) -> Reply:
        """Return the history of one key, for every partition that holds it."""
        key = text(args, "key")
        return {"rows": [explain_row(p, key, now=now) for p in self._partitions.values() if key in p.rows]}

    def _inspect(self, args: Args, now: float) -> Reply:
        """Return limits, reservations and claims, which `stats` leaves out."""
        claims = claim_rules.overview(self._partitions.values(), self._claims.values(), now=now)
        return self._capacity.limits(now) | claims

    # ---- claims

    def _claim(self, args: Args, now: float) -> Reply:
        partition, task_name = self._partition(args), text(args, "task")
        cursor = self._cursor(partition, task_name)
        self._expire(partition, task_name, cursor, now)
        needed = partition.by_family(texts(args, "fields"))
        keys = claim_rules.pick_rows(
            partition,
            cursor,
            needed=needed,
            batch_size=number(args, "batch_size"),
            groups=texts(args, "groups") if "groups" in args else (),
        )
        if not keys:
            return {"keys": [], "why": claim_rules.explain(partition, cursor, needed=needed, now=now)}
        self._num_claims += 1
        lease = ClaimLease(
            claim_id=self._num_claims,
            consumer_id=text(args, "consumer"),
            taken=now,
            expires=now + self._lease_s,
            keys=set(),
        )
        for key in keys:
            cursor.lease(key, lease)
        self._claims[lease.claim_id] = (partition.name, task_name, lease)
        self._record("claim", args, keys, now, rows=partition.rows, task=task_name, by=lease.consumer_id)
        rows = [partition.rows[key] for key in keys]
        lengths = [row.length for row in rows]
        return {
            "keys": keys,
            "claim": lease.claim_id,
            "lease_s": self._lease_s,
            "lengths": None if None in lengths else lengths,
            "tags": partition.tags_of(keys),
            "versions": claim_rules.versions_of(partition, keys, needed),
        }

    def _release(self, args: Args, now: float) -> Reply:
        partition, task_name = self._partition(args), text(args, "task")
        keys, cursor = texts(args, "keys"), self._cursor(partition, task_name)
        claims = claim_rules.parse(args["claims"])
        finished = claim_rules.release(partition, task_name, keys=keys, claims=claims, now=now)
        for key in finished:
            cursor.finish(key)
        self._record("release", args, finished, now, rows=partition.rows, task=task_name)
        return {}

    def _heartbeat(self, args: Args, now: float) -> Reply:
        """Renew claims; a claim that expired, but was not handed on, is taken up again."""
        ended: list[int] = []
        claims = args["claims"]
        assert isinstance(claims, list)
        for claim_id in claims:
            claim = self._claims.get(claim_id)
            if claim is None or not claim[2].keys:
                self._claims.pop(claim_id, None)
                ended.append(claim_id)
                continue
            partition_id, task_name, lease = claim
            lease.expires = now + self._lease_s
            if lease.has_expired:
                lease.has_expired = False
                pending = self._partitions[partition_id].tasks[task_name].pending
                for key in lease.keys:
                    pending.pop(key, None)
        return {"ended": ended}

    def _consumption(self, args: Args, now: float) -> Reply:
        partition = self._partition(args)
        done = True
        for task_name in texts(args, "tasks"):
            cursor = self._cursor(partition, task_name)
            self._expire(partition, task_name, cursor, now)
            done = done and not cursor.pending
        return {"done": done}

    def _expire(self, partition: Partition, task_name: str, cursor: TaskCursor, now: float) -> None:
        for lease in cursor.expire(now, partition.rows):
            self.num_expired += 1
            where: Args = {"partition": partition.name}
            self._record(
                "expire", where, sorted(lease.keys), now, rows=partition.rows, task=task_name, by=lease.consumer_id
            )

    # ---- look-ups

    def _partition(self, args: Args) -> Partition:
        name = text(args, "partition")
        partition = self._partitions.get(name)
        if partition is None:
            raise PartitionNotFound(
                f"partition {name!r} was never registered, or dropped; registered: "
                f"{name_some(self._partitions) or 'none'}"
            )
        if args.get("declared", partition.declared) != partition.declared:
            raise SchemaMismatch(
                f"partition {name!r} was dropped and declared anew since this client learned its fields; call again"
            )
        return partition

    def _cursor(self, partition: Partition, task_name: str) -> TaskCursor:
        cursor = partition.tasks.get(task_name)
        if cursor is None:
            raise SchemaMismatch(
                f"partition {partition.name!r}: unknown task {task_name!r}; declared consumer_tasks: "
                f"{name_some(partition.tasks) or 'none'}"
            )
        return cursor


def _demand(partition: Partition, keys: Sequence[str], *, nbytes: int, reservation: int = 0) -> Demand:
    new_rows = len(keys) - sum(map(partition.rows.__contains__, keys))
    return Demand(num_keys=len(keys), new_rows=new_rows, nbytes=nbytes, reservation=reservation)
