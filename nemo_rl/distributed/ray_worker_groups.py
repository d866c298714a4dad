"""`RayWorkerGroup`: workers as Ray actors, with deadlines and the root cause of a failure.

Made by the driver. Invariant: a call ends by its deadline, and raises the failure that came first, not what other ranks
say because of it.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TypeVar, cast

import ray
from ray import cloudpickle
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl.distributed.abort import GuardedWorker, RootCause, is_secondary
from nemo_rl.distributed.environment import WorkerLog, raise_open_files
from nemo_rl.distributed.liveness import STOPPED_WORKERS, DriverWatchdog, ProcessIdentity
from nemo_rl.distributed.own_ray import check_own_ray
from nemo_rl.distributed.worker_groups import Call, Pending, WorkerGroup
from nemo_rl.errors import NemoRLError, WorkerError, WorkerLate, WorkerLost
from nemo_rl.utils.deadlines import awake_s
from nemo_rl.utils.process_guard import leave_notices_to_driver

__all__ = ["RayPlacement", "RayWorkerGroup"]

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

_creating = threading.Lock()
"""Held while an actor is created: several threads of a driver replace lost workers."""
STREAMS = "streams"
"""The group of an actor's threads that run its streams beside its other calls."""
UNKNOWN_RANK = -1
"""Rank in the record of a worker that does not know its own; the driver does."""
INLINE_BYTES = 64 << 10
"""Most bytes of arguments that go with a call to each rank; Ray stores larger ones anew for every call."""
START_KEY = "cluster.worker_start_timeout_s"
"""Sets how long the start of workers may take."""
RAY_LOOK_S = 1.0
"""Seconds between two checks of the processes of a run's own Ray, whose death no call notices for a minute."""
FIRST_CAUSE_GRACE_S = 2.0
"""After a failure without a root cause (a dead process, a worker without a watch), how long peers may report it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _WorkerProcess:
    id: int
    host: str
    identity: ProcessIdentity


class _Host:
    """The Ray actor: holds one worker and answers with records, so that no exception has to be unpickled."""

    def __init__(self, log_file: Path | None, log_level: str) -> None:
        raise_open_files()
        leave_notices_to_driver()
        self._worker: object | None = None
        self._log = WorkerLog.open(log_file, level=log_level)
        logger.info("process %d on %s", os.getpid(), socket.gethostname())
        head = str(ray.get_runtime_context().gcs_address)
        # On loopback the head is on this machine, and Ray hears of its end at once.
        self._watchdog = None if head.startswith("127.") else DriverWatchdog(head)

    def start(self, factory: Callable[..., object], stage: str, kwargs: Mapping[str, object]) -> dict[str, object]:
        """Builds the worker; separate from the actor's start so that its errors come back as records."""
        reply = self._guard(stage, lambda: self._assign(factory(**kwargs)))[0]
        me = ProcessIdentity.of_this_process()
        return {**reply, "process": _WorkerProcess(id=me.pid, host=socket.gethostname(), identity=me)}

    def call(self, method: str, stage: str, message: bytes) -> dict[str, object]:
        reply, value = self._guard(stage, lambda: getattr(self._worker, method)(**_unpacked(message)))
        return {**reply, "value": value}

    def stream(self, method: str, stage: str, message: bytes) -> Iterator[dict[str, object]]:
        """Yield a record with each result of a method that yields them, then one without a result."""
        reply, results = self._guard(stage, lambda: iter(getattr(self._worker, method)(**_unpacked(message))))
        while reply["ok"]:
            reply, value = self._guard(stage, partial(next, cast("Iterator[object]", results), _END))
            if value is _END:
                break
            if reply["ok"]:
                yield {**reply, "value": value}
        yield reply

    def reserve_port(self, reserve: Callable[[str], int]) -> tuple[str, int]:
        address = ray.util.get_node_ip_address()
        return address, reserve(address)

    def _assign(self, worker: object) -> None:
        self._worker = worker

    def _guard(self, stage: str, action: Callable[[], object]) -> tuple[dict[str, object], object]:
        guarded = self._worker if isinstance(self._worker, GuardedWorker) else None
        self._log.stage = stage
        try:
            with guarded.guarded(stage) if guarded is not None else nullcontext():
                value = action()
            return {"ok": True, "warnings": self._log.take_warnings()}, value
        except Exception as error:
            known = guarded.root_cause if guarded is not None else None
            cause = known or RootCause.of(error, rank=UNKNOWN_RANK, stage=stage)
            logger.info("failed", exc_info=True)
            return {
                "ok": False,
                "warnings": self._log.take_warnings(),
                "cause": cause.to_json(),
                "is_first": known is not None,
                "trace": traceback.format_exc(),
            }, None


