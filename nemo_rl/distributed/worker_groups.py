"""Groups of workers behind one call: in this process, or as Ray actors.

The driver names a method of the worker's class with its arguments (`ask`), a stage and a deadline (`Call`); `run`
gives the results in rank order, `submit` a `Pending` that gives them later. Invariant: when one rank fails, the first
cause is raised with its rank and stage, and the rest of the group is ended, never reused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from nemo_rl.distributed.calls import Call, Pending
from nemo_rl.errors import WorkerError

__all__ = ["LocalWorkerGroup", "WorkerGroup"]

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
