"""`ProgramAttempt`: a conversation that a program of somebody else drives through the endpoint.

    ProgramAttempt.run
      `- ProgramHost.run                        the program, from its start to its exit; ended in every path
           `- _serve, per request               a repeated request gets the answer of the first one
                `- _take                        answers after the end of the conversation are refused
                     |- SessionTree.find, .add  the history is that of a row, or begins another row, or is refused
                     |- Attempt._sample         the model
                     `- ChatAnswer              text and calls

Called by the loop of conversations, in its event loop. Invariant: a request says which messages follow, never which
tokens were sampled: what a row holds stays, and only messages that are new to it are made into tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

from nemo_rl.config.env import Ending
from nemo_rl.data.conversation import Message
from nemo_rl.environments.call_formats import ParsedTurn, typed
from nemo_rl.environments.chat import ChatAnswer, ChatRequest, RefusedRequest
from nemo_rl.environments.conversation import EnvironmentFailure, Reply, ToolResult
from nemo_rl.environments.programs import ProgramResult
from nemo_rl.errors import DatasetError, ModelFolderError
from nemo_rl.experience.conversation_attempt import (
    Attempt,
    AttemptParts,
    ConversationTask,
    SaidTurn,
    TimeIsUp,
    TurnRecord,
)
from nemo_rl.experience.session_tree import NoRoom, SessionTree, TurnNode
from nemo_rl.experience.turn_sampler import TurnSample

__all__ = ["ProgramAttempt"]

WITHOUT_EFFECT_ON_SAMPLING = frozenset({"model", "user", "metadata", "store", "service_tier"})
"""Fields of a request that need no answer; of any other one the log says that the recipe's value is used."""
FULL = "this model's maximum context length leaves no room for another turn ({ending}: {keys})"
LIMIT_KEYS: Mapping[Ending, str] = {
    Ending.TURN_LIMIT: "experience.conversation.max_turns and max_rows",
    Ending.TOKEN_LIMIT: "experience.conversation.max_sampled_tokens",
    Ending.CONTEXT_FULL: "policy.max_total_sequence_length",
}


