"""`ClientLink`: one client's way to its ledger and its store. Calls have deadlines, errors say whose they are.

Used by `ledger_client`, `writes` and `reads`. Beside it: the stage for which a thread works (`stage_context`), the
clock of a call's parts, the wait for capacity (`RoomWait`), and the declared columns of partitions (`SchemaCache`).
Invariants: nothing reaches the host or the store after `end`, and no call outlives its deadline; a wait ends with the
ledger's grant or with `CapacityExceeded`; a call that fails because its partition was dropped and declared anew is made
again with the new declaration, so a client never has to be informed.

The claims one client holds, and the heartbeat that keeps them alive.

Used by `LedgerClient`. The heartbeat thread lives only while claims are held; a claim is remembered until its rows are
released, written or cleared here, so that a late write without its meta can show which claim it belongs to.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from nemo_rl.data_plane.address import DataPlaneAddress, Handles
from nemo_rl.data_plane.batch_meta import KVBatchMeta, Version
from nemo_rl.data_plane.interfaces import PayloadStore
from nemo_rl.data_plane.keys import block_ids, chunk_id, client_label
from nemo_rl.data_plane.ledger.host import LedgerHost
from nemo_rl.data_plane.ledger.ledger import Args, Reply
from nemo_rl.data_plane.schema import FieldSpec, spec_from_record, stage_of_task, writes_that_end_claims
from nemo_rl.errors import (
    CapacityExceeded,
    DataPlaneClosed,
    DataPlaneError,
    DataPlaneTimeout,
    PayloadLost,
    SchemaMismatch,
    name_some,
)
from nemo_rl.utils.deadlines import awake_s

__all__ = [
    "CLEAR",
    "FIRST_POLL_S",
    "LONGEST_POLL_S",
    "ClientCall",
    "ClientLink",
    "Declaration",
    "LeaseRenewer",
    "RoomWait",
    "SchemaCache",
    "current_stage",
    "names_of",
    "plain_versions",
    "stage_context",
    "versions_of",
]

logger = logging.getLogger(__name__)


NO_STAGE = ""
CLEAR = "clear"
"""The stage of what `factory.open_step` does."""

current_stage: ContextVar[str] = ContextVar("data_plane_stage", default=NO_STAGE)


@contextmanager
def stage_context(stage: str) -> Iterator[None]:
    """Calls made inside, in this thread, belong to `stage`."""
    token = current_stage.set(stage)
    try:
        yield
    finally:
        current_stage.reset(token)


class StageClock:
    """Seconds by part of a call, summed over calls. Thread-safe."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time of the block to `part`, also when it fails."""
        started = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            with self._lock:
                self._seconds[part] = self._seconds.get(part, 0.0) + spent

    def snapshot(self) -> dict[str, float]:
        """Return seconds by part since the start."""
        with self._lock:
            return dict(self._seconds)


FIRST_POLL_S, LONGEST_POLL_S = 0.002, 0.1
"""A waiting call asks the ledger again after so long, doubling."""
LAST_CALLS_S = 0.05
"""Kept back from the deadline, so that the end of a wait can still be reported to the ledger."""


@dataclass(slots=True)
class RoomWait:
    """The waiting of one put.

    Args:
        ask: one ledger operation of this put.
        deadline: monotonic seconds.
        what: the put, for the error.
    """

    ask: Callable[[str, Args], Reply]
    deadline: float
    what: str
    waited_s: float = 0.0
    """Seconds blocked so far."""
    _told_s: float = 0.0
    """Seconds of `waited_s` that the ledger knows."""

    def granted(self, op: str, args: Args) -> Reply:
        """Return the reply of `op` once it is not blocked.

        Raises:
            CapacityExceeded: the deadline came first, or the ledger says that no wait can help.
        """
        poll_s = FIRST_POLL_S
        while True:
            asked = awake_s()
            reply = self.ask(op, {**args, "waited_s": self.untold_s()})
            blocked = reply.get("blocked")
            if blocked is None:
                return reply
            if awake_s() + poll_s + LAST_CALLS_S > self.deadline:
                self.waited_s += awake_s() - asked
                raise CapacityExceeded(
                    f"{self.what}: no capacity: {blocked}; waited {self.waited_s:.1f} s; clear rows sooner, put "
                    "fewer rows at a time, or raise the limit"
                )
            time.sleep(poll_s)
            self.waited_s += awake_s() - asked
            poll_s = min(poll_s * 2, LONGEST_POLL_S)

    def untold_s(self) -> float:
        """Return seconds blocked since the last report to the ledger."""
        untold, self._told_s = self.waited_s - self._told_s, self.waited_s
        return untold


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ClientCall:
    """One public call: its deadline, and what an error message says about it."""

    what: str
    deadline: float
    started: float

    def left(self) -> float:
        """Return seconds until the deadline."""
        return max(self.deadline - awake_s(), 0.0)

    def age(self) -> float:
        """Return seconds since it began."""
        return awake_s() - self.started


