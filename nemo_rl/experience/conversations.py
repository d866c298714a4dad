"""`ConversationLoop`: one coroutine per conversation: the model's turn, then tools or the environment, until it ends.

    ConversationLoop.run (a thread per caller)        groups come as their conversations end
      `- _group                                       all conversations of a group; a refill where too few were scored
           `- _conversation                           attempts with the same seeds, as the policy of the ending says
                `- Attempt.run                        (conversation_attempt.py)
                   ProgramAttempt.run                 where a program drives (program_attempt.py)

Used by the rollout worker, for training and for validation. Everything runs in one event loop in its own thread,
which never blocks: engines, environments and tools answer through futures. Invariants: what was sampled is never
tokenised again; an environment that was opened is closed in every path; a failure of the infrastructure is no reward.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import TypeVar

from nemo_rl.config.env import ConversationConfig
from nemo_rl.data.datasets import Prompt
from nemo_rl.experience.conversation_attempt import (
    Attempt,
    AttemptParts,
    ConversationRecord,
    ConversationTask,
    Hosts,
)
from nemo_rl.experience.program_attempt import ProgramAttempt
from nemo_rl.experience.rollouts import row_seeds
from nemo_rl.models.generation.interfaces import SamplingParams

__all__ = ["ConversationGroup", "ConversationLoop", "GroupTask"]

_T = TypeVar("_T")

END_TIMEOUT_S = 30.0
"""Seconds for everything that is open to be closed at the end of the loop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTask:
    """The conversations of one group: samples of one prompt."""

    prompt: Prompt
    seeds: tuple[int, ...]
    sampling: SamplingParams
    name: str = ""
    """Name of the group in the schedule of an asynchronous run; empty: it is in none."""
    only_engine: int | None = None
    """Number of the only engine that may sample it; None: any."""
    min_scored: int = 1
    """Fewest scored conversations of the group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationGroup:
    """A group whose conversations have all ended."""

    number: int
    """Number of its task in the call."""
    records: tuple[ConversationRecord, ...]
    """One per conversation, in the order of the seeds."""


class ConversationLoop:
    """Runs conversations in its own event loop.

    Args:
        config: limits and policies.
        hosts: processes of environment and tools, used in this loop alone.
    """

    def __init__(self, config: ConversationConfig, hosts: Hosts) -> None:
        self._config, self._hosts = config, hosts
        self._parts: AttemptParts | None = None
        self._by_section: Mapping[str, AttemptParts] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="conversations", daemon=True)
        self._thread.start()
        self._places = asyncio.Semaphore(config.max_open)
        self._lock = threading.Lock()
        self._running: dict[Future[None], str] = {}
        """Groups that run, and their names."""
        self._attempts: dict[Attempt, str] = {}
        """Conversations that run, and their names."""
        self._is_closed = False

    def start(self, *, timeout_s: float) -> None:
        """Start the processes of environment and tools.

        Raises:
            UserError: the environment or a tool cannot be loaded.
        """
        self._submit(self._hosts.start()).result(timeout_s)

    def use(self, parts: AttemptParts, *, by_section: Mapping[str, AttemptParts] | None = None) -> None:
        """Make conversations with these parts.

        Args:
            by_section: parts of the prompts of some sections of `data`, in place of the others.
        """
        self._parts, self._by_section = parts, by_section or {}

    @property
    def num_open(self) -> int:
        return self._hosts.num_open

    def run(self, groups: Sequence[GroupTask]) -> Iterator[ConversationGroup]:
        """Yield groups as their conversations end; those that are aborted meanwhile are left out.

        Raises:
            UserError, WorkerError: the first error that is not the failure of a conversation.
        """
        found: SimpleQueue[ConversationGroup | BaseException | None] = SimpleQueue()
        mine = [self._begin(number, group, found) for number, group in enumerate(groups)]
        try:
            for _ in mine:
                ended = found.get()
                if isinstance(ended, BaseException):
                    raise ended
                if ended is not None:
                    yield ended
        finally:
            for future in mine:
                future.cancel()

    def abort(self, names: Sequence[str]) -> None:
        """Cancel the groups with these names; `run` does not give them."""
        with self._lock:
            chosen = [future for future, name in self._running.items() if name in names]
        for future in chosen:
            future.cancel()

    def waiting(self, names: Sequence[str]) -> list[str]:
        """Return what conversations of the groups with these names wait for, those that have waited longest first."""
        with self._lock:
            found = [
                (attempt.waits_for, name) for attempt, name in self._attempts.items() if name.partition("/")[0] in names
            ]
        return [f"{name} {state}" for (_, state), name in sorted(found, reverse=True)]

    def close(self) -> None:
        """Cancel what runs, close every environment, and end the loop. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._submit(self._end()).result(END_TIMEOUT_S)
        finally:
            self._hosts.kill()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(END_TIMEOUT_S)
            if not self._thread.is_alive():
                self._loop.close()

    async def _end(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._hosts.shutdown()

    def _submit(self, work: Coroutine[object, object, _T]) -> Future[_T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _begin(
        self, number: int, group: GroupTask, found: SimpleQueue[ConversationGroup | BaseException | None]
    ) -> Future[None]:
        async def run() -> None:
            try:
                found.put(ConversationGroup(number=number, records=await self._group(group)))
            except asyncio.CancelledError:
                found.put(None)
                raise
            except Exception as error:  # noqa: BLE001 - raised by `run` in the caller's thread
                found.put(error)

        future = self._submit(run())
        with self._lock:
            self._running[future] = group.name
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: Future[None]) -> None:
        with self._lock:
            self._running.pop(future, None)

    async def _group(self, group: GroupTask) -> tuple[ConversationRecord, ...]:
        """Return the records of a group; where too few are scored, those that are not are sampled once more."""
        tasks = [
            ConversationTask(
                prompt=group.prompt,
                seed=seed,
                sampling=group.sampling,
                name=f"{group.name}/{number}" if group.name else "",
                only_engine=group.only_engine,
            )
            for number, seed in enumerate(group.seeds)
        ]
        records = await _all(self._conversation(task) for task in tasks)
        num_scored = sum(record.is_scored for record in records)
        if self._config.too_few == "refill" and num_scored < group.min_scored:
            again = {
                number: self._conversation(
                    replace(task, seed=row_seeds(task.seed, "refill", count=1)[0], name=task.name and f"{task.name}r")
                )
                for number, (task, record) in enumerate(zip(tasks, records, strict=True))
                if not record.is_scored
            }
            for number, record in zip(again, await _all(again.values()), strict=True):
                records[number] = replace(record, is_refill=True)
        return tuple(records)

    async def _conversation(self, task: ConversationTask) -> ConversationRecord:
        assert self._parts is not None, "use comes before the first conversation"
        kind = Attempt if self._hosts.programs is None else ProgramAttempt
        parts = self._by_section.get(task.prompt.section, self._parts)
        async with self._places:
            for number in range(self._config.retries + 1):
                record = await self._attempt(kind(task, parts, number=number), task.name)
                policy = self._config.endings.by_ending[record.ending]
                if policy != "retry":
                    break
        return replace(record, is_scored=policy == "score")

    async def _attempt(self, attempt: Attempt, name: str) -> ConversationRecord:
        with self._lock:
            self._attempts[attempt] = name
        try:
            return await attempt.run()
        finally:
            with self._lock:
                del self._attempts[attempt]


async def _all(work: Iterable[Coroutine[object, object, _T]]) -> list[_T]:
    """Return all results; the first error cancels the others, and is raised once they have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
