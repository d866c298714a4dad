"""Groups of workers behind one call: in this process, or as Ray actors.

The driver names a method of the worker's class with its arguments (`ask`), a stage and a deadline (`Call`); `run`
gives the results in rank order, `submit` a `Pending` that gives them later. Invariant: when one rank fails, the first
cause is raised with its rank and stage, and the rest of the group is ended, never reused.

`WorkerFleet`: workers that do not need each other, so that one may die or hang and be replaced.

Made by the driver for the generation engines; the rollout worker has a copy that asks the same processes. Each member
is a group of one worker and keeps its number. Invariant: a member that was lost is ended and never asked again; an
error that a worker raises is no loss, and is raised here.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from nemo_rl.errors import NemoRLError, WorkerError, WorkerLost

__all__ = ["Call", "LocalWorkerGroup", "Pending", "Request", "WorkerFleet", "WorkerGroup", "ask"]

logger = logging.getLogger(__name__)


_T = TypeVar("_T")


class WorkerGroup(ABC):
    """Workers of one kind, rank 0 to `world_size - 1`."""

    world_size: int

    def run(self, call: Call[_T]) -> list[_T]:
        """Calls the method on the ranks at the same time and returns their results in rank order.

        Raises:
            UserError: a worker refused its input. WorkerError: a worker failed, died or passed the deadline.
        """
        return self.submit(call).result()

    @abstractmethod
    def submit(self, call: Call[_T]) -> Pending[list[_T]]:
        """Start a call without waiting; the deadline counts from here. Each rank does its calls in the order of
        submits.

        Raises:
            WorkerError: the group was ended.
        """

    @abstractmethod
    def stream(self, call: Call[Iterator[_T]]) -> Iterator[_T]:
        """Call a method of the only worker that yields results one by one, and return them as they come.

        The deadline counts from here to the last result.

        Raises:
            UserError, WorkerError: as `run`, from the iterator.
        """

    @property
    @abstractmethod
    def is_local(self) -> bool:
        """True when the worker is an object of this process, so that calls run in the calling thread."""

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """False once the group was ended, by `shutdown` or by a failure."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the workers. Idempotent."""


class LocalWorkerGroup(WorkerGroup):
    """One worker in this process: a call is done when `submit` returns."""

    def __init__(self, factory: Callable[[], object]) -> None:
        self.world_size = 1
        self._worker: object | None = factory()

    def submit(self, call: Call[_T]) -> Pending[list[_T]]:
        if self._worker is None:
            raise WorkerError("the worker has been shut down", rank=0, stage=call.stage)
        done: Future[list[_T]] = Future()
        try:
            request = call.of_rank(0)
            done.set_result([getattr(self._worker, request.method)(**request.arguments)])
        except Exception as error:  # noqa: BLE001 - raised by `result`
            done.set_exception(error)
        return Pending(done.result)

    def stream(self, call: Call[Iterator[_T]]) -> Iterator[_T]:
        return iter(self.run(call)[0])

    @property
    def is_local(self) -> bool:
        return True

    @property
    def is_running(self) -> bool:
        return self._worker is not None

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown()  # type: ignore[attr-defined]


_S = TypeVar("_S")
_P = ParamSpec("_P")


@dataclass(frozen=True, slots=True)
class Request(Generic[_T]):
    """One method of a worker with its arguments, which gives a `_T`; made by `ask`."""

    method: str
    """Name of the method; only this crosses to the worker's process: the worker may be of a subclass."""
    arguments: Mapping[str, object]
    _message: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)

    def message(self, pack: Callable[[Mapping[str, object]], Any]) -> Any:
        """Return the arguments as they are sent: packed once, however many ranks and groups get this request."""
        if not self._message:
            self._message.append(pack(self.arguments))
        return self._message[0]


