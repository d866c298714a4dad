"""Resolves `${...}` in a composed recipe: `resolve_interpolations`.

Called by the loader after overrides. A key that the recipe leaves alone resolves to its default in the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_rl.config.compose import Recipe
from nemo_rl.config.schema_walk import default_tree

__all__ = ["resolve_interpolations"]


def resolve_interpolations(recipe: Recipe) -> dict[tuple[str, ...], str]:
    """Replaces interpolations by their values; returns path -> problem of those that cannot be resolved."""
    wanted = [(path, value) for path, value in recipe.leaves() if isinstance(value, str) and "${" in value]
    if not wanted:
        return {}
    _register_resolvers()
    problems: dict[tuple[str, ...], str] = {}
    everything = OmegaConf.create(_overlay(default_tree(), recipe.tree))
    resolved: list[tuple[tuple[str, ...], Any]] = []
    for path, value in wanted:
        try:
            resolved.append((path, _value_at(everything, path)))
        except (OmegaConfBaseException, RecursionError, ArithmeticError, TypeError) as error:
            problems[path] = _unresolved(value, error)
    for path, value in resolved:
        _assign(recipe.tree, path, value)
    return problems


def _register_resolvers() -> None:
    """`${mul:a,b}` and the like, as the field's recipes use them."""
    resolvers: dict[str, Callable[..., Any]] = {
        "add": lambda *numbers: sum(numbers),
        "div": lambda a, b: a // b if isinstance(a, int) and isinstance(b, int) and a % b == 0 else a / b,
        "max": lambda *numbers: max(numbers),
        "mul": lambda a, b: a * b,
    }
    for name, function in resolvers.items():
        OmegaConf.register_new_resolver(name, function, replace=True)


def _value_at(everything: Any, path: Sequence[str]) -> Any:
    node = everything
    for part in path:
        node = node[int(part) if OmegaConf.is_list(node) else part]
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def _unresolved(value: str, error: Exception) -> str:
    detail = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"cannot resolve {value!r}: {detail}"


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
