"""Programs that are coroutines of this process: what a `ProgramHost` runs, without processes and HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.config.data import History
from nemo_rl.config.env import ConversationConfig, ToolsConfig
from nemo_rl.data.conversation import Message
from nemo_rl.data.datasets import Prompt
from nemo_rl.data.turn_encoder import TurnEncoder
from nemo_rl.environments.call_formats import HermesCalls
from nemo_rl.environments.chat import Answer, ChatAnswer
from nemo_rl.environments.chat_completions import parse_request
from nemo_rl.environments.conversation import ConversationRow
from nemo_rl.environments.programs import ProgramHost, ProgramResult, ProgramSpec
from nemo_rl.experience.conversation_attempt import AttemptParts, ConversationRecord, Hosts
from nemo_rl.experience.conversations import ConversationLoop, GroupTask
from nemo_rl.experience.turn_sampler import SamplesTurns, TurnRequest, TurnSample, TurnSampler
from nemo_rl.models.generation.interfaces import SamplingParams
from tests.helpers.chat_templates import NOW
from tests.helpers.conversations import WITH_TOOLS, Scripted, engine_of, small_tokenizer

USER = "guess 1 to 9"


class Client:
    """Sends the JSON of requests, as a client over HTTP does."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def ask(self, messages: Sequence[Any], **settings: object) -> ChatAnswer:
        """Return the answer to a request with these messages."""
        body = json.dumps({"model": "any", "messages": list(messages), **settings}).encode()
        return await self._answer(replace(parse_request(body), digest=hashlib.blake2b(body).hexdigest()))

    async def say(self, messages: list[Any], **settings: object) -> ChatAnswer:
        """Return the answer, which is put behind the messages."""
        found = await self.ask(messages, **settings)
        messages.append({"role": "assistant", "content": found.text})
        return found


Program = Callable[[Client], Awaitable[float | None]]
"""A program: asks, and returns the reward that it states."""


class CallbackHost(ProgramHost):
    """Runs a coroutine in place of a process."""

    def __init__(self, program: Program, *, timeout_s: float = 20, is_scored: bool = False) -> None:
        self.heard: list[str] = []
        super().__init__(
            ProgramSpec(command=["none"]), timeout_s=timeout_s, is_scored=is_scored, hear=self.heard.append
        )
        self._program = program

    async def run(self, row: ConversationRow, answer: Answer) -> ProgramResult:
        self.num_open += 1
        try:
            return ProgramResult(reward=await self._program(Client(answer)), components={}, seconds=0.0)
        finally:
            self.num_open -= 1


class Together:
    """Samples turns once so many have been asked for at the same time."""

    def __init__(self, sampler: SamplesTurns, count: int) -> None:
        self._sampler, self._count, self._waiting = sampler, count, 0
        self._all = asyncio.Event()

    async def sample(self, request: TurnRequest) -> TurnSample:
        self._waiting += 1
        if self._waiting >= self._count:
            self._all.set()
        async with asyncio.timeout(10):
            await self._all.wait()
        return await self._sampler.sample(request)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """The conversations that a program has driven."""

    records: list[ConversationRecord]
    requests: dict[tuple[int, int], TurnRequest]
    """By seed and turn."""
    tokenizer: PreTrainedTokenizerBase

    @property
    def record(self) -> ConversationRecord:
        [found] = self.records
        return found


def drive(
    program: Program,
    *,
    script: Sequence[str | None] = (None,) * 12,
    history: History = "branch",
    size: int = 1,
    together: int = 0,
    max_length: int = WITH_TOOLS,
    timeout_s: float = 20,
    **config: object,
) -> Sampled:
    """Run a group of conversations with the program.

    Args:
        script: texts of the turns by their numbers, as in `Scripted`.
        together: turns that must be asked for at the same time before one is sampled; 0 for any.
        max_length: tokens of a row.
        config: keys of `experience.conversation`.
    """
    tokenizer = small_tokenizer()
    stops = (int(tokenizer.eos_token_id),)
    section = ConversationConfig.model_validate({"enabled": True, "retries": 0, **config})
    hosts = Hosts(programs=CallbackHost(program, timeout_s=timeout_s))
    loop = ConversationLoop(section, hosts)
    turns = TurnSampler(engine_of(tokenizer), with_routes=False, with_support=False)
    scripted = Scripted(tokenizer, [script] * size, turns)
    encoder = TurnEncoder(tokenizer, stop_ids=stops, now=NOW, history="new_row" if history == "new_row" else "append")
    try:
        loop.start(timeout_s=60)
        loop.use(
            AttemptParts(
                config=section,
                tools_config=ToolsConfig(),
                tokenizer=tokenizer,
                encoder=encoder,
                sampler=Together(scripted, together) if together else scripted,
                max_total_length=max_length,
                hosts=hosts,
                calls=HermesCalls(tokenizer),
                stop_ids=frozenset(stops),
                history=history,
            )
        )
        messages = (Message(role="user", content=USER),)
        prompt = Prompt(index=0, text=USER, answer=4, ids=encoder.prompt(messages), messages=messages)
        sampling = SamplingParams(temperature=1.0, max_new_tokens=12, stop_token_ids=stops)
        [group] = loop.run([GroupTask(prompt=prompt, seeds=tuple(range(size)), sampling=sampling)])
        assert loop.num_open == 0
    finally:
        loop.close()
        turns.close()
    return Sampled(records=list(group.records), requests=scripted.requests, tokenizer=tokenizer)
