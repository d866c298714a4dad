"""Resolves `${...}` in a composed recipe: `resolve_interpolations`.

Called by the loader after overrides. A key that the recipe leaves alone resolves to its default in the schema.
`${a.b}` is the value at a.b, `${.b}` that of a neighbour, `${..b}` one section further up; `${mul:2,${a.b}}` calls one
of `FUNCTIONS`; a backslash before it leaves it as text. Every key is resolved once, and all that references
bring is counted each time, so references that multiply end. OmegaConf reads the same language, but has no such bounds
and ends at the first problem.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemo_rl.config.compose import Recipe
from nemo_rl.config.schema_walk import default_tree
from nemo_rl.config.yaml_text import MAX_DEPTH, MAX_INTEGER, MAX_TEXT, MAX_VALUES, YamlProblem, parse_yaml

__all__ = ["FUNCTIONS", "resolve_interpolations"]

_START = re.compile(r"\\?\$\{")
_INDEX = re.compile(r"\[(\w+)\]")


class _Unresolved(ValueError):
    """The reason why one text cannot be resolved."""


def resolve_interpolations(recipe: Recipe, *, defaults: Mapping[str, Any] | None = None) -> dict[tuple[str, ...], str]:
    """Replace interpolations by their values; return path -> problem of those that cannot be resolved.

    Args:
        defaults: what a key that the recipe leaves alone resolves to; None takes the schema's.
    """
    wanted = [(path, value) for path, value in recipe.leaves() if isinstance(value, str) and "${" in value]
    if not wanted:
        return {}
    problems: dict[tuple[str, ...], str] = {}
    resolver = _Resolver(_overlay(default_tree() if defaults is None else dict(defaults), recipe.tree))
    resolved: list[tuple[tuple[str, ...], Any]] = []
    for path, value in wanted:
        try:
            resolved.append((path, resolver.value_at(path)))
        except _Unresolved as error:
            problems[path] = f"cannot resolve {value[:200]!r}: {error}"
    for path, value in resolved:
        _assign(recipe.tree, path, value)
    return problems


class _Resolver:
    """Values of a tree; remembers what it has resolved."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self._tree = tree
        self._known: dict[tuple[str, ...], Any] = {}
        self._open: list[tuple[str, ...]] = []
        self._num_values = self._num_characters = 0

    def value_at(self, path: tuple[str, ...]) -> Any:
        """Return the value at `path`, without interpolations."""
        if path in self._known:
            return self._known[path]
        if path in self._open:
            raise _Unresolved(" -> ".join(".".join(part) for part in (*self._open[self._open.index(path) :], path)))
        if len(self._open) > MAX_DEPTH:
            raise _Unresolved(f"more than {MAX_DEPTH} references one behind the other")
        self._open.append(path)
        try:
            self._known[path] = found = self._plain(self._find(path), path)
        finally:
            self._open.pop()
        return found

    def _find(self, path: tuple[str, ...]) -> Any:
        node: Any = self._tree
        for index, part in enumerate(path):
            if isinstance(node, str) and "${" in node:
                node = self.value_at(path[:index])
            if isinstance(node, list) and part.isdecimal() and len(part) < 6 and int(part) < len(node):
                node = node[int(part)]
            elif isinstance(node, Mapping) and part in node:
                node = node[part]
            else:
                raise _Unresolved(f"there is no {'.'.join(path[: index + 1])}")
        return node

    def _counted(self, value: Any) -> Any:
        """Return a value that a reference brings, which is written out in each place that refers to it."""
        self._num_values += 1
        self._num_characters += len(value) if isinstance(value, str) else 0
        if self._num_values > MAX_VALUES:
            raise _Unresolved(f"more than {MAX_VALUES} values come from references")
        if self._num_characters > MAX_TEXT:
            raise _Unresolved(f"more than {MAX_TEXT} characters come from references")
        if isinstance(value, (dict, list)):
            for item in value.values() if isinstance(value, dict) else value:
                self._counted(item)
        return value

    def _plain(self, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, dict):
            return {key: self._plain(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [self._plain(item, (*path, str(index))) for index, item in enumerate(value)]
        return self._text(value, path[:-1]) if isinstance(value, str) and "${" in value else value

    def _text(self, text: str, section: tuple[str, ...], *, depth: int = 0) -> Any:
        """Return `text` with its interpolations replaced; one that is all of the text keeps its type."""
        if depth > MAX_DEPTH:
            raise _Unresolved(f"nested deeper than {MAX_DEPTH} levels")
        parts: list[Any] = []
        position = 0
        while (start := _START.search(text, position)) is not None:
            parts.append(text[position : start.start()])
            if start[0].startswith("\\"):
                parts.append("${")
                position = start.end()
                continue
            end = _closing(text, start.end())
            parts.append(self._reference(text[start.end() : end], section, depth=depth + 1))
            position = end + 1
        parts.append(text[position:])
        filled = [part for part in parts if part != ""]
        if len(filled) == 1:
            return filled[0]
        return self._counted("".join(str(part) for part in filled))

    def _reference(self, body: str, section: tuple[str, ...], *, depth: int) -> Any:
        name, colon, arguments = body.partition(":")
        if colon and "${" not in name:
            return self._call(name.strip(), [self._argument(text, section, depth) for text in _split(arguments)])
        key = str(self._text(body, section, depth=depth)).strip()
        named = key.lstrip(".")
        num_dots = len(key) - len(named)
        if num_dots > len(section) + 1 or not named:
            raise _Unresolved(f"expected a key, got {body[:80]!r}")
        above = section[: len(section) - num_dots + 1] if num_dots else ()
        return self._counted(self.value_at((*above, *_INDEX.sub(r".\1", named).split("."))))

    def _argument(self, text: str, section: tuple[str, ...], depth: int) -> Any:
        if "${" in text:
            return self._text(text.strip(), section, depth=depth)
        try:
            return parse_yaml(text)
        except YamlProblem as error:
            raise _Unresolved(str(error)) from None

    def _call(self, name: str, arguments: Sequence[Any]) -> Any:
        if name not in FUNCTIONS:
            raise _Unresolved(f"expected one of the functions {', '.join(FUNCTIONS)}, got {name[:80]!r}")
        try:
            value = FUNCTIONS[name](*arguments)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise _Unresolved(f"{name}: {error}") from None
        if isinstance(value, (int, float)) and not (math.isfinite(value) and abs(value) <= MAX_INTEGER):
            raise _Unresolved(f"{name}: expected a number of at most 64 bits, got a larger one")
        return value


def _numbers(given: Sequence[Any]) -> list[Any]:
    wrong = [value for value in given if isinstance(value, bool) or not isinstance(value, (int, float))]
    if wrong:
        raise TypeError(f"expected numbers, got {str(wrong[0])[:80]!r}")
    return list(given)


def _divide(*given: Any) -> Any:
    a, b = _numbers(given)
    return a // b if isinstance(a, int) and isinstance(b, int) and a % b == 0 else a / b


def _environment(name: str, *default: Any) -> Any:
    found = os.environ.get(str(name), *default[:1])
    if found is None:
        raise ValueError(f"the environment has no {name}, and there is no default after a comma")
    return found


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "add": lambda *numbers: sum(_numbers(numbers)),
    "div": _divide,
    "max": lambda *numbers: max(_numbers(numbers)),
    "mul": lambda *numbers: math.prod(_numbers(numbers)),
    "oc.env": _environment,
}
"""Resolvers that may stand before the colon, as other frameworks' recipes use them."""


def _closing(text: str, start: int) -> int:
    """Return the end of the interpolation that begins before `start`."""
    depth, position = 1, start
    while position < len(text):
        if text.startswith("${", position):
            depth += 1
            position += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    raise _Unresolved("the closing brace is missing")


def _split(arguments: str) -> list[str]:
    """Split a text at the commas outside of nested interpolations."""
    found, depth, start = [], 0, 0
    for position, character in enumerate(arguments):
        if arguments.startswith("${", position):
            depth += 1
        elif character == "}":
            depth -= 1
        elif character == "," and depth == 0:
            found.append(arguments[start:position])
            start = position + 1
    return [*found, arguments[start:]]


def _assign(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    node: Any = tree
    for part in path[:-1]:
        node = node[int(part) if isinstance(node, list) else part]
    last = path[-1]
    node[int(last) if isinstance(node, list) else last] = value


def _overlay(base: dict[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        present = merged.get(key)
        merged[key] = _overlay(present, value) if isinstance(present, dict) and isinstance(value, dict) else value
    return merged
