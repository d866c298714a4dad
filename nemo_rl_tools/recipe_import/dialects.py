"""Keys that several frameworks have by their own names: turns and tools, adapters, and sources of prompts.

Of recipes of verl, TRL and prime-rl these keys alone are converted; the others are named as unknown. Called by
`convert_sections`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.config.backends import ALL_LINEAR
from nemo_rl_tools.recipe_import.keys import (
    Fate,
    Given,
    KeyOutcome,
    Table,
    becomes,
    each,
    lacks,
    no_effect,
    not_supported,
    refused,
    with_others,
)

__all__ = [
    "ADAPTERS",
    "GAME",
    "GRADED",
    "SOURCES",
    "TURNS",
    "convert_adapters",
    "convert_sources",
    "convert_turns",
    "names_of",
    "no_held_out",
]

GRADED = "my_rewards:score"

GAME = "sliding_puzzle_game"
"""The environment of NeMo-RL that is here as well."""
SCORING = ("math", "math_default", "math_multi_reward", "code", "reward_model")
"""Environments of NeMo-RL that end every row after one turn."""
GAME_PROMPTS = 10_000
VERL, AGENT = "actor_rollout_ref.rollout.multi_turn", "actor_rollout_ref.rollout.agent"
PREFIX = "experience.conversation"
NO_LIMIT = 1000
"""Turns that stand for no limit there: `policy.max_total_sequence_length` ends a conversation before."""
CHARACTERS_PER_TOKEN = 4
FORMATS = {name: name for name in ("hermes", "gpt_oss", "llama3", "qwen3_coder")}
FORMATS |= {"gpt-oss": "gpt_oss", "llama3_json": "llama3"}
"""Formats of calls here, by their names in verl."""
OWN_TOOLS = "list functions in env.tools.use (docs/environments.md)"
OWN_ENVIRONMENT = "write it as an environment with turns (env.name=module:Class, docs/environments.md)"
CONVERSATION = "becomes experience.conversation and env.tools"

TURNS: Table = {
    "grpo.max_rollout_turns": with_others("becomes experience.conversation where the environment has turns"),
    **each(
        with_others(CONVERSATION),
        f"{VERL}: enable max_assistant_turns max_user_turns max_parallel_calls max_tool_response_length format",
        "max_tool_calling_iterations",
    ),
    f"{VERL}.tool_response_truncate_side": not_supported("the middle of a long result is cut", off=(None, "middle")),
    **each(refused(OWN_TOOLS), f"{VERL}: tool_config_path function_tool_path", "tools"),
    **each(
        refused(OWN_ENVIRONMENT),
        f"{VERL}: interaction_config_path completion_callback",
        f"{AGENT}: agent_loop_config_path",
        "environment_factory",
    ),
    f"{VERL}.use_inference_chat_template": no_effect("what was sampled is never rendered again; see data.history"),
    f"{VERL}.tokenization_sanity_check_mode": no_effect("tokens are never made from text again"),
    f"{VERL}.num_repeat_rollouts": not_supported("grpo.num_generations_per_prompt counts the rows of a prompt"),
    f"{AGENT}.num_workers": no_effect("one loop runs all conversations of a rollout worker"),
    f"{AGENT}.default_agent_loop": no_effect("tools and environment decide"),
    "max_completion_length": with_others("becomes policy.generation.max_new_tokens"),
}
"""Rules by key."""


def convert_turns(given: Given) -> Iterator[KeyOutcome]:
    yield from _nemo_rl_turns(given)
    if given.section(VERL):
        yield from _verl(given)
    yield from _trl(given)


def _nemo_rl_turns(given: Given) -> Iterator[KeyOutcome]:
    key, game = "grpo.max_rollout_turns", given.section(f"env.{GAME}")
    turns = given.get(key)
    most = turns if isinstance(turns, int) else 1
    if game:
        yield from _game(given, most if given.has(key) else NO_LIMIT)
    elif most > 1:
        name = given.get("data.train.env_name") or given.get("data.default.env_name") or SCORING[0]
        if name in SCORING:
            why = "the environment ends every row after one turn"
            yield KeyOutcome(key=key, fate=Fate.IGNORED, why=why)
            return
        yield becomes("", f"{PREFIX}.enabled", True, f"{key} is above 1")
        yield becomes(key, f"{PREFIX}.max_turns", most, "turns of the model")
        yield lacks(key, f"turns of env.{name}: {OWN_ENVIRONMENT}", must_decide=True)
    elif given.has(key):
        yield KeyOutcome(key=key, fate=Fate.SAME, why="one turn, as without experience.conversation")


def _game(given: Given, most: int) -> Iterator[KeyOutcome]:
    """Convert the sliding puzzle; its moves are turns."""
    prefix = f"env.{GAME}"
    names = {"size": "side", "shuffle_moves": "moves"}
    yield becomes("", "env.name", "sliding_puzzle", f"{GAME} there")
    for key, value in (
        ("dataset_name", "sliding_puzzle"),
        ("size", GAME_PROMPTS),
        ("seed", given.get("grpo.seed", 42)),
    ):
        yield becomes("", f"data.train.{key}", value, "there a script makes the boards while it trains")
    for theirs, ours in names.items():
        key = f"{prefix}.cfg.game_config.{theirs}"
        if given.has(key):
            yield becomes(key, f"data.train.options.{ours}", given.get(key), "")
    key = f"{prefix}.cfg.max_moves"
    moves = given.get(key)
    yield becomes("", f"{PREFIX}.enabled", True, "the environment has turns")
    if isinstance(moves, int):
        yield becomes(
            key, f"{PREFIX}.max_turns", min(moves, most), "a move is a turn, and grpo.max_rollout_turns holds"
        )
    elif most != NO_LIMIT:
        yield becomes("grpo.max_rollout_turns", f"{PREFIX}.max_turns", most, "")
    if given.has(f"{prefix}.num_workers"):
        yield becomes(f"{prefix}.num_workers", "env.num_workers", given.get(f"{prefix}.num_workers"), "")


def _verl(given: Given) -> Iterator[KeyOutcome]:
    is_on = bool(given.get(f"{VERL}.enable"))
    yield becomes(f"{VERL}.enable", f"{PREFIX}.enabled", is_on, "")
    if not is_on:
        return
    yield from _verl_turns(given)
    calls, length, form = (f"{VERL}.{name}" for name in ("max_parallel_calls", "max_tool_response_length", "format"))
    has_tools = bool(given.get(f"{VERL}.tool_config_path") or given.get(f"{VERL}.function_tool_path"))
    if not has_tools:
        for key in (calls, length, form):
            if given.has(key):
                yield KeyOutcome(key=key, fate=Fate.IGNORED, why="the recipe names no tool")
        return
    if given.has(calls):
        why = "further calls are dropped there, here the model is told"
        yield becomes(calls, "env.tools.max_parallel_calls", given.get(calls), why)
    characters = given.get(length)
    if isinstance(characters, int):
        tokens = max(1, characters // CHARACTERS_PER_TOKEN)
        why = f"{characters} characters there, about {CHARACTERS_PER_TOKEN} in a token"
        yield becomes(length, "env.tools.max_result_tokens", tokens, why)
    name = given.get(form)
    if name in FORMATS:
        yield becomes(form, "env.tools.format", FORMATS[name], "")
    elif name is not None:
        why = f"{name!r} is not here; write it as a class (env.tools.format=module:Class)"
        yield lacks(form, why, must_decide=True)


def _verl_turns(given: Given) -> Iterator[KeyOutcome]:
    """Convert both limits of turns to the one of the model's turns: a reply more makes a turn more."""
    own, replies = f"{VERL}.max_assistant_turns", f"{VERL}.max_user_turns"
    limits = {own: given.get(own), replies: given.get(replies)}
    found = {key: value + (key == replies) for key, value in limits.items() if isinstance(value, int)}
    if not found:
        yield becomes(own if given.has(own) else "", f"{PREFIX}.max_turns", NO_LIMIT, "no limit there")
        return
    least = min(found, key=lambda key: found[key])
    why = "a last turn follows the last reply" if least == replies else ""
    yield becomes(least, f"{PREFIX}.max_turns", found[least], why)
    for key in found:
        if key != least:
            yield KeyOutcome(key=key, fate=Fate.MAPPED, why=f"{least} is the lower limit")


