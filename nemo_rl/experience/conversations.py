"""`ConversationLoop`: one coroutine per conversation: the model's turn, then tools or the environment, until it ends.

    ConversationLoop.run (a thread per caller)        groups come as their conversations end
      `- _group                                       all conversations of a group; a refill where too few were scored
           `- _conversation                           attempts with the same seeds, as the policy of the ending says
                `- Attempt.run                        (conversation_attempt.py)
                   ProgramAttempt.run                 where a program drives (program_attempt.py)

Used by the rollout worker, for training and for validation. Everything runs in one event loop in its own thread,
which never blocks: engines, environments and tools answer through futures. Invariants: what was sampled is never
tokenised again; an environment that was opened is closed in every path; a failure of the infrastructure is no reward.

`ProgramAttempt`: a conversation that a program of somebody else drives through the endpoint.

    ProgramAttempt.run
      `- ProgramHost.run                        the program, from its start to its exit; ended in every path
           `- _serve, per request               answers after the end of the conversation are refused
                |- _read                        the history is the row's, or begins another row, or is refused
                |- Attempt._sample              the model
                `- ChatAnswer                   text and calls

Called by the loop of conversations. Invariant: a request says which messages follow, never which tokens were sampled:
what the row holds stays, and only messages that are new to it are made into tokens.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, TypeVar

from nemo_rl.config.env import ConversationConfig, Ending
from nemo_rl.data.conversation import Message
from nemo_rl.data.datasets import Prompt
from nemo_rl.environments.call_formats import ParsedTurn, typed
from nemo_rl.environments.conversation import EnvironmentFailure, Reply, ToolResult
from nemo_rl.environments.endpoint import ChatAnswer, ChatRequest, RefusedRequest
from nemo_rl.environments.programs import ProgramResult
from nemo_rl.environments.wire import sound_text
from nemo_rl.errors import DatasetError, ModelFolderError
from nemo_rl.experience.conversation_attempt import (
    Attempt,
    AttemptParts,
    ConversationRecord,
    ConversationTask,
    Hosts,
    SaidTurn,
    TimeIsUp,
)
from nemo_rl.experience.rollouts import row_seeds
from nemo_rl.experience.token_row import TokenRow
from nemo_rl.experience.turn_sampler import TurnSample
from nemo_rl.models.generation.interfaces import SamplingParams

__all__ = ["ConversationGroup", "ConversationLoop", "GroupTask", "ProgramAttempt"]


WITHOUT_EFFECT_ON_SAMPLING = frozenset({"model", "user", "metadata", "store", "service_tier"})
"""Fields of a request that need no answer; of any other one the log says that the recipe's value is used."""


