"""Reads a recipe and its `defaults:` into one plain tree that remembers which file set what.

`defaults:` is one path or a list of paths, looked for as every path of a recipe: depth first, later entries win, the
file itself wins over all of them. A section with `_override_: true` replaces the inherited one instead of merging.
Called by the loader; the tree is not validated here.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nemo_rl.config.recipe_paths import find_path, places_text
from nemo_rl.config.yaml_text import MAX_TEXT, YamlProblem, parse_yaml, text_problem
from nemo_rl.errors import ConfigError, shorten

__all__ = ["COMMAND_LINE", "Layer", "Recipe", "compose"]

_REPLACE = "_override_"
_MAX_FILES = 64
"""Files that a recipe is made of; ours have up to four."""


class Layer(NamedTuple):
    """A file or the command line; later layers win over earlier ones."""

    order: int
    name: str


COMMAND_LINE = Layer(order=sys.maxsize, name="command line")


@dataclass(kw_only=True, slots=True)
class Recipe:
    """A composed tree, before validation."""

    file: str
    """The recipe the user named."""
    tree: dict[str, Any] = field(default_factory=dict)
    layers: dict[tuple[str, ...], Layer] = field(default_factory=dict)
    """Path of every value set -> who set it last."""
    num_files: int = 0
    missing: list[str] = field(default_factory=list)
    """Parents that are not there, where that is no error."""

    def layer_of(self, path: Sequence[str]) -> Layer | None:
        """Who set `path` or anything below it last, or else the nearest section above it; None for a default."""
        inside = [layer for known, layer in self.layers.items() if known[: len(path)] == tuple(path)]
        if inside:
            return max(inside)
        for end in range(len(path), 0, -1):
            found = self.layers.get(tuple(path[:end]))
            if found is not None:
                return found
        return None

    def source_of(self, path: Sequence[str]) -> str:
        """Name of the layer that set `path`; for a default, the recipe itself."""
        layer = self.layer_of(path)
        return self.file if layer is None else layer.name

    def leaves(self) -> list[tuple[tuple[str, ...], Any]]:
        """Path and value of everything that is no section; elements of a list by their index."""
        return list(_leaves(self.tree, prefix=()))

    def set(self, path: Sequence[str], value: Any, *, layer: Layer) -> str | None:
        """Sets one value, making the sections above it; a value where a section must be is a problem."""
        node = self.tree
        for index, part in enumerate(path[:-1]):
            present = node.get(part)
            if present is not None and not isinstance(present, dict):
                return f"{'.'.join(path[: index + 1])} is no section that has keys, but {shorten(repr(present))}"
            node = _new_section(node, part) if present is None else present
        node[path[-1]] = value
        self.mark(tuple(path), layer)
        return None

    def mark(self, path: tuple[str, ...], layer: Layer | None) -> None:
        """Notes who set `path` with all that is below it; None forgets it."""
        for below in [known for known in self.layers if known[: len(path)] == path]:
            del self.layers[below]
        if layer is not None:
            self.layers[path] = layer


def compose(path: Path, *, needs_parents: bool = True) -> Recipe:
    """The recipe at `path` over everything it inherits.

    Args:
        needs_parents: False notes parents that are not there in `missing`.

    Raises:
        ConfigError: a file is missing, is no YAML mapping, or inherits from itself.
    """
    problem = text_problem(str(path))
    if problem is not None:
        raise ConfigError(f"{str(path)!a}: expected the path of a YAML recipe, got a text that {problem}")
    recipe = Recipe(file=str(path))
    _read_into(recipe, path, chain=(), needs_parents=needs_parents)
    return recipe


def _read_into(recipe: Recipe, path: Path, *, chain: tuple[Path, ...], needs_parents: bool) -> None:
    real = path.resolve()
    if chain and not needs_parents and not path.exists():
        recipe.missing.append(str(path))
        return
    if real in chain:
        circle = " -> ".join(str(p) for p in (*chain[chain.index(real) :], real))
        raise ConfigError(f"{path}: defaults: expected files that do not inherit from each other, got {circle}")
    if recipe.num_files + len(chain) >= _MAX_FILES:
        raise ConfigError(f"{path}: defaults: expected a recipe of at most {_MAX_FILES} files, got more")
    tree = _read(path, chain=chain)
    parents = tree.pop("defaults", [])
    if isinstance(parents, str):
        parents = [parents]
    if not isinstance(parents, list) or not all(isinstance(p, str) for p in parents):
        raise ConfigError(f"{path}: defaults: expected a path or a list of paths, got {shorten(repr(parents))}")
    for parent in parents:
        problem = text_problem(parent)
        if problem is not None:
            raise ConfigError(f"{path}: defaults: expected a path, got a text that {problem}: {shorten(repr(parent))}")
        # A circle is named as one.
        found = find_path(parent, recipe=str(path), but_not=(*chain, real)) or find_path(parent, recipe=str(path))
        if found is None and needs_parents:
            looked = places_text(parent, recipe=str(path))
            raise ConfigError(
                f"{shorten(parent)}: no such file (named in `defaults:` of {path}); expected a YAML recipe, looked for "
                f"{shorten(looked)}"
            )
        _read_into(recipe, found or path.parent / parent, chain=(*chain, real), needs_parents=needs_parents)
    recipe.num_files += 1
    _merge(recipe, recipe.tree, tree, prefix=(), layer=Layer(order=recipe.num_files, name=str(path)))


def _read(path: Path, *, chain: tuple[Path, ...]) -> dict[str, Any]:
    wanted_by = f" (named in `defaults:` of {chain[-1]})" if chain else ""
    try:
        with path.open(encoding="utf-8") as file:
            loaded = parse_yaml(file.read(MAX_TEXT + 1))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{wanted_by}; expected a YAML recipe") from None
    except YamlProblem as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be opened{wanted_by}: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, got {shorten(repr(loaded))}")
    return loaded


def _new_section(node: dict[str, Any], name: str) -> dict[str, Any]:
    section: dict[str, Any] = {}
    node[name] = section
    return section


def _merge(
    recipe: Recipe, into: dict[Any, Any], child: Mapping[Any, Any], *, prefix: tuple[str, ...], layer: Layer
) -> None:
    for key, value in child.items():
        path = (*prefix, str(key))
        if isinstance(value, dict):
            replaces = value.pop(_REPLACE, False)
            if not isinstance(replaces, bool):
                raise ConfigError(
                    f"{layer.name}: {'.'.join(path)}.{_REPLACE}: expected true or false, got {shorten(repr(replaces))}"
                )
            present = into.get(key)
            if replaces or not isinstance(present, dict):
                into[key] = {}
                recipe.mark(path, layer)
            _merge(recipe, into[key], value, prefix=path, layer=layer)
        else:
            into[key] = copy.deepcopy(value)
            recipe.mark(path, layer)


def _leaves(node: Any, *, prefix: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, prefix=(*prefix, str(key)))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _leaves(value, prefix=(*prefix, str(index)))
    else:
        yield prefix, node
