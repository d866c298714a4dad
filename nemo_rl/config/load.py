"""Loads a YAML recipe with overrides as a `MasterConfig`: `load_config`.

Called by the command line, tests and anything that starts a run. One `ConfigError` holds every problem: unknown keys
at any depth, wrong types, missing keys, interpolations and cross-field rules. Imports neither torch nor ray.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from nemo_rl.config.backends import MegatronOptimizerConfig, OptimizerConfig, SchedulerConfig
from nemo_rl.config.compose import Layer, Recipe, apply_overrides, compose, locate_paths, recipe_of
from nemo_rl.config.env import SESSION
from nemo_rl.config.interpolate import resolve_interpolations
from nemo_rl.config.parts import UNKNOWN_PART
from nemo_rl.config.r3_trace_env import r3_trace_verify_forward_enabled
from nemo_rl.config.rules import RULES
from nemo_rl.config.rules.rule import Ignored
from nemo_rl.config.schema import MasterConfig
from nemo_rl.config.schema_walk import default_tree, dotted, drop, lookup, place_of, put, suggest, suggest_path
from nemo_rl.config.sft import WARM_FOLDER, WARM_RATE, WARM_ROWS
from nemo_rl.config.yaml_text import MASKED
from nemo_rl.errors import ConfigError, shorten

__all__ = ["carry_optimizer", "first_stage", "load_config", "load_recipe", "parse_tree"]

# What OmegaConf and Hydra users write for "must be set by the user of this file".
_MUST_BE_SET = "???"
_MAX_LINES = 100
"""Problems that are described; the others are counted."""

_EXPECTED: Mapping[str, str] = {
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "a number > {gt}",
    "greater_than_equal": "a number >= {ge}",
    "int_from_float": "an integer",
    "int_type": "an integer",
    "less_than": "a number < {lt}",
    "less_than_equal": "a number <= {le}",
    "list_type": "a list",
    "literal_error": "one of {expected}",
    "model_attributes_type": "a section",
    "model_type": "a section",
    "none_required": "null",
    "path_type": "a path",
    "string_too_short": "a text that is not empty",
    "string_type": "a text",
    "too_short": "a list of at least {min_length}",
}


def load_config(path: str | Path, overrides: Sequence[str] = (), *, with_masked: bool = False) -> MasterConfig:
    """Compose `path`, apply `overrides`, resolve `${...}` and validate.

    Args:
        with_masked: secrets may be masked, because nothing uses them.

    Raises:
        ConfigError: with one line per problem, `FILE: dotted.path: what; expected ..., got ...; did you mean 'x'?`
    """
    return load_recipe(compose(Path(path)), overrides, with_masked=with_masked)


def load_recipe(recipe: Recipe, overrides: Sequence[str] = (), *, with_masked: bool = False) -> MasterConfig:
    """Return the config of a composed recipe; arguments and errors as of `load_config`."""
    problems = apply_overrides(recipe, overrides)
    unusable = resolve_interpolations(recipe) | _unset(recipe) | ({} if with_masked else _masked(recipe))
    unusable |= {place: text for place, text in locate_paths(recipe).items() if place not in unusable}
    problems += [f"{recipe.source_of(place)}: {'.'.join(place)}: {text}" for place, text in unusable.items()]
    problems += carry_optimizer(recipe)
    for place in unusable:
        drop(recipe.tree, place)
    try:
        config = parse_tree(recipe.tree)
    except ValidationError as error:
        broken, lines = _translate(recipe, error, reported=unusable)
        raise ConfigError([*problems, *lines, *_rules_on_the_rest(recipe, error, broken)]) from None
    broken = [".".join(place) for place in unusable]
    problems += _rule_problems(recipe, config, broken)
    if problems:
        raise ConfigError(problems)
    data = config.data.model_copy(update={"train": config.data.train.without_ignored()})
    config = _with_digests(config.model_copy(update={"data": data}))
    first_stage(config)
    return config


_SHARED = ("policy", "cluster", "data_plane", "logger", "checkpointing")
"""Sections that both of two stages have."""
_OF_THE_SECOND = (
    *("policy.generation", "policy.router_replay", "policy.optimizer", "policy.scheduler"),
    *("policy.megatron_cfg.optimizer", "policy.megatron_cfg.scheduler", "policy.tracer", "data_plane.durable"),
    *("checkpointing.checkpoint_dir", "checkpointing.staging_dir", "checkpointing.keep_top_k"),
    *("checkpointing.metric_name", "checkpointing.higher_is_better"),
)
"""Keys of them that are of the second stage alone."""


def first_stage(config: MasterConfig) -> MasterConfig | None:
    """Return the recipe of the first of two stages (`stages`); None where there is one.

    Raises:
        ConfigError: what is wrong with `sft.settings`.
    """
    if len(config.stages) < 2:
        return None
    tree = config.model_dump(mode="json", include=set(_SHARED))
    stop_ids, is_megatron = config.policy.generation.stop_token_ids, config.policy.megatron_cfg.enabled
    for key in _OF_THE_SECOND:
        drop(tree, key.split("."))
    if not config.checkpointing.enabled:
        tree.pop("checkpointing")
    given: dict[str, object] = {
        "sft.enabled": True,
        "sft.min_reward": config.sft.min_reward,
        "logger.log_dir": str(config.logger.log_dir / WARM_FOLDER),
        "policy.generation.stop_token_ids": None if stop_ids is None else list(stop_ids),
        "policy.train_global_batch_size": WARM_ROWS,
        "policy.megatron_cfg.optimizer.lr" if is_megatron else "policy.optimizer.kwargs.lr": WARM_RATE,
        "grpo.max_num_epochs": 1,
    }
    own = dotted(config.sft.settings)
    if not any(key.startswith("data.validation") for key in own):
        given |= {"data.validation": None, "grpo.val_period": 0, "grpo.val_at_start": False, "grpo.val_at_end": False}
    for key, value in {**given, **own}.items():
        put(tree, key.split("."), value)
    # Secrets of the whole recipe have been looked at.
    return load_recipe(recipe_of(tree, name="stages: sft"), with_masked=True)


def _with_digests(config: MasterConfig) -> MasterConfig:
    """Add the digests that a switch of the route trace asks for: it changes the stored columns, so the resolved config
    has it."""
    replay = config.policy.router_replay
    if not replay.enabled or not r3_trace_verify_forward_enabled():
        return config
    policy = config.policy.model_copy(update={"router_replay": replay.model_copy(update={"with_digests": True})})
    return config.model_copy(update={"policy": policy})


def parse_tree(tree: Mapping[str, Any]) -> MasterConfig:
    """Return a plain tree as a config, without the rules; pydantic's error names what does not fit."""
    # JSON mode: strict about types ("32" is no integer), and lists and texts still become tuples and paths.
    return MasterConfig.model_validate_json(json.dumps(tree), strict=True)


