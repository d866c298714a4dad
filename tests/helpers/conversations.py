"""Conversations through real parts: a tiny random model in the embedded engine, environments and tools in processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from nemo_rl.config.env import ConversationConfig, ToolsConfig
from nemo_rl.data.conversation import Message
from nemo_rl.data.datasets import Prompt
from nemo_rl.data.tokenizer import TOOLS_TEMPLATE, build_tokenizer
from nemo_rl.data.turn_encoder import TurnEncoder
from nemo_rl.environments.call_formats import GptOssCalls, HermesCalls, Llama3Calls
from nemo_rl.environments.conversation_host import EnvironmentHost
from nemo_rl.environments.tools import HostedTool, ToolHost
from nemo_rl.environments.zygote import HostLimits
from nemo_rl.experience.conversation_attempt import AttemptParts, Hosts, turn_seed
from nemo_rl.experience.conversations import ConversationLoop, GroupTask
from nemo_rl.experience.token_row import TokenRow
from nemo_rl.experience.turn_sampler import SamplesTurns, TurnRequest, TurnSample, TurnSampler
from nemo_rl.models.generation.interfaces import GenerationInterface, GenerationRequest, SamplingParams
from nemo_rl.models.generation.torch_engine import TorchEngine
from nemo_rl.models.generation.turn_batch import ContinuousSpec
from tests.helpers.chat_templates import NOW, stop_ids_of, tokenizer_of
from tests.helpers.tiny_model import VOCAB, tiny_model

CALLS = {"llama3": Llama3Calls, "gpt_oss": GptOssCalls}
LIMITS = HostLimits(timeout_s=20, start_timeout_s=60)
TOTAL, WITH_TOOLS = 128, 1024
"""Longest rows, without and with schemas of tools in the prompt."""


def small_tokenizer(chat_template: str = TOOLS_TEMPLATE) -> PreTrainedTokenizerBase:
    """Return a tokenizer of 300 tokens with a template for tools."""
    corpus = ["user\nguess 1 to 9\nassistant\n4", "higher", "lower", "<tool_call>", "tool", '{"name": "add"}'] * 3
    return build_tokenizer(corpus, max_vocab_size=300, chat_template=chat_template)


def engine_of(tokenizer: PreTrainedTokenizerBase, *, places: int = 16, is_invariant: bool = False) -> TorchEngine:
    """Return an embedded engine whose rows come and go."""
    engine = TorchEngine(
        tiny_model(vocab_size=max(VOCAB, len(tokenizer))),
        tokenizer=tokenizer,
        max_total_length=WITH_TOOLS,
        weight_version=0,
        batch_invariant=is_invariant,
    )
    engine.decode_continuously(ContinuousSpec(number=0, places=places))
    return engine


class Scripted:
    """Samples turns of which some texts are given, with the log-probabilities that the model has of them.

    Args:
        script: texts of the turns of each conversation, by its seed from 0 on; one that ends in `...` is cut there, and
            None is sampled.
        sampler: samples what is not given.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        script: Sequence[Sequence[str | None]],
        sampler: SamplesTurns,
        *,
        end: str | None = None,
    ) -> None:
        self._tokenizer, self._script, self._sampler = tokenizer, script, sampler
        self._model = tiny_model(vocab_size=max(VOCAB, len(tokenizer)))
        self._first = {turn_seed(seed, turn): (seed, turn) for seed in range(len(script)) for turn in range(20)}
        self._end = int(tokenizer.eos_token_id) if end is None else int(tokenizer.convert_tokens_to_ids(end))
        self.requests: dict[tuple[int, int], TurnRequest] = {}

    async def sample(self, request: TurnRequest) -> TurnSample:
        seed, turn = self._first[request.seed]
        self.requests[seed, turn] = request
        text = self._script[seed][turn]
        if text is None:
            return await self._sampler.sample(request)
        is_cut = text.endswith("...")
        ids = tuple(self._tokenizer.encode(text.removesuffix("..."), add_special_tokens=False))
        ids = ids if is_cut else (*ids, self._end)
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*request.prompt_ids, *ids]])).logits[0, -len(ids) - 1 : -1]
        logprobs = logits.float().log_softmax(-1).gather(-1, torch.tensor(ids)[:, None]).squeeze(-1)
        return TurnSample(token_ids=ids, logprobs=logprobs, truncated=is_cut, version_spans=((0, 0),), engine=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A loop that runs, and its parts."""

    loop: ConversationLoop
    tokenizer: PreTrainedTokenizerBase
    encoder: TurnEncoder
    stops: tuple[int, ...]

    def task(
        self, text: str = "guess 1 to 9", *, answer: object = 4, size: int = 4, seed: int = 7, **more: Any
    ) -> GroupTask:
        """Return a group of conversations about one prompt."""
        messages = (Message(role="user", content=text),)
        prompt = Prompt(index=0, text=text, answer=answer, ids=self.encoder.prompt(messages), messages=messages)
        sampling = SamplingParams(temperature=1.0, max_new_tokens=12, stop_token_ids=self.stops)
        return GroupTask(prompt=prompt, seeds=tuple(range(seed, seed + size)), sampling=sampling, **more)


@contextmanager
def conversations(
    *,
    environment: str | None = "nemo_rl.environments.turn_environments:Guess",
    options: Mapping[str, object] | None = None,
    tools: Sequence[str] = (),
    tools_config: ToolsConfig | None = None,
    case: str | None = None,
    engine: GenerationInterface | None = None,
    samples: Callable[[TurnSampler], SamplesTurns] = lambda sampler: sampler,
    timeout_s: float = 20,
    **config: object,
) -> Iterator[Setting]:
    """Start a loop of conversations, and end it with the block.

    Args:
        environment: `module:Class`; None: last turns are answers.
        tools: functions, as `module:function`.
        case: name of a chat template of `chat_templates`; None: that of the starters.
        timeout_s: deadline of a reply.
        samples: what samples turns, given the sampler of the engine.
        config: keys of `experience.conversation`.
    """
    tokenizer = small_tokenizer() if case is None else tokenizer_of(case)
    stops = (int(tokenizer.eos_token_id),) if case is None else stop_ids_of(case)
    section = ConversationConfig.model_validate({"enabled": True, **config})
    limits = HostLimits(timeout_s=20, start_timeout_s=60, num_workers=2)
    heard: list[str] = []
    hosts = Hosts(
        environment=None
        if environment is None
        else EnvironmentHost(
            environment, dict(options or {}), limits=replace(LIMITS, timeout_s=timeout_s), hear=heard.append
        ),
        tools=ToolHost([HostedTool(target=tool) for tool in tools], limits=limits, hear=heard.append)
        if tools
        else None,
    )
    loop = ConversationLoop(section, hosts)
    sampler = TurnSampler(engine or engine_of(tokenizer), with_routes=False, with_support=False)
    try:
        loop.start(timeout_s=60)
        encoder = TurnEncoder(
            tokenizer, stop_ids=stops, tools=() if hosts.tools is None else hosts.tools.schemas, now=NOW
        )
        loop.use(
            AttemptParts(
                config=section,
                tools_config=tools_config or ToolsConfig(),
                tokenizer=tokenizer,
                encoder=encoder,
                sampler=samples(sampler),
                max_total_length=WITH_TOOLS if tools else TOTAL,
                hosts=hosts,
                calls=CALLS.get(case or "", HermesCalls)(tokenizer) if tools else None,
                stop_ids=frozenset(stops),
            )
        )
        yield Setting(loop=loop, tokenizer=tokenizer, encoder=encoder, stops=stops)
    finally:
        loop.close()
        sampler.close()


def rescored_error(rows: Sequence[TokenRow], *, vocab_size: int = VOCAB) -> float:
    """Return the largest difference between the log-probabilities of rows and those of their turns, each decoded by
    force under the tokens before it."""
    model = tiny_model(vocab_size=vocab_size)
    engine = TorchEngine(model, tokenizer=None, max_total_length=WITH_TOOLS, max_batch_size=64, weight_version=0)
    turns = [(row, number) for row in rows for number in range(len(row.turns))]
    request = GenerationRequest(
        prompt_ids=tuple(row.ids[: row.turns[number].start] for row, number in turns),
        seeds=(0,) * len(turns),
        sampling=SamplingParams(temperature=1.0, max_new_tokens=WITH_TOOLS, stop_token_ids=()),
        forced=tuple(row.turn_ids(number) for row, number in turns),
    )
    return float((engine.generate(request).logprobs - logprobs_of(rows)).abs().max())


def logprobs_of(rows: Sequence[TokenRow]) -> torch.Tensor:
    """Return the log-probabilities of all sampled tokens."""
    return torch.cat([row.sampled_logprobs for row in rows])
