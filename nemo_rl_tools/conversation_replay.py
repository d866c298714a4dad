"""`replay_conversations`: the conversations of a kept step sampled again, with the replies that were recorded.

    replay_conversations
      |- read_link, replay_settings, KeptWeights       which step, its config, the weights that sampled its turns
      |- kept_conversations                            tokens of the step's columns, replies of conversations.jsonl
      `- Attempt.run, one per conversation             as in the run, with three parts in place of the run's:
           |- ComparedTurns.sample                     an engine samples the turn; tokens and bits are compared at once
           |- RecordedReplies.reply                    the reply that the environment gave
           `- RecordedResults.call                     the result that the tool gave

No process of an environment or of a tool is started. Invariant: what a turn samples depends on its prompt, its seed and
the weights alone, so neither the number of engines nor the order of replies changes a token.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nemo_rl.algorithms.kept_steps.folder import CONVERSATION_FILE
from nemo_rl.config.parts import CALL_FORMATS, PROGRAM
from nemo_rl.data.conversation import ToolCall
from nemo_rl.data.datasets import Prompt
from nemo_rl.data.tokenizer import load_tokenizer, stop_token_ids
from nemo_rl.data.turn_encoder import TurnEncoder
from nemo_rl.data_plane.keys import group_uid
from nemo_rl.distributed.worker_groups import LocalWorkerGroup, WorkerFleet
from nemo_rl.environments.conversation import ConversationRow, EnvironmentFailure, Reply, ToolResult, Turn
from nemo_rl.errors import CheckpointError, WorkerError
from nemo_rl.experience.conversation_attempt import Attempt, AttemptParts, ConversationTask, Hosts, turn_seed
from nemo_rl.experience.conversation_log import ConversationFile, ConversationLog
from nemo_rl.experience.conversation_setup import call_format
from nemo_rl.experience.payload import TURNS, VERSION_SPANS
from nemo_rl.experience.rollout_records import WEIGHT_VERSION
from nemo_rl.experience.rollouts import sampling_params
from nemo_rl.experience.scheduler import EngineScheduler
from nemo_rl.experience.turn_sampler import SamplesTurns, TurnRequest, TurnSample, TurnSampler
from nemo_rl.models.adapters.folder import policy_at
from nemo_rl.models.generation.torch_engine.engine import TorchEngine
from nemo_rl.models.generation.turn_batch import DEADLINE_S, ContinuousSpec
from nemo_rl.records.sites import SiteKind
from nemo_rl.tracer.watch import GENERATION
from nemo_rl_tools.compare.limits import DEFAULT
from nemo_rl_tools.mismatch.progress import Progress
from nemo_rl_tools.mismatch.versions import KeptWeights
from nemo_rl_tools.step_replay.chain import (
    ChainLink,
    ReplayProblem,
    ReplayRequest,
    SnapshotColumns,
    damage_named,
    read_link,
)
from nemo_rl_tools.step_replay.settings import ReplaySettings, replay_settings
from nemo_rl_tools.verdict import Comparison, SiteCheck, Verdict

__all__ = ["KeptConversation", "KeptTurn", "replay_conversations"]

Pause = Callable[[], Awaitable[None]]
"""Awaited before each recorded reply."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptTurn:
    """A turn as the run has sampled it."""

    ids: tuple[int, ...]
    logprobs: torch.Tensor
    """`[len(ids)]` float32."""
    before: tuple[int, ...]
    """All tokens of its row before it."""
    version: int | None
    """Version of the weights; None: it was sampled from several, one after the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptConversation:
    """A conversation of the step."""

    key: str
    """Key of its first row."""
    log: ConversationLog
    opening: ConversationLog
    """The log of its group that has the messages of the prompt, where one has them."""
    turns: Mapping[int, KeptTurn]


def replay_conversations(
    request: ReplayRequest,
    *,
    num_engines: int | None = None,
    report: Callable[[str], None] = lambda _: None,
    pause: Pause | None = None,
) -> Comparison:
    """Sample the conversations of a step again and compare them token by token.

    Args:
        num_engines: engines in this process; None: as many as the run had.
        report: gets lines on the progress, from another thread.
        pause: awaited before each reply, so that replies come in another order; None: they come at once.

    Raises:
        ReplayProblem: the step or its replies were not kept, or its weights cannot be had.
        ConfigError: an override is wrong.
    """
    started = time.perf_counter()
    target = read_link(request.run, request.step)
    settings = replay_settings(request, target.step)
    _check_parts(request, settings)
    generation = settings.config.policy.generation
    count = num_engines or generation.num_replicas
    with damage_named():
        kept, file = kept_conversations(target, only=request.rows)
        versions = {turn.version for each in kept for turn in each.turns.values() if turn.version is not None}
        with Progress(report) as progress, tempfile.TemporaryDirectory(prefix="nemo_rl_replay_") as folder:
            weights = KeptWeights(request, settings, target, scratch=Path(folder), progress=progress).find(versions)
            progress.begin("sampling conversations again", total=len(kept))
            replay = _ConversationReplay(settings, file, pause=pause, progress=progress)
            found = replay.run(kept, weights, num_engines=count)
    differences = list(settings.differences)
    if not generation.batch_invariant:
        differences.append(
            "policy.generation.batch_invariant is false: the bits of a row depend on what is decoded beside it"
        )
    mixed = sum(turn.version is None for each in kept for turn in each.turns.values())
    notes = [*settings.notes]
    if mixed:
        notes.append(f"{mixed} turns were sampled while the weights were replaced; they are taken as they were kept")
    facts = {
        "num_conversations": len(kept),
        "num_turns": sum(len(each.turns) for each in kept),
        "num_compared": sum(each.num_compared for each in found),
        "num_tokens": sum(each.num_tokens for each in found),
        "largest": max((each.largest for each in found), default=0.0),
    }
    notes.append(
        "{num_compared} of {num_turns} turns sampled again: {num_tokens} tokens and their log-probabilities compared, "
        "at most {largest:.2g} apart".format(**facts)
    )
    return Comparison(
        title=f"conversations of step {request.step} of {request.run}: {count} embedded "
        f"engine{'s' if count > 1 else ''}, weights of version {', '.join(map(str, sorted(versions))) or 'none'}, "
        "recorded replies",
        sites=[each.check(exact=not differences) for each in found if each.kept.turns],
        inexact=differences,
        notes=notes,
        facts=facts,
        seconds=time.perf_counter() - started,
    )


def _check_parts(request: ReplayRequest, settings: ReplaySettings) -> None:
    config, step = settings.config, request.step
    if not config.experience.conversation.enabled:
        raise ReplayProblem(
            f"--conversations: step {step} is of a run with single turns; replay it without the option",
            verdict=Verdict.USAGE,
        )
    if config.policy.generation.backend != "torch":
        raise ReplayProblem(
            f"--conversations: expected a run with policy.generation.backend=torch, got "
            f"{config.policy.generation.backend!r}, whose sampling the embedded engine does not repeat",
            verdict=Verdict.UNSUPPORTED,
        )
    if own := [where for where, section in config.data.sections.items() if section.tools is not None]:
        raise ReplayProblem(
            f"--conversations: {own[0]}.tools chooses among the tools of env.tools.use, and what is kept of a run does "
            "not say which prompt had which",
            verdict=Verdict.UNSUPPORTED,
        )
    format_of_calls = config.env.tools.format
    if config.env.tools.use and not CALL_FORMATS.is_builtin(format_of_calls) and not request.allows_code:
        raise ReplayProblem(
            f"env.tools.format: {format_of_calls!r} is code outside the library, which a replay imports and so runs. "
            "Add --allow-code if you trust who wrote this folder",
            verdict=Verdict.USAGE,
        )


def kept_conversations(
    target: ChainLink, *, only: Sequence[str] = ()
) -> tuple[list[KeptConversation], ConversationFile]:
    """Return the conversations of a step, and the file that has their replies.

    Args:
        only: keys of their first rows; empty takes all.

    Raises:
        ReplayProblem: rows or replies were not kept, or no conversation has such a key.
        CheckpointError: a file is torn.
    """
    step, path = target.step, target.folder.path / CONVERSATION_FILE
    if step.rows is None or step.rows.conversations is None or not path.is_file():
        raise ReplayProblem(
            f"step {step.number}: the replies of its conversations were not kept in {path}; run with "
            "diagnostics.keep_steps.enabled=true and experience.conversation.keep_replies=true",
            verdict=Verdict.INCOMPLETE,
        )
    file = ConversationFile.read(path)
    unknown = sorted(set(only) - file.logs.keys())
    if unknown:
        raise ReplayProblem(
            f"step {step.number} has no conversation whose first row is {unknown[0]}; see {path}", verdict=Verdict.USAGE
        )
    turns = _kept_turns(target)
    openings = {group_uid(key): log for key, log in reversed([*file.logs.items()])}
    openings |= {group_uid(key): log for key, log in file.logs.items() if log.opening}
    samples = zip(step.rows.keys, step.rows.conversations["sample"], strict=True)
    names = {key: (group_uid(key), int(sample)) for key, sample in samples}
    missing = [key for key in file.logs if key not in names or group_uid(key) not in openings]
    if missing:
        raise CheckpointError(f"{path}: conversation {missing[0]} is none of the step's, or its prompt is missing")
    found = [
        KeptConversation(key=key, log=log, opening=openings[group_uid(key)], turns=turns.get(names[key], {}))
        for key, log in file.logs.items()
        if not only or key in only
    ]
    return found, file


def _kept_turns(target: ChainLink) -> dict[tuple[str, int], dict[int, KeptTurn]]:
    """Return the turns of each conversation by their numbers, from the columns of its rows."""
    rows, columns = target.step.rows, SnapshotColumns.read(target.folder, target.step)
    assert rows is not None and rows.conversations is not None, "the step has conversations"
    everywhere = range(len(rows.keys))
    ids, logprobs, spans = (
        columns.rows(name, everywhere).unbind() for name in ("input_ids", "generation_logprobs", TURNS)
    )
    versions = columns.rows(VERSION_SPANS, everywhere).unbind() if columns.has(VERSION_SPANS, everywhere) else None
    found: dict[tuple[str, int], dict[int, KeptTurn]] = {}
    for row, key in enumerate(rows.keys):
        tokens, num_before = ids[row].tolist(), 0
        of_row = [[0, rows.tags[WEIGHT_VERSION][row]]] if versions is None else versions[row].tolist()
        turns = found.setdefault((group_uid(key), int(rows.conversations["sample"][row])), {})
        for start, length, number in spans[row].tolist():
            turns[number] = KeptTurn(
                ids=tuple(tokens[start : start + length]),
                logprobs=logprobs[row][start : start + length],
                before=tuple(tokens[:start]),
                version=_only_version(of_row, num_before, num_before + length),
            )
            num_before += length
    return found


def _only_version(spans: Sequence[Sequence[Any]], start: int, end: int) -> int | None:
    """Return the version of the sampled tokens from `start` to `end` of a row; None where there are several."""
    # A span ends where the next one begins, the last one nowhere.
    ends = [*(int(first) for first, _ in spans[1:]), end]
    held = {
        int(version) for (first, version), after in zip(spans, ends, strict=True) if int(first) < end and after > start
    }
    return held.pop() if len(held) == 1 else None


class _NoProcess:
    """The host of an environment or of tools that runs nothing."""

    source = ""

    async def start(self) -> None:
        """Do nothing: there is no process."""

    async def close(self) -> None:
        """Do nothing: there is no process."""

    async def shutdown(self) -> None:
        """Do nothing: there is no process."""

    def kill(self) -> None:
        """Do nothing: there is no process."""


class RecordedReplies(_NoProcess):
    """An environment with the replies of one conversation."""

    num_open = 0

    def __init__(self, log: ConversationLog, pause: Pause | None) -> None:
        self._log, self._pause = log, pause

    async def open(self, row: ConversationRow) -> RecordedReplies:
        return self

    async def reply(self, turn: Turn) -> Reply:
        """Return the recorded reply; the end where the run's conversation ended or nothing was recorded."""
        if self._pause is not None:
            await self._pause()
        if turn.number >= len(self._log.turns):
            raise EnvironmentFailure(f"no reply to turn {turn.number} was recorded")
        kept = self._log.turns[turn.number]
        return Reply(
            messages=kept.messages,
            done=not kept.messages,
            reward=kept.reward,
            components=kept.components,
            stop=kept.stop,
        )


