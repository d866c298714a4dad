"""The shrunk recipe on disk: a child of the user's one with its overrides, and a child of that with what was changed.

Invariant: `python examples/run_grpo.py --config DIR/shrunk.yaml` is the run that `shrink` makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.cluster.shrink.changes import Changes
from nemo_rl.config.compose import COMMAND_LINE, apply_overrides, compose
from nemo_rl.config.load import load_config
from nemo_rl.config.schema import MasterConfig
from nemo_rl.config.schema_walk import default_tree, lookup, place_of
from nemo_rl.errors import RunFolderError, boundary

__all__ = ["SHRUNK", "write_recipe"]

GIVEN, SHRUNK = "recipe.yaml", "shrunk.yaml"
DELETES = "~"


def write_recipe(folder: Path, recipe: Path, overrides: Sequence[str], changes: Changes) -> MasterConfig:
    """Writes both files and loads the small one, so that every rule has looked at it.

    Raises:
        ConfigError: the small recipe breaks a rule.
        RunFolderError: the folder cannot be written.
    """
    given = {"defaults": str(recipe.absolute()), **_overridden(recipe, overrides)}
    _write(folder / GIVEN, [f"{recipe.name} with what was set over it."], given)
    head = f"What `nemo-rl shrink` changed. To run it: python examples/run_grpo.py --config {folder / SHRUNK}"
    why = [f"{change.key}: {change.why}" for change in changes.found]
    _write(folder / SHRUNK, [head, *why], {"defaults": GIVEN, **changes.tree()})
    return load_config(folder / SHRUNK)


def _overridden(recipe: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Overrides of a command line as a recipe; a deleted key has its default again."""
    composed, tree = compose(recipe), dict[str, Any]()
    apply_overrides(composed, overrides)
    for path, layer in composed.layers.items():
        if layer is COMMAND_LINE:
            _set(tree, path, lookup(composed.tree, path)[1])
    for text in overrides:
        path = tuple(text.removeprefix(DELETES).split("."))
        if not text.startswith(DELETES) or lookup(composed.tree, path)[0]:
            continue
        if place_of(path).is_free:
            _set(tree, path[:-1], {"_override_": True, **lookup(composed.tree, path[:-1])[1]})
        else:
            _set(tree, path, lookup(default_tree(), path)[1])
    return tree


def _set(tree: dict[str, Any], path: Sequence[str], value: object) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _write(path: Path, head: Sequence[str], tree: Mapping[str, Any]) -> None:
    text = yaml.safe_dump(dict(tree), sort_keys=False, allow_unicode=True, width=116)
    with boundary(RunFolderError, f"{path}: cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"# {line}\n" for line in head) + text, encoding="utf-8")
