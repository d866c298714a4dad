"""`RolloutSampling`: environment, sampler of held-out prompts and, where the recipe has them, conversations, and the
check of `env.tools.format`.

Called by the rollout worker and by `nemo-rl eval`. Invariant: what is started is ended when a later part fails.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.config.env import EnvConfig, ToolsConfig, program_command
from nemo_rl.config.parts import AUTO, CALL_FORMATS, ENVIRONMENTS, PROGRAM, TOOLS, TURN_ENVIRONMENTS
from nemo_rl.data.conversation import ToolCall
from nemo_rl.data.datasets import tools_of
from nemo_rl.data.turn_encoder import TurnEncoder
from nemo_rl.environments.call_formats import CallFormat, typed
from nemo_rl.environments.conversation_host import EnvironmentHost
from nemo_rl.environments.interfaces import Environment
from nemo_rl.environments.process_environment import RewardLog
from nemo_rl.environments.programs import ProgramHost, ProgramSpec, absolute_command
from nemo_rl.environments.section_rewards import SectionRewards, build_rewards
from nemo_rl.environments.tool_schema import schema_of
from nemo_rl.environments.tools import HostedTool, ToolHost, calculator
from nemo_rl.environments.zygote import HostLimits
from nemo_rl.errors import ConfigError, ModelFolderError, shorten
from nemo_rl.experience.conversation_attempt import AttemptParts, Hosts
from nemo_rl.experience.conversation_rollouts import ConversationRollouts, ConversationSampler
from nemo_rl.experience.conversations import ConversationLoop
from nemo_rl.experience.rollouts import ResponseSampler, ResponseScorer, RolloutSpec, SamplesPrompts, sampling_params
from nemo_rl.experience.turn_sampler import TurnSampler
from nemo_rl.models.generation.interfaces import GenerationInterface, SamplingParams
from nemo_rl.models.vision.processor import PromptPictures, encoder_of

__all__ = [
    "FormatCheck",
    "RolloutEnvironment",
    "RolloutSampling",
    "call_format",
    "check_format",
    "reading_formats",
]

FORMAT_KEY = "env.tools.format"
EXAMPLE_TOOLS: tuple[Mapping[str, Any], ...] = (schema_of(calculator),)
"""Stands for the tools of a program, which are not known before its first request."""
_TEXT = 'a < b: "c" {d}\n3'
_SAMPLES: Mapping[str, object] = {"string": _TEXT, "integer": 3, "number": 2.5, "boolean": True, "null": None}


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatCheck:
    """The finding on a format: the one that is used, and what is said about it."""

    name: str
    line: str
    is_refused: bool = False


class RolloutEnvironment:
    """Environment and tools of a run, started.

    Args:
        log_file: gets what environments, tools and rewards print; None drops it.

    Raises:
        UserError: an environment, a tool or a reward cannot be loaded.
    """

    def __init__(self, spec: RolloutSpec, *, log_file: Path | None = None) -> None:
        self._spec = spec
        self._ending = ExitStack()
        self._turns = turn_environment(spec.env)
        self.hosts = Hosts()
        """Processes of the environment with turns and of tools."""
        self.log = RewardLog(log_file)
        self.scorer: Environment | None = None
        """Scores responses; None where the environment has turns."""
        self._rewards = ""
        """Identities of the rewards of the scorer."""
        self.loop: ConversationLoop | None = None
        """Runs conversations; None where every row is one response to one prompt."""
        try:
            self._open(log_file)
        except BaseException:
            self.shutdown()
            raise

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        return () if self.hosts.tools is None else self.hosts.tools.schemas

    def scorer_of(self, section: str) -> Environment | None:
        """Return what scores the rows of a section of `data`."""
        return self.scorer.of(section) if isinstance(self.scorer, SectionRewards) else self.scorer

    @property
    def identity(self) -> str:
        """Return the name of a built-in reward; of one of the user's, and of tools, a digest of the source as well."""
        if self.hosts.programs is not None:
            scores = "" if self.scorer is None else f":{self._rewards}"
            found = f"{PROGRAM}:{self.hosts.programs.source}{scores}"
        elif self.scorer is not None:
            found = self._rewards
        else:
            assert self.hosts.environment is not None, "an environment scores, or has turns"
            found = f"{self._spec.env.name}:{self.hosts.environment.source}"
        return found if self.hosts.tools is None else f"{found}:{self.hosts.tools.source}"

    def shutdown(self) -> None:
        """End conversations, tools and environment. Idempotent."""
        self._ending.close()

    def _open(self, log_file: Path | None) -> None:
        spec, conversation = self._spec, self._spec.experience.conversation
        is_program = spec.env.name == PROGRAM
        if self._turns is not None and not conversation.enabled:
            raise ConfigError(
                f"experience.conversation.enabled: env.name {spec.env.name!r} is an environment with turns; set it to "
                "true"
            )
        if self._turns is None and (not is_program or spec.env.reward_function is not None):
            self.scorer, self._rewards = build_rewards(
                spec.envs, start_timeout_s=spec.start_timeout_s, log_file=log_file
            )
            self._ending.callback(self.scorer.shutdown)
        if conversation.enabled:
            self.hosts = Hosts(
                environment=self._environment_host(),
                tools=self._tool_host(),
                programs=self._program_host() if is_program else None,
            )
            self.loop = ConversationLoop(conversation, self.hosts)
            self._ending.callback(self.loop.close)
            self.loop.start(timeout_s=2 * spec.start_timeout_s)

    def _limits(self, section: EnvConfig | ToolsConfig) -> HostLimits:
        return HostLimits(
            timeout_s=section.timeout_s,
            start_timeout_s=self._spec.start_timeout_s,
            num_workers=section.num_workers,
            memory_mib=section.memory_mib,
            network=section.network,
        )

    def _environment_host(self) -> EnvironmentHost | None:
        env = self._spec.env
        if self._turns is None:
            return None
        return EnvironmentHost(self._turns, env.options, limits=self._limits(env), hear=self.log.hear)

    def _program_host(self) -> ProgramHost:
        env = self._spec.env
        command = program_command(env.options)
        if isinstance(command, str):
            raise ConfigError(command)
        command = absolute_command(command)
        if shutil.which(command[0]) is None:
            raise ConfigError(f"env.options.command: no program {command[0]!r} on this machine")
        return ProgramHost(
            ProgramSpec(command=command, memory_mib=env.memory_mib),
            timeout_s=env.timeout_s,
            is_scored=self.scorer is not None,
            hear=self.log.hear,
        )

    def _tool_host(self) -> ToolHost | None:
        tools = self._spec.env.tools
        if not tools.use:
            return None
        hosted = [
            HostedTool(target=TOOLS.builtin.get(tool.name, tool.name), options=tool.options) for tool in tools.use
        ]
        return ToolHost(hosted, limits=self._limits(tools), hear=self.log.hear)


