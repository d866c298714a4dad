"""Settings of rollout workers (`experience`), of conversations of several turns (`experience.conversation`) and of
tools (`env.tools`), and the rules over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from nemo_rl.config.base import Options, Section
from nemo_rl.config.parts import CALL_FORMATS, PROGRAM, TOOLS, TURN_ENVIRONMENTS
from nemo_rl.config.rule import keys_besides_the_switch, would_be_ignored

if TYPE_CHECKING:
    from nemo_rl.config.schema import MasterConfig

__all__ = [
    "ConversationConfig",
    "Ending",
    "EndingPolicy",
    "ExperienceConfig",
    "ToolConfig",
    "ToolsConfig",
    "program_command",
]


class Ending(StrEnum):
    """The reason why a conversation ended; each has exactly one."""

    ANSWERED = "answered"
    """The model gave its answer: a turn without a call, to an environment that only scores."""
    ENVIRONMENT_DONE = "environment_done"
    """The environment said that it is done."""
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    """`max_sampled_tokens` are used up, or the turn that should have been the answer was cut."""
    TIME_LIMIT = "time_limit"
    INVALID_CALLS = "invalid_calls"
    """More than `max_invalid_calls` calls could not be read, or named no tool."""
    CONTEXT_FULL = "context_full"
    """`policy.max_total_sequence_length` leaves no room for another turn."""
    ENV_ERROR = "env_error"
    """The process of the environment or of a tool failed."""
    ENGINE_ERROR = "engine_error"
    """No engine could sample a turn."""
    CANCELLED = "cancelled"
    """The group was given up, or the run ended."""


EndingPolicy = Literal["score", "leave_out", "retry"]


class EndingPolicies(Section):
    """The treatment of a row by its ending. `score`: its reward counts; `leave_out`: the row is in no statistic and not
    trained; `retry`: the conversation is sampled again from its start with the same seeds, at most `retries` times, and
    left out when it fails again."""

    answered: EndingPolicy = "score"
    """The model gave its answer: a turn without a call, to an environment that only scores."""
    environment_done: EndingPolicy = "score"
    """The environment, or the program, said that it is done."""
    turn_limit: EndingPolicy = "score"
    """`max_turns` turns, and no end."""
    token_limit: EndingPolicy = "score"
    """`max_sampled_tokens` are used up, or the turn that should have been the answer was cut."""
    time_limit: EndingPolicy = "score"
    """`max_seconds` have passed."""
    invalid_calls: EndingPolicy = "score"
    """More than `env.tools.max_invalid_calls` calls could not be read, or named no tool."""
    context_full: EndingPolicy = "score"
    """`policy.max_total_sequence_length` leaves no room for another turn."""
    env_error: Literal["leave_out", "retry"] = "retry"
    """The process of the environment, of a tool or of a program failed; this is never a reward."""
    engine_error: Literal["leave_out", "retry"] = "retry"
    """No engine could sample a turn; this is never a reward."""
    cancelled: Literal["leave_out"] = "leave_out"
    """The group was given up, or the run ended."""

    @property
    def by_ending(self) -> dict[Ending, EndingPolicy]:
        """Return the policy of each ending."""
        return {
            Ending.ANSWERED: self.answered,
            Ending.ENVIRONMENT_DONE: self.environment_done,
            Ending.TURN_LIMIT: self.turn_limit,
            Ending.TOKEN_LIMIT: self.token_limit,
            Ending.TIME_LIMIT: self.time_limit,
            Ending.INVALID_CALLS: self.invalid_calls,
            Ending.CONTEXT_FULL: self.context_full,
            Ending.ENV_ERROR: self.env_error,
            Ending.ENGINE_ERROR: self.engine_error,
            Ending.CANCELLED: self.cancelled,
        }


class ConversationConfig(Section):
    """Rollouts of several turns: the model and an environment, tools or a program take turns."""

    enabled: bool = False
    """True: every row is a conversation; an environment that only scores then scores the last turn. False: every row is
    one response to one prompt."""
    max_turns: PositiveInt = 16
    """Most turns of the model in a conversation."""
    max_sampled_tokens: PositiveInt | None = None
    """Most tokens that the model samples in a conversation; null: what `policy.max_total_sequence_length` leaves. A
    turn alone has at most `policy.generation.max_new_tokens`."""
    max_seconds: PositiveFloat | None = None
    """Most seconds of a conversation, without the time that it waits for a place in an engine; null: no limit."""
    max_open: PositiveInt = 1024
    """Most conversations that a rollout worker has open at one time; others wait."""
    endings: EndingPolicies = Field(default_factory=EndingPolicies)
    retries: NonNegativeInt = 2
    """Most further attempts of a conversation whose ending is `retry`."""
    min_scored: PositiveInt = 2
    """Fewest scored conversations of a group; a group with fewer is treated as `too_few` says."""
    too_few: Literal["leave_out", "refill"] = "leave_out"
    """A group with too few scored conversations: train none of its rows, or sample those that are missing once more
    with other seeds."""
    drop_void_turns: bool = False
    """Leave a row out of the loss that has a turn without text and without a call (SimpleTIR); it counts for the
    baseline."""
    keep_replies: bool = True
    """Write the replies of environments and tools with `diagnostics.keep_steps`, so that conversations can be
    replayed."""


class ExperienceConfig(Section):
    """The workers that turn prompts into scored rows, and the conversations in which they do it."""

    num_workers: PositiveInt = 1
    """Rollout workers, each with reward processes of its own; more than one only with `grpo.async.enabled`."""
    conversation: ConversationConfig = Field(default_factory=ConversationConfig)


class ToolConfig(Section):
    """One tool that the model may call."""

    name: Annotated[str, TOOLS]
    """`calculator`, `python`, `lookup`, or `module:function` of your own; the schema comes from its signature."""
    options: Options = Field(default_factory=dict)
    """Settings of the tool, such as the table of `lookup`; a function of your own gets them by keyword-only
    parameters."""


class ToolsConfig(Section):
    """Tools that the model may call in a turn."""

    use: tuple[ToolConfig, ...] = ()
    """The tools; none: turns are not searched for calls."""
    format: Annotated[str, CALL_FORMATS] = "auto"
    """The form in which the model writes calls. `auto`: that of the chat template, which the preflight names. Others:
    `hermes` (Qwen), `llama3`, `gpt_oss`, `qwen3_coder` (Qwen3.5 too), `kimi`, `glm`, `deepseek`, `mistral`, `gemma`,
    `gemma4`, or `module:Class` of your own."""
    timeout_s: PositiveFloat = 10.0
    """Wall-clock limit of one call; past it the process of the tool is ended and the model is told."""
    num_workers: PositiveInt = 2
    """Processes that run calls."""
    memory_mib: PositiveInt = 1024
    """Most memory of a tool's process, in MiB."""
    network: bool = False
    """Let tools use the network."""
    max_parallel_calls: PositiveInt = 8
    """Most calls of one turn; the model is told of the others that they were not made."""
    max_result_tokens: PositiveInt = 256
    """Most tokens of a result; the middle of a longer one is cut, which its text says."""
    max_invalid_calls: PositiveInt = 3
    """Calls of a conversation that cannot be read or name no tool; one more ends it as `invalid_calls`."""