def ask(method: Callable[Concatenate[Any, _P], _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Request[_T]:
    """A request for a method of a class, as in `ask(PolicyWorker.train, batch=batch, loss_fn=loss_fn)`.

    Raises:
        TypeError: an argument is given without its name.
    """
    if args:
        raise TypeError(f"ask({method.__qualname__}): name every argument, got {len(args)} without a name")
    return Request(method.__name__, kwargs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call(Generic[_T]):
    """A request to every rank."""

    request: Request[_T] | Sequence[Request[_T]]
    """The same for all ranks, or one for each rank of the group."""
    stage: str
    timeout_s: float
    ranks: Sequence[int] | None = None
    """The ranks that are called; None means all."""
    deadline_key: str = "cluster.stage_timeout_s"
    """The config key that sets `timeout_s`, for messages."""

    def of_rank(self, rank: int) -> Request[_T]:
        return self.request if isinstance(self.request, Request) else self.request[rank]


class Pending(Generic[_T]):
    """A result that workers are busy with.

    Args:
        wait_for_it: gives the result, or raises; called once.
        ready: gives a future, the same at each call, that is done once `wait_for_it` has nothing more to wait for;
            called when somebody asks. None: the result is there.
    """

    def __init__(self, wait_for_it: Callable[[], _T], *, ready: Callable[[], Future[None]] | None = None) -> None:
        self._wait, self._found = wait_for_it, list[_T]()
        self._ready = ready

    @classmethod
    def done(cls, result: _T) -> Pending[_T]:
        return cls(lambda: result)

    def result(self) -> _T:
        """Wait for the result; that of a call to several ranks is a list in rank order.

        Raises:
            UserError: a worker refused its input. WorkerError: a worker failed, died or passed the deadline.
        """
        if not self._found:
            self._found.append(self._wait())
        return self._found[0]

    def then(self, change: Callable[[_T], _S]) -> Pending[_S]:
        """Return what `change` makes of the result, on the side of the first caller of `result`."""
        return self.after(lambda: change(self.result()))

    def after(self, finish: Callable[[], _S]) -> Pending[_S]:
        """Return what `finish` gives, which asks for this result itself."""
        return Pending(finish, ready=self._ready)

    @property
    def is_ready(self) -> bool:
        """True when `result` returns, or raises, without waiting."""
        return self._ready is None or self._ready().done()

    def when_ready(self, callback: Callable[[Pending[_T]], object]) -> None:
        """Call `callback` with this object when the result is there: at once if it is, else in its own thread."""
        if self._ready is None:
            callback(self)
        else:
            self._ready().add_done_callback(lambda _: callback(self))

    @staticmethod
    def first(pendings: Sequence[Pending[_S]], *, timeout_s: float) -> Pending[_S] | None:
        """Wait until one of `pendings` is ready and return it, the earliest in their order; None after the timeout."""
        waiting = {pending._ready() for pending in pendings if pending._ready is not None}
        if len(waiting) == len(pendings):
            wait(waiting, timeout=timeout_s, return_when=FIRST_COMPLETED)
        return next((pending for pending in pendings if pending.is_ready), None)


MOST_STARTS = 2
"""Starts of one number that may fail in a row; then it is left out for good."""


class WorkerFleet:
    """Numbered workers.

    Args:
        members: groups of one worker each; the number of each is its place.
        start: starts the worker of a number anew, to its end; None: nobody is replaced.

    Example:
        >>> fleet = WorkerFleet([engine_0, engine_1])                                # doctest: +SKIP
        >>> fleet.run(ask(Engine.load, path=path), stage="load", timeout_s=60)       # doctest: +SKIP
        {0: 12, 1: 12}
    """

    def __init__(self, members: Sequence[WorkerGroup], *, start: Callable[[int], WorkerGroup] | None = None) -> None:
        self.size = len(members)
        """Number of members when all are there."""
        self._members = dict(enumerate(members))
        self._start = start
        self._failed_starts = dict.fromkeys(self._members, 0)
        self._incarnations = dict.fromkeys(self._members, 1)
        self._cause: WorkerLost | None = None

    @property
    def members(self) -> tuple[WorkerGroup, ...]:
        return tuple(self._members[number] for number in self.numbers)

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(sorted(self._members))

    @property
    def incarnations(self) -> Mapping[int, int]:
        """Number of starts of each member that is there: another count is another process."""
        return {number: self._incarnations[number] for number in self.numbers}

    def copy(self) -> WorkerFleet:
        """The same processes for another caller, who replaces nobody."""
        twin = WorkerFleet([])
        twin.size, twin._members, twin._incarnations = self.size, dict(self._members), dict(self._incarnations)
        return twin

    def run(self, request: Request[_T] | Mapping[int, Request[_T]], *, stage: str, timeout_s: float) -> dict[int, _T]:
        """Asks all members at the same time, or those that have their own request; results by number.

        A member that is lost has no result.

        Raises:
            UserError: a worker refused its input. WorkerError: a worker failed, or none is left.
        """
        asked = dict.fromkeys(self.numbers, request) if isinstance(request, Request) else request
        pending: dict[int, Pending[list[_T]]] = {}
        results: dict[int, _T] = {}
        for number in sorted(asked.keys() & self._members.keys()):
            with self._losing(number):
                pending[number] = self._member(number, stage).submit(
                    Call(request=asked[number], stage=stage, timeout_s=timeout_s)
                )
        for number, answer in pending.items():
            with self._losing(number):
                results[number] = answer.result()[0]
        if not results:
            raise self.none_left(stage)
        return results

    def run_one(self, number: int, call: Call[_T]) -> _T:
        """Asks one member.

        Raises:
            WorkerLost: it is lost, and no member any more; the caller says what becomes of the work.
        """
        try:
            return self._member(number, call.stage).run(call)[0]
        except WorkerLost as error:
            self.lose(number, error)
            raise

    def submit_one(self, number: int, call: Call[_T]) -> Pending[_T]:
        """Ask one member without waiting.

        Raises:
            WorkerLost: as `run_one`, from the result.
        """
        pending = self._member(number, call.stage).submit(call)

        def result() -> _T:
            try:
                return pending.result()[0]
            except WorkerLost as error:
                self.lose(number, error)
                raise

        return pending.after(result)

    def stream_one(self, number: int, call: Call[Iterator[_T]]) -> Iterator[_T]:
        """Ask one member for results that come one by one; see `WorkerGroup.stream`.

        Raises:
            WorkerLost: as `run_one`.
        """
        try:
            yield from self._member(number, call.stage).stream(call)
        except WorkerLost as error:
            self.lose(number, error)
            raise

    def _member(self, number: int, stage: str) -> WorkerGroup:
        member = self._members.get(number)
        if member is None:
            raise WorkerLost(f"worker {number} has been lost", rank=number, stage=stage)
        return member

    def is_local(self, number: int) -> bool:
        """Return whether the worker is an object of this process."""
        return self._members[number].is_local

    def lose(self, number: int, cause: WorkerLost) -> None:
        """Ends a member that does not answer. Idempotent."""
        member = self._members.pop(number, None)
        if member is None:
            return
        self._cause = self._cause or cause
        member.shutdown()
        if not len(self):
            logger.warning("worker %d is lost, and none of %d is left: %s", number, self.size, cause)
        else:
            logger.warning("goes on without worker %d, %d of %d are left: %s", number, len(self), self.size, cause)

    @contextmanager
    def _losing(self, number: int) -> Iterator[None]:
        """End a lost member alone when the block loses it."""
        try:
            yield
        except WorkerLost as error:
            self.lose(number, error)

    def none_left(self, stage: str) -> WorkerError:
        """Return the error that ends a run whose members are all lost: the first loss since all were there."""
        return self._cause or WorkerError("no worker is left", stage=stage)

    def restart_failed(self) -> tuple[int, ...]:
        """Starts those anew that were lost; returns their numbers. One that does not start is left out."""
        if self._start is None:
            return ()
        missing = [number for number in range(self.size) if number not in self._members]
        healed = []
        for number in missing:
            if self._failed_starts[number] >= MOST_STARTS:
                continue
            try:
                self._members[number] = self._start(number)
            except NemoRLError as error:
                self._failed_starts[number] += 1
                logger.warning("worker %d does not start again: %s", number, error)
                continue
            self._failed_starts[number] = 0
            self._incarnations[number] += 1
            healed.append(number)
            logger.warning("worker %d has been replaced, %d of %d are there", number, len(self), self.size)
        if len(self) == self.size:
            # What was lost before has no part in what is lost from here on.
            self._cause = None
        return tuple(healed)

    def shutdown(self) -> None:
        """Ends all members, and starts none anew from here on. Idempotent."""
        members, self._members, self._start = self._members, {}, None
        for member in members.values():
            member.shutdown()

    def __len__(self) -> int:
        return len(self._members)