class RolloutSampling:
    """Everything that samples and scores, in one process.

    Args:
        generation: engines, shared with the weight sync.
        log_file: as in `RolloutEnvironment`.

    Raises:
        UserError: an environment, a tool or a reward cannot be loaded.
    """

    def __init__(
        self,
        spec: RolloutSpec,
        *,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        generation: GenerationInterface,
        log_file: Path,
    ) -> None:
        self._spec, self._tokenizer, self._generation = spec, tokenizer, generation
        self.pictures = PromptPictures(encoder_of(spec.policy, spec.data, tokenizer))
        """Images of prompts."""
        self.environment = RolloutEnvironment(spec, log_file=log_file)
        self.now = spec.now or datetime.now()
        """The clock of the chat template."""
        self.conversations: ConversationRollouts | None = None
        self.turn_sampler: TurnSampler | None = None
        if self.environment.loop is not None:
            try:
                self._join(self.environment.loop, stop_ids)
            except BaseException:
                self.shutdown()
                raise

    def sampler_of(self, sampling: SamplingParams) -> SamplesPrompts:
        """Return the sampler of held-out prompts.

        Args:
            sampling: how responses are sampled; a stop token at their end is no part of their text.
        """
        if self.conversations is not None:
            return ConversationSampler(self.conversations)
        scorer = self.environment.scorer
        assert scorer is not None, "single turns are scored"
        scorer_of_texts = ResponseScorer(scorer, self._tokenizer, sampling=sampling)
        return ResponseSampler(self._generation, scorer_of_texts, pictures=self.pictures)

    def shutdown(self) -> None:
        """End conversations, tools and environment. Idempotent."""
        # Conversations end before the engines' feeds do.
        self.environment.shutdown()
        if self.turn_sampler is not None:
            self.turn_sampler.close()

    def _join(self, loop: ConversationLoop, stop_ids: Sequence[int]) -> None:
        spec, policy, tools = self._spec, self._spec.policy, self._spec.env.tools
        stops = sampling_params(policy.generation, stop_ids, is_validation=False).stop_token_ids
        self.turn_sampler = TurnSampler(
            self._generation,
            with_routes=policy.router_replay.records_at_rollout,
            with_support=policy.generation.record_support,
        )
        encoder = TurnEncoder(
            self._tokenizer,
            stop_ids=stops,
            tools=self.environment.schemas,
            now=self.now,
            history="new_row" if spec.history == "new_row" else "append",
        )
        parts = AttemptParts(
            config=spec.experience.conversation,
            tools_config=tools,
            tokenizer=self._tokenizer,
            encoder=encoder,
            sampler=self.turn_sampler,
            max_total_length=policy.max_total_sequence_length,
            hosts=self.environment.hosts,
            calls=self._call_format(encoder),
            stop_ids=frozenset(stops),
            history=spec.history,
        )
        schemas = self.environment.schemas
        own = {
            where: parts.with_tools(tools_of(section, where, schemas))
            for where, section in spec.data.sections.items()
            if section.tools is not None
        }
        loop.use(parts, by_section=own)
        self.conversations = ConversationRollouts(
            loop, spec.experience.conversation, environment=self.environment.scorer, log=self.environment.log
        )

    def _call_format(self, encoder: TurnEncoder) -> CallFormat | None:
        """Return the format in which turns are searched for calls; None where they are not."""
        name = self._spec.env.tools.format
        if self._spec.env.name == PROGRAM:
            encoder = encoder.with_tools(EXAMPLE_TOOLS)
            if name == AUTO and not reading_formats(encoder):
                return None  # A program may have no tools; its requests with tools are refused.
        return call_format(name, encoder) if encoder.tools else None


