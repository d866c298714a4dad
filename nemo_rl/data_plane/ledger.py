"""The ledger: the only truth about rows. A pure state machine without I/O, threads or clocks.

A host (`ledger_host`, `ledger_ray`, `ledger_socket`) serialises the calls and passes `now`. Requests and replies are
plain values that msgpack carries, so one dispatcher, `Ledger.handle`, serves all hosts. Every operation checks
everything before it changes anything: a refused commit leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from nemo_rl.data_plane import ledger_claims
from nemo_rl.data_plane.ledger_state import Cell, Chunk, Lease, Partition, Piece, Row, TaskCursor, check_invariants
from nemo_rl.data_plane.schema import spec_from_record
from nemo_rl.errors import (
    CapacityExceeded,
    DataPlaneClosed,
    DataPlaneError,
    FieldNotProduced,
    KeysNotFound,
    PartitionNotFound,
    SchemaMismatch,
    VersionMismatch,
    name_some,
    to_record,
)

__all__ = ["Args", "Ledger", "Reply"]

Args: TypeAlias = dict[str, object]
"""Plain values only: None, bool, int, float, str, bytes, list and dict with string keys."""
Reply: TypeAlias = dict[str, object]


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
        validate: bool = False,
    ) -> None:
        self.run_id = run_id
        self._capacity_rows = capacity_rows
        self._capacity_bytes = capacity_bytes
        self._lease_s = lease_s
        self._validate = validate
        self._partitions: dict[str, Partition] = {}
        self._chunks: dict[str, Chunk] = {}
        self._claims: dict[int, tuple[str, str, Lease]] = {}
        self._num_claims = 0
        self._stats: dict[str, int] = {
            f"{prefix}_{what}": 0 for prefix in ("live", "peak") for what in ("rows", "bytes", "chunks")
        }
        self._ops: Mapping[str, Callable[[Args, float], Reply]] = {
            "register": self._register,
            "describe": self._describe,
            "commit": self._commit,
            "locate": self._locate,
            "claim": self._claim,
            "release": self._release,
            "heartbeat": self._heartbeat,
            "consumption": self._consumption,
            "list": self._list,
            "clear": self._clear,
            "stats": lambda args, now: dict(self._stats),
        }

    def handle(self, request: Mapping[str, object], *, now: float) -> Reply:
        """One request `{"run", "op", "args"}`; the reply is `{"ok": ...}` or `{"error": record}`.

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
        existing = self._partitions.get(name)
        if existing is not None:
            differ = [what for what, value in existing.declaration.items() if args[what] != value]
            if differ:
                raise SchemaMismatch(
                    f"partition {name!r} is registered with another declaration: {', '.join(differ)} differ; "
                    "use the same declaration or another partition id"
                )
            return {}
        specs = {str(record["name"]): spec_from_record(record) for record in _records(args, "fields")}
        writes = args["task_writes"]
        assert isinstance(writes, dict)
        group_size = args["group_size"]
        self._partitions[name] = Partition(
            declaration=dict(args),
            specs=specs,
            num_samples=_number(args, "num_samples"),
            group_size=None if group_size is None else _number(args, "group_size"),
            tasks={
                task: TaskCursor(writes=frozenset(writes[task]) & frozenset(specs)) for task in _texts(args, "tasks")
            },
        )
        return {}

    def _describe(self, args: Args, now: float) -> Reply:
        return dict(self._partition(args).declaration)

    # ---- writing

    def _commit(self, args: Args, now: float) -> Reply:
        partition, keys = self._partition(args), _texts(args, "keys")
        chunks = _records(args, "chunks")
        self._check_room(partition, keys, chunks, where=f"partition {args['partition']!r}")
        layouts = _check_layouts(partition, keys, chunks, args)
        ledger_claims.check_held(partition, keys, ledger_claims.parse(args["claims"]))
        if not args["may_create"]:
            _check_present(partition, keys, str(args["partition"]))

        partition.layouts.update(layouts)
        rows = [partition.rows.get(key) or partition.add_row(key) for key in keys]
        tags, lengths = args["tags"], args["lengths"]
        if isinstance(lengths, list):
            for row, length in zip(rows, lengths, strict=True):
                row.length = length
        if isinstance(tags, list):
            for row, extra in zip(rows, tags, strict=True):
                row.tags.update(extra)
        dropped: list[str] = []
        versions = _next_versions(rows, chunks)
        for record in chunks:
            dropped += self._attach(rows, record, version=versions[str(record["family"])])
        for chunk_id in dropped:
            del self._chunks[chunk_id]
        written = {name for record in chunks for name in _texts(record, "fields")}
        ledger_claims.finish_written(partition, keys, rows, written)
        self._recount()
        return {"versions": versions, "drop": dropped}

    def _check_room(self, partition: Partition, keys: Sequence[str], chunks: Sequence[Args], *, where: str) -> None:
        new_rows = sum(1 for key in keys if key not in partition.rows)
        if len(partition.rows) + new_rows > partition.num_samples:
            raise CapacityExceeded(
                f"{where}: {new_rows} new rows beside {len(partition.rows)} live ones are more than the "
                f"{partition.num_samples} declared; clear rows or register with a larger num_samples"
            )
        if self._stats["live_rows"] + new_rows > self._capacity_rows:
            raise CapacityExceeded(
                f"{where}: {new_rows} new rows beside {self._stats['live_rows']} live ones are more than "
                f"data_plane.capacity_rows = {self._capacity_rows}; clear rows or raise it"
            )
        num_bytes = sum(_number(record, "nbytes") for record in chunks)
        if self._capacity_bytes is not None and self._stats["live_bytes"] + num_bytes > self._capacity_bytes:
            raise CapacityExceeded(
                f"{where}: {num_bytes} new bytes beside {self._stats['live_bytes']} live ones are more than "
                f"data_plane.capacity_bytes = {self._capacity_bytes}; clear rows or raise it"
            )

    def _attach(self, rows: Sequence[Row], record: Args, *, version: int) -> list[str]:
        """Points rows at a new chunk; returns chunks that lost their last row."""
        chunk_id, family = _text(record, "id"), _text(record, "family")
        fields = frozenset(_texts(record, "fields"))
        first, count = _number(record, "first"), _number(record, "rows")
        chunk = self._chunks[chunk_id] = Chunk(nbytes=_number(record, "nbytes"), refs=count)
        self._stats["live_bytes"] += chunk.nbytes
        dropped: list[str] = []
        for index, row in enumerate(rows[first : first + count]):
            piece = Piece(chunk_id, index, fields)
            cell = row.cells.get(family)
            if cell is None:
                row.cells[family] = Cell(version, [piece])
                continue
            kept: list[Piece] = []
            for old in cell.pieces:
                rest = old.fields - fields
                if rest:
                    kept.append(Piece(old.chunk_id, old.index, rest))
                else:
                    dropped += self._unref(old.chunk_id)
            row.cells[family] = Cell(version, [*kept, piece])
        return dropped

    def _unref(self, chunk_id: str) -> list[str]:
        chunk = self._chunks[chunk_id]
        chunk.refs -= 1
        if chunk.refs:
            return []
        self._stats["live_bytes"] -= chunk.nbytes
        return [chunk_id]

    def _clear(self, args: Args, now: float) -> Reply:
        partition = self._partition(args)
        keys = list(partition.rows) if args["keys"] is None else _texts(args, "keys")
        dropped: list[str] = []
        cleared = 0
        for key in keys:
            if key not in partition.rows:
                continue
            cleared += 1
            for cell in partition.remove_row(key).cells.values():
                for piece in cell.pieces:
                    dropped += self._unref(piece.chunk_id)
        for chunk_id in dropped:
            del self._chunks[chunk_id]
        self._claims = {i: claim for i, claim in self._claims.items() if claim[2].keys}
        self._recount()
        return {"rows": cleared, "drop": dropped}

    def _recount(self) -> None:
        self._stats["live_rows"] = sum(len(p.rows) for p in self._partitions.values())
        self._stats["live_chunks"] = len(self._chunks)
        for what in ("rows", "bytes", "chunks"):
            self._stats[f"peak_{what}"] = max(self._stats[f"peak_{what}"], self._stats[f"live_{what}"])

    # ---- reading

    def _locate(self, args: Args, now: float) -> Reply:
        partition, name = self._partition(args), _text(args, "partition")
        keys, fields = _texts(args, "keys"), _texts(args, "fields")
        _check_present(partition, keys, name)
        rows = [partition.rows[key] for key in keys]
        needed = partition.by_family(fields)
        for family, names in needed.items():
            _check_written(name, keys, rows, family, names)
        expected = args["versions"]
        assert isinstance(expected, dict)
        for family in needed:
            if family in expected:
                _check_version(name, keys, rows, family, expected[family])
        table: dict[str, int] = {}
        placements: list[Reply] = []
        for family, names in needed.items():
            cells = [row.cells[family] for row in rows]
            if all(len(cell.pieces) == 1 for cell in cells):
                placements.append({"fields": sorted(names), "runs": _runs([c.pieces[0] for c in cells], table)})
            else:
                for field in sorted(names):
                    placements.append({"fields": [field], "runs": _runs([c.piece_of(field) for c in cells], table)})
        layouts = {field: [*partition.layouts[field]] for field in fields if field in partition.layouts}
        return {"chunks": list(table), "placements": placements, "layouts": layouts}

    def _list(self, args: Args, now: float) -> Reply:
        rows = self._partition(args).rows
        return {"keys": list(rows), "tags": [dict(row.tags) for row in rows.values()]}

    # ---- claims

    def _claim(self, args: Args, now: float) -> Reply:
        partition, task_name = self._partition(args), _text(args, "task")
        cursor = self._cursor(partition, args, task_name)
        cursor.lapse(now, partition.rows)
        needed = partition.by_family(_texts(args, "fields"))
        keys = ledger_claims.pick_rows(partition, cursor, needed=needed, batch_size=_number(args, "batch_size"))
        if not keys:
            return {"keys": [], "why": ledger_claims.explain(partition, cursor, needed=needed, now=now)}
        self._num_claims += 1
        lease = Lease(
            claim_id=self._num_claims,
            consumer_id=_text(args, "consumer"),
            taken=now,
            expires=now + self._lease_s,
            keys=set(),
        )
        for key in keys:
            cursor.lease(key, lease)
        self._claims[lease.claim_id] = (_text(args, "partition"), task_name, lease)
        rows = [partition.rows[key] for key in keys]
        lengths = [row.length for row in rows]
        return {
            "keys": keys,
            "claim": lease.claim_id,
            "lease_s": self._lease_s,
            "lengths": None if None in lengths else lengths,
            "tags": [dict(row.tags) for row in rows],
            "versions": {family: rows[0].cells[family].version for family in needed},
        }

    def _release(self, args: Args, now: float) -> Reply:
        partition, task_name = self._partition(args), _text(args, "task")
        cursor = self._cursor(partition, args, task_name)
        ledger_claims.release(
            partition,
            cursor,
            keys=_texts(args, "keys"),
            claims=ledger_claims.parse(args["claims"]),
            task_name=task_name,
        )
        return {}

    def _heartbeat(self, args: Args, now: float) -> Reply:
        """Renews claims; a claim that lapsed, but was not handed on, is taken up again."""
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
            if lease.has_lapsed:
                lease.has_lapsed = False
                pending = self._partitions[partition_id].tasks[task_name].pending
                for key in lease.keys:
                    pending.pop(key, None)
        return {"ended": ended}

    def _consumption(self, args: Args, now: float) -> Reply:
        partition = self._partition(args)
        done = True
        for task_name in _texts(args, "tasks"):
            cursor = self._cursor(partition, args, task_name)
            cursor.lapse(now, partition.rows)
            done = done and not cursor.pending
        return {"done": done}

    # ---- look-ups

    def _partition(self, args: Args) -> Partition:
        name = _text(args, "partition")
        partition = self._partitions.get(name)
        if partition is None:
            raise PartitionNotFound(
                f"partition {name!r} was never registered; registered: {name_some(self._partitions) or 'none'}"
            )
        return partition

    def _cursor(self, partition: Partition, args: Args, task_name: str) -> TaskCursor:
        cursor = partition.tasks.get(task_name)
        if cursor is None:
            raise SchemaMismatch(
                f"partition {args['partition']!r}: unknown task {task_name!r}; declared consumer_tasks: "
                f"{name_some(partition.tasks) or 'none'}"
            )
        return cursor