def _rule_problems(recipe: Recipe, config: MasterConfig, broken: Sequence[str]) -> list[str]:
    """Return the problems that the rules find, with the file to change; lines that name a key in `broken` are only its
    consequences."""
    lines = [line for rule in RULES for line in rule(config) if not any(name in line for name in broken)]
    return [
        f"{recipe.source_of(line.split(':', 1)[0].split('.'))}: {line}"
        for line in lines
        if not (isinstance(line, Ignored) and _is_switched_off_later(recipe, line))
    ]


def _is_switched_off_later(recipe: Recipe, line: Ignored) -> bool:
    """Return whether a key is switched off later. A child recipe or the command line may turn off what its parent has
    set up, or a default; no key of its own is ignored."""
    path, switch = line.key.split("."), recipe.layer_of(line.switch.split("."))
    key = recipe.layer_of(path) if recipe.sets(path) else None
    return switch is not None and (key is None or key.order < switch.order)


def _rules_on_the_rest(recipe: Recipe, error: ValidationError, broken: Sequence[str]) -> list[str]:
    """Check the rules on the sound part: broken keys take their defaults; rules that name them are left out."""
    tree = copy.deepcopy(recipe.tree)
    for detail in error.errors():
        path = _input_path(recipe.tree, detail)
        _, section = lookup(tree, path[:-1])
        if detail["type"] == "missing" and isinstance(section, dict):
            section[path[-1]] = _MUST_BE_SET
        elif isinstance(section, dict):
            section.pop(path[-1], None)
    try:
        config = parse_tree(tree)
    except ValidationError:
        return []
    return _rule_problems(recipe, config, broken)