def turn_environment(env: EnvConfig) -> str | None:
    """Return `module:Class` of an environment with turns; None for one that only scores."""
    if ENVIRONMENTS.is_builtin(env.name):
        return TURN_ENVIRONMENTS.get(env.name)
    found = ENVIRONMENTS.load(env.name, key="env.name")
    return env.name if inspect.getattr_static(found, "open", None) is not None else None


def call_format(name: str, encoder: TurnEncoder) -> CallFormat:
    """Return the format of a name; for `auto` the first built-in one that reads the calls of the chat template.

    Args:
        encoder: of conversations with the tools.

    Raises:
        ConfigError: `auto`, and no format reads them.
    """
    if name == AUTO:
        found = check_format(name, encoder)
        if found.is_refused:
            raise ConfigError(found.line)
        name = found.name
    return CALL_FORMATS.load(name, key=FORMAT_KEY)(encoder.tokenizer)


def check_format(name: str, encoder: TurnEncoder) -> FormatCheck:
    """Return what becomes of `env.tools.format` with the calls that the chat template writes."""
    readers = reading_formats(encoder)
    several = reading_formats(encoder, at_once=2)
    if name in readers or (name == AUTO and readers):
        found = next((each for each in readers if each in several), readers[0]) if name == AUTO else name
        takes = f"auto takes {found}, which" if name == AUTO else name
        one_by_one = (
            "" if found in several else "; several calls in a turn it does not read, or the template cannot write"
        )
        return FormatCheck(name=found, line=f"{FORMAT_KEY}: {takes} reads the calls of the chat template{one_by_one}")
    try:
        written = encoder.written(_sample_call(encoder.tools[0]))
        writes = f"it writes {shorten(repr(encoder.tokenizer.decode(list(written))))}"
    except ModelFolderError as error:
        writes = shorten(str(error))
    if name == AUTO:
        names = ", ".join(word for word in CALL_FORMATS.builtin if word != AUTO)
        line = (
            f"{FORMAT_KEY}: no format reads the calls of the chat template: {writes}; set "
            "policy.tokenizer.chat_template to one that prints tools and calls, or name the format that the model is "
            f"told of: {names}, or module:Class"
        )
        return FormatCheck(name=name, line=line, is_refused=True)
    line = f"{FORMAT_KEY}: {name} does not read the calls of the chat template: {writes}"
    if readers:
        line += f"; set it to auto, or to {' or '.join(readers)}"
    return FormatCheck(name=name, line=line, is_refused=bool(readers) and CALL_FORMATS.is_builtin(name))


def reading_formats(encoder: TurnEncoder, *, at_once: int = 1) -> tuple[str, ...]:
    """Return the built-in formats that read calls of every tool as the chat template writes so many in one turn; none
    where it has no form for them."""
    turns = [(_sample_call(schema),) * at_once for schema in encoder.tools]
    try:
        written = [encoder.written(*calls) for calls in turns]
    except ModelFolderError:
        return ()

    def reads(name: str) -> bool:
        form: CallFormat = CALL_FORMATS.load(name, key=FORMAT_KEY)(encoder.tokenizer)
        read = [typed(form.parse(ids), encoder.tools) for ids in written]
        return all(turn.calls == calls and not turn.invalid for turn, calls in zip(read, turns, strict=True))

    return tuple(name for name in CALL_FORMATS.builtin if name != AUTO and reads(name))


def _sample_call(schema: Mapping[str, Any]) -> ToolCall:
    function = schema["function"]
    properties = function["parameters"].get("properties", {})
    return ToolCall(name=function["name"], arguments={name: _sample(form) for name, form in properties.items()})


def _sample(form: Mapping[str, Any]) -> object:
    if "anyOf" in form:
        return _sample(form["anyOf"][0])
    if "enum" in form:
        return form["enum"][0]
    kind = form.get("type", "string")
    if kind == "array":
        return [_sample(form.get("items", {}))]
    return {"key": _sample(form.get("additionalProperties") or {})} if kind == "object" else _SAMPLES[kind]