def rule_conversation_keys_need_conversations(config: MasterConfig) -> Iterator[str]:
    section, prefix = config.experience.conversation, "experience.conversation"
    if section.enabled:
        return
    names, switch = keys_besides_the_switch(section), f"{prefix}.enabled"
    yield from would_be_ignored(section, prefix, names, switch=switch)
    tools = tuple(type(config.env.tools).model_fields)
    yield from would_be_ignored(config.env.tools, "env.tools", tools, switch=switch)
    if config.data.history != "append":
        yield from would_be_ignored(config.data, "data", ("history",), switch=switch)


def rule_tool_keys_need_tools(config: MasterConfig) -> Iterator[str]:
    section, prefix = config.env.tools, "env.tools"
    if section.use or not config.experience.conversation.enabled:
        return
    kept = ("use", "format") if config.env.name == PROGRAM else ("use",)
    names = tuple(name for name in type(section).model_fields if name not in kept)
    yield from would_be_ignored(section, prefix, names, switch=f"{prefix}.use", because=f"{prefix}.use names no tool")


def program_command(options: Mapping[str, object]) -> tuple[str, ...] | str:
    """Return the command of `env.options`; what is wrong with it where it is none."""
    others = sorted(options.keys() - {"command"})
    if others:
        return f"env.options.{others[0]}: env.name {PROGRAM!r} takes command only"
    command = options.get("command")
    if isinstance(command, (list, tuple)) and command and all(isinstance(part, str) and part for part in command):
        return tuple(command)
    return (
        f"env.options.command: expected program and arguments, such as [python, agent.py], for env.name {PROGRAM!r}, "
        f"got {command!r}"
    )