def _trl(given: Given) -> Iterator[KeyOutcome]:
    rounds, length = "max_tool_calling_iterations", "max_completion_length"
    has_turns = given.has(rounds) or bool(given.get("tools")) or bool(given.get("environment_factory"))
    if has_turns:
        most = given.get(rounds)
        yield becomes("", f"{PREFIX}.enabled", True, "the trainer there has tools")
        key = rounds if given.has(rounds) else ""
        turns, why = (
            (most + 1, "a last turn follows the last call") if isinstance(most, int) else (NO_LIMIT, "no limit")
        )
        yield becomes(key, f"{PREFIX}.max_turns", turns, why)
    if given.has(length):
        why = (
            "there of all turns and results of a row, here of one turn; policy.max_total_sequence_length bounds the row"
        )
        yield becomes(length, "policy.generation.max_new_tokens", given.get(length), why if has_turns else "")


HERE = "policy.lora"
BECOMES = "becomes policy.lora"
BELONGS = "belongs to adapters, which are off there"
EXCLUDED = "layers are named by policy.lora.targets alone; list those that are left"
OTHER_ADAPTERS = "adapters of A and B alone are here"
QUANTISED = "the base is trained beside in full precision; quantised weights are not here"
START = "A starts uniform or normal (policy.lora.init), B at 0"
FUSED: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
    "experts": ("experts.gate_up_proj", "experts.down_proj"),
}
"""Fused layers of megatron-core, and prime-rl's name for all experts -> the layers of Hugging Face models."""
WILDCARD = "*"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Dialect:
    """The names by which a framework asks for adapters, and what it takes where a recipe does not say."""

    section: str
    """Dotted path of its keys; empty for keys at the top."""
    defaults: tuple[int, float, float]
    """Rank, alpha and dropout."""
    switch: str | None = None
    """Key that switches adapters on; None: the section does so by being there, or `rank` by being above 0."""
    rank: str = "rank"
    alpha: str = "alpha"
    dropout: str = "dropout"
    targets: str = "target_modules"
    rslora: str = ""
    excluded: str = ""
    adapter: str = ""
    merges: str = ""
    parameters: str = ""

    def key(self, name: str) -> str:
        return f"{self.section}.{name}" if self.section else name

    def is_on(self, given: Given) -> bool:
        if self.switch is not None:
            return bool(given.get(self.key(self.switch)))
        return bool(given.get(self.key(self.rank), self.defaults[0] if self.section and self._is_there(given) else 0))

    def _is_there(self, given: Given) -> bool:
        return bool(given.section(self.section))