_END = object()
"""The value that `next` gives behind the last result of a stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayPlacement:
    """Resources and place of the actors of a group."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    placement_group: PlacementGroup | None = None
    """The placement group, or None to leave placement to Ray."""
    bundles: Sequence[int] = ()
    """Bundles of the placement group: rank r runs in number r of these, counted around; empty means all."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables."""


class RayWorkerGroup(WorkerGroup):
    """Workers as Ray actors, one process each.

    Args:
        name: appears in errors and logs.
        world_size: number of actors.
        placement: resources of each.
        first: number of the first rank, where several groups share one name: in errors, logs and placement.
        log_dir: every rank's records go to `<name>_<rank>.log` there, on its own node; None writes no files.
        log_level: from which on they do.
        num_streams: threads of a worker for `stream`, beside that of its other calls; 0: all calls share one thread.
    """

    def __init__(
        self,
        name: str,
        *,
        world_size: int,
        placement: RayPlacement,
        log_dir: Path | None = None,
        log_level: str = "INFO",
        first: int = 0,
        num_streams: int = 0,
    ) -> None:
        self.name, self.world_size, self._first = name, world_size, first
        self._stream_options = {"concurrency_group": STREAMS} if num_streams else {}
        files = {rank: log_dir and log_dir / f"{name}_{rank}.log" for rank in range(first, first + world_size)}
        self._actors: list[ActorHandle] = [
            _new_actor(name, placement, rank, arguments=(file, log_level), num_streams=num_streams)
            for rank, file in files.items()
        ]
        self._processes: list[_WorkerProcess] = []
        """Processes by rank, once all have started."""
        self._starting: list[ray.ObjectRef] = []
        self._start_stage = f"start of {name}"

    def begin_start(self, factory: Callable[..., object], per_rank: Sequence[Mapping[str, object]]) -> None:
        """Asks every actor to build its worker with `factory(**per_rank[rank])`, without waiting."""
        self._starting = [
            actor.start.remote(factory, self._start_stage, dict(kwargs))
            for actor, kwargs in zip(self._actors, per_rank, strict=True)
        ]

    def finish_start(self, *, timeout_s: float) -> None:
        """Waits until every worker is built. Idempotent."""
        starting, self._starting = self._starting, []
        if not starting:
            return
        replies = self._collect(
            starting,
            list(range(self.world_size)),
            stage=self._start_stage,
            timeout_s=timeout_s,
            deadline=awake_s() + timeout_s,
            key=START_KEY,
        )
        self._processes = [cast("_WorkerProcess", reply["process"]) for reply in replies]
        STOPPED_WORKERS.watch(
            {f"{self.name} rank {self._first + rank}": each.identity for rank, each in enumerate(self._processes)}
        )

    def rendezvous(self, reserve: Callable[[str], int], *, timeout_s: float) -> tuple[str, int]:
        """Address of rank 0's node, and a port there that `reserve` has bound in the process of rank 0.

        Raises:
            WorkerError: the process of rank 0 did not start in time, or died.
        """
        try:
            return cast("tuple[str, int]", ray.get(self._actors[0].reserve_port.remote(reserve), timeout=timeout_s))
        except GetTimeoutError as error:
            raise self._too_late([0], timeout_s, stage=self._start_stage, key=START_KEY) from error
        except RayError as error:
            self.shutdown()
            raise WorkerError(
                f"the worker process died: {_first_line(error)}", rank=0, stage=self._start_stage
            ) from error

    def submit(self, call: Call[_T]) -> Pending[list[_T]]:
        deadline = awake_s() + call.timeout_s
        ranks = self._ranks(call)
        refs = [self._alive(rank, call.stage).call.remote(*_sent(call, rank)) for rank in ranks]

        def wait() -> list[_T]:
            replies = self._collect(
                refs, ranks, stage=call.stage, timeout_s=call.timeout_s, deadline=deadline, key=call.deadline_key
            )
            return [cast("_T", reply["value"]) for reply in replies]

        return Pending(wait, ready=cache(lambda: _first_failure_or_all(refs)))

    def stream(self, call: Call[Iterator[_T]]) -> Iterator[_T]:
        deadline = awake_s() + call.timeout_s
        method = self._alive(0, call.stage).stream.options(num_returns="streaming", **self._stream_options)
        return self._results(method.remote(*_sent(call, 0)), call, deadline)

    def _results(self, replies: ray.ObjectRefGenerator, call: Call[Iterator[_T]], deadline: float) -> Iterator[_T]:
        while True:
            left = max(0.0, deadline - awake_s())
            done, _ = ray.wait([replies], timeout=min(left, RAY_LOOK_S))
            check_own_ray(stage=call.stage)
            if not done and left:
                continue
            if done:
                reply = _reply(next(replies))
                self._show_warnings(reply, 0, call.stage)
                failure = _failure(reply, rank=self._first, stage=call.stage, who=self._who(0))
            else:
                failure = self._too_late([0], call.timeout_s, stage=call.stage, key=call.deadline_key)
            if failure is not None:
                self.shutdown()
                raise self._located(failure)
            if "value" not in reply:
                return
            yield cast("_T", reply["value"])

    @property
    def is_local(self) -> bool:
        return False

    def _ranks(self, call: Call[_T]) -> list[int]:
        return list(call.ranks) if call.ranks is not None else list(range(self.world_size))

    @property
    def is_running(self) -> bool:
        return bool(self._actors)

    def shutdown(self) -> None:
        actors, self._actors = self._actors, []
        for actor in actors if ray.is_initialized() else ():
            ray.kill(actor)

    def _alive(self, rank: int, stage: str) -> ActorHandle:
        if not self._actors:
            raise WorkerLost(f"{self.name} has been shut down", rank=rank, stage=stage)
        return self._actors[rank]

    def _collect(
        self,
        refs: Sequence[ray.ObjectRef],
        ranks: Sequence[int],
        *,
        stage: str,
        timeout_s: float,
        deadline: float,
        key: str,
    ) -> list[dict[str, object]]:
        """Replies in the order of `refs`; on the first failure ends the group and raises the root cause.

        Args:
            timeout_s: for the error of ranks that are not done at `deadline`, by `awake_s`. What has come by
                then is taken, however late the driver looks.
            key: of the config that sets it.
        """
        rank_of, waiting = dict(zip(refs, ranks, strict=True)), list(refs)
        replies: dict[ray.ObjectRef, dict[str, object]] = {}
        failures: list[NemoRLError] = []
        while waiting:
            left = max(0.0, deadline - awake_s())
            if not ray.is_initialized():
                # A thread that still waits while the run ends: `ray.wait` would start its own Ray.
                raise WorkerLost("the run has ended", rank=self._first + rank_of[waiting[0]], stage=stage)
            done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=min(left, RAY_LOOK_S))
            check_own_ray(stage=stage)
            if not done and not left:
                break
            for ref in done:
                rank = rank_of[ref]
                reply = _reply(ref)
                self._show_warnings(reply, rank, stage)
                failure = _failure(reply, rank=self._first + rank, stage=stage, who=self._who(rank))
                if failure is None:
                    replies[ref] = reply
                    continue
                if reply["is_first"]:
                    self._note_silence(failure, {other: rank_of[other] for other in waiting})
                    self.shutdown()
                    raise self._located(failure)
                if not failures:
                    deadline = min(deadline, awake_s() + FIRST_CAUSE_GRACE_S)
                failures.append(failure)
        if failures or waiting:
            self.shutdown()
            late = sorted(rank_of[ref] for ref in waiting)
            raise self._located(
                # Without a recorded root cause the first failure that is not merely what a peer's death looks like.
                next((failure for failure in failures if not is_secondary(failure)), failures[0])
                if failures
                else self._too_late(late, timeout_s, stage=stage, key=key)
            )
        return [replies[ref] for ref in refs]

    def _show_warnings(self, reply: Mapping[str, object], rank: int, stage: str) -> None:
        for text in cast("list[str]", reply.get("warnings", [])):
            logger.warning("%s rank %d, stage %s: %s", self.name, self._first + rank, stage, text)

    @property
    def _is_one_host(self) -> bool:
        return len({process.host for process in self._processes}) < 2

    def _places(self, ranks: Sequence[int]) -> str:
        """Processes of these ranks; with several hosts also whose they are."""
        found = (self._processes[rank] for rank in ranks if self._processes)
        return ", ".join(str(each.id) if self._is_one_host else f"{each.id} on {each.host}" for each in found)

    def _who(self, rank: int) -> str:
        return f"{self.name} worker, process {self._places([rank])}" if self._processes else f"{self.name} worker"

    def _note_silence(self, error: NemoRLError, waiting: Mapping[ray.ObjectRef, int]) -> None:
        """Add, with several hosts, which ranks do not even fail: their host may be cut off."""
        if self._is_one_host or not waiting:
            return
        _, silent = ray.wait(list(waiting), num_returns=len(waiting), timeout=FIRST_CAUSE_GRACE_S)
        if silent:
            ranks = sorted(waiting[ref] for ref in silent)
            shown = [self._first + rank for rank in ranks]
            error.add_note(f"no answer from {self.name} ranks {shown}: processes {self._places(ranks)}")

    def _located(self, error: NemoRLError) -> NemoRLError:
        """Add, with several hosts, where the rank was."""
        rank = error.rank if isinstance(error, WorkerError) else error.origin_rank
        if rank is not None and not self._is_one_host:
            error.add_note(f"rank {rank} of {self.name}: process {self._places([rank - self._first])}")
        return error

    def _too_late(self, late: Sequence[int], timeout_s: float, *, stage: str, key: str) -> WorkerLate:
        ranks, me = [self._first + rank for rank in late], ProcessIdentity.of_this_process()
        waited_for = [self._processes[rank].identity for rank in late if self._processes]
        stopped = [each.stopped_text() for each in waited_for if each.is_visible_from(me) and each.is_stopped()]
        advice = "; ".join(stopped) or f"raise {key} if they are only slow"
        return WorkerLate(
            f"{self.name}: ranks {ranks} did not finish in {timeout_s:.0f} s (processes {self._places(late)}); "
            f"{advice}",
            rank=ranks[0],
            stage=stage,
        )


