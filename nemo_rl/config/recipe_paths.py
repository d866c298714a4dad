"""Paths that a recipe reads from: looked for in the working directory, then beside the recipe that names them.

`find_path` is the only place that looks; `compose` calls it for `defaults:`, the loader for all keys. What a run writes
(`logger.log_dir`, `checkpointing.checkpoint_dir`) is not looked for: it lies in the working directory.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_rl.config.compose import Recipe

__all__ = ["find_path", "locate_paths", "places_text"]

READ = (
    "policy.model_name",
    "policy.tokenizer.name",
    "data.train.data_path",
    "data.validation.data_path",
    "data.validation_sets.*.data_path",
    "diagnostics.tracer.artifacts",
)
"""Keys with the path of a file or a folder that a run reads."""
REWARD = "env.reward_function"


def find_path(given: str, *, recipe: str, but_not: tuple[Path, ...] = ()) -> Path | None:
    """The file or folder that a recipe means; None where there is none.

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
    """Where a path was looked for, for messages."""
    if Path(given).is_absolute():
        return given
    places = dict.fromkeys(os.path.abspath(folder) for folder in (Path(), Path(recipe).parent))
    return f"{given} in {' and in '.join(places)}"


def locate_paths(recipe: Recipe) -> dict[tuple[str, ...], str]:
    """Puts the absolute path in place of one that is found beside its recipe alone; returns what cannot be found.

    Other paths stay as they are: they may be made later, or be names on the hub.
    """
    problems: dict[tuple[str, ...], str] = {}
    for path, value in list(recipe.leaves()):
        name, layer = ".".join(path), recipe.layer_of(path)
        if layer is None or not isinstance(value, str) or not value:
            continue
        # A name on the command line is of the working directory.
        file = layer.name if Path(layer.name).is_file() else ""
        if name == REWARD:
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
    """`FILE.py:function` with the file's absolute path, or `module:function`; None where the file is not there."""
    place, colon, function = given.rpartition(":")
    if not colon:
        return given
    if place.endswith(".py"):
        found = find_path(place, recipe=recipe)
        return None if found is None else f"{os.path.abspath(found)}:{function}"
    for file in _files_of(place):
        if Path(file).is_file() or _can_be_imported(place):
            return given
        found = find_path(file, recipe=recipe)
        if found is not None:
            return f"{os.path.abspath(found)}:{function}"
    return given


def _files_of(module: str) -> Iterator[str]:
    """Files that a module could be in; none for what is no name of a module."""
    names = module.split(".")
    if all(map(str.isidentifier, names)):
        yield f"{'/'.join(names)}.py"
        yield f"{'/'.join(names)}/__init__.py"


def _can_be_imported(module: str) -> bool:
    """Whether the module path has its first package; nothing is imported for it."""
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False