_DTENSOR, _MEGATRON = (
    _Dialect(section=section, switch="enabled", rank="dim", excluded="exclude_modules", defaults=(rank, 32.0, 0.0))
    for section, rank in (("policy.dtensor_cfg.lora_cfg", 8), ("policy.megatron_cfg.peft", 32))
)
_VERL_MODEL = "actor_rollout_ref.model"
_VERL = _Dialect(
    section=_VERL_MODEL,
    rank="lora_rank",
    alpha="lora_alpha",
    dropout="lora_dropout",
    excluded="exclude_modules",
    adapter="lora_adapter_path",
    # Its section is there in every recipe: the rank decides.
    defaults=(0, 16.0, 0.0),
)
_VERL_MEGATRON = _Dialect(
    section=f"{_VERL_MODEL}.lora",
    excluded="exclude_modules",
    adapter="adapter_path",
    merges="merge",
    defaults=(0, 32.0, 0.0),
)
_TRL = _Dialect(
    section="",
    switch="use_peft",
    rank="lora_r",
    alpha="lora_alpha",
    dropout="lora_dropout",
    targets="lora_target_modules",
    parameters="lora_target_parameters",
    rslora="use_rslora",
    defaults=(16, 32.0, 0.05),
)
_PRIME = tuple(_Dialect(section=section, defaults=(16, 32.0, 0.0)) for section in ("model.lora", "trainer.model.lora"))
DIALECTS = (_DTENSOR, _MEGATRON, _VERL, _VERL_MEGATRON, _TRL, *_PRIME)


def _rows(dialect: _Dialect) -> Iterator[str]:
    names = (dialect.switch, dialect.rank, dialect.alpha, dialect.dropout, dialect.targets, dialect.rslora)
    others = (dialect.excluded, dialect.adapter, dialect.merges, dialect.parameters)
    return (dialect.key(name) for name in (*names, *others) if name)


