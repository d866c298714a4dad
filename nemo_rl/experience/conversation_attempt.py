"""`Attempt`: one conversation from its opening to its ending: who says what, and what becomes of it.

    Attempt.run
      |- EnvironmentHost.open                   where the environment has turns; closed in every path
      `- turn by turn, until there is an `Ending`
           |- SamplesTurns.sample               the model
           |- CallFormat.parse                  calls of tools, from the token ids
           |- ToolHost.call                     all calls of a turn at the same time
           |- EnvironmentHandle.reply           a turn without calls, where the environment has turns
           `- TurnEncoder.extend                what the model reads next, behind what it has sampled

A program that drives its conversation itself is a `ProgramAttempt` (program_attempt.py), which shares everything here
but who asks for turns. Called by the loop of conversations, in its event loop. Invariants: what a turn samples
depends on the tokens before it, the seed of the row and the number of the turn alone; a call in a turn that was cut
is not made.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from nemo_rl.config.data import History
from nemo_rl.config.env import ConversationConfig, Ending, ToolsConfig
from nemo_rl.data.conversation import Message, ToolCall
from nemo_rl.data.datasets import Prompt
from nemo_rl.data.turn_encoder import TurnEncoder
from nemo_rl.environments.call_formats import CallFormat, ParsedTurn, typed
from nemo_rl.environments.conversation import ConversationRow, EnvironmentFailure, Reply, ToolResult, Turn
from nemo_rl.environments.interfaces import Response
from nemo_rl.environments.programs import ProgramHost
from nemo_rl.environments.tools import unknown_tool
from nemo_rl.errors import DatasetError, WorkerError, WorkerLost
from nemo_rl.experience.rollouts import row_seeds
from nemo_rl.experience.token_row import TokenRow
from nemo_rl.experience.turn_sampler import SamplesTurns, TurnRequest, TurnSample
from nemo_rl.models.generation.interfaces import SamplingParams

__all__ = [
    "Attempt",
    "AttemptParts",
    "ConversationRecord",
    "ConversationTask",
    "Hosts",
    "Replies",
    "SaidTurn",
    "TimeIsUp",
    "TurnRecord",
    "turn_seed",
]

_T = TypeVar("_T")

CUT_NOTE = "Your turn was cut after {tokens} tokens. No call of it was made."
TOO_MANY = "not made: a turn may make at most {most} calls"


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationTask:
    """One conversation to run."""

    prompt: Prompt
    seed: int
    sampling: SamplingParams
    """Settings of a turn, whose `max_new_tokens` is cut to what the limits leave."""
    name: str = ""
    """Name in the schedule of an asynchronous run; empty: it is in none."""
    only_engine: int | None = None
    """Number of the only engine that may sample it; None: any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRecord:
    """One turn, for people and for replays."""

    text: str
    num_tokens: int
    truncated: bool
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    """One per call that was read, then one for each that could not be read."""
    messages: tuple[Message, ...] = ()
    """Messages that the model was given next; empty at the end."""
    stop: tuple[str, ...] | None = None
    """Strings that end the next turn, as in `Reply`."""
    reward: float = 0.0
    components: Mapping[str, float] = field(default_factory=dict)
    columns: Mapping[str, object] = field(default_factory=dict)
    """Values of extra columns that the environment gave with it."""
    engine: int = 0
    cached_tokens: int | None = None
    waited_s: float = 0.0
    """Seconds until the engine began."""
    sampled_s: float = 0.0
    tool_s: float = 0.0
    """Seconds of tools and environment."""
    follows: int | None = None
    """Number of the turn whose history it continues, -1 for none; None: the turn before it."""
    opening: tuple[Message, ...] = ()
    """Messages of a program that began its row, where that is not the first one."""
    is_side: bool = False
    """A side request of a program, which is not trained."""

    @property
    def num_valid_calls(self) -> int:
        return sum(result.error is None for result in self.results)

    @property
    def is_void(self) -> bool:
        """Return whether the turn has neither text nor a call."""
        return not self.calls and not self.text.strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationRecord:
    """A conversation that has ended."""

    rows: tuple[TokenRow, ...]
    """One row, or several where the template rewrites what was said or a program has several histories; the last one
    has the last turn."""
    turns: tuple[TurnRecord, ...]
    ending: Ending
    reward: float | None
    """Sum of the rewards of its turns; None where an environment that only scores is still to be asked."""
    seed: int = 0
    answer: Response | None = None
    """The last turn; None where nothing was sampled."""
    error: str = ""
    """Cause of `env_error` and `engine_error`."""
    num_attempts: int = 1
    is_scored: bool = True
    """False: the policy of its ending leaves it out of all statistics."""
    num_rewrites: int = 0
    """Requests of a program whose history was none that a row ends with."""
    num_joined: int = 0
    """Requests of a program that repeated another one, and got its answer."""
    is_refill: bool = False
    """True where it was sampled with other seeds in place of one that was left out."""
    seconds: float = 0.0

    @property
    def components(self) -> Mapping[str, float]:
        """Return the parts of the reward, summed over turns."""
        total: dict[str, float] = {}
        for turn in self.turns:
            for name, part in turn.components.items():
                total[name] = total.get(name, 0.0) + part
        return total

    @property
    def columns(self) -> Mapping[str, object]:
        """Return the values of extra columns that the environment gave, the last one of each name."""
        return {name: value for turn in self.turns for name, value in turn.columns.items()}

    def with_outcome(self, reward: float) -> ConversationRecord:
        """Return the record with the reward that its last turn was given."""
        if not self.turns:
            return replace(self, reward=reward)
        self.rows[-1].set_reward(-1, reward)
        *others, last = self.turns
        return replace(self, reward=reward, turns=(*others, replace(last, reward=reward)))