class RecordedResults(_NoProcess):
    """Tools with the results of one conversation."""

    has_cut = True

    def __init__(self, log: ConversationLog, schemas: tuple[Mapping[str, Any], ...], pause: Pause | None) -> None:
        self._log, self._pause, self.schemas = log, pause, schemas
        self._numbers = {turn_seed(log.seed, number): number for number in range(len(log.turns))}
        self._made: Counter[int] = Counter()
        """Calls of each turn so far."""

    async def call(self, call: ToolCall, *, seed: int) -> ToolResult:
        number = self._numbers.get(seed, -1)
        place, self._made[number] = self._made[number], self._made[number] + 1
        if self._pause is not None:
            await self._pause()
        results = self._log.turns[number].results if number >= 0 else ()
        if place >= len(results):
            raise EnvironmentFailure(f"no result of call {place} of {call.name!r} was recorded")
        return results[place]


@dataclass(kw_only=True)
class ComparedTurns:
    """Samples the turns of one conversation and compares each with the kept one; the first difference ends it."""

    kept: KeptConversation
    samplers: Mapping[int, SamplesTurns]
    """Samplers by the version of their weights."""
    text_of: Callable[[int], str]
    limit: float = DEFAULT.of_stage(SiteKind.LOGPROB, phase=GENERATION)
    """Largest difference of a log-probability where rows of a batch share their rounding."""
    num_compared: int = 0
    num_tokens: int = 0
    largest: float = 0.0
    _number: int = 0
    _differs: str = ""
    _bits: str = ""
    """The first log-probability that has other bits."""
    _bound: str = ""
    """The first one beyond the limit."""

    async def sample(self, request: TurnRequest) -> TurnSample:
        """Return the turn as it is sampled now.

        Raises:
            WorkerError: it, or what stands before it, is not as it was kept, or no such turn was kept.
        """
        number, self._number = self._number, self._number + 1
        kept = self.kept.turns.get(number)
        if kept is None:
            raise WorkerError(f"no turn {number} was kept", stage="replay")
        self._same(number, "read", kept.before, request.prompt_ids)
        if kept.version is None:
            spans = ((0, 0),)
            return TurnSample(
                token_ids=kept.ids, logprobs=kept.logprobs, truncated=False, version_spans=spans, engine=0
            )
        sample = await self.samplers[kept.version].sample(replace(request, engine=None))
        self._same(number, "sampled", kept.ids, sample.token_ids)
        self._same_values(number, kept, sample)
        self.num_compared += 1
        self.num_tokens += len(kept.ids)
        return sample

    def check(self, *, exact: bool) -> SiteCheck:
        """Return the conversation as a site; with `exact` any bit of a log-probability counts."""
        difference = self._differs or (self._bits if exact else self._bound)
        is_whole = self.num_compared == len(self.kept.turns)
        return SiteCheck(
            name=self.kept.key,
            a=f"{len(self.kept.turns)} turns",
            b=f"{self.num_compared} turns",
            agrees=False if difference else True if is_whole else None,
            difference=difference or (self._bits and f"within {self.limit:g}"),
        )

    def _same(self, number: int, what: str, kept: tuple[int, ...], made: tuple[int, ...]) -> None:
        if kept == made:
            return
        pairs = list(zip(kept, made, strict=False))
        place = next((place for place, (one, other) in enumerate(pairs) if one != other), len(pairs))
        shown = [
            f"{ids[place]} {self.text_of(ids[place])!r}" if place < len(ids) else "the end" for ids in (kept, made)
        ]
        where = f"token {place} of the row, which it {what}" if what == "read" else f"token {place} that it {what}"
        text = f"{where}: expected {shown[0]} as kept, got {shown[1]}"
        self._differs = f"turn {number}: {text}"
        raise WorkerError(text, stage="replay")

    def _same_values(self, number: int, kept: KeptTurn, sample: TurnSample) -> None:
        apart = (kept.logprobs.double() - sample.logprobs.double()).abs()
        self.largest = max(self.largest, float(apart.max()))
        is_other = kept.logprobs.float().view(torch.int32) != sample.logprobs.float().view(torch.int32)
        for place in is_other.nonzero().flatten().tolist():
            text = (
                f"log-probability of token {place} that it sampled: expected {float(kept.logprobs[place])!r} as kept, "
                f"got {float(sample.logprobs[place])!r}"
            )
            found = f"turn {number}: {text}"
            self._bits = self._bits or found
            if not float(apart[place]) <= self.limit:
                self._bound = self._bound or found