ADAPTERS: Table = {
    **{key: with_others(BECOMES) for dialect in DIALECTS for key in _rows(dialect)},
    **each(no_effect("an empty section asks for nothing"), "policy.dtensor_cfg.lora_cfg policy.megatron_cfg.peft"),
    "policy.dtensor_cfg.lora_cfg.match_all_linear": with_others(BECOMES),
    **each(
        no_effect("what goes into A is dropped"),
        "policy: dtensor_cfg.lora_cfg.dropout_position megatron_cfg.peft.dropout_position",
    ),
    **each(
        no_effect(START),
        "policy.dtensor_cfg.lora_cfg: lora_A_init",
        "policy.megatron_cfg.peft: lora_A_init_method lora_B_init_method",
        f"{_VERL_MODEL}: lora.*",
    ),
    "policy.dtensor_cfg.lora_cfg.lora_dtype": no_effect("adapters are trained in float32"),
    "policy.dtensor_cfg.lora_cfg.use_triton": no_effect("a matter of speed that has no switch here"),
    "policy.dtensor_cfg.lora_cfg.*": no_effect("belongs to lora_cfg.enabled"),
    "policy.megatron_cfg.peft.*": no_effect("belongs to peft.enabled"),
    "checkpointing.is_peft": no_effect("a run with policy.lora saves adapters"),
    f"{_VERL_MODEL}.lora.type": not_supported("peft's layers are here", off=(None, "lora", "canonical_lora")),
    "actor_rollout_ref.rollout.layered_summon": no_effect("weights are gathered one at a time"),
    "actor_rollout_ref.rollout.load_format": no_effect("engines get the base once, from the trainer"),
    "lora_task_type": no_effect("the model is a causal language model"),
    **each(refused(QUANTISED), "load_in_4bit load_in_8bit"),
    **each(refused(OTHER_ADAPTERS), "lora_modules_to_save use_dora policy.dtensor_cfg.lora_cfg.use_dora"),
    **each(refused(OTHER_ADAPTERS, off=(None, [])), "model.lora.modules_to_save trainer.model.lora.modules_to_save"),
}
"""Rules by key."""


def convert_adapters(given: Given) -> Iterator[KeyOutcome]:
    """Convert the adapters of the first framework that asks for them."""
    for dialect in DIALECTS:
        if dialect.is_on(given) and not _is_of_other_worker(dialect, given):
            yield from _converted(dialect, given)
            return
    for dialect in DIALECTS:
        for key in _rows(dialect):
            if given.has(key) and (dialect.section or given.has("use_peft")):
                yield KeyOutcome(key=key, fate=Fate.IGNORED, why=BELONGS)


def _is_of_other_worker(dialect: _Dialect, given: Given) -> bool:
    """Return whether the keys are of NeMo-RL's worker that does not train."""
    is_megatron = bool(given.get("policy.megatron_cfg.enabled"))
    return (dialect is _DTENSOR and is_megatron) or (dialect is _MEGATRON and not is_megatron)


def _converted(dialect: _Dialect, given: Given) -> Iterator[KeyOutcome]:
    switch = dialect.key(dialect.switch or dialect.rank)
    yield becomes(switch if dialect.switch else "", f"{HERE}.enabled", True, "adapters are trained there")
    for name, here, default in zip(
        (dialect.rank, dialect.alpha, dialect.dropout), ("rank", "alpha", "dropout"), dialect.defaults, strict=True
    ):
        key = dialect.key(name)
        if given.has(key):
            yield becomes(key, f"{HERE}.{here}", given.get(key), "")
        else:
            yield becomes("", f"{HERE}.{here}", default, f"the default of {key}")
    if dialect.rslora and given.has(dialect.key(dialect.rslora)):
        key = dialect.key(dialect.rslora)
        yield becomes(key, f"{HERE}.rslora", bool(given.get(key)), "")
    if dialect.adapter and given.get(dialect.key(dialect.adapter)):
        key = dialect.key(dialect.adapter)
        yield becomes(key, f"{HERE}.adapter", given.get(key), "")
    if dialect.merges and given.get(dialect.key(dialect.merges)):
        yield becomes(dialect.key(dialect.merges), f"{HERE}.serve", "merged", "weights are merged for the engines")
    if dialect.excluded and given.get(dialect.key(dialect.excluded)):
        yield lacks(dialect.key(dialect.excluded), EXCLUDED, must_decide=True)
    yield from _targets(dialect, given)


