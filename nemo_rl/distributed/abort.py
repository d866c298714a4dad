"""The abort of a step: an error on one rank ends it on all ranks within seconds, with that error's text.

Each worker process of a job has one `AbortWatch` and does its work inside `watch.stage(name)`:

    a rank raises      -> its record goes to the error key of the job's store, where the first one stays
                       -> it ends its own connections, which frees the peers that wait for them
    every rank's watch -> polls the key on its own connection (a client that is blocked in a collective serves no
                          second thread), ends the connections of this process, and the blocked collective raises
    leaving the stage  -> raises the root cause, whatever this rank saw of it
    still not out      -> the process ends: failed workers are replaced, never reused

A rank that was killed writes nothing: its neighbours see that its process is gone, others that its sign of life stands
still, and write the record for it.

NCCL can abort a communicator. Gloo has no working abort (torch 2.13: `ProcessGroup.abort` returns and the blocked call
stays), but every blocked call ends with "Connection closed by peer" when its sockets are shut down, in this process as
well. Gloo's sockets are those that its own threads poll.

`RootCause` is the record of what ended a step: written here on the ranks, read by `worker_groups` on the driver, and
the error that every rank and the driver raise from it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from nemo_rl.distributed.liveness import ProcessIdentity
from nemo_rl.errors import (
    CollectiveTimeout,
    NemoRLError,
    UserError,
    WorkerError,
    WorkerLate,
    WorkerLost,
    from_record,
    to_record,
)
from nemo_rl.torch_private import abort_nccl

__all__ = ["AbortWatch", "GuardedWorker", "RootCause", "StepWatch", "abort_process_groups", "is_secondary"]

SECONDARY_TEXTS = (
    "connection closed",
    "connection reset",
    "timed out waiting",
    "gloo",
    "nccl",
    "broken pipe",
    "communicator",
)
"""Texts of errors that a peer's failure causes: something else is the root cause."""
WORKER_ERRORS = {kind.__name__: kind for kind in (WorkerError, CollectiveTimeout, WorkerLost, WorkerLate)}


def is_secondary(error: BaseException) -> bool:
    """Return whether the error looks like what a peer's failure does to this rank."""
    if isinstance(error, UserError):
        return False
    text = str(error).lower()
    return isinstance(error, RuntimeError | WorkerError) and any(word in text for word in SECONDARY_TEXTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class RootCause:
    """The error that ended a step, with its rank and stage."""

    rank: int
    stage: str
    kind: str
    """Name of the exception's class."""
    text: str

    @classmethod
    def of(cls, error: BaseException, *, rank: int, stage: str) -> RootCause:
        """Return the record of an error that left `stage` on `rank`; one that came from another rank keeps its own."""
        if isinstance(error, WorkerError):
            rank = rank if error.rank is None else error.rank
            return cls(rank=rank, stage=error.stage or stage, kind=type(error).__name__, text=error.text)
        if isinstance(error, NemoRLError) and error.origin_rank is not None:
            rank = error.origin_rank
        return cls(rank=rank, stage=stage, **to_record(error))

    def to_error(self) -> NemoRLError:
        """Return the error that every rank and the driver raise.

        It is of the same kind if the user can fix it, else a `WorkerError`.
        """
        error = from_record({"kind": self.kind, "text": self.text})
        if isinstance(error, UserError):
            error.origin_rank = self.rank
            error.add_note(f"rank {self.rank}, stage {self.stage}")
            return error
        kind = WORKER_ERRORS.get(self.kind)
        if kind is not None:
            return kind(self.text, rank=self.rank, stage=self.stage)
        return WorkerError(f"{self.kind}: {self.text}", rank=self.rank, stage=self.stage)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RootCause:
        return cls(**json.loads(text))


class GuardedWorker(ABC):
    """A worker whose calls can be aborted."""

    @abstractmethod
    def guarded(self, stage: str) -> AbstractContextManager[None]:
        """(collective) Inside it an error on one rank ends the stage on all ranks, with that error's text."""

    @property
    @abstractmethod
    def root_cause(self) -> RootCause | None:
        """The cause that ended the step, or None while nothing has."""


TASKS = Path("/proc/self/task")
GLOO_LOOP = "gloo_tcp_loop"
"""Name of the thread in which a gloo device polls its connections."""
LOOKS = 5
"""Number of looks at a thread that was not in its poll just then."""
_one_at_a_time = threading.Lock()


def abort_process_groups() -> int:
    """End every connection of gloo and every communicator of NCCL in this process; return how many there were.

    The groups cannot be used any more. Where `/proc` does not show gloo's sockets it ends none of them: then a blocked
    thread ends with its process.
    """
    with _one_at_a_time:
        return (abort_nccl() if torch.cuda.is_available() else 0) + sum(
            _shut_down(fd) for epoll in set(_gloo_polls()) for fd in _polled_by(epoll)
        )


def _gloo_polls() -> Iterator[int]:
    """Yield the epoll descriptor of each gloo thread: the first argument of the call that the thread is in."""
    for task in TASKS.iterdir():
        for _ in range(LOOKS):
            try:
                if (task / "comm").read_text().strip() != GLOO_LOOP:
                    break
                call = (task / "syscall").read_text().split()
            except OSError:
                break
            if len(call) > 1 and _link(fd := int(call[1], 16)) == "anon_inode:[eventpoll]":
                yield fd
                break


def _polled_by(epoll: int) -> list[int]:
    try:
        text = Path(f"/proc/self/fdinfo/{epoll}").read_text()
    except OSError:
        return []
    return [int(fd) for fd in re.findall(r"tfd:\s+(\d+)", text)]


def _shut_down(fd: int) -> int:
    """1 if the descriptor was a connection that was still open."""
    try:
        copy = os.dup(fd)  # gloo closes its own when it meets the error
    except OSError:
        return 0
    if not _link(copy).startswith("socket:"):
        os.close(copy)
        return 0
    with socket.socket(fileno=copy) as connection:
        try:
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)
                return 1
        except OSError:
            pass  # the other end was faster
    return 0