def _masked(recipe: Recipe) -> dict[tuple[str, ...], str]:
    """Return the keys whose values a run did not write down: secrets, and functions of a Python session."""
    reward = recipe.tree.get("env", {}).get("reward_function") if isinstance(recipe.tree.get("env"), dict) else None
    gone = {
        ("env", "reward_function"): f"{shorten(repr(reward))} was a function of a Python session, which no file holds; "
        "write it into a file and set env.reward_function=FILE.py:function, or go on from Python (docs/python.md)"
    }
    return (gone if isinstance(reward, str) and reward.startswith(SESSION) else {}) | {
        path: f"was masked when this file was written; give it anew, as '{'.'.join(path)}=${{oc.env:NAME}}'"
        for path, value in recipe.leaves()
        if isinstance(value, str) and MASKED.search(value)
    }


def _unset(recipe: Recipe) -> dict[tuple[str, ...], str]:
    """Return the keys whose value is still `???`, with what the schema says about them."""
    return {path: _must_be_set(path) for path, value in recipe.leaves() if value == _MUST_BE_SET}


def _must_be_set(path: Sequence[str]) -> str:
    field = place_of(path).field
    return f"must be set; {field.description}" if field is not None and field.description else "must be set"


# ---- pydantic's errors as lines


def _input_path(tree: Mapping[str, Any], detail: ErrorDetails) -> tuple[str, ...]:
    """Return the path in the user's tree: pydantic adds names of union members and of derived keys."""
    path: list[str] = []
    node: Any = tree
    for index, part in enumerate(detail["loc"]):
        is_missing_key = detail["type"] == "missing" and index == len(detail["loc"]) - 1
        if isinstance(node, Mapping) and (part in node or is_missing_key):
            node = node.get(part)
        elif isinstance(node, list) and isinstance(part, int):
            node = node[part]
        else:
            continue
        path.append(str(part))
    return tuple(path)


def _translate(
    recipe: Recipe, error: ValidationError, *, reported: Container[tuple[str, ...]]
) -> tuple[list[str], list[str]]:
    """Return the dotted paths that are broken (with what may have been meant), and one line per problem."""
    by_path: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for detail in error.errors():
        by_path.setdefault(_input_path(recipe.tree, detail), []).append(detail)
    broken: list[str] = []
    lines: list[str] = []
    for number, (path, details) in enumerate(by_path.items()):
        name = ".".join(path)
        if number >= _MAX_LINES:
            broken.append(name)
            continue
        text, meant = _describe(recipe, path, details)
        broken += [name, *meant]
        if path not in reported:
            lines.append(f"{recipe.source_of(path)}: {name}: {text}")
    if len(by_path) > _MAX_LINES:
        lines.append(f"{recipe.file}: and {len(by_path) - _MAX_LINES} more problems")
    return broken, lines


def _describe(recipe: Recipe, path: tuple[str, ...], details: Sequence[ErrorDetails]) -> tuple[str, list[str]]:
    first = details[0]
    place = place_of(path)
    # Where names of the user's stand beside keys, what is no section is a key that was misspelt.
    is_no_name = first["type"] == "model_type" and place.is_known and place.field is None and place.candidates
    if first["type"] == "extra_forbidden" or is_no_name:
        hint = suggest_path(path, place.candidates, recipe.tree)
        quoted = hint.split("'")[1::2]
        return f"unknown key{hint}", [".".join((*path[:-1], name)) if "." not in name else name for name in quoted]
    is_set, value = lookup(recipe.tree, path)
    if first["type"] == "missing":
        return _must_be_set(path), []
    expected = " or ".join(dict.fromkeys(_expected(detail) for detail in details))
    hint = ""
    if not is_set or value is None:
        # An element of a list, or what a validator has made of the value.
        value = first["input"]
    if first["type"] in ("literal_error", UNKNOWN_PART) and isinstance(value, str):
        hint = suggest(value, str(first["ctx"]["expected"]).replace("'", "").replace(" or ", ", ").split(", "))
    return f"expected {expected}, got {'null' if value is None else shorten(repr(value))}{hint}", []