def _targets(dialect: _Dialect, given: Given) -> Iterator[KeyOutcome]:
    key = dialect.key(dialect.targets)
    named, everything = given.get(key), dialect.key("match_all_linear")
    if dialect is _DTENSOR and given.has(everything):
        if given.get(everything) or not named:
            yield becomes(everything, f"{HERE}.targets", ALL_LINEAR, "")
            return
        yield KeyOutcome(key=everything, fate=Fate.MAPPED, why="the targets are named")
    parameters = given.get(dialect.key(dialect.parameters)) if dialect.parameters else None
    if named in (None, [], ALL_LINEAR, "all_linear") and not parameters:
        yield becomes(key if given.has(key) else "", f"{HERE}.targets", ALL_LINEAR, "all but the head and routers")
        return
    names = [named] if isinstance(named, str) else list(named or ())
    found = [layer for name in names for layer in FUSED.get(str(name), (str(name).removeprefix("*."),))]
    wild = [name for name in found if WILDCARD in name]
    if wild:
        yield lacks(key, f"{wild[0]!r} is a pattern; list ends of names such as q_proj", must_decide=True)
        return
    yield becomes(key, f"{HERE}.targets", [*dict.fromkeys([*found, *(parameters or ())])], "")
    if parameters:
        yield KeyOutcome(key=dialect.key(dialect.parameters), fate=Fate.MAPPED, why="listed among policy.lora.targets")


PRIME_SOURCES, PRIME_GROUP = "orchestrator.train.source", "orchestrator.group_size"
FILES = {"train": "data.train_files", "validation": "data.val_files"}
"""Lists of files of verl, which reads those of one list as one."""
SPLITS = ("train", "test", "val", "validation")
"""Stems of files that say nothing of what is in them."""
LIMITS = ("max_completion_tokens", "max_tokens")
"""Names of the longest response in prime-rl's `sampling`."""

SOURCES: Table = {
    **each(with_others("becomes data.train and data.validation"), *FILES.values(), "data.prompt_key data.image_key"),
    PRIME_SOURCES: with_others("becomes data.train"),
    PRIME_GROUP: with_others("becomes grpo.num_generations_per_prompt"),
}
"""Rules by key."""


def convert_sources(given: Given) -> Iterator[KeyOutcome]:
    """Convert the lists of verl's files and of prime-rl's sources to sections with names."""
    for part, key in FILES.items():
        found = given.get(key)
        files = [found] if isinstance(found, str) else [str(each) for each in found or ()]
        yield from _verl_files(given, part, key, files)
    entries = given.get(PRIME_SOURCES)
    is_primes = isinstance(entries, list) and all(isinstance(entry, Mapping) for entry in entries)
    if is_primes:
        yield from _prime_sources(given, entries)
    if is_primes or (given.get(FILES["train"]) and not given.get(FILES["validation"])):
        yield from no_held_out(given)


def no_held_out(given: Given) -> Iterator[KeyOutcome]:
    """Turn validation off."""
    why = "the recipe has no validation prompts"
    yield becomes("data.validation" if given.has("data.validation") else "", "data.validation", None, why)
    for name, off in (("val_period", 0), ("val_at_start", False), ("val_at_end", False)):
        yield becomes(f"grpo.{name}" if given.has(f"grpo.{name}") else "", f"grpo.{name}", off, why)


def _verl_files(given: Given, part: str, key: str, files: Sequence[str]) -> Iterator[KeyOutcome]:
    paths = [Path(file) for file in files]
    names = names_of([path.parent.name if path.stem in SPLITS and path.parent.name else path.stem for path in paths])
    for number, (file, name) in enumerate(zip(files, names, strict=True)):
        where = f"data.{part}" if number == 0 else f"data.validation_sets.{name}"
        if part == "train" and len(files) > 1:
            where = f"data.train.{name}"
        kind = "jsonl" if file.endswith((".json", ".jsonl")) else "huggingface"
        yield becomes(key, f"{where}.dataset_name", kind, "")
        yield becomes(key, f"{where}.data_path", file, "")
        asked = "data.prompt_key"
        yield becomes(asked if given.has(asked) else "", f"{where}.input_key", given.get(asked, "prompt"), "")
        yield becomes("", f"{where}.output_key", "reward_model.ground_truth", "the column of verl's rows")
        if given.get("data.image_key"):
            yield becomes("data.image_key", f"{where}.image_key", given.get("data.image_key"), "")
    if part == "train" and len(files) > 1:
        why = "the files are read as one there, so that each prompt is drawn equally often"
        yield becomes(key, "data.mixture.by", "size", why)
    if part == "train" and files:
        yield lacks(
            key, "its column data_source chooses a score there; here one reward scores a section: see docs/data.md"
        )