def rule_programs_have_a_command(config: MasterConfig) -> Iterator[str]:
    if config.env.name != PROGRAM:
        return
    command = program_command(config.env.options)
    lines = [command] if isinstance(command, str) else []
    if config.env.tools.use:
        lines.append(
            f"env.tools.use: the program of env.name {PROGRAM!r} brings tools of its own in its requests; leave it "
            "empty"
        )
    yield from lines


def rule_environments_with_turns_need_conversations(config: MasterConfig) -> Iterator[str]:
    name = config.env.name
    if config.experience.conversation.enabled or not (name in TURN_ENVIRONMENTS or name == PROGRAM):
        return
    yield f"experience.conversation.enabled: env.name {name!r} is an environment with turns; set it to true"


def rule_rewards_of_conversations_have_no_length(config: MasterConfig) -> Iterator[str]:
    shaping = config.grpo.reward_shaping
    has_buffer = shaping.enabled and shaping.stop_properly_penalty_coef is None
    if config.experience.conversation.enabled and has_buffer:
        yield (
            "grpo.reward_shaping.overlong_buffer_length: the penalty is on the length of one response, and "
            "experience.conversation.enabled gives several turns; set grpo.reward_shaping.enabled=false, and "
            "experience.conversation.max_sampled_tokens as a limit"
        )


def rule_rewards_of_turns_stay_as_they_are(config: MasterConfig) -> Iterator[str]:
    grpo = config.grpo
    if grpo.adv_estimator.name in ("outcome_plus_turn", "discounted_return"):
        yield from (
            f"grpo.{part}.enabled: true changes the reward of a conversation, and grpo.adv_estimator.name "
            f"{grpo.adv_estimator.name!r} reads those of its turns as they are; set it to false"
            for part, section in (("reward_scaling", grpo.reward_scaling), ("reward_shaping", grpo.reward_shaping))
            if section.enabled
        )


def rule_conversations_take_no_kl_from_rewards(config: MasterConfig) -> Iterator[str]:
    if config.experience.conversation.enabled and config.loss_fn.use_kl_in_reward:
        yield (
            "loss_fn.use_kl_in_reward: true takes the KL of one response from its reward, and "
            "experience.conversation.enabled gives several; set it to false, which adds the KL to the loss"
        )


def rule_conversations_are_not_kept_with_checkpoints(config: MasterConfig) -> Iterator[str]:
    if config.experience.conversation.enabled and config.grpo.async_.keep_finished:
        yield (
            "grpo.async.keep_finished: true keeps finished groups of single turns, and experience.conversation.enabled "
            "gives others; set it to false, which samples their prompts again"
        )


def rule_groups_have_enough_rows(config: MasterConfig) -> Iterator[str]:
    section, size = config.experience.conversation, config.grpo.num_generations_per_prompt
    if section.enabled and section.min_scored > size:
        yield (
            f"experience.conversation.min_scored: {section.min_scored} is more than grpo.num_generations_per_prompt "
            f"{size}; lower it"
        )
