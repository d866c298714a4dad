"""Settings of rewards, environments and their tools (`env`), of rollout workers and conversations (`experience`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveFloat, PositiveInt, PrivateAttr

from nemo_rl.config.base import ListOptions, Options, Section
from nemo_rl.config.judges import JudgeConfig
from nemo_rl.config.parts import CALL_FORMATS, ENVIRONMENTS, PROGRAM, TOOLS

__all__ = [
    "SESSION",
    "ConversationConfig",
    "Ending",
    "EndingPolicy",
    "EnvConfig",
    "ExperienceConfig",
    "RewardCode",
    "ToolConfig",
    "ToolsConfig",
    "program_command",
]


SESSION = "python:"
"""Before the name of a reward that lives in a Python session alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardCode:
    """A function of a Python session, for the processes that score."""

    name: str
    """The name that messages and `config.yaml` have."""
    pickled: bytes
    """The function by value, as cloudpickle writes it."""
    digest: str
    """Digest of its source."""
    paths: tuple[str, ...]
    """Folders from which the session imports."""


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


class EnvConfig(Section):
    """The source of rewards."""

    name: Annotated[str, ENVIRONMENTS] = "math"
    """`sort`: exact match; `reasoning_gym`: the task's own score; `math`: math-verify; `custom`: your function;
    `judge`: models that are asked (`judges`), and your function beside them if there is one;
    with turns: `guess`, `sliding_puzzle`, `calculator_task`, `reasoning_gym_turns`; `program`: a program that asks for
    turns; or `module:Class` of an environment of your own, see docs/environments.md."""
    options: ListOptions = Field(default_factory=dict)
    """Settings of your own environment, or of one with turns; `command` of `program`, such as `[python, agent.py]`."""
    reward_function: str | None = None
    """`module:function` or `FILE.py:function` of a custom reward: `(prompt: str, response: str, answer: object) ->
    float`. It may return components by name instead of one number, be an `async def`, and have further parameters; see
    docs/guide.md."""
    reward_weights: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Weight of each component of a custom reward in the reward: all must be named; 0 only draws its curve. Without
    weights the components are added up."""
    reward_batch_size: PositiveInt | None = None
    """Largest list of prompts, responses and answers that a custom reward is given; null: one response at a time."""
    judges: dict[str, JudgeConfig] = Field(default_factory=dict)
    """Models that are asked for scores, by names of yours; each score is a component of the reward. See
    docs/judges.md."""
    gates: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Components that come first, with the least value that opens the gate: below it the later components count 0,
    and their judges are not asked. For `judge`."""
    preflight_reward: bool = True
    """Call `reward_function` once before the run, with the first row of `data.train` and an empty response: an
    exception, no finite number, or no answer within `timeout_s` refuses the run. Judges are given four responses: no
    verdict that can be read refuses the run, equal verdicts are a warning."""
    timeout_s: PositiveFloat = 10.0
    """Wall-clock limit of one call of the reward, that is of one response or one batch; past it the scorer's process is
    ended, and the responses of a batch are scored one by one, each with this limit."""
    on_timeout: Literal["zero", "error"] = "zero"
    """A response whose scoring takes too long: reward 0 and a counter, or stop the run."""
    on_none: Literal["error", "leave_out"] = "error"
    """A reward of yours that is None, as for a row that it does not concern, or a component of one: stop the run, or
    leave it out, which is never a 0: a component out of the sum and of its own statistics, a row without any out of
    all, counted."""
    num_workers: PositiveInt = 1
    """Scoring processes; `sort` needs none."""
    memory_mib: PositiveInt | None = None
    """Most memory of a process of an environment with turns, in MiB; null: no limit."""
    network: bool = False
    """Let an environment with turns use the network; loopback is always there."""
    tools: ToolsConfig = Field(default_factory=ToolsConfig)
    score_threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    """Make a graded reward (`reasoning_gym`, `custom`) right or wrong: 1 at or above the threshold, 0 below."""
    _code: RewardCode | None = PrivateAttr(None)

    @property
    def code(self) -> RewardCode | None:
        """Return the reward that `nemo_rl.train` was given as a function; None where a file or a module has it."""
        return self._code

    def with_code(self, code: RewardCode) -> EnvConfig:
        """Return the section with a function of this Python session as its reward, shown as `python:NAME`."""
        section = self.model_copy(update={"reward_function": f"{SESSION}{code.name}"})
        section._code = code
        return section

    @property
    def is_accuracy(self) -> bool:
        """Return whether every reward is 1 for right or 0 for wrong, so that its mean is an accuracy."""
        return self.name in ("sort", "math") or self.score_threshold is not None


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
    JUDGE_ERROR = "judge_error"
    """A judge gave no verdict on the response; `env.judges.NAME.on_failure` decides on the row."""
    NO_REWARD = "no_reward"
    """The reward is None, and `env.on_none` leaves the row out."""


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
    max_rows: PositiveInt = 16
    """Most rows of a conversation of a program with `data.history: branch`: its histories that are not one another's
    beginning. One more is answered as behind `max_turns`."""
    side_requests: Literal["leave_out", "train"] = "leave_out"
    """Requests of a program that is given tools, such as for a title: a single turn without tools, under another system
    prompt than its histories with tools. `leave_out`: they are answered and counted, and not trained."""
    equal_requests: Literal["join", "sample"] = "join"
    """A request of a program that is equal, byte for byte, to one that is being answered, or whose answer no request
    has continued yet, as clients repeat it after a lost connection. `join`: it gets the same answer; `sample`: another
    turn is sampled."""
    limit_answer: Literal["error", "empty_turn"] = "error"
    """The answer to a program behind a limit. `error`: status 400 with the code `context_length_exceeded`, which
    clients do not repeat; `empty_turn`: a turn without text, with the reason `length`."""
    keep_replies: bool = True
    """Write the replies of environments and tools with `diagnostics.keep_steps`, so that conversations can be
    replayed."""


class ExperienceConfig(Section):
    """The workers that turn prompts into scored rows, and the conversations in which they do it."""

    num_workers: PositiveInt = 1
    """Rollout workers, each with reward processes of its own; they share the engines. Rows are the same whatever their
    number."""
    conversation: ConversationConfig = Field(default_factory=ConversationConfig)
