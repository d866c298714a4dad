"""A recipe as layers: its parents (`defaults:`), the file itself, the overrides of the command line, and its paths."""

from __future__ import annotations

import copy
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from nemo_rl.config.schema_walk import default_tree, lookup, place_of, suggest, suggest_path
from nemo_rl.config.yaml_text import MAX_DEPTH, MAX_TEXT, YamlProblem, commented_defaults, parse_yaml, text_problem
from nemo_rl.errors import ConfigError, shorten

__all__ = [
    "COMMAND_LINE",
    "Layer",
    "Recipe",
    "apply_overrides",
    "compose",
    "find_path",
    "locate_paths",
    "places_text",
    "recipe_of",
]

READ = (
    "policy.model_name",
    "policy.tokenizer.name",
    "data.train.data_path",
    "data.train.*.data_path",
    "data.validation.data_path",
    "data.validation_sets.*.data_path",
    "diagnostics.tracer.artifacts",
)
"""Keys with the path of a file or a folder that a run reads."""
REWARD = ("env.reward_function", "data.*.env.reward_function")
"""Keys with a reward that may be in a file."""


def find_path(given: str, *, recipe: str, but_not: tuple[Path, ...] = ()) -> Path | None:
    """Return the file or folder that a recipe means; None where there is none.

    Args:
        recipe: file that names it.
        but_not: real paths that it cannot mean.
    """
    for folder in (Path(), Path(recipe).parent):
        found = folder / given
        try:
            if found.exists() and found.resolve() not in but_not:
                return found
        except OSError:
            # A name that no file can have.
            return None
    return None


def places_text(given: str, *, recipe: str) -> str:
    """Return the places in which a path was looked for, for messages."""
    if Path(given).is_absolute():
        return given
    places = dict.fromkeys(os.path.abspath(folder) for folder in (Path(), Path(recipe).parent))
    return f"{given} in {' and in '.join(places)}"


def locate_paths(recipe: Recipe) -> dict[tuple[str, ...], str]:
    """Put the absolute path in place of one that is found beside its recipe alone; return what cannot be found.

    Other paths stay as they are: they may be made later, or be names on the hub.
    """
    problems: dict[tuple[str, ...], str] = {}
    for path, value in list(recipe.leaves()):
        name = ".".join(path).removeprefix("sft.settings.")
        if not isinstance(value, str) or not value:
            continue
        layer = recipe.layer_of(path)
        if layer is None:
            continue
        # A name on the command line is of the working directory.
        file = layer.name if Path(layer.name).is_file() else ""
        if any(fnmatchcase(name, pattern) for pattern in REWARD):
            located = _reward(value, file)
            if located is None:
                place = value.rpartition(":")[0]
                problems[path] = (
                    f"expected a file with the function, got {value!r}: no {places_text(place, recipe=file)}"
                )
                continue
        elif any(fnmatchcase(name, pattern) for pattern in READ) and not Path(value).is_absolute():
            found = find_path(value, recipe=file)
            located = value if found is None or found == Path(value) else os.path.abspath(found)
        else:
            continue
        if located != value:
            recipe.set(path, located, layer=layer)
    return problems


def _reward(given: str, recipe: str) -> str | None:
    """Return `FILE.py:function` with the file's absolute path, or `module:function`; None where the file is
    not there."""
    place, colon, function = given.rpartition(":")
    if not colon:
        return given
    if place.endswith(".py"):
        found = find_path(place, recipe=recipe)
        return None if found is None else f"{os.path.abspath(found)}:{function}"
    for file in _files_of(place):
        # A folder of the working directory may be a package without __init__.py, whose parts import one another by its
        # name. Another file gets its path, which a run's config.yaml keeps for `nemo-rl eval` from any folder.
        if _can_be_imported(place) or ("." in place and Path(file).is_file()):
            return given
        found = find_path(file, recipe=recipe)
        if found is not None:
            return f"{os.path.abspath(found)}:{function}"
    return given


def _files_of(module: str) -> Iterator[str]:
    """Yield the files that a module could be in; none for what is no name of a module."""
    names = module.split(".")
    if all(map(str.isidentifier, names)):
        yield f"{'/'.join(names)}.py"
        yield f"{'/'.join(names)}/__init__.py"