class _ConversationReplay:
    def __init__(
        self,
        settings: ReplaySettings,
        file: ConversationFile,
        *,
        pause: Pause | None,
        progress: Progress,
    ) -> None:
        self._settings, self._file = settings, file
        self._pause, self._progress = pause, progress
        policy = settings.config.policy
        named = policy.tokenizer.name or policy.model_name
        self._tokenizer = load_tokenizer(named, chat_template=policy.tokenizer.chat_template)
        stops = stop_token_ids(policy.model_name, self._tokenizer)
        self._sampling = sampling_params(policy.generation, stops, is_validation=False)

    def run(
        self, kept: Sequence[KeptConversation], weights: Mapping[int, Path], *, num_engines: int
    ) -> list[ComparedTurns]:
        """Sample all conversations at the same time, with as many engines for each version of the weights."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._settings.config.cluster.threads_per_worker)
        try:
            with ExitStack() as ending:
                samplers: dict[int, SamplesTurns] = {}
                for version, folder in weights.items():
                    sampler = self._sampler(folder, num_engines)
                    ending.callback(sampler.close)
                    samplers[version] = sampler
                return asyncio.run(self._all(kept, samplers))
        finally:
            torch.set_num_threads(before)

    def _sampler(self, folder: Path, num_engines: int) -> TurnSampler:
        policy = self._settings.config.policy
        named = policy.tokenizer.model_copy(update={"name": policy.tokenizer.name or policy.model_name})
        of_version = policy_at(policy, folder).model_copy(update={"tokenizer": named})
        groups = []
        for number in range(num_engines):
            device = "cuda" if self._settings.uses_gpu else "cpu"
            engine = TorchEngine.from_config(of_version, device=device, weight_version=0, number=number)
            engine.decode_continuously(ContinuousSpec(number=number, places=policy.generation.max_batch_size))
            groups.append(LocalWorkerGroup(_given(engine)))
        scheduler = EngineScheduler(WorkerFleet(groups), batch_rows=1, timeout_s=DEADLINE_S, is_continuous=True)
        return TurnSampler(scheduler, with_routes=False, with_support=False)

    async def _all(self, kept: Sequence[KeptConversation], samplers: Mapping[int, SamplesTurns]) -> list[ComparedTurns]:
        encoder = TurnEncoder(
            self._tokenizer,
            stop_ids=self._sampling.stop_token_ids,
            tools=self._file.schemas,
            now=self._file.now,
            history="new_row" if self._settings.config.history == "new_row" else "append",
        )
        limit = self._settings.limits.of_stage(SiteKind.LOGPROB, phase=GENERATION)
        found = [ComparedTurns(kept=each, samplers=samplers, text_of=self._text_of, limit=limit) for each in kept]
        async with asyncio.TaskGroup() as group:
            for each in found:
                if each.kept.turns:
                    group.create_task(self._one(each, encoder))
        return found

    async def _one(self, compared: ComparedTurns, encoder: TurnEncoder) -> None:
        config, log = self._settings.config, compared.kept.log
        if config.env.name == PROGRAM:
            await self._of_program(compared)
            self._progress.advance(1)
            return
        tools = config.env.tools
        parts = AttemptParts(
            # Time is no part of a replay: where a limit of it ended the conversation, no reply was recorded.
            config=config.experience.conversation.model_copy(update={"max_seconds": None}),
            tools_config=tools,
            tokenizer=self._tokenizer,
            encoder=encoder,
            sampler=compared,
            max_total_length=config.policy.max_total_sequence_length,
            hosts=Hosts(
                environment=RecordedReplies(log, self._pause),
                tools=RecordedResults(log, self._file.schemas, self._pause) if tools.use else None,
            ),
            calls=call_format(tools.format, encoder) if tools.use else None,
            stop_ids=frozenset(self._sampling.stop_token_ids),
        )
        opening = compared.kept.opening.opening
        first = compared.kept.turns[min(compared.kept.turns)]
        prompt = Prompt(index=log.prompt, text="", answer=None, ids=first.before, messages=opening)
        await Attempt(ConversationTask(prompt=prompt, seed=log.seed, sampling=self._sampling), parts).run()
        self._progress.advance(1)

    async def _of_program(self, compared: ComparedTurns) -> None:
        """Sample the turns that a program asked for, each behind the tokens that were kept before it: the program,
        whose messages these are, is not run."""
        kept, seed = compared.kept.turns, compared.kept.log.seed
        for number in sorted(kept):
            ids = kept[number].ids
            # A turn has as many tokens as it had: limits and stop strings of requests end a turn and change no token.
            sampling = replace(self._sampling, max_new_tokens=len(ids), stop_strings=())
            request = TurnRequest(prompt_ids=kept[number].before, seed=turn_seed(seed, number), sampling=sampling)
            try:
                await compared.sample(request)
            except WorkerError:
                # It is not as it was kept, which the report says.
                return

    def _text_of(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))


def _given(engine: TorchEngine) -> Callable[[], TorchEngine]:
    return lambda: engine