def _prime_sources(given: Given, entries: Sequence[Mapping[str, Any]]) -> Iterator[KeyOutcome]:
    """Convert sources with their shares, group sizes and limits; those of the recipe are the largest of all."""
    limits = [next((value for name, value in _sampling(entry).items() if name in LIMITS), None) for entry in entries]
    sizes = [entry.get("group_size") for entry in entries]
    names = names_of([str(entry.get("name") or _environment(entry)) for entry in entries])
    own = {"grpo.num_generations_per_prompt": sizes, "policy.generation.max_new_tokens": limits}
    of_all = [given.get(PRIME_GROUP), None]
    for (here, found), whole in zip(own.items(), of_all, strict=True):
        numbers = [each for each in (*found, whole) if isinstance(each, int)]
        if numbers:
            key = PRIME_GROUP if whole is not None and here.startswith("grpo") else PRIME_SOURCES
            yield becomes(key, here, max(numbers), "the largest of all sources; those without their own have it, too")
        for name, number in zip(names, found, strict=True):
            asked = number if number is not None else whole
            if numbers and asked is not None and asked != max(numbers):
                yield becomes(PRIME_SOURCES, f"data.train.{name}.{here.rpartition('.')[2]}", asked, "")
    for number, (name, entry) in enumerate(zip(names, entries, strict=True)):
        yield from _prime_source(f"{PRIME_SOURCES}.{number}", f"data.train.{name}", name, entry)


def _prime_source(key: str, where: str, name: str, entry: Mapping[str, Any]) -> Iterator[KeyOutcome]:
    environment = _environment(entry)
    why = (
        f'the environment {environment!r} brings its prompts there: write them as lines {{"input": ..., "output": ...}}'
    )
    yield becomes(f"{key}.env", f"{where}.dataset_name", "jsonl", "")
    yield becomes(f"{key}.env", f"{where}.data_path", f"data/{name}.jsonl", why)
    yield becomes(f"{key}.env", f"{where}.env.name", "custom", "")
    yield becomes(f"{key}.env", f"{where}.env.reward_function", GRADED, "write it: see docs/guide.md")
    yield lacks(f"{key}.env", f"the environment {environment!r} is not here; {GRADED} stands for its reward")
    if entry.get("ratio") is not None:
        yield becomes(f"{key}.ratio", f"{where}.weight", entry["ratio"], "shares hold exactly here, without a draw")
    for part, value in _sampling(entry).items():
        if part == "stop" and value:
            yield becomes(
                f"{key}.sampling.stop", f"{where}.stop_strings", [value] if isinstance(value, str) else value, ""
            )
        elif part not in LIMITS and value is not None:
            one = "the trainer scores the rows of all sources alike; set it for all under policy.generation"
            yield lacks(f"{key}.sampling.{part}", one, must_decide=True)
    for part in sorted(entry.keys() - {"name", "env", "ratio", "group_size", "sampling"}):
        yield lacks(f"{key}.{part}", "a source has no such key here", must_decide=True)


def _sampling(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    found = entry.get("sampling")
    return found if isinstance(found, Mapping) else {}


def _environment(entry: Mapping[str, Any]) -> str:
    found = entry.get("env")
    return str(found.get("id") or found.get("name") or "env") if isinstance(found, Mapping) else str(found or "env")


def names_of(given: Sequence[str]) -> list[str]:
    """Return a name that a section may have for each text, all different."""
    found: list[str] = []
    for number, text in enumerate(given):
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-").lstrip("_-") or "data"
        found.append(name if name not in found else f"{name}-{number}")
    return found
