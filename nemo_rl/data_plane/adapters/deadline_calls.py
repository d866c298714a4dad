"""Blocking calls of a native library, run in daemon threads so that each caller gets its answer by a deadline.

Used by `mooncake.MooncakeStore`. The invariant: after `close` no call starts, and whoever closed knows whether one is
still inside the library, which must not be torn down under it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from nemo_rl.errors import DataPlaneClosed, DataPlaneTimeout

__all__ = ["DeadlineCalls"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class DeadlineCalls:
    """Threads that are made on demand and reused."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._is_closed = False

    def run(self, action: Callable[[], _T], *, timeout_s: float) -> _T:
        """The result of `action`.

        Raises:
            DataPlaneTimeout: it is not there in time; the action goes on alone, with what it refers to.
            DataPlaneClosed: after `close`.
        """
        outcome: Future[_T] = Future()

        def job() -> None:
            try:
                result = action()
            except BaseException as error:  # noqa: BLE001 - raised again in the caller
                self._rest(worker)
                outcome.set_exception(error)
            else:
                self._rest(worker)
                outcome.set_result(result)

        with self._changed:
            if self._is_closed:
                raise DataPlaneClosed(f"this {self._name} client is closed")
            worker = self._idle.pop() if self._idle else _Worker(self._name)
            self._busy.add(worker)
        worker.jobs.put(job)
        try:
            return outcome.result(timeout=max(timeout_s, 0.0))
        except TimeoutError as error:
            if outcome.done():
                raise
            raise DataPlaneTimeout(f"{self._name} did not answer within {timeout_s:.1f} s") from error

    def close(self, *, grace_s: float) -> bool:
        """Ends the threads; whether none is left inside a call. May be called again to wait for the rest."""
        give_up = time.monotonic() + grace_s
        with self._changed:
            self._is_closed = True
            idle, self._idle = self._idle, []
            while self._busy and time.monotonic() < give_up:
                self._changed.wait(give_up - time.monotonic())
            is_idle = not self._busy
            idle += self._idle
            self._idle = []
        for worker in idle:
            worker.jobs.put(None)
        for worker in idle:
            worker.thread.join(grace_s)
        return is_idle

    def _rest(self, worker: _Worker) -> None:
        with self._changed:
            self._busy.discard(worker)
            if self._is_closed:
                worker.jobs.put(None)
            else:
                self._idle.append(worker)
            self._changed.notify_all()


class _Worker:
    def __init__(self, name: str) -> None:
        self.jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name=f"{name}-call", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while (job := self.jobs.get()) is not None:
            job()
            del job