class ClientLink:
    """Host, store, deadline, counters and clock of one client."""

    def __init__(self, *, host: LedgerHost, store: PayloadStore, address: DataPlaneAddress) -> None:
        self.store, self.address, self._host = store, address, host
        self.timeout_s = address.config.timeout_s
        self.label = client_label(store.place)
        self.clock = StageClock()
        self._lock = threading.Lock()
        self._num_chunks = 0
        self._has_ended = False
        self._counters = {"put_bytes": 0, "get_bytes": 0, "over_read_bytes": 0}

    @property
    def counters(self) -> dict[str, int]:
        """Payload bytes put and got, and bytes read but not asked for."""
        with self._lock:
            return dict(self._counters)

    def count(self, what: str, num_bytes: int) -> None:
        with self._lock:
            self._counters[what] += num_bytes

    def begin(self, what: str) -> ClientCall:
        self.check_open()
        now = awake_s()
        return ClientCall(what=what, deadline=now + self.timeout_s, started=now)

    def check_open(self) -> None:
        """Raise DataPlaneClosed after `end`."""
        if self._has_ended:
            raise DataPlaneClosed(f"this client of run {self.address.run_id!r} is closed")

    def ask(self, call: ClientCall, op: str, args: Args, *, handles: Handles | None = None) -> Reply:
        """Run one operation of the ledger, signed with the client's label and its stage."""
        signed: Args = {"who": self.label, "stage": current_stage.get(), **args}
        with self.clock.measure("ledger"), self.errors_of(call):
            return self._host.call(op, signed, timeout_s=call.left(), handles=handles)

    def notify(self, op: str, args: Args, *, timeout_s: float | None = None) -> Reply:
        """Run an operation outside of any call: heartbeats, reservations that are given back, counts."""
        signed: Args = {"who": self.label, **args}
        return self._host.call(op, signed, timeout_s=self.timeout_s if timeout_s is None else timeout_s)

    @contextmanager
    def errors_of(self, call: ClientCall) -> Iterator[None]:
        """Make errors inside about a peer that is gone or silent name the call, its owner and its age."""
        self.check_open()
        try:
            yield
        except (DataPlaneClosed, DataPlaneTimeout, PayloadLost) as error:
            raise type(error)(
                f"{call.what}: {error}; deadline {self.timeout_s:.1f} s, age {call.age():.1f} s, "
                f"owner: run {self.address.run_id!r} in process {self.address.process_id}"
            ) from error

    def new_ids(self, count: int) -> list[str]:
        with self._lock:
            first = self._num_chunks
            self._num_chunks += count
        return [chunk_id(self.address.run_id, self.label, first + i) for i in range(count)]

    def drop(self, chunk_ids: Sequence[str]) -> None:
        """Free chunks that no row reads any more; the rows are settled already, so a failure is only reported."""
        if not chunk_ids:
            return
        try:
            self.store.drop([stored for chunk in chunk_ids for stored in block_ids(chunk)], timeout_s=self.timeout_s)
        except DataPlaneError as error:
            logger.warning("could not free %d chunks of run %s: %s", len(chunk_ids), self.address.run_id, error)

    def end(self) -> bool:
        """End the link: later calls fail. Return False when it had ended before."""
        with self._lock:
            was_open, self._has_ended = not self._has_ended, True
        return was_open

    def close(self) -> None:
        """Close store and host, both also when one of them fails."""
        with ExitStack() as closing:
            closing.callback(self._host.close)
            closing.callback(self.store.close)


def names_of(value: object) -> list[str]:
    assert isinstance(value, list), f"malformed reply: {value!r}"
    return value


def versions_of(reply: Reply) -> dict[str, Version]:
    versions = reply["versions"]
    assert isinstance(versions, dict), f"malformed reply: {reply}"
    return versions


