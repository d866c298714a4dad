"""The ledger: the single source of truth about rows. A pure state machine without I/O, threads or clocks.

A host (`host`, `host_ray`, `host_socket`) serialises the calls and passes `now`. Requests and replies are plain values
that msgpack carries, so one dispatcher, `Ledger.handle`, serves all hosts. Every operation checks everything before it
changes anything: a refused commit leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from nemo_rl.data_plane.ledger import claims as claim_rules
from nemo_rl.data_plane.ledger import put_rules
from nemo_rl.data_plane.ledger.capacity import Capacity, Demand
from nemo_rl.data_plane.ledger.events import EventSink, Recorder, explain_row
from nemo_rl.data_plane.ledger.keyed_rows import KeyedRows, lacking
from nemo_rl.data_plane.ledger.reads import locate
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
            "lacking": self._lacking,
            "strangers": self._strangers,
            "locate": self._locate,
            "gone": lambda args, now: {"chunks": [i for i in _texts(args, "chunks") if i not in self._chunks]},
            "claim": self._claim,
            "release": self._release,
            "heartbeat": self._heartbeat,
            "consumption": self._consumption,
            "list": self._list,
            "explain": self._explain,
            "clear": self._clear,
            "forget": self._forget,
            "stats": lambda args, now: self._capacity.stats(now),
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
        except DataPlaneError as error:
            return {"error": to_record(error)}
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
            return {"error": to_record(DataPlaneError(f"the ledger could not serve {request.get('op')!r}: {error!r}"))}
        finally:
            if self._validate:
                check_invariants(self._partitions, self._chunks)
        return {"ok": reply}

    # ---- declaration

    def _register(self, args: Args, now: float) -> Reply:
        name = _text(args, "partition")
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
        specs = {str(record["name"]): spec_from_record(record) for record in _records(args, "fields")}
        writes = args["task_writes"]
        assert isinstance(writes, dict)
        group_size = args["group_size"]
        self._num_declared += 1
        first_version = self._first_versions.pop(name, 1)
        self._partitions[name] = Partition(
            name=name,
            declaration=declaration,
            specs=specs,
            num_samples=_number(args, "num_samples"),
            group_size=None if group_size is None else _number(args, "group_size"),
            tasks={
                task: TaskCursor(writes=frozenset(writes[task]) & frozenset(specs)) for task in _texts(args, "tasks")
            },
            columns={spec.family: FamilyColumn() for spec in specs.values()},
            declared=self._num_declared,
            first_version=first_version,
            top_version=first_version - 1,
        )
        self._record("register", args, (), now, fields=list(specs))
        return {"declared": self._num_declared}

    def _describe(self, args: Args, now: float) -> Reply:
        partition = self._partition(args)
        fields = [*_records(partition.declaration, "fields"), *partition.added]
        return {**partition.declaration, "fields": fields, "declared": partition.declared}

    def _add_fields(self, args: Args, now: float) -> Reply:
        """Declare further columns; the declaration that `register` repeats stays as it was."""
        partition = self._partition(args)
        specs = {str(record["name"]): (spec_from_record(record), record) for record in _records(args, "fields")}
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
        partition, keys = self._partition(args), _texts(args, "keys")
        self._capacity.blocked_s += _seconds(args, "waited_s")
        demand = _demand(partition, keys, nbytes=_number(args, "nbytes"))
        blocked = self._capacity.lacks_capacity(partition, demand, now=now)
        if blocked is not None:
            return {"blocked": blocked}
        return {"reservation": self._capacity.reserve(partition, demand, now=now)}

    def _unreserve(self, args: Args, now: float) -> Reply:
        """Give back the capacity that a put has reserved before it gave up."""
        self._capacity.blocked_s += _seconds(args, "waited_s")
        self._capacity.end(_number(args, "reservation"))
        return {}

    def _begin(self, args: Args, now: float) -> Reply:
        """Announce a put to a store that keeps columns under the rows' keys; one that its commit would refuse is
        refused here, before other programs can see any of it."""
        partition, keys, families = self._partition(args), _texts(args, "keys"), args["families"]
        assert isinstance(families, dict), f"families: expected a dict, got {families!r}"
        put_rules.check(partition, keys, args, [args], now=now)
        keyed = self._keyed.setdefault(partition.name, KeyedRows())
        return keyed.begin(partition.rows, keys, families, now=now, lasts_s=_seconds(args, "lasts_s"))

    def _end(self, args: Args, now: float) -> Reply:
        """An announced put writes nothing any more."""
        name = _text(args, "partition")
        partition, keyed = self._partitions.get(name), self._keyed[name]
        keyed.end(_number(args, "put"), () if partition is None else partition.rows, now)
        return {"free": keyed.due(now)}

    def _freed(self, args: Args, now: float) -> Reply:
        """The caller has freed rows that a reply has named under `free`."""
        self._keyed[_text(args, "partition")].freed(_texts(args, "keys"))
        return {}

    def _lacking(self, args: Args, now: float) -> Reply:
        """Fields that another program may have written while the ledger lacks them."""
        partition, keys = self._partition(args), args["keys"]
        assert keys is None or isinstance(keys, list), f"keys: expected a list, got {keys!r}"
        keyed = self._keyed.setdefault(partition.name, KeyedRows())
        return {"fields": lacking(partition, keyed, _texts(args, "fields"), keys), "live": len(partition.rows)}

    def _strangers(self, args: Args, now: float) -> Reply:
        partition = self._partition(args)
        keyed = self._keyed.setdefault(partition.name, KeyedRows())
        return {"keys": keyed.strangers(partition.rows, _texts(args, "keys"))}

    def _commit(self, args: Args, now: float) -> Reply:
        """Make a put visible, or answer `blocked` when it does not fit now."""
        partition, keys = self._partition(args), _texts(args, "keys")
        chunks = _records(args, "chunks")
        if args.get("if_absent") and put_rules.is_any_written(partition, keys, chunks):
            return {"present": True}
        put = args.get("put", 0)
        assert isinstance(put, int)
        if put and not self._keyed[partition.name].is_under_way(put):
            raise DataPlaneTimeout(
                f"partition {partition.name!r}: a put took longer than it had announced, so its rows may be freed"
            )
        self._capacity.blocked_s += _seconds(args, "waited_s")
        written = partition.by_family(name for record in chunks for name in _texts(record, "fields"))
        column_types = put_rules.check(partition, keys, args, chunks, now=now)
        nbytes = sum([_number(record, "nbytes") for record in chunks])
        reservation = args.get("reservation", 0)
        assert isinstance(reservation, int)
        demand = _demand(partition, keys, nbytes=nbytes, reservation=reservation)
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
            dropped += self._attach(partition, keys, record, version=versions[_text(record, "family")])
        fields = frozenset().union(*written.values())
        claim_rules.finish_written(partition, keys, fields)
        self._capacity.mark(partition)
        if self._record.is_on:
            self._record("commit", args, keys, now, rows=partition.rows, fields=sorted(fields), nbytes=nbytes)
        reply: Reply = {"versions": versions, "drop": dropped}
        if partition.name in self._keyed:
            reply["free"] = self._finish_keyed(partition, keys, fields, put if args.get("is_last") else 0, now)
        return reply

    def _finish_keyed(
        self, partition: Partition, keys: Sequence[str], fields: frozenset[str], put: int, now: float
    ) -> list[str]:
        """Remember what was written, and end the announced put unless it goes on (0); return rows to be freed."""
        keyed = self._keyed[partition.name]
        keyed.touch(fields, keys)
        if put:
            keyed.end(put, partition.rows, now)
        return keyed.due(now)

    def _put_rows(self, partition: Partition, keys: Sequence[str], args: Args, now: float) -> None:
        """Create the rows that are new and settle lengths and tags."""
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
        chunk_id, first, count = _text(record, "id"), _number(record, "first"), _number(record, "rows")
        fields, sizes, row_sizes = _texts(record, "fields"), record["sizes"], record["row_sizes"]
        assert isinstance(sizes, list) and isinstance(row_sizes, dict), f"malformed chunk record: {record}"
        chunk = Chunk(
            chunk_id=chunk_id,
            nbytes=_number(record, "nbytes"),
            fields=frozenset(fields),
            rows=count,
            sizes=dict(zip(fields, sizes, strict=True)),
            row_sizes={name: memoryview(table).cast("Q") for name, table in row_sizes.items()},
            version=version,
            form=_form(record),
            is_keyed=bool(record.get("keyed", False)),
        )
        self._chunks[chunk_id] = chunk
        self._capacity.attach(partition, chunk)
        left = partition.columns[_text(record, "family")].attach(keys[first : first + count], chunk)
        return self._let_go(partition, left)

    def _let_go(self, partition: Partition, left: Sequence[RowPiece]) -> list[str]:
        """Settle that these cells are gone; return the ids of chunks that nobody reads now."""
        dropped: list[str] = []
        for piece in left:
            chunk = piece.chunk
            chunk.cells -= len(piece.fields)
            if chunk.cells:
                self._capacity.shrink(partition, piece)
            else:
                dropped += self._drop(partition, [chunk])
        return dropped

    def _drop(self, partition: Partition, chunks: Sequence[Chunk]) -> list[str]:
        """Forget chunks; return the ids of those that are payloads of their own."""
        for chunk in chunks:
            self._capacity.detach(partition, chunk)
            del self._chunks[chunk.chunk_id]
        return [chunk.chunk_id for chunk in chunks if not chunk.is_keyed]

    def _clear(self, args: Args, now: float) -> Reply:
        partition = self._partition(args)
        keys = list(partition.rows if args["keys"] is None else dict.fromkeys(_texts(args, "keys")))
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
        reply: Reply = {"rows": len(gone), "drop": dropped}
        keyed = self._keyed.get(partition.name)
        if keyed is not None:
            keyed.expire(partition.rows, now)
            keyed.clear(gone, now)
            reply["free"] = keyed.due(now)
        return reply

    # ---- reading

    def _locate(self, args: Args, now: float) -> Reply:
        partition, keys, fields = self._partition(args), _texts(args, "keys"), _texts(args, "fields")
        put_rules.check_present(partition, keys)
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
        key = _text(args, "key")
        return {"rows": [explain_row(p, key, now=now) for p in self._partitions.values() if key in p.rows]}

    def _inspect(self, args: Args, now: float) -> Reply:
        """Return limits, reservations and claims, which `stats` leaves out."""
        claims = claim_rules.overview(self._partitions.values(), self._claims.values(), now=now)
        return self._capacity.limits(now) | claims

    # ---- claims

    def _claim(self, args: Args, now: float) -> Reply:
        partition, task_name = self._partition(args), _text(args, "task")
        cursor = self._cursor(partition, task_name)
        self._expire(partition, task_name, cursor, now)
        needed = partition.by_family(_texts(args, "fields"))
        keys = claim_rules.pick_rows(
            partition,
            cursor,
            needed=needed,
            batch_size=_number(args, "batch_size"),
            groups=_texts(args, "groups") if "groups" in args else (),
        )
        if not keys:
            return {"keys": [], "why": claim_rules.explain(partition, cursor, needed=needed, now=now)}
        self._num_claims += 1
        lease = ClaimLease(
            claim_id=self._num_claims,
            consumer_id=_text(args, "consumer"),
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
        partition, task_name = self._partition(args), _text(args, "task")
        keys, cursor = _texts(args, "keys"), self._cursor(partition, task_name)
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
        for task_name in _texts(args, "tasks"):
            cursor = self._cursor(partition, task_name)
            self._expire(partition, task_name, cursor, now)
            done = done and not cursor.pending
        return {"done": done}

    def _expire(self, partition: Partition, task_name: str, cursor: TaskCursor, now: float) -> None:
        for lease in cursor.expire(now, partition.rows):
            where: Args = {"partition": partition.name}
            self._record(
                "expire", where, sorted(lease.keys), now, rows=partition.rows, task=task_name, by=lease.consumer_id
            )

    # ---- look-ups

    def _partition(self, args: Args) -> Partition:
        name = _text(args, "partition")
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


def _form(record: Args) -> dict[str, bytes]:
    form = record.get("form", {})
    assert isinstance(form, dict), f"form: expected a dict, got {form!r}"
    return form


def _text(args: Mapping[str, object], name: str) -> str:
    value = args[name]
    assert isinstance(value, str), f"{name}: expected a string, got {value!r}"
    return value


def _number(args: Mapping[str, object], name: str) -> int:
    value = args[name]
    assert isinstance(value, int), f"{name}: expected an integer, got {value!r}"
    return value


def _seconds(args: Mapping[str, object], name: str) -> float:
    value = args.get(name, 0.0)
    assert isinstance(value, int | float), f"{name}: expected seconds, got {value!r}"
    return float(value)


def _texts(args: Mapping[str, object], name: str) -> list[str]:
    value = args[name]
    assert isinstance(value, list), f"{name}: expected a list, got {value!r}"
    return value


def _records(args: Mapping[str, object], name: str) -> list[dict[str, object]]:
    value = args[name]
    assert isinstance(value, list), f"{name}: expected a list, got {value!r}"
    return value