def _sent(call: Call[_T], rank: int) -> tuple[str, str, bytes | ray.ObjectRef]:
    request = call.of_rank(rank)
    return request.method, call.stage, request.message(_packed)


def _unpacked(message: bytes) -> dict[str, object]:
    """Return the arguments that the driver has packed for its own workers."""
    return cast("dict[str, object]", pickle.loads(message))


def _packed(arguments: Mapping[str, object]) -> bytes | ray.ObjectRef:
    """Return the arguments as bytes that go with each call; many bytes lie in Ray's store, where a node gets them
    once."""
    message = cloudpickle.dumps(dict(arguments))
    return message if len(message) <= INLINE_BYTES else ray.put(message)


def _first_failure_or_all(refs: Sequence[ray.ObjectRef]) -> Future[None]:
    """Return a future that is done when a rank has failed, or when all have answered."""
    done, lock, waiting = Future[None](), threading.Lock(), set(refs)

    def answered(ref: ray.ObjectRef, answer: Future[dict[str, object]]) -> None:
        with lock:
            waiting.discard(ref)
            is_over = not waiting or answer.exception() is not None or not answer.result()["ok"]
            if is_over and not done.done():
                done.set_result(None)

    for ref in refs:
        ref.future().add_done_callback(partial(answered, ref))
    return done