def plain_versions(versions: Mapping[str, Version]) -> dict[str, int | list[int]]:
    return {family: version if isinstance(version, int) else list(version) for family, version in versions.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Declaration:
    """Columns of a partition."""

    number: int
    """The ledger's count of declarations when this one was made."""
    specs: Mapping[str, FieldSpec]
    """The columns by name."""

    def check_declared(self, names: Sequence[str], *, where: str) -> None:
        """Refuse names of columns that the partition does not have."""
        unknown = [name for name in names if name not in self.specs]
        if unknown:
            raise SchemaMismatch(
                f"{where}: fields {name_some(unknown)} are not declared; declared: {', '.join(self.specs)}"
            )


class SchemaCache:
    """Declarations by partition; asked of the ledger once, and again when one has changed."""

    def __init__(self, link: ClientLink) -> None:
        self._link = link
        self._known: dict[str, Declaration] = {}

    def learn(self, partition_id: str, specs: Mapping[str, FieldSpec], reply: Reply) -> Declaration:
        number = reply["declared"]
        assert isinstance(number, int), f"malformed reply: {reply}"
        self._known[partition_id] = Declaration(number=number, specs=specs)
        return self._known[partition_id]

    def forget(self, partition_id: str) -> None:
        self._known.pop(partition_id, None)

    def get(self, call: ClientCall, partition_id: str) -> Declaration:
        return self._known.get(partition_id) or self.ask(call, partition_id)

    def use(self, call: ClientCall, partition_id: str, action: Callable[[Declaration], _T]) -> _T:
        """Run `action` with the declaration; once more when it fails and the declaration has changed since."""
        known = self.get(call, partition_id)
        try:
            return action(known)
        except SchemaMismatch:
            fresh = self.ask(call, partition_id)
            if fresh == known:
                raise
        return action(fresh)

    def ask(self, call: ClientCall, partition_id: str) -> Declaration:
        reply = self._link.ask(call, "describe", {"partition": partition_id})
        records = reply["fields"]
        assert isinstance(records, list), f"malformed reply: {reply}"
        return self.learn(partition_id, {spec.name: spec for spec in map(spec_from_record, records)}, reply)


class LeaseRenewer:
    """Claims by partition, task and key."""

    def __init__(self, *, renew: Callable[[list[int]], list[int]], period_s: float) -> None:
        """Args:
        renew: renews claims at the ledger; returns those that have ended.
        period_s: seconds between heartbeats.
        """
        self._renew, self._period_s = renew, period_s
        self._held: dict[tuple[str, str], dict[str, int]] = {}
        self._ended: set[int] = set()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def add(self, partition_id: str, task_name: str, keys: Sequence[str], claim_id: int) -> None:
        """Hold a claim; start the heartbeat if it is the first."""
        with self._lock:
            self._held.setdefault((partition_id, task_name), {}).update(dict.fromkeys(keys, claim_id))
            if self._thread is None and not self._is_closed:
                self._wake.clear()
                self._thread = threading.Thread(target=self._beat, name="data-plane-heartbeat", daemon=True)
                self._thread.start()

    def held(self, partition_id: str, keys: Sequence[str]) -> dict[str, dict[str, int]]:
        """Return task -> key -> claim id, for the keys that this client holds."""
        with self._lock:
            found = {
                task: {key: claims[key] for key in keys if key in claims}
                for (partition, task), claims in self._held.items()
                if partition == partition_id
            }
        return {task: claims for task, claims in found.items() if claims}

    def claims_of(self, partition_id: str, keys: Sequence[str], meta: KVBatchMeta | None) -> dict[str, dict[str, int]]:
        """Return task -> key -> claim id: what the meta says, and for other tasks what this client holds."""
        claims = self.held(partition_id, keys)
        if meta is not None and meta.claims is not None and meta.task_name is not None:
            if meta.partition_id != partition_id:
                raise SchemaMismatch(f"the claimed meta is of partition {meta.partition_id!r}, not {partition_id!r}")
            its = meta.claims_by_key()
            claims[meta.task_name] = {key: its[key] for key in keys if key in its}
        return claims

    def forget(self, partition_id: str, keys: Collection[str] | None) -> None:
        """Drop rows (all when None) of all tasks: they are gone."""
        with self._lock:
            for (partition, _), claims in self._held.items():
                if partition == partition_id:
                    for key in list(claims) if keys is None else keys:
                        claims.pop(key, None)
            self._prune()

    def forget_claims(self, partition_id: str, task_name: str, claims: Mapping[str, int]) -> None:
        """Drop rows (key -> claim id) of one task, unless they were claimed anew."""
        with self._lock:
            held = self._held.get((partition_id, task_name), {})
            for key, claim_id in claims.items():
                if held.get(key) == claim_id:
                    del held[key]
            self._prune()

    def forget_written(self, partition_id: str, keys: Sequence[str], fields: Collection[str]) -> None:
        """Rows whose task wrote its fields are done: the ledger has ended their claims."""
        with self._lock:
            tasks = [task for partition, task in self._held if partition == partition_id]
        for task in tasks:
            writes = writes_that_end_claims(stage_of_task(task))
            if writes and set(writes) <= set(fields):
                self.forget_claims(partition_id, task, self.held(partition_id, keys).get(task, {}))

    def close(self) -> None:
        """Stop the heartbeat; the claims expire at the ledger."""
        with self._lock:
            self._is_closed = True
            self._held.clear()
            thread = self._thread
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _prune(self) -> None:
        self._held = {where: claims for where, claims in self._held.items() if claims}
        self._ended &= _ids(self._held)

    def _beat(self) -> None:
        while not self._wake.wait(self._period_s):
            with self._lock:
                alive = sorted(_ids(self._held) - self._ended)
                if not self._held:
                    self._thread = None
                    return
            if not alive:
                continue
            try:
                ended = self._renew(alive)
            except DataPlaneClosed:
                break
            except DataPlaneError as error:
                logger.warning("heartbeat for %d claims failed: %s", len(alive), error)
                continue
            with self._lock:
                self._ended.update(ended)
        with self._lock:
            self._thread = None


def _ids(held: Mapping[tuple[str, str], Mapping[str, int]]) -> set[int]:
    return {claim_id for claims in held.values() for claim_id in claims.values()}