def _link(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


logger = logging.getLogger(__name__)

POLL_S = 0.25
"""Seconds between two looks at the error key: a peer is out of its collective well within the 5 s of the contract."""
SECONDARY_WAIT_S = 2.0
"""Seconds that a rank with a broken connection waits for the record of the cause and watches the signs of life."""
SEEN_WAIT_S = 2.0
"""Seconds that a failed rank stays so that its peers can read the record: the store may end with its process."""
EXIT_GRACE_S = 3.0
"""Seconds that a rank may take to leave its stage after the abort."""
STORE_TIMEOUT_S = 10.0
CLOSE_WAIT_S = 5.0
"""Seconds that rank 0, which keeps the store, waits for the others to close their watches."""
EXIT_CODE = 70
PREFIX = "nemo_rl/abort"


class StepWatch:
    """A worker's watch over its steps; the base class is that of a job of one rank, where no peer waits for it."""

    @property
    def cause(self) -> RootCause | None:
        """The cause that ended the step, or None while nothing has."""
        return None

    def stage(self, name: str) -> AbstractContextManager[None]:
        """(collective) Inside it an error ends the stage on every rank. Nests: the inner name is reported."""
        return nullcontext()

    def close(self) -> None:
        """End the watch: peers know that this rank left in peace. Idempotent."""


class AbortWatch(StepWatch):
    """One rank's part of the abort. Every rank makes one after its process group (collective: all wait for all).

    Args:
        store: of the process group; the watch talks to it over its own connection.
        rank, world_size: as in the process group.
        timeout_s: how long to wait for the other ranks here.

    Raises:
        WorkerError: in `stage`, on every rank: the root cause with its rank. UserError: the same, of its own kind.
    """

    def __init__(self, store: dist.Store, *, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank, self.world_size = rank, world_size
        self._store = dist.PrefixStore(PREFIX, store.clone())  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=timeout_s))
        self._neighbours = self._meet()
        self._store.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
        self._cause: RootCause | None = None
        self._raised: BaseException | None = None
        self._stages: list[str] = []
        self._idle, self._closed = threading.Event(), threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._watch, name="abort-watch", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def cause(self) -> RootCause | None:
        return self._cause

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._check()
        self._stages.append(name)
        self._idle.clear()
        try:
            yield
            self._check()
        except BaseException as error:
            failure = self._settle(error, name)
            if failure is error:
                raise
            raise failure from error
        finally:
            self._stages.pop()
            if not self._stages:
                self._idle.set()

    def close(self) -> None:
        """End the watch: peers know that this rank left in peace. Rank 0 leaves last. Idempotent.

        A process that ends without calling it does so on its way out.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        atexit.unregister(self.close)
        self._thread.join(timeout=STORE_TIMEOUT_S)
        with suppress(RuntimeError):  # the store has ended with its process
            self._store.set(f"left/{self.rank}", "")
            if self.rank == 0 and self._cause is None:
                self._await_all("left", CLOSE_WAIT_S)

    def _check(self) -> None:
        if self._cause is not None:
            self._raised = self._cause.to_error()
            raise self._raised

    # On the rank that fails.

    def _settle(self, error: BaseException, stage: str) -> BaseException:
        """Return the error that this rank raises for one that leaves the stage, after every peer was informed."""
        if error is self._raised:
            return error
        mine = RootCause.of(error, rank=self.rank, stage=stage)
        if self._cause is None:
            self._learn(self._explain(error, mine))
        abort_process_groups()
        assert self._cause is not None
        with suppress(RuntimeError):  # the store has ended with its process
            self._store.set(f"seen/{self.rank}", "")
            if self.rank in (0, self._cause.rank):
                self._await_all("seen", SEEN_WAIT_S)
        self._raised = error if self._cause == mine and mine.rank == self.rank else self._cause.to_error()
        return self._raised

    def _explain(self, error: BaseException, mine: RootCause) -> RootCause:
        """Return the root cause of an error of this rank: an earlier record, a dead peer, or the error itself."""
        try:
            if isinstance(error, UserError):
                return self._publish(mine)
            found = self._read() or self._find_dead(mine.stage)
            if found is None and is_secondary(error):
                found = self._wait_for_cause(mine)
            return found or self._publish(mine)
        except RuntimeError as lost:
            return self._cause or self._without_store(lost, mine.stage)

    def _wait_for_cause(self, mine: RootCause) -> RootCause:
        """Return the cause of a broken connection: the record that comes, the silent ranks, or what this rank saw."""
        before = self._signs_of_life()
        deadline = time.monotonic() + SECONDARY_WAIT_S
        while time.monotonic() < deadline:
            time.sleep(POLL_S / 2)
            found = self._cause or self._read() or self._find_dead(mine.stage)
            if found is not None:
                return found
        after = self._signs_of_life()
        silent = [rank for rank in range(self.world_size) if rank != self.rank and before[rank] == after[rank]]
        if silent:
            known = self._neighbours.get(silent[0])
            why = f": {known.stopped_text()}" if known is not None and known.is_stopped() else ""
            what = f"gave no sign of life for {SECONDARY_WAIT_S:.0f} s{why}"
            return self._publish(_death(silent[0], mine.stage, what))
        timed_out = "timed out waiting" in mine.text.lower()
        kind = CollectiveTimeout.__name__ if timed_out else WorkerError.__name__
        text = f"a collective failed, and every rank still lives: {mine.text}"
        return self._publish(RootCause(rank=self.rank, stage=mine.stage, kind=kind, text=text))

    def _await_all(self, what: str, wait_s: float) -> None:
        keys = [f"{what}/{rank}" for rank in range(self.world_size) if rank != self.rank]
        deadline = time.monotonic() + wait_s
        while not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(POLL_S / 5)

    # On every rank, in the watch's thread.

    def _watch(self) -> None:
        count = 0
        while self._cause is None:
            count += 1
            try:
                self._store.set(f"life/{self.rank}", str(count))
                found = self._read() or self._find_dead(self._stage_now())
            except RuntimeError as error:
                found = None if self._closed.is_set() else self._without_store(error, self._stage_now())
            if found is not None:
                self._learn(found)
            elif self._closed.wait(POLL_S):
                return
        self._abort()

    def _abort(self) -> None:
        """Free this process's threads from their collectives, and end the process if that does not help."""
        with suppress(RuntimeError):
            self._store.set(f"seen/{self.rank}", "")
        deadline = time.monotonic() + EXIT_GRACE_S + (SEEN_WAIT_S if self.rank == 0 else 0.0)
        while True:
            abort_process_groups()
            if self._idle.wait(POLL_S) or self._closed.is_set():
                return
            if time.monotonic() > deadline:
                break
        logger.critical("rank %d ends its process, it is stuck in a stage that has failed: %s", self.rank, self._cause)
        logging.shutdown()
        os._exit(EXIT_CODE)

    def _stage_now(self) -> str:
        """Innermost stage of this rank; the main thread may leave it meanwhile."""
        return next(reversed(tuple(self._stages)), "between stages")

    def _learn(self, cause: RootCause) -> None:
        self._cause = self._cause or cause

    # The store.

    def _meet(self) -> dict[int, ProcessIdentity]:
        """Return ranks whose processes can be looked at from here."""
        me = ProcessIdentity.of_this_process()
        self._store.set(f"process/{self.rank}", json.dumps(asdict(me)))
        self._store.set(f"life/{self.rank}", "0")
        found = self._store.multi_get([f"process/{rank}" for rank in range(self.world_size)])
        processes = {rank: ProcessIdentity(**json.loads(text)) for rank, text in enumerate(found)}
        return {rank: p for rank, p in processes.items() if rank != self.rank and p.is_visible_from(me)}

    def _read(self) -> RootCause | None:
        return RootCause.from_json(self._store.get("error")) if self._store.check(["error"]) else None

    def _publish(self, cause: RootCause) -> RootCause:
        """Agree on the cause: the first record wins, on every rank."""
        return RootCause.from_json(self._store.compare_set("error", "", cause.to_json()))

    def _signs_of_life(self) -> list[bytes]:
        return self._store.multi_get([f"life/{rank}" for rank in range(self.world_size)])

    def _find_dead(self, stage: str) -> RootCause | None:
        """Write the record of a neighbour whose process ended without leaving the job."""
        for rank, process in self._neighbours.items():
            if not process.is_alive() and not self._store.check([f"left/{rank}"]):
                return self._publish(_death(rank, stage, f"exited without output (process {process.pid})"))
        return None

    def _without_store(self, error: RuntimeError, stage: str) -> RootCause:
        dead = [rank for rank, process in self._neighbours.items() if not process.is_alive()]
        if dead:
            return _death(dead[0], stage, "exited without output, and the job's store with it")
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        return _death(0, stage, f"or the launcher, whichever keeps the job's store, has ended: {first_line}")


def _death(rank: int, stage: str, what: str) -> RootCause:
    text = f"the worker process of rank {rank} {what}; look for a kill, an out-of-memory or a crash in its log"
    return RootCause(rank=rank, stage=stage, kind=WorkerError.__name__, text=text)