class ProgramAttempt(Attempt):
    """One attempt of a conversation with a program.

    Args:
        number: of the attempt, from 0 on; all have the same seeds.
    """

    def __init__(self, task: ConversationTask, parts: AttemptParts, *, number: int = 0) -> None:
        super().__init__(task, parts, number=number)
        assert parts.hosts.programs is not None, "a program drives this conversation"
        self._host, config = parts.hosts.programs, parts.config
        self._is_open = parts.history == "branch"
        self._tree = SessionTree(
            parts.encoder,
            max_length=parts.max_total_length,
            max_rows=config.max_rows if self._is_open else config.max_turns + 1,
            is_open=self._is_open,
            trains_sides=config.side_requests == "train",
        )
        self._answered = self._began
        """Monotonic seconds of the last answer."""
        self._num_taken = self._num_sampling = 0
        """Turns that were begun; those that an engine samples now."""
        self._limit: Ending | None = None
        """The limit that was reached: further requests are answered as behind a limit."""
        self._stated: float | None = None
        self._refused = ""
        """The reason why the last request was refused."""
        self._is_over = False
        self._in_turn: AbstractAsyncContextManager[None] = nullcontext() if self._is_open else asyncio.Lock()
        """Where one row is open, its requests are answered one after the other. Where all are, no two that are
        sampled at one time are of one row: the later one begins another."""
        self._requests: set[asyncio.Task[ChatAnswer]] = set()
        self._by_digest: dict[str, asyncio.Task[ChatAnswer]] = {}
        """Requests that are answered, or whose answers no other request has continued yet."""
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
        """Record the turns; the last one has the reward that the program stated."""
        rows, turns, sides = self._tree.ended()
        self._rows = rows or self._rows
        if turns and turns[-1].said is not None:
            last = turns[-1].said
            last.tool_s = time.monotonic() - self._answered
            if result is not None:
                self._stated = result.reward
                last.reply = Reply(done=True, reward=result.reward or 0.0, components=result.components)
                rows[-1].set_reward(-1, last.reply.reward)
        # The last of them is the answer.
        self._turns = [*(_record(node, is_side=True) for node in sides), *map(_record, turns)]

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
        if self._is_over:
            raise EnvironmentFailure("the conversation has ended")
        task = self._by_digest.get(request.digest)
        if task is not None:
            self._num_joined += 1
        else:
            task = asyncio.get_running_loop().create_task(self._take(request))
            self._requests.add(task)
            if request.digest and self._parts.config.equal_requests == "join":
                self._by_digest[request.digest] = task
            task.add_done_callback(lambda done: self._settle(done, request.digest))
        # Its reader may be gone, and another one may have joined.
        return await asyncio.shield(task)

    def _settle(self, task: asyncio.Task[ChatAnswer], digest: str) -> None:
        self._requests.discard(task)
        if (task.cancelled() or task.exception() is not None) and self._by_digest.get(digest) is task:
            del self._by_digest[digest]

    async def _take(self, request: ChatRequest) -> ChatAnswer:
        async with self._in_turn:
            if self._is_over:
                raise EnvironmentFailure("the conversation has ended")
            if self._limit is not None and not (self._is_open and self._limit is Ending.CONTEXT_FULL):
                return self._cut_turn(self._limit)
            self._tell(request)
            try:
                return await self._next_turn(request)
            except (RefusedRequest, DatasetError, ModelFolderError) as error:
                # A program that asks for the same again and again has no more time for it.
                self._refused = str(error)
                raise error if isinstance(error, RefusedRequest) else RefusedRequest(str(error)) from error
            except NoRoom as full:
                if self._limit is None and not self._num_sampling:
                    self._allow()
                self._limit = full.ending
                return self._cut_turn(full.ending)
            except Exception as error:
                # Raised by `_watched`, in the task of the conversation.
                if not self._broken.done():
                    self._broken.set_result(error)
                raise EnvironmentFailure("the conversation has ended") from error

    async def _next_turn(self, request: ChatRequest) -> ChatAnswer:
        if self._num_taken >= self._parts.config.max_turns:
            raise NoRoom(Ending.TURN_LIMIT)
        node = self._place(request)
        room = self._room(node.row)
        if room < 1:
            raise NoRoom(self._full())
        self._stop, before = request.stop or None, len(node.row)
        parent = node.parent
        engine = self._engine if parent is None or parent.said is None else parent.said.sample.engine
        # A full row was left for another one, such as with a summary of it.
        self._limit = None
        self._num_taken += 1
        self._begin_sampling()
        try:
            sample = await self._sample(node.number, min(room, request.max_tokens or room), node.row, engine=engine)
        finally:
            self._end_sampling()
        self._engine = sample.engine
        said = SaidTurn(sample=sample, parsed=self._parse_calls(sample, request.tools))
        node.end_turn(said)
        self._refused = ""
        return ChatAnswer(
            text=said.parsed.text,
            calls=said.parsed.calls,
            truncated=said.sample.truncated,
            prompt_tokens=before,
            sampled_tokens=len(said.sample.token_ids),
        )

    def _begin_sampling(self) -> None:
        self._num_sampling += 1
        self._reschedule(None)

    def _end_sampling(self) -> None:
        self._num_sampling -= 1
        if not self._num_sampling:
            self._answered = time.monotonic()
            self._enter("the program")
            self._allow()

    def _cut_turn(self, limit: Ending) -> ChatAnswer:
        if self._parts.config.limit_answer == "empty_turn":
            return ChatAnswer(text="", truncated=True)
        text = FULL.format(ending=limit.value, keys=LIMIT_KEYS[limit])
        raise RefusedRequest(text, code="context_length_exceeded", param="messages")

    def _tell(self, request: ChatRequest) -> None:
        names = sorted(request.settings.keys() - WITHOUT_EFFECT_ON_SAMPLING)
        if names:
            self._host.tell_once(
                f"{self._host.name}: its requests set {', '.join(names)}, which have no effect: turns are sampled as "
                "the recipe says"
            )

    # ---- tokens

    def _place(self, request: ChatRequest) -> TurnNode:
        """Put what the request adds behind the turn that it continues, or begin a row."""
        tree = self._tree
        parent = tree.find(request.messages, request.tools)
        if not tree.is_empty and (parent is None or parent.children):
            self._num_rewrites += 1
            if self._parts.history == "append":
                raise RefusedRequest(
                    "messages: expected the messages of the conversation as they were, then those of users or tools, "
                    "with the same tools; data.history append trains one row: set it to branch or new_row for "
                    "programs with several histories",
                    code="history_changed",
                )
        if parent is None and request.tools:
            self._check_tools(request)
        node = tree.add(parent, request.messages, request.tools, number=self._num_taken)
        node.digest = request.digest
        if parent is not None and parent.said is not None:
            self._by_digest.pop(parent.digest, None)
            if not parent.said.messages:
                parent.said.messages, parent.said.results = node.given, _results(node.given)
                parent.said.tool_s = time.monotonic() - self._answered
        return node

    def _check_tools(self, request: ChatRequest) -> None:
        encoder = self._encoder.with_tools(request.tools)
        if not (encoder.prints_tools and self._parts.calls):
            raise RefusedRequest(
                "tools: the chat template of the model prints no tools, or writes calls that env.tools.format does not "
                "read; set policy.tokenizer.chat_template",
                code="no_tools",
            )

    def _parse_calls(self, sample: TurnSample, tools: Sequence[Mapping[str, Any]]) -> ParsedTurn:
        """Read the calls of a turn; one that was cut, or whose calls cannot be read, is given as text."""
        plain = self._plain(sample.token_ids)
        if not tools or sample.truncated or self._parts.calls is None:
            return plain
        parsed = typed(self._parts.calls.parse(sample.token_ids), tools)
        return plain if parsed.invalid else parsed


def _results(messages: Sequence[Message]) -> tuple[ToolResult, ...]:
    return tuple(ToolResult(text=message.content) for message in messages if message.role == "tool")


def _record(node: TurnNode, *, is_side: bool = False) -> TurnRecord:
    assert node.said is not None, "turns that were sampled are recorded"
    before = -1 if node.parent is None else node.parent.number
    return replace(
        node.said.record(was_extended=True),
        follows=None if before == node.number - 1 else before,
        opening=node.given if node.begins_row and node.number else (),
        is_side=is_side,
    )