class ProgramAttempt(Attempt):
    """One attempt of a conversation with a program.

    Args:
        number: of the attempt, from 0 on; all have the same seeds.
    """

    def __init__(self, task: ConversationTask, parts: AttemptParts, *, number: int = 0) -> None:
        super().__init__(task, parts, number=number)
        assert parts.hosts.programs is not None, "a program drives this conversation"
        self._host = parts.hosts.programs
        self._said: SaidTurn | None = None
        """The last turn, until it is known what follows it."""
        self._answered = self._began
        """Monotonic seconds of the last answer."""
        self._tools: tuple[Mapping[str, Any], ...] = ()
        """The program's own tools, as the row's prompt has them."""
        self._num_taken = 0
        """Sampled turns."""
        self._limit: Ending | None = None
        """The limit that was reached: further requests are answered with a cut turn."""
        self._stated: float | None = None
        self._refused = ""
        """The reason why the last request was refused."""
        self._is_over = False
        self._lock = asyncio.Lock()
        """Requests of a program are answered one after the other."""
        self._requests: set[asyncio.Task[ChatAnswer]] = set()
        self._broken: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        """The error of a request that ends the conversation."""
        self._timer = asyncio.timeout(None)

    def _reward(self) -> float | None:
        return None if self._stated is None and self._host.is_scored else self._stated or 0.0

    async def _whole(self) -> Ending:
        program = asyncio.get_running_loop().create_task(self._host.run(self._row(), self._serve))
        result = None
        self._enter("the program")
        try:
            result = await self._watched(program)
        except (EnvironmentFailure, TimeIsUp) as failure:
            # The limit was reached before, which is what the model did: no failure of the program counts any more.
            if self._limit is None and self._refused and isinstance(failure, EnvironmentFailure):
                raise EnvironmentFailure(f"{failure}; its last request was refused: {self._refused}") from failure
            if self._limit is None:
                raise
        finally:
            await self._end(program)
            self._finish(result)
        return self._ending(result)

    async def _watched(self, program: asyncio.Task[ProgramResult]) -> ProgramResult:
        """Return the result of the program; it has a deadline whenever no turn is sampled for it."""
        first: set[asyncio.Future[Any]] = {program, self._broken}
        try:
            async with self._timer:
                self._allow()
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            if self._seconds_left() <= 0:
                raise TimeIsUp from None
            raise EnvironmentFailure(
                f"{self._host.name}: neither asked for a turn nor ended within env.timeout_s {self._host.timeout_s:g} s"
                f" (after {self._num_taken} turns)"
            ) from None
        if self._broken.done():
            raise self._broken.result()
        return program.result()

    def _allow(self) -> None:
        """Let the deadline of the program begin; it stays where it is once a limit was reached."""
        left = min(self._host.timeout_s, self._seconds_left())
        self._reschedule(asyncio.get_running_loop().time() + left)

    def _reschedule(self, when: float | None) -> None:
        with suppress(RuntimeError):  # its time is up already
            self._timer.reschedule(when)

    async def _end(self, program: asyncio.Task[ProgramResult]) -> None:
        self._is_over = True
        tasks = [program, *self._requests]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _finish(self, result: ProgramResult | None) -> None:
        """Record the last turn with the reward that the program stated."""
        for row in self._rows:
            row.drop_open_reply()
        if self._said is not None:
            if result is not None:
                self._stated = result.reward
                self._said.reply = Reply(done=True, reward=result.reward or 0.0, components=result.components)
            self._record_said(was_extended=False)

    def _ending(self, result: ProgramResult | None) -> Ending:
        if self._limit is not None:
            return self._limit
        assert result is not None, "without a limit a program that ends has a result"
        if not self._turns:
            raise EnvironmentFailure(f"{self._host.name}: exited without a request")
        if result.reward is None and not self._host.is_scored:
            raise EnvironmentFailure(
                f'{self._host.name}: expected a last line such as {{"reward": 1.0}}, got none; let it print one, or '
                "set env.reward_function"
            )
        return Ending.ANSWERED if result.reward is None else Ending.ENVIRONMENT_DONE

    # ---- requests

    async def _serve(self, request: ChatRequest) -> ChatAnswer:
        task = asyncio.get_running_loop().create_task(self._take(request))
        self._requests.add(task)
        try:
            return await task
        finally:
            self._requests.discard(task)

    async def _take(self, request: ChatRequest) -> ChatAnswer:
        async with self._lock:
            if self._is_over:
                raise EnvironmentFailure("the conversation has ended")
            if self._limit is not None:
                return self._cut_turn()
            self._tell(request)
            deadline = self._timer.when()
            self._reschedule(None)
            try:
                answer = await self._next_turn(request)
            except (RefusedRequest, DatasetError, ModelFolderError) as error:
                # A program that asks for the same again and again has no more time for it.
                self._reschedule(deadline)
                self._enter("the program")
                self._refused = str(error)
                raise error if isinstance(error, RefusedRequest) else RefusedRequest(str(error)) from error
            except Exception as error:
                # Raised by `_watched`, in the task of the conversation.
                if not self._broken.done():
                    self._broken.set_result(error)
                raise EnvironmentFailure("the conversation has ended") from error
            self._answered = time.monotonic()
            self._enter("the program")
            self._allow()
            return answer

    async def _next_turn(self, request: ChatRequest) -> ChatAnswer:
        if self._num_taken >= self._parts.config.max_turns:
            return self._reach(Ending.TURN_LIMIT)
        if not self._read(request):
            return self._reach(Ending.CONTEXT_FULL)
        room = self._room()
        if room < 1:
            return self._reach(self._full())
        self._stop = request.stop or None
        before = len(self._rows[-1])
        said = await self._sample(self._num_taken, min(room, request.max_tokens or room))
        self._said, self._num_taken, self._refused = said, self._num_taken + 1, ""
        return ChatAnswer(
            text=said.parsed.text,
            calls=said.parsed.calls,
            truncated=said.sample.truncated,
            prompt_tokens=before,
            sampled_tokens=len(said.sample.token_ids),
        )

    def _reach(self, limit: Ending) -> ChatAnswer:
        self._limit = limit
        return self._cut_turn()

    def _cut_turn(self) -> ChatAnswer:
        return ChatAnswer(text="", truncated=True, prompt_tokens=len(self._rows[-1]))

    def _tell(self, request: ChatRequest) -> None:
        names = sorted(request.settings.keys() - WITHOUT_EFFECT_ON_SAMPLING)
        if names:
            self._host.tell_once(
                f"{self._host.name}: its requests set {', '.join(names)}, which have no effect: turns are sampled as "
                "the recipe says"
            )

    # ---- tokens

    def _read(self, request: ChatRequest) -> bool:
        """Put what the request adds behind the last turn, or begin a row; False where there is no room for a turn."""
        if self._said is None:
            return self._begin_row(request)
        new = self._new_messages(request, self._said)
        if new is None:
            self._num_rewrites += 1
            if self._encoder.history == "append":
                raise RefusedRequest(
                    f"messages: expected the {len(self._messages) + 1} messages of the conversation as they were, then "
                    "those of users or tools, with the same tools; data.history append trains one row: set it to "
                    "new_row for programs that rewrite their history",
                    code="history_changed",
                )
            return self._begin_row(request)
        held, self._said.messages = list(self._messages), new
        self._said.results = tuple(ToolResult(text=message.content) for message in new if message.role == "tool")
        try:
            has_room = self._read_next(self._said)
        except (DatasetError, ModelFolderError):
            self._messages, self._said.results = held, ()
            raise
        if has_room:
            self._record_said(was_extended=True)
        return has_room

    def _new_messages(self, request: ChatRequest, said: SaidTurn) -> tuple[Message, ...] | None:
        """Return the messages behind the last turn; None where those before are not the row's."""
        turn = Message(role="assistant", content=said.parsed.text, calls=said.parsed.calls)
        held = [*self._messages, turn]
        new = request.messages[len(held) :]
        is_same = request.tools == self._tools and all(map(_is_same, held, request.messages))
        follows = bool(new) and all(message.role in ("user", "tool") for message in new)
        return new if is_same and follows else None

    def _begin_row(self, request: ChatRequest) -> bool:
        encoder = self._encoder.with_tools(request.tools)
        if request.tools and not (encoder.prints_tools and self._parts.calls):
            raise RefusedRequest(
                "tools: the chat template of the model prints no tools, or writes calls that env.tools.format does not "
                "read; set policy.tokenizer.chat_template",
                code="no_tools",
            )
        row = TokenRow(encoder.prompt(request.messages), first_turn=self._num_taken)
        if self._said is not None:
            self._record_said(was_extended=False)
        self._rows = [*(row for row in self._rows if row.turns), row]
        self._messages, self._tools, self._encoder = list(request.messages), request.tools, encoder
        return len(row) < self._parts.max_total_length

    def _parse(self, sample: TurnSample) -> ParsedTurn:
        """Read the calls of a turn; one that was cut, or whose calls cannot be read, is given as text."""
        plain = self._plain(sample.token_ids)
        if not self._tools or sample.truncated or self._parts.calls is None:
            return plain
        parsed = typed(self._parts.calls.parse(sample.token_ids), self._tools)
        return plain if parsed.invalid else parsed

    def _record_said(self, *, was_extended: bool) -> None:
        said, self._said = self._said, None
        assert said is not None, "a turn was sampled"
        said.tool_s = time.monotonic() - self._answered
        self._turns.append(said.record(was_extended=was_extended))
        row = next(row for row in reversed(self._rows) if row.turns)
        row.set_reward(-1, said.reply.reward)


def _is_same(held: Message, given: Message) -> bool:
    """Return whether a program has given a message back as it was, but for white space around it."""
    return (
        held.role == given.role
        and sound_text(held.content).strip() == given.content.strip()
        and [(call.name, dict(call.arguments)) for call in held.calls]
        == [(call.name, dict(call.arguments)) for call in given.calls]
    )


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

    def use(self, parts: AttemptParts) -> None:
        self._parts = parts

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
        async with self._places:
            for number in range(self._config.retries + 1):
                record = await self._attempt(kind(task, self._parts, number=number), task.name)
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
