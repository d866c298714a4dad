"""Reads a recipe and its `defaults:` into one plain tree that remembers which file set what.

`defaults:` is one path or a list of paths, relative to the file that names them: depth first, later entries win, the
file itself wins over all of them. A section with `_override_: true` replaces the inherited one instead of merging.
Called by the loader; the tree is not validated here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_rl.errors import ConfigError

__all__ = ["COMMAND_LINE", "Recipe", "compose"]

COMMAND_LINE = "command line"
_REPLACE = "_override_"


@dataclass(kw_only=True, slots=True)
class Recipe:
    """A composed tree, before validation."""

    file: str
    """The recipe the user named."""
    tree: dict[str, Any] = field(default_factory=dict)
    sources: dict[tuple[str, ...], str] = field(default_factory=dict)
    """Path of every value set -> file (or the command line) that set it last."""

    def source_of(self, path: Sequence[str]) -> str:
        """Who set `path`, or the nearest section above it, or anything below it; else the recipe itself."""
        for end in range(len(path), 0, -1):
            found = self.sources.get(tuple(path[:end]))
            if found is not None:
                return found
        return self.file

    def leaves(self) -> list[tuple[tuple[str, ...], Any]]:
        """Path and value of everything that is no section; elements of a list by their index."""
        return list(_leaves(self.tree, prefix=()))

    def set(self, path: Sequence[str], value: Any, *, source: str) -> None:
        """Sets one value, making the sections above it."""
        node = self.tree
        for part in path[:-1]:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        node[path[-1]] = value
        self.sources[tuple(path)] = source


def compose(path: Path) -> Recipe:
    """The recipe at `path` over everything it inherits.

    Raises:
        ConfigError: a file is missing, is no YAML mapping, or inherits from itself.
    """
    recipe = Recipe(file=str(path))
    _read_into(recipe, path, chain=())
    return recipe


def _read_into(recipe: Recipe, path: Path, *, chain: tuple[Path, ...]) -> None:
    real = path.resolve()
    if real in chain:
        circle = " -> ".join(str(p) for p in (*chain[chain.index(real) :], real))
        raise ConfigError(f"{path}: defaults: expected files that do not inherit from each other, got {circle}")
    tree = _read(path, chain=chain)
    parents = tree.pop("defaults", [])
    if isinstance(parents, str):
        parents = [parents]
    if not isinstance(parents, list) or not all(isinstance(p, str) for p in parents):
        raise ConfigError(f"{path}: defaults: expected a path or a list of paths, got {parents!r}")
    for parent in parents:
        _read_into(recipe, path.parent / parent, chain=(*chain, real))
    _merge(recipe, recipe.tree, tree, prefix=(), source=str(path))


def _read(path: Path, *, chain: tuple[Path, ...]) -> dict[str, Any]:
    wanted_by = f" (named in `defaults:` of {chain[-1]})" if chain else ""
    try:
        loaded = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{wanted_by}; expected a YAML recipe") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be opened{wanted_by}: {error}") from error
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: expected a mapping of sections, got a list")
    tree: dict[str, Any] = OmegaConf.to_container(loaded, resolve=False)
    return tree


def _merge(
    recipe: Recipe, into: dict[Any, Any], child: Mapping[Any, Any], *, prefix: tuple[str, ...], source: str
) -> None:
    for key, value in child.items():
        path = (*prefix, str(key))
        if isinstance(value, dict):
            replaces = value.pop(_REPLACE, False) is True
            present = into.get(key)
            if replaces or not isinstance(present, dict):
                into[key] = {}
                recipe.sources[path] = source
            _merge(recipe, into[key], value, prefix=path, source=source)
        else:
            into[key] = copy.deepcopy(value)
            recipe.sources[path] = source


def _leaves(node: Any, *, prefix: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, prefix=(*prefix, str(key)))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _leaves(value, prefix=(*prefix, str(index)))
    else:
        yield prefix, node