class Replies(Protocol):
    """The side of an open conversation that an attempt uses."""

    async def reply(self, turn: Turn) -> Reply:
        """Return the answer to a turn; raises EnvironmentFailure."""
        ...

    async def close(self) -> None:
        """End the conversation. Idempotent."""
        ...


class OpensConversations(Protocol):
    """An environment with turns: that of a run is an `EnvironmentHost`, that of a replay has its recorded replies."""

    source: str

    @property
    def num_open(self) -> int: ...

    async def start(self) -> None: ...

    async def open(self, row: ConversationRow) -> Replies:
        """Return a new conversation; raises EnvironmentFailure."""
        ...

    async def shutdown(self) -> None: ...

    def kill(self) -> None: ...


class CallsTools(Protocol):
    """Tools: those of a run are a `ToolHost`, those of a replay have recorded results."""

    source: str
    has_cut: bool
    """Results have been cut to what the model reads."""

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]: ...

    async def start(self) -> None: ...

    async def call(self, call: ToolCall, *, seed: int) -> ToolResult:
        """Return the result of a call; raises EnvironmentFailure."""
        ...

    async def shutdown(self) -> None: ...

    def kill(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """The environment and the tools that answer the model."""

    environment: OpensConversations | None = None
    """The environment with turns; None where it only scores, or is a program."""
    tools: CallsTools | None = None
    programs: ProgramHost | None = None
    """The programs that drive the conversations; None where there are none."""

    @property
    def num_open(self) -> int:
        return sum(host.num_open for host in (self.environment, self.programs) if host is not None)

    async def start(self) -> None:
        """Start environment, tools and the endpoint of programs."""
        for host in (self.environment, self.tools, self.programs):
            if host is not None:
                await host.start()

    async def shutdown(self) -> None:
        """End environment, tools and the endpoint of programs. Idempotent."""
        for host in (self.environment, self.tools, self.programs):
            if host is not None:
                await host.shutdown()

    def kill(self) -> None:
        """End the processes of environment and tools at once. Idempotent."""
        for host in (self.environment, self.tools):
            if host is not None:
                host.kill()


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptParts:
    """Everything that conversations are made with."""

    config: ConversationConfig
    tools_config: ToolsConfig
    tokenizer: PreTrainedTokenizerBase
    encoder: TurnEncoder
    sampler: SamplesTurns
    max_total_length: int
    """Most tokens of a row."""
    hosts: Hosts
    calls: CallFormat | None = None
    """The form of calls; None where turns are not searched for calls."""
    stop_ids: frozenset[int] = frozenset()
    history: History = "append"
    """`data.history` for programs."""
    tool_names: tuple[str, ...] | None = None
    """The tools that may be called; None: all of the host."""

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> AttemptParts:
        """Return the parts of conversations that have these tools of the host, by their schemas, and no others."""
        names = tuple(str(schema["function"]["name"]) for schema in tools)
        calls = self.calls if tools else None
        return replace(self, encoder=self.encoder.with_tools(tools), calls=calls, tool_names=names)


class TimeIsUp(Exception):
    """`max_seconds` have passed."""


@dataclass(slots=True)
class SaidTurn:
    """The turn that was just taken."""

    sample: TurnSample
    parsed: ParsedTurn
    results: tuple[ToolResult, ...] = ()
    messages: tuple[Message, ...] = ()
    reply: Reply = field(default_factory=Reply)
    tool_s: float = 0.0

    def record(self, *, was_extended: bool) -> TurnRecord:
        """Return the record; its messages are those that were put behind it."""
        sample = self.sample
        return TurnRecord(
            text=self.parsed.text,
            num_tokens=len(sample.token_ids),
            truncated=sample.truncated,
            calls=self.parsed.calls,
            results=self.results,
            messages=self.messages if was_extended else (),
            stop=self.reply.stop,
            reward=self.reply.reward,
            components=self.reply.components,
            columns=self.reply.columns,
            engine=sample.engine,
            cached_tokens=sample.cached_tokens,
            waited_s=sample.waited_s,
            sampled_s=sample.sampled_s,
            tool_s=self.tool_s,
        )


class Attempt:
    """One attempt of a conversation.

    Args:
        number: of the attempt, from 0 on; all have the same seeds.
    """

    def __init__(self, task: ConversationTask, parts: AttemptParts, *, number: int = 0) -> None:
        self._task, self._parts, self._number = task, parts, number
        self._encoder = parts.encoder
        self._messages = list(task.prompt.messages)
        self._rows = [TokenRow(task.prompt.ids)]
        self._turns: list[TurnRecord] = []
        self._handle: Replies | None = None
        self._num_sampled = self._num_invalid = self._num_rewrites = self._num_joined = 0
        self._began, self._waited_s = time.monotonic(), 0.0
        self._stop: tuple[str, ...] | None = None
        self._engine: int | None = None
        self._doing, self._since = "begins", self._began

    @property
    def waits_for(self) -> tuple[float, str]:
        """Return the seconds that the conversation has been in its state, and the state: turn and what it waits for."""
        seconds = time.monotonic() - self._since
        return seconds, f"turn {len(self._turns)} waits for {self._doing} since {seconds:.0f} s"

    async def run(self) -> ConversationRecord:
        """Run the conversation; a failure of its environment or of an engine is its ending."""
        error = ""
        try:
            ending = await self._whole()
        except (EnvironmentFailure, DatasetError) as failure:
            # A reply that cannot be made into tokens is no reply.
            ending, error = Ending.ENV_ERROR, str(failure)
        except WorkerLost:
            # No engine is left: what ends the rollout, not this conversation alone.
            raise
        except WorkerError as failure:
            ending, error = Ending.ENGINE_ERROR, str(failure)
        except TimeIsUp:
            ending = Ending.TIME_LIMIT
        last = self._turns[-1] if self._turns else None
        return ConversationRecord(
            # A row that was begun and in which nothing was sampled has nothing to train.
            rows=tuple(row for row in self._rows if row.turns) or (self._rows[0],),
            turns=tuple(self._turns),
            ending=ending,
            seed=self._task.seed,
            reward=self._reward(),
            answer=None
            if last is None
            else Response(text=last.text, num_tokens=last.num_tokens, truncated=last.truncated),
            error=error,
            num_attempts=self._number + 1,
            num_rewrites=self._num_rewrites,
            num_joined=self._num_joined,
            seconds=time.monotonic() - self._began,
        )

    def _reward(self) -> float | None:
        """Return the reward of the conversation; None where its answer is still to be scored."""
        return None if self._parts.hosts.environment is None else sum(turn.reward for turn in self._turns)

    def _row(self) -> ConversationRow:
        prompt = self._task.prompt
        return ConversationRow(prompt=prompt.text, answer=prompt.answer, metadata=prompt.metadata, seed=self._task.seed)

    async def _whole(self) -> Ending:
        environment = self._parts.hosts.environment
        if environment is None:
            return await self._take_turns()
        self._enter("the environment to open")
        self._handle = await self._timed(environment.open(self._row()))
        try:
            return await self._take_turns()
        finally:
            self._enter("the environment to close")
            await self._handle.close()

    def _enter(self, state: str) -> None:
        self._doing, self._since = state, time.monotonic()

    async def _take_turns(self) -> Ending:
        most = self._parts.config.max_turns
        for number in range(most):
            row = self._rows[-1]
            room = self._room(row)
            if room < 1:
                return self._full()
            sample = await self._sample(number, room, row, engine=self._engine)
            self._engine, said = sample.engine, SaidTurn(sample=sample, parsed=self._parse(sample))
            was_extended = False
            try:
                ending = Ending.TIME_LIMIT if self._seconds_left() <= 0 else await self._answer(number, said)
                if ending is None and number + 1 == most:
                    ending = Ending.TURN_LIMIT
                if ending is None:
                    was_extended = self._read_next(said)
            finally:
                # Also a turn whose answer failed was sampled.
                self._turns.append(said.record(was_extended=was_extended))
                row.set_reward(-1, said.reply.reward)
            if not was_extended:
                return ending or Ending.CONTEXT_FULL
        raise AssertionError("the last turn has an ending")

    def _room(self, row: TokenRow) -> int:
        most, parts = self._task.sampling.max_new_tokens, self._parts
        if parts.config.max_sampled_tokens is not None:
            most = min(most, parts.config.max_sampled_tokens - self._num_sampled)
        return min(most, parts.max_total_length - len(row))

    def _full(self) -> Ending:
        limit = self._parts.config.max_sampled_tokens
        return Ending.TOKEN_LIMIT if limit is not None and self._num_sampled >= limit else Ending.CONTEXT_FULL

    async def _sample(self, number: int, room: int, row: TokenRow, *, engine: int | None) -> TurnSample:
        """Return a turn, which is put behind the tokens of its row.

        Args:
            engine: the one that has the row in its prefix cache; None where none has.
        """
        task = self._task
        sampling = replace(task.sampling, max_new_tokens=room)
        if self._stop is not None:
            sampling = replace(sampling, stop_strings=self._stop)
        attempt = f".{self._number}" if self._number else ""
        request = TurnRequest(
            prompt_ids=row.ids,
            seed=turn_seed(task.seed, number),
            sampling=sampling,
            name=f"{task.name}.{number}{attempt}" if task.name else "",
            engine=engine,
            only_engine=task.only_engine,
        )
        self._enter("an engine")
        sample = await self._parts.sampler.sample(request)
        self._waited_s += sample.waited_s
        self._num_sampled += len(sample.token_ids)
        row.add_turn(
            sample.token_ids,
            sample.logprobs,
            version_spans=sample.version_spans,
            number=number,
            cached_tokens=sample.cached_tokens,
            truncated=sample.truncated,
            support=sample.support,
            routes=sample.routes,
        )
        return sample

    def _parse(self, sample: TurnSample) -> ParsedTurn:
        calls, tools = self._parts.calls, self._parts.hosts.tools
        if calls is None or tools is None:
            return self._plain(sample.token_ids)
        return typed(calls.parse(sample.token_ids), self._parts.encoder.tools)

    def _plain(self, ids: Sequence[int]) -> ParsedTurn:
        """Return a turn whose calls are text as well."""
        kept = ids[:-1] if ids[-1] in self._parts.stop_ids else ids
        return ParsedTurn(text=str(self._parts.tokenizer.decode(list(kept), skip_special_tokens=False)))

    async def _answer(self, number: int, said: SaidTurn) -> Ending | None:
        """Let tools or the environment answer a turn; return the ending, None where the conversation goes on."""
        parsed, is_cut = said.parsed, said.sample.truncated
        began = time.monotonic()
        try:
            if parsed.calls or parsed.invalid:
                return await self._use_tools(number, said)
            if self._handle is None:
                return Ending.TOKEN_LIMIT if is_cut else Ending.ANSWERED
            self._enter("the environment's reply")
            turn = Turn(text=parsed.text, number=number, num_tokens=len(said.sample.token_ids), truncated=is_cut)
            said.reply = await self._timed(self._handle.reply(turn))
            if said.reply.done:
                return Ending.ENVIRONMENT_DONE
            if not said.reply.messages:
                raise EnvironmentFailure(f"the reply to turn {number} has no message, and the environment is not done")
            said.messages, self._stop = said.reply.messages, said.reply.stop
            return None
        finally:
            said.tool_s = time.monotonic() - began

    async def _use_tools(self, number: int, said: SaidTurn) -> Ending | None:
        config = self._parts.tools_config
        tools, parsed = self._parts.hosts.tools, said.parsed
        assert tools is not None, "calls are parsed where there are tools"
        if said.sample.truncated:
            self._num_invalid += 1
            note = CUT_NOTE.format(tokens=len(said.sample.token_ids))
            said.messages = (Message(role="user", content=note),)
        elif number + 1 < self._parts.config.max_turns:
            allowed, refused = parsed.calls[: config.max_parallel_calls], parsed.calls[config.max_parallel_calls :]
            seed = turn_seed(self._task.seed, number)
            self._enter(f"tools ({', '.join(dict.fromkeys(call.name for call in allowed)) or 'none'})")
            found = await self._timed(asyncio.gather(*(self._call(tools, call, seed) for call in allowed)))
            made = found if tools.has_cut else [self._cut(result) for result in found]
            text = TOO_MANY.format(most=config.max_parallel_calls)
            refusals = [ToolResult(text=text, error="too_many_calls") for _ in refused]
            names: list[str | None] = [call.name for call in parsed.calls]
            refusals += [ToolResult(text=f"error: {reason}", error="unreadable") for reason in parsed.invalid]
            results = [*made, *map(self._cut, refusals)]
            names += [None] * len(parsed.invalid)
            self._num_invalid += sum(each.error in ("unreadable", "unknown_tool") for each in results)
            said.results = tuple(results)
            said.messages = tuple(
                Message(role="tool", content=each.text, name=name) for name, each in zip(names, results, strict=True)
            )
        return Ending.INVALID_CALLS if self._num_invalid > config.max_invalid_calls else None

    async def _call(self, tools: CallsTools, call: ToolCall, seed: int) -> ToolResult:
        names = self._parts.tool_names
        if names is None or call.name in names:
            return await tools.call(call, seed=seed)
        return ToolResult(text=unknown_tool(call.name, names), error="unknown_tool")

    def _cut(self, result: ToolResult) -> ToolResult:
        text, _ = self._parts.encoder.cut_text(result.text, self._parts.tools_config.max_result_tokens)
        return replace(result, text=text)

    def _read_next(self, said: SaidTurn) -> bool:
        """Put what the model reads next behind what it has sampled; False where there is no room for another turn."""
        self._messages.append(Message(role="assistant", content=said.parsed.text, calls=said.parsed.calls))
        row, sample = self._rows[-1], said.sample
        found = self._encoder.extend(self._messages, said.messages, sampled=sample.token_ids, is_cut=sample.truncated)
        before = 0 if found.starts_row else len(row)
        if before + len(found.ids) >= self._parts.max_total_length:
            return False
        self._messages += said.messages
        if found.starts_row:
            self._rows.append(TokenRow(found.ids))
        else:
            row.insert(found.ids, num_seam=found.num_seam)
        return True

    async def _timed(self, work: Awaitable[_T]) -> _T:
        """Wait for environment or tools, at most for what is left of `max_seconds`."""
        left = self._seconds_left()
        try:
            async with asyncio.timeout(None if left == math.inf else left):
                return await work
        except TimeoutError:
            raise TimeIsUp from None

    def _seconds_left(self) -> float:
        """Return what is left of `max_seconds`; infinity where there is no limit."""
        limit = self._parts.config.max_seconds
        return math.inf if limit is None else limit - (time.monotonic() - self._began - self._waited_s)


def turn_seed(seed: int, number: int) -> int:
    """Return the seed of a turn of a row; that of the first one is the row's own."""
    return seed if number == 0 else row_seeds(seed, "turn", number, count=1)[0]
