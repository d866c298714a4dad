"""Overrides of the command line: `a.b=v` changes a key, `+a.b=v` adds one, `~a.b` deletes one.

Values are YAML (`lr=1e-4`, `betas=[0.9,0.95]`, `name=null`). Called by the loader; problems are returned, not raised.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl.config.compose import COMMAND_LINE, Recipe
from nemo_rl.config.schema_walk import default_tree, lookup, place_of, suggest, suggest_path
from nemo_rl.config.yaml_text import MAX_DEPTH, YamlProblem, parse_yaml
from nemo_rl.errors import shorten

__all__ = ["apply_overrides"]

_OVERRIDE = re.compile(r"(?P<mode>[+~]?)(?P<path>[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*)(?P<value>=.*)?", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Override:
    mode: str
    path: tuple[str, ...]
    value: Any

    @property
    def name(self) -> str:
        return ".".join(self.path)


def apply_overrides(recipe: Recipe, overrides: Sequence[str]) -> list[str]:
    """Changes `recipe` in the order given and returns one line per problem."""
    problems: list[str] = []
    for text in overrides:
        parsed = _parse(text)
        if isinstance(parsed, str):
            problems.append(f"{COMMAND_LINE.name}: {parsed}")
            continue
        problem = _delete(recipe, parsed) if parsed.mode == "~" else _set(recipe, parsed)
        if problem:
            problems.append(f"{COMMAND_LINE.name}: {shorten(parsed.name)}: {shorten(problem)}")
    return problems


def _parse(text: str) -> _Override | str:
    match = _OVERRIDE.fullmatch(text)
    if match is None:
        return f"{shorten(repr(text))}: expected a.b=VALUE, +a.b=VALUE or ~a.b"
    mode, value = match["mode"], match["value"]
    if (value is None) != (mode == "~"):
        expected = "~a.b without a value" if mode == "~" else f"{match['path']}=VALUE"
        return f"{shorten(repr(text))}: expected {expected}"
    path = tuple(match["path"].split("."))
    if len(path) > MAX_DEPTH:
        return f"{shorten(repr(text))}: expected at most {MAX_DEPTH} names, got {len(path)}"
    if mode == "~":
        return _Override(mode=mode, path=path, value=None)
    try:
        parsed = parse_yaml(value.removeprefix("="))
    except YamlProblem as error:
        return f"{shorten(repr(text))}: the value cannot be read: {error}"
    return _Override(mode=mode, path=path, value=parsed)


def _set(recipe: Recipe, override: _Override) -> str | None:
    place = place_of(override.path)
    if not place.is_known:
        path = override.path[: place.unknown_at + 1]
        what = (
            f"unknown key {path[-1]!r}" if len(path) < len(override.path) or place.candidates else "has no keys below"
        )
        return what + suggest_path(path, place.candidates, recipe.tree)
    if place.is_free:
        _seed_free_section(recipe, override.path)
    is_set, present = lookup(recipe.tree, override.path)
    if override.mode == "+" and is_set:
        return f"is already set to {shorten(repr(present))}; use {override.name}=... to change it"
    if override.mode == "" and place.is_free and not is_set:
        _, siblings = lookup(recipe.tree, override.path[:-1])
        names = siblings if isinstance(siblings, dict) else ()
        return f"is not set in the recipe{suggest(override.path[-1], names)}; use +{override.name}=... to add it"
    return recipe.set(override.path, override.value, layer=COMMAND_LINE)


def _delete(recipe: Recipe, override: _Override) -> str | None:
    is_set, _ = lookup(recipe.tree, override.path)
    _, section = lookup(recipe.tree, override.path[:-1])
    if not is_set:
        names = section if isinstance(section, dict) else ()
        return f"is not set in the recipe, so it cannot be deleted{suggest(override.path[-1], names)}"
    del section[override.path[-1]]
    recipe.mark(override.path, None)
    return None


def _seed_free_section(recipe: Recipe, path: tuple[str, ...]) -> None:
    """A dictionary with free keys that the recipe leaves at its default starts from that default."""
    for end in range(1, len(path)):
        section = path[:end]
        if place_of(section).field is None or lookup(recipe.tree, section)[0]:
            continue
        has_default, value = lookup(default_tree(), section)
        if has_default and isinstance(value, dict) and end == len(path) - 1:
            recipe.set(section, copy.deepcopy(value), layer=COMMAND_LINE)