def _expected(detail: ErrorDetails) -> str:
    template = _EXPECTED.get(detail["type"])
    return detail["msg"] if template is None else template.format(**detail.get("ctx", {}))


_SWITCH = ("policy", "megatron_cfg", "enabled")
_OPTIMIZER, _SCHEDULER = ("policy", "optimizer"), ("policy", "scheduler")
_MEGATRON_OPTIMIZER = ("policy", "megatron_cfg", "optimizer")
_MEGATRON_SCHEDULER = ("policy", "megatron_cfg", "scheduler")
_ADAMW = ("AdamW", "torch.optim.AdamW", "torch.optim.adamw.AdamW")
_PLAIN = {"lr": "lr", "weight_decay": "weight_decay", "eps": "adam_eps"}
"""Arguments of torch's AdamW by their names in `policy.megatron_cfg.optimizer`; the defaults of both are the same."""


def carry_optimizer(recipe: Recipe) -> list[str]:
    """Move what an earlier layer has set to the worker that trains; return a line for each part that it cannot."""
    is_megatron = lookup(recipe.tree, _SWITCH)[1] is True
    # Both on, or both off, is refused by a rule.
    if (lookup(recipe.tree, ("policy", "dtensor_cfg", "enabled"))[1] is not False) == is_megatron:
        return []
    switch = recipe.layer_of(_SWITCH)
    if is_megatron:
        return [*_to_megatron(recipe, switch)]
    return [*_to_dtensor(recipe, switch)]


def _given(recipe: Recipe, path: tuple[str, ...], switch: Layer | None, *, over: tuple[str, ...]) -> Any:
    """Return the values that a layer before the switch has set in a section; None where that layer, or one before it,
    has set the section that is read, `over`, too."""
    value, setter, reader = lookup(recipe.tree, path)[1], recipe.layer_of(path), recipe.layer_of(over)
    if switch is None or setter is None or setter.order >= switch.order or _is_default(recipe, path):
        return None
    if reader is not None and reader.order > setter.order:
        return value
    is_read_section_set = reader is not None and reader.order == setter.order
    return None if is_read_section_set or not _is_default(recipe, over) else value


def _set_later(recipe: Recipe, section: tuple[str, ...], *, than: tuple[str, ...]) -> set[str]:
    """Return the keys of a section that a later layer has set than the one that set the section `than`."""
    setter, value = recipe.layer_of(than), lookup(recipe.tree, section)[1]
    if setter is None or not isinstance(value, Mapping):
        return set()
    layers = {name: recipe.layer_of((*section, name)) for name in value}
    return {name for name, layer in layers.items() if layer is not None and layer.order > setter.order}


def _is_default(recipe: Recipe, path: tuple[str, ...]) -> bool:
    """Return whether a section has nothing but defaults: the base recipe spells all of them out."""
    value, default = lookup(recipe.tree, path)[1], lookup(default_tree(), path)[1]
    if not isinstance(value, Mapping):
        return not value
    return isinstance(default, Mapping) and all(default.get(name) == each for name, each in value.items())


def _to_megatron(recipe: Recipe, switch: Layer | None) -> Iterator[str]:
    optimizer = _given(recipe, _OPTIMIZER, switch, over=_MEGATRON_OPTIMIZER)
    kwargs: Any = optimizer.get("kwargs") or OptimizerConfig().kwargs if isinstance(optimizer, Mapping) else None
    own = _set_later(recipe, _MEGATRON_OPTIMIZER, than=_OPTIMIZER)
    if isinstance(optimizer, Mapping) and isinstance(kwargs, Mapping) and "optimizer" not in own:
        betas = kwargs.get("betas") or []
        betas = betas if isinstance(betas, list) else [betas]
        unknown = set(kwargs) - {*_PLAIN, "betas"}
        is_known = optimizer.get("name", _ADAMW[1]) in _ADAMW and not unknown and len(betas) in (0, 2)
        if not is_known and "lr" not in own:
            what = ", ".join([str(optimizer.get("name", "AdamW")), *sorted(unknown)])
            yield _lost(recipe, _OPTIMIZER, _MEGATRON_OPTIMIZER, f"{what} has no counterpart there")
        elif is_known:
            carried = {_PLAIN[name]: value for name, value in kwargs.items() if name in _PLAIN}
            carried |= dict(zip(("adam_beta1", "adam_beta2"), betas, strict=False))
            _move(recipe, _OPTIMIZER, _MEGATRON_OPTIMIZER, carried, own=own)
    scheduler = _given(recipe, _SCHEDULER, switch, over=_MEGATRON_SCHEDULER)
    if scheduler is None:
        return
    own = _set_later(recipe, _MEGATRON_SCHEDULER, than=_SCHEDULER)
    if own and (not isinstance(scheduler, Mapping) or "lr_decay_style" in own):
        return
    if not isinstance(scheduler, Mapping) or scheduler.get("phases") or "." in str(scheduler.get("name", "")):
        yield _lost(recipe, _SCHEDULER, _MEGATRON_SCHEDULER, "torch's schedulers have no counterpart there")
        return
    _carry_shape(recipe, scheduler, own=own)