def _new_actor(
    name: str, placement: RayPlacement, rank: int, *, arguments: Sequence[object], num_streams: int
) -> ActorHandle:
    options: dict[str, object] = {"num_cpus": placement.num_cpus, "num_gpus": placement.num_gpus, "max_restarts": 0}
    if placement.placement_group is not None:
        bundles = placement.bundles or range(placement.placement_group.bundle_count)
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=placement.placement_group, placement_group_bundle_index=bundles[rank % len(bundles)]
        )
    if placement.environment:
        options["runtime_env"] = {"env_vars": dict(placement.environment)}
    # Ray names the process after the class, so that `ps` and Ray's logs distinguish the workers.
    host = type(f"{name.capitalize()}Worker", (_Host,), {"__module__": __name__})
    actor = ray.remote(concurrency_groups={STREAMS: num_streams})(host) if num_streams else ray.remote(host)
    with _creating:
        return actor.options(**options).remote(*arguments)


def _reply(ref: ray.ObjectRef) -> dict[str, object]:
    try:
        return ray.get(ref)
    except RayActorError as error:
        return {"ok": False, "is_first": False, "died": "the worker process died", "text": _first_line(error)}
    except RayError as error:
        return {"ok": False, "is_first": False, "died": "the call was lost", "text": _first_line(error)}


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _failure(reply: Mapping[str, object], *, rank: int, stage: str, who: str) -> NemoRLError | None:
    if reply["ok"]:
        return None
    if "died" in reply:
        return WorkerLost(f"{reply['died']} ({who}): {reply['text']}", rank=rank, stage=stage)
    logger.debug("rank %s, stage %s:\n%s", rank, stage, reply["trace"])
    cause = RootCause.from_json(str(reply["cause"]))
    return (replace(cause, rank=rank) if cause.rank == UNKNOWN_RANK else cause).to_error()
