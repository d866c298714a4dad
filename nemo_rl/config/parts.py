"""Parts of a run that a recipe names: built-in ones by a word, user-defined ones as `module:name`.

A `PluginKind` knows the words of one kind and where each is defined. Nothing is imported before it is asked for, so
that reading a recipe imports no part. A field of the schema is `Annotated[str, KIND]`, which refuses what is no name of
a part; code that builds a part calls `PluginKind.load`.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from nemo_rl.errors import ConfigError

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "CALL_FORMATS",
    "CURRICULUM_RULES",
    "DATASETS",
    "ENGINES",
    "ENGINE_CAPABILITIES",
    "ENVIRONMENTS",
    "GENERATED_DATASETS",
    "HUB_NAME",
    "JUDGE",
    "JUDGES",
    "LOSSES",
    "PROGRAM",
    "SELECTIONS",
    "STORES",
    "TOKEN_ESTIMATORS",
    "TOOLS",
    "TRACKERS",
    "TURN_ENVIRONMENTS",
    "UNKNOWN_PART",
    "EngineCapabilities",
    "PluginKind",
]

HUB_NAME = re.compile(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*")
"""`owner/name` on the Hugging Face hub."""
UNKNOWN_PART = "unknown_part"
"""Type of the validation error, whose context has the words as `expected`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PluginKind:
    """One kind of part.

    Example:
        >>> LOSSES.check("clipped_pg"), LOSSES.is_builtin("my_package.losses:MyLoss")
        ('clipped_pg', False)
    """

    what: str
    """The name of the kind in messages, for example `a loss`."""
    builtin: Mapping[str, str]
    """Word -> `module:name` of its definition."""

    hub: str | None = None
    """Definition that serves every `owner/name` of the Hugging Face hub; None where such a name means nothing."""

    def is_builtin(self, name: str) -> bool:
        return name in self.builtin or self.is_on_hub(name)

    def is_on_hub(self, name: str) -> bool:
        return self.hub is not None and HUB_NAME.fullmatch(name) is not None

    def check(self, name: str) -> str:
        """Validate that `name` is a built-in word, or two names with a colon between them."""
        module, colon, attribute = name.partition(":")
        if self.is_builtin(name) or (
            colon and attribute.isidentifier() and all(map(str.isidentifier, module.split(".")))
        ):
            return name
        words = ", ".join(map(repr, self.builtin)) or "none is built in"
        words += "" if self.hub is None else ", owner/name of the Hugging Face hub"
        raise PydanticCustomError(UNKNOWN_PART, "one of {expected}, or module:name of your own", {"expected": words})

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Make the validator of a field that is annotated with this kind; pydantic calls it."""
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def load(self, name: str, *, key: str) -> Callable[..., Any]:
        """Return the class or function that `name` stands for.

        Args:
            key: dotted path of the config key, for messages.

        Raises:
            ConfigError: it cannot be imported, or is nothing that can be called.
        """
        of_hub = self.hub if self.is_on_hub(name) else None
        module, _, attribute = (self.builtin.get(name) or of_hub or name).partition(":")
        if (here := os.getcwd()) not in sys.path:
            # As in workers and in processes of rewards; the script of `nemo-rl` has the folder of the script alone.
            sys.path.append(here)
        try:
            part = vars(importlib.import_module(module))[attribute]
        except KeyError:
            raise ConfigError(f"{key}: module {module!r} has no {attribute!r}; expected {self.what}") from None
        except Exception as error:
            # A module of the user's may fail in any way while it is imported.
            raise ConfigError(
                f"{key}: {name!r} cannot be imported: {type(error).__name__}: {error}; is its folder on PYTHONPATH?"
            ) from error
        if not callable(part):
            raise ConfigError(f"{key}: expected {self.what}, a class or a function, got {part!r}")
        return part  # type: ignore[no-any-return]


_LOSS_NAMES = (
    *("clipped_pg", "reinforce", "gspo", "gspo_token", "luspo", "gmpo"),
    *("cispo", "sapo", "dppo_tv", "dppo_kl", "vespo", "dro"),
)
LOSSES = PluginKind(
    what="a loss",
    builtin={name: f"nemo_rl.algorithms.losses.terms:{name}" for name in _LOSS_NAMES},
)
"""Built-in ones are `PolicyTerm`s, which `PolicyLoss` completes; one of the user's own is a whole `LossFunction`."""
ADVANTAGE_ESTIMATORS = PluginKind(
    what="an advantage estimator",
    builtin={
        "grpo": "nemo_rl.algorithms.estimators:GroupAdvantages",
        "dr_grpo": "nemo_rl.algorithms.estimators:DrGRPO",
        "rloo": "nemo_rl.algorithms.estimators:LeaveOneOut",
        "reinforce_plus_plus": "nemo_rl.algorithms.estimators:ReinforcePlusPlus",
        "reinforce_plus_plus_baseline": "nemo_rl.algorithms.estimators:ReinforcePlusPlusBaseline",
        "gdpo": "nemo_rl.algorithms.estimators:GDPO",
        "maxrl": "nemo_rl.algorithms.estimators:MaxRL",
        "optimal_token_baseline": "nemo_rl.algorithms.estimators:OptimalTokenBaseline",
        "outcome_plus_turn": "nemo_rl.algorithms.estimators:OutcomePlusTurn",
        "discounted_return": "nemo_rl.algorithms.estimators:DiscountedReturn",
    },
)
TOKEN_ESTIMATORS = PluginKind(
    what="an estimator of advantages per token",
    builtin={
        "reinforce_plus_plus": "nemo_rl.algorithms.estimators:TokenReinforcePlusPlus",
        "optimal_token_baseline": "nemo_rl.algorithms.estimators:OptimalTokenBaseline",
        "outcome_plus_turn": "nemo_rl.algorithms.estimators:OutcomePlusTurn",
        "discounted_return": "nemo_rl.algorithms.estimators:DiscountedReturn",
    },
)
"""The form per token of those of `ADVANTAGE_ESTIMATORS` that have one."""
SELECTIONS = PluginKind(
    what="an order of finished groups",
    builtin={
        "oldest_first": "nemo_rl.algorithms.async_selection:OldestFirst",
        "in_order": "nemo_rl.algorithms.async_selection:InOrder",
        "ready_first": "nemo_rl.algorithms.async_selection:ReadyFirst",
    },
)
TRAINING_ENGINES = PluginKind(
    what="a training engine",
    builtin={
        "dtensor": "nemo_rl.models.policy.workers.dtensor_engine:DTensorEngine",
        "megatron": "nemo_rl.models.policy.workers.megatron_engine:MegatronEngine",
    },
)
"""The kind has no key of its own: `policy.dtensor_cfg.enabled` or `policy.megatron_cfg.enabled` chooses."""
ENGINES = PluginKind(
    what="a generation engine",
    builtin={
        "torch": "nemo_rl.models.generation.torch_engine.worker:build_engine_worker",
        "vllm": "nemo_rl.models.generation.vllm.worker:build_vllm_worker",
    },
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCapabilities:
    """Facts about a generation engine that a run must know; a user-defined one has the defaults."""

    keys: tuple[str, ...] = ()
    """Keys of `policy.generation` that only this engine reads."""
    needs_own_process: bool = False
    """True where the engine changes its process (threads, random numbers), so that no trainer may share it."""
    shows_decoding: bool = False
    """True where the engine is a `TracedEngine`."""
    records_decoding: bool = False
    """True where the engine is a `RecordedEngine`."""
    takes_full_weights: bool = False
    """True where a refit hands the engine full weights, so that for deltas its process keeps the last ones."""
    can_sleep: bool = False
    """True where the engine frees memory in `sleep`."""
    has_planned_memory: bool = False
    """True where `nemo-rl plan` knows the needs of the engine."""
    check: str | None = None
    """`module:name` of a function that is given the `PolicyConfig` and returns a line per problem, before a run."""


ENGINE_CAPABILITIES: Mapping[str, EngineCapabilities] = {
    "torch": EngineCapabilities(
        keys=("batch_invariant",),
        shows_decoding=True,
        records_decoding=True,
        can_sleep=True,
        has_planned_memory=True,
    ),
    "vllm": EngineCapabilities(
        keys=("vllm_cfg", "vllm_kwargs"),
        needs_own_process=True,
        records_decoding=True,
        takes_full_weights=True,
        can_sleep=True,
        has_planned_memory=True,
        check="nemo_rl.models.generation.vllm.start:check_vllm",
    ),
}
"""Capabilities of the built-in engines, by name."""
STORES = PluginKind(
    what="a payload store",
    builtin={
        "noop": "nemo_rl.data_plane.adapters.noop:NoopStore",
        "shm": "nemo_rl.data_plane.adapters.shm:SharedMemoryStore",
        "ray": "nemo_rl.data_plane.adapters.ray_store:RayStore",
        "transfer_queue": "nemo_rl.data_plane.adapters.transfer_queue:TransferQueueStore",
        "mooncake": "nemo_rl.data_plane.adapters.mooncake:MooncakeStore",
    },
)
"""Further facts about each are in `data_plane.store_kinds`."""
TURN_ENVIRONMENTS: Mapping[str, str] = {
    "guess": "nemo_rl.environments.turn_environments:Guess",
    "sliding_puzzle": "nemo_rl.environments.turn_environments:SlidingPuzzle",
    "calculator_task": "nemo_rl.environments.turn_environments:CalculatorTask",
    "reasoning_gym_turns": "nemo_rl.environments.turn_environments:ReasoningGymTurns",
}
"""Built-in environments with turns: `TurnEnvironment`s, made with `env.options`; the others only score."""
PROGRAM = "program"
"""The environment whose conversations a program drives; `env.options.command` is its command."""
JUDGE = "judge"
"""The environment whose rewards are verdicts of `env.judges`."""
JUDGES = PluginKind(
    what="a judge",
    builtin={
        "endpoint": "nemo_rl.environments.judges.endpoint:EndpointModel",
        "classifier": "nemo_rl.environments.judges.classifier:ClassifierJudge",
        "engine": "nemo_rl.experience.judge_engine:EngineModel",
    },
)
"""Models that are asked for verdicts; one of the user's own is a `JudgeModel`."""
ENVIRONMENTS = PluginKind(
    what="an environment",
    builtin={
        **TURN_ENVIRONMENTS,
        PROGRAM: "nemo_rl.environments.process_environment:custom_environment",
        "sort": "nemo_rl.environments.process_environment:sort_environment",
        "reasoning_gym": "nemo_rl.environments.process_environment:reasoning_gym_environment",
        "math": "nemo_rl.environments.process_environment:math_environment",
        "custom": "nemo_rl.environments.process_environment:custom_environment",
        JUDGE: "nemo_rl.environments.judges.environment:judge_environment",
    },
)
TOOLS = PluginKind(
    what="a tool",
    builtin={
        "calculator": "nemo_rl.environments.tools:calculator",
        "python": "nemo_rl.environments.tools:python",
        "lookup": "nemo_rl.environments.tools:lookup",
    },
)
AUTO = "auto"
CALL_FORMATS = PluginKind(
    what="a format of calls",
    builtin={
        AUTO: "nemo_rl.experience.conversation_setup:call_format",
        "hermes": "nemo_rl.environments.call_formats:HermesCalls",
        "llama3": "nemo_rl.environments.call_formats:Llama3Calls",
        "gpt_oss": "nemo_rl.environments.call_formats:GptOssCalls",
        "qwen3_coder": "nemo_rl.environments.call_formats:Qwen3CoderCalls",
        "kimi": "nemo_rl.environments.call_formats:KimiCalls",
        "glm": "nemo_rl.environments.call_formats:GlmCalls",
        "deepseek": "nemo_rl.environments.call_formats:DeepSeekCalls",
        "mistral": "nemo_rl.environments.call_formats:MistralCalls",
        "gemma": "nemo_rl.environments.call_formats:GemmaCalls",
        "gemma4": "nemo_rl.environments.call_formats:Gemma4Calls",
    },
)
"""Built-in formats; `auto` takes the first of them that reads the calls of the chat template."""
GENERATED_DATASETS: Mapping[str, tuple[str, ...] | None] = {
    "sort_digits": ("min_digits", "max_digits"),
    "guess": ("numbers", "games"),
    "calculator_sums": ("min_digits", "max_digits", "smallest"),
    "sliding_puzzle": ("side", "moves"),
    "shapes": ("cells", "most", "task"),
    "reasoning_gym": None,
}
"""Options of the datasets that are drawn by a seed and a size; None: those of the task."""
DATASETS = PluginKind(
    what="a dataset",
    builtin={name: f"nemo_rl.data.sources:{name}_prompts" for name in (*GENERATED_DATASETS, "jsonl", "huggingface")},
    hub="nemo_rl.data.sources:hub_prompts",
)
CURRICULUM_RULES = PluginKind(what="a rule of a curriculum", builtin={})
"""Built-in rules have sections of their own in `data.curriculum`."""
TRACKERS = PluginKind(what="a tracker", builtin={})
"""Built-in trackers have switches of their own (`logger.wandb_enabled` and so on)."""
