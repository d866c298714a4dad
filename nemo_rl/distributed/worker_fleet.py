"""`WorkerFleet`: workers that do not need each other, so that one may die or hang and be replaced.

Made by the driver for the generation engines; the rollout worker has a copy that asks the same processes. Each member
is a group of one worker and keeps its number. Invariant: a member that was lost is ended and never asked again; an
error that a worker raises is no loss, and is raised here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from nemo_rl.distributed.worker_groups import Call, Pending, Request, WorkerGroup
from nemo_rl.errors import NemoRLError, WorkerError, WorkerLost

__all__ = ["WorkerFleet"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

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