def _check_present(partition: Partition, keys: Sequence[str], name: str) -> None:
    missing = [key for key in keys if key not in partition.rows]
    if missing:
        raise KeysNotFound(
            f"partition {name!r}: {len(missing)} of {len(keys)} rows are not there (never put, or cleared): "
            f"{name_some(missing)}"
        )


def _check_layouts(
    partition: Partition, keys: Sequence[str], chunks: Sequence[Args], args: Args
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype, trailing dims and lengths must agree with what the partition already holds."""
    where = f"partition {args['partition']!r}"
    lengths = args["lengths"]
    if isinstance(lengths, list):
        for key, length in zip(keys, lengths, strict=True):
            row = partition.rows.get(key)
            if row is not None and row.length is not None and row.length != length:
                raise SchemaMismatch(f"{where}: row {key!r} has {row.length} tokens, got a column with {length}")
    settled: dict[str, tuple[str, tuple[int, ...]]] = {}
    for record in chunks:
        layouts = record["layouts"]
        assert isinstance(layouts, dict)
        for name, (dtype, trailing) in layouts.items():
            layout = (dtype, tuple(trailing))
            before = partition.layouts.get(name)
            if before is not None and before != layout:
                raise SchemaMismatch(
                    f"{where}: field {name!r} holds {before[0]} rows with trailing dims {list(before[1])}, "
                    f"got {dtype} with {list(trailing)}"
                )
            settled[name] = layout
    return settled


def _next_versions(rows: Sequence[Row], chunks: Sequence[Args]) -> dict[str, int]:
    """Version of each family after the commit: one more when a field is rewritten, the same for all rows of a put."""
    versions: dict[str, int] = {}
    families = {_text(record, "family"): _texts(record, "fields") for record in chunks}
    for family, fields in families.items():
        versions[family] = 1
        for row in rows:
            cell = row.cells.get(family)
            if cell is not None:
                is_rewrite = any(name in piece.fields for name in fields for piece in cell.pieces)
                versions[family] = max(versions[family], cell.version + is_rewrite)
    return versions


def _check_written(
    partition: str, keys: Sequence[str], rows: Sequence[Row], family: str, names: frozenset[str]
) -> None:
    late = [i for i, row in enumerate(rows) if family not in row.cells or not row.cells[family].has(names)]
    if late:
        raise FieldNotProduced(
            f"partition {partition!r}: fields {', '.join(sorted(names))} are not written yet for {len(late)} of "
            f"{len(rows)} rows: {name_some(keys[i] for i in late)}"
        )


def _check_version(partition: str, keys: Sequence[str], rows: Sequence[Row], family: str, expected: object) -> None:
    other = [i for i, row in enumerate(rows) if row.cells[family].version != expected]
    if other:
        raise VersionMismatch(
            f"partition {partition!r}: family {family!r} was rewritten: the meta names version {expected}, the ledger "
            f"holds {rows[other[0]].cells[family].version} for {name_some(keys[i] for i in other)}; "
            "use the meta that the rewriting put returned"
        )


def _runs(pieces: Sequence[Piece], table: dict[str, int]) -> list[list[int]]:
    """Rows as runs `[chunk, first row, rows]`, in order; `table` numbers the chunks."""
    runs: list[list[int]] = []
    for piece in pieces:
        chunk = table.setdefault(piece.chunk_id, len(table))
        if runs and runs[-1][0] == chunk and runs[-1][1] + runs[-1][2] == piece.index:
            runs[-1][2] += 1
        else:
            runs.append([chunk, piece.index, 1])
    return runs


def _text(args: Mapping[str, object], name: str) -> str:
    value = args[name]
    assert isinstance(value, str), f"{name}: expected a string, got {value!r}"
    return value


def _number(args: Mapping[str, object], name: str) -> int:
    value = args[name]
    assert isinstance(value, int), f"{name}: expected an integer, got {value!r}"
    return value


def _texts(args: Mapping[str, object], name: str) -> list[str]:
    value = args[name]
    assert isinstance(value, list), f"{name}: expected a list, got {value!r}"
    return value


def _records(args: Mapping[str, object], name: str) -> list[dict[str, object]]:
    value = args[name]
    assert isinstance(value, list), f"{name}: expected a list, got {value!r}"
    return value
