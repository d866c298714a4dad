"""`ProgramAttempt`: a conversation that a program of somebody else drives through the endpoint.

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
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from nemo_rl.config.conversation import Ending
from nemo_rl.data.conversation import Message
from nemo_rl.environments.call_formats import ParsedTurn, typed
from nemo_rl.environments.conversation import EnvironmentFailure, Reply, ToolResult
from nemo_rl.environments.endpoint import ChatAnswer, ChatRequest, RefusedRequest
from nemo_rl.environments.programs import ProgramResult
from nemo_rl.environments.wire import sound_text
from nemo_rl.errors import DatasetError, ModelFolderError
from nemo_rl.experience.conversation_attempt import Attempt, AttemptParts, ConversationTask, SaidTurn, TimeIsUp
from nemo_rl.experience.token_row import TokenRow
from nemo_rl.experience.turn_sampler import TurnSample

__all__ = ["ProgramAttempt"]

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