def _can_be_imported(module: str) -> bool:
    """Return whether the first package of a module path exists; nothing is imported for it."""
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False


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
        """Return the layer that set `path` or anything below it last, or else the nearest section above it; None for a
        default."""
        inside = [layer for known, layer in self.layers.items() if known[: len(path)] == tuple(path)]
        if inside:
            return max(inside)
        for end in range(len(path), 0, -1):
            found = self.layers.get(tuple(path[:end]))
            if found is not None:
                return found
        return None

    def sets(self, path: Sequence[str]) -> bool:
        """Return whether a layer sets `path` or anything below it; the section around it alone does not."""
        return any(known[: len(path)] == tuple(path) for known in self.layers)

    def source_of(self, path: Sequence[str]) -> str:
        """Return the name of the layer that set `path`; for a default, the recipe itself."""
        layer = self.layer_of(path)
        return self.file if layer is None else layer.name

    def leaves(self) -> list[tuple[tuple[str, ...], Any]]:
        """Return the path and value of everything that is no section; elements of a list by their index."""
        return list(_leaves(self.tree, prefix=()))

    def set(self, path: Sequence[str], value: Any, *, layer: Layer) -> str | None:
        """Set one value, making the sections above it; a value where a section must be is a problem."""
        node = self.tree
        for index, part in enumerate(path[:-1]):
            present = node.get(part)
            if present is not None and not isinstance(present, dict):
                return f"{'.'.join(path[: index + 1])} is no section that has keys, but {shorten(repr(present))}"
            node = _new_section(node, part) if present is None else present
        node[path[-1]] = value
        self.mark(tuple(path), layer)
        self.layers |= {leaf: layer for leaf, _ in _leaves(value, prefix=tuple(path))}
        return None

    def mark(self, path: tuple[str, ...], layer: Layer | None) -> None:
        """Note who set `path` with all that is below it; None forgets it."""
        for below in [known for known in self.layers if known[: len(path)] == path]:
            del self.layers[below]
        if layer is not None:
            self.layers[path] = layer


def compose(path: Path, *, needs_parents: bool = True) -> Recipe:
    """Return the recipe at `path` over everything it inherits.

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


def recipe_of(sections: Mapping[str, Any], *, name: str) -> Recipe:
    """Return the recipe of a tree that stands in no file, over the defaults of every key.

    Args:
        name: what messages call it.
    """
    recipe = Recipe(file=name)
    for order, tree in enumerate((parse_yaml(commented_defaults()), copy.deepcopy(dict(sections)))):
        _merge(recipe, recipe.tree, tree, prefix=(), layer=Layer(order=order, name=name))
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
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ConfigError(f"{path}: cannot be opened{wanted_by}: expected a plain file, got a pipe, socket or device")
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
        path, present = (*prefix, str(key)), into.get(key)
        if isinstance(value, dict):
            replaces = value.pop(_REPLACE, False)
            if not isinstance(replaces, bool):
                raise ConfigError(
                    f"{layer.name}: {'.'.join(path)}.{_REPLACE}: expected true or false, got {shorten(repr(replaces))}"
                )
            if replaces or not isinstance(present, dict):
                into[key] = {}
                recipe.mark(path, layer)
            _merge(recipe, into[key], value, prefix=path, layer=layer)
            continue
        into[key] = copy.deepcopy(value)
        if isinstance(present, dict | list):
            recipe.mark(path, layer)
        else:
            # Nothing is below it, and a look for it at every path known would be most of the time of a merge.
            recipe.layers[path] = layer


def _leaves(node: Any, *, prefix: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, prefix=(*prefix, str(key)))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _leaves(value, prefix=(*prefix, str(index)))
    else:
        yield prefix, node


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
    """Change `recipe` in the order given and return one line per problem."""
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
    """Seed a dictionary with free keys: one that the recipe leaves at its default starts from that default."""
    for end in range(1, len(path)):
        section = path[:end]
        if place_of(section).field is None or lookup(recipe.tree, section)[0]:
            continue
        has_default, value = lookup(default_tree(), section)
        if has_default and isinstance(value, dict) and end == len(path) - 1:
            recipe.set(section, copy.deepcopy(value), layer=COMMAND_LINE)