def _carry_shape(recipe: Recipe, scheduler: Mapping[str, Any], *, own: set[str]) -> None:
    """Carry the shape of the schedule. The first of W steps of warm-up has 1/W of the rate with the DTensor worker, and
    what is asked for with Megatron: the rates of a warm-up are the same, those of a decay differ by one step of its
    length."""
    default, layer = SchedulerConfig(), _layer(recipe, _SCHEDULER)
    peak = lookup(recipe.tree, (*_MEGATRON_OPTIMIZER, "lr"))[1] or MegatronOptimizerConfig().lr
    style, factor = scheduler.get("name", default.name), scheduler.get("min_factor", default.min_factor)
    warmup, end = scheduler.get("warmup_steps", default.warmup_steps), scheduler.get("decay_steps")
    if not all(isinstance(number, (int, float)) for number in (peak, factor, warmup)):
        # The schema says what is wrong with them.
        return
    shape = {"lr_decay_style": style}
    if warmup > 1 and not own & {"lr_warmup_iters", "lr_warmup_fraction", "lr_warmup_init"}:
        shape |= {"lr_warmup_iters": warmup - 1, "lr_warmup_init": peak / warmup}
    if style != default.name:
        shape |= {} if end is None else {"lr_decay_iters": end}
        if not lookup(recipe.tree, (*_MEGATRON_OPTIMIZER, "min_lr"))[1]:
            recipe.set((*_MEGATRON_OPTIMIZER, "min_lr"), peak * factor, layer=layer)
    _move(recipe, _SCHEDULER, _MEGATRON_SCHEDULER, shape, own=own)


def _to_dtensor(recipe: Recipe, switch: Layer | None) -> Iterator[str]:
    """Report what is not carried: Megatron's section says more than torch's AdamW knows, so the user has to decide."""
    for section, kept in ((_MEGATRON_OPTIMIZER, _OPTIMIZER), (_MEGATRON_SCHEDULER, _SCHEDULER)):
        if _given(recipe, section, switch, over=kept) is not None:
            yield _lost(recipe, section, kept, "the DTensor worker does not read it")


def _lost(recipe: Recipe, section: tuple[str, ...], kept: tuple[str, ...], why: str) -> str:
    name, drop = ".".join(section), "~" if section[1] == "megatron_cfg" else ""
    return (
        f"{recipe.source_of(section)}: {name}: would be lost with the worker that {'.'.join(_SWITCH)} selects: {why}; "
        f"set {'.'.join(kept)}, or drop it with {drop}{name}{'' if drop else '=null'}"
    )


def _move(
    recipe: Recipe, section: tuple[str, ...], to: tuple[str, ...], values: Mapping[str, Any], *, own: set[str]
) -> None:
    """
    Args:
        own: names of `to` that keep their values.
    """
    layer = _layer(recipe, section)
    for name, value in values.items():
        if name not in own:
            recipe.set((*to, name), value, layer=layer)
    recipe.tree[section[0]].pop(section[1])
    recipe.mark(section, None)


def _layer(recipe: Recipe, section: tuple[str, ...]) -> Layer:
    return recipe.layer_of(section) or Layer(order=0, name=recipe.file)
