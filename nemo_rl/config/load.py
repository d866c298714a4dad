"""From a YAML recipe and overrides to a `MasterConfig`: `load_config`.

Called by the command line, tests and anything that starts a run. One `ConfigError` holds every problem: unknown keys
at any depth, wrong types, missing keys, interpolations and cross-field rules. Imports neither torch nor ray.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from nemo_rl.config.carry import carry_optimizer
from nemo_rl.config.compose import Recipe, compose
from nemo_rl.config.interpolate import resolve_interpolations
from nemo_rl.config.overrides import apply_overrides
from nemo_rl.config.parts import UNKNOWN_PART
from nemo_rl.config.r3_trace_env import r3_trace_verify_forward_enabled
from nemo_rl.config.recipe_paths import locate_paths
from nemo_rl.config.rule import Ignored
from nemo_rl.config.schema import MasterConfig
from nemo_rl.config.schema_walk import lookup, place_of, suggest, suggest_path
from nemo_rl.config.validate import RULES
from nemo_rl.errors import ConfigError, shorten

__all__ = ["load_config"]

# What OmegaConf and Hydra users write for "must be set by whoever uses this file".
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


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> MasterConfig:
    """Composes `path`, applies `overrides`, resolves `${...}` and validates.

    Raises:
        ConfigError: with one line per problem, `FILE: dotted.path: what; expected ..., got ...; did you mean 'x'?`
    """
    recipe = compose(Path(path))
    problems = apply_overrides(recipe, overrides)
    unusable = resolve_interpolations(recipe) | _unset(recipe)
    unusable |= {place: text for place, text in locate_paths(recipe).items() if place not in unusable}
    problems += [f"{recipe.source_of(place)}: {'.'.join(place)}: {text}" for place, text in unusable.items()]
    problems += carry_optimizer(recipe)
    for place in unusable:
        _remove(recipe.tree, place)
    try:
        config = _parse(recipe.tree)
    except ValidationError as error:
        broken, lines = _translate(recipe, error, reported=unusable)
        raise ConfigError([*problems, *lines, *_rules_on_the_rest(recipe, error, broken)]) from None
    broken = [".".join(place) for place in unusable]
    problems += _rule_problems(recipe, config, broken)
    if problems:
        raise ConfigError(problems)
    return _with_digests(config)


def _with_digests(config: MasterConfig) -> MasterConfig:
    """A switch of the route trace changes which columns are stored, so the resolved config has it."""
    replay = config.policy.router_replay
    if not replay.enabled or not r3_trace_verify_forward_enabled():
        return config
    policy = config.policy.model_copy(update={"router_replay": replay.model_copy(update={"with_digests": True})})
    return config.model_copy(update={"policy": policy})


def _parse(tree: Mapping[str, Any]) -> MasterConfig:
    # JSON mode: strict about types ("32" is no integer), and lists and texts still become tuples and paths.
    return MasterConfig.model_validate_json(json.dumps(tree), strict=True)


def _rule_problems(recipe: Recipe, config: MasterConfig, broken: Sequence[str]) -> list[str]:
    """What the rules find, with the file to change; lines that name a key in `broken` are only its consequences."""
    lines = [line for rule in RULES for line in rule(config) if not any(name in line for name in broken)]
    return [
        f"{recipe.source_of(line.split(':', 1)[0].split('.'))}: {line}"
        for line in lines
        if not (isinstance(line, Ignored) and _is_switched_off_later(recipe, line))
    ]


def _is_switched_off_later(recipe: Recipe, line: Ignored) -> bool:
    """A child recipe or the command line may turn off what its parent has set up, or a default; no key of its own is
    ignored."""
    key, switch = recipe.layer_of(line.key.split(".")), recipe.layer_of(line.switch.split("."))
    return switch is not None and (key is None or key.order < switch.order)


def _rules_on_the_rest(recipe: Recipe, error: ValidationError, broken: Sequence[str]) -> list[str]:
    """Cross-field rules on what is sound: broken keys take their defaults; rules that name them are left out."""
    tree = copy.deepcopy(recipe.tree)
    for detail in error.errors():
        path = _input_path(recipe.tree, detail)
        _, section = lookup(tree, path[:-1])
        if detail["type"] == "missing" and isinstance(section, dict):
            section[path[-1]] = _MUST_BE_SET
        elif isinstance(section, dict):
            section.pop(path[-1], None)
    try:
        config = _parse(tree)
    except ValidationError:
        return []
    return _rule_problems(recipe, config, broken)


def _unset(recipe: Recipe) -> dict[tuple[str, ...], str]:
    """Keys whose value is still `???`, with what the schema says about them."""
    return {path: _must_be_set(path) for path, value in recipe.leaves() if value == _MUST_BE_SET}


def _must_be_set(path: Sequence[str]) -> str:
    field = place_of(path).field
    return f"must be set; {field.description}" if field is not None and field.description else "must be set"


def _remove(tree: dict[str, Any], path: Sequence[str]) -> None:
    """Removes a key; of a list with an unusable element, the whole list."""
    node: Any = tree
    for part in path[:-1]:
        if not isinstance(node.get(part), dict):
            node.pop(part, None)
            return
        node = node[part]
    node.pop(path[-1], None)


# ---- pydantic's errors as lines


def _input_path(tree: Mapping[str, Any], detail: ErrorDetails) -> tuple[str, ...]:
    """The path in the user's tree: pydantic adds names of union members and of derived keys."""
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
    """Dotted paths that are broken (with what may have been meant), and one line per problem."""
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
    if first["type"] == "extra_forbidden":
        place = place_of(path)
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
