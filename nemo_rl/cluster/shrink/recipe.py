"""The shrunk recipe on disk: the user's one as it was composed, and a child of it that holds what was changed.

Invariant: `python examples/run_grpo.py --config DIR/shrunk.yaml` is the run that `shrink` makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.cluster.shrink.changes import Changes
from nemo_rl.config.compose import compose
from nemo_rl.config.load import load_config
from nemo_rl.config.overrides import apply_overrides
from nemo_rl.config.schema import MasterConfig
from nemo_rl.errors import RunFolderError, boundary

__all__ = ["SHRUNK", "write_recipe"]

GIVEN, SHRUNK = "recipe.yaml", "shrunk.yaml"


def write_recipe(folder: Path, recipe: Path, overrides: Sequence[str], changes: Changes) -> MasterConfig:
    """Writes both files and loads the small one, so that every rule has looked at it.

    Raises:
        ConfigError: the small recipe breaks a rule.
        RunFolderError: the folder cannot be written.
    """
    composed = compose(recipe)
    apply_overrides(composed, overrides)
    _write(folder / GIVEN, f"{recipe} with its overrides.", composed.tree)
    why = {change.key: change.why for change in changes.found}
    head = f"What `nemo-rl shrink` changed in {GIVEN}. Run: python examples/run_grpo.py --config {folder / SHRUNK}"
    _write(folder / SHRUNK, "\n# ".join([head, *(f"{key}: {text}" for key, text in why.items())]), changes.tree())
    return load_config(folder / SHRUNK)


def _write(path: Path, head: str, tree: Mapping[str, Any]) -> None:
    inherited = {"defaults": GIVEN} if path.name == SHRUNK else {}
    text = yaml.safe_dump({**inherited, **tree}, sort_keys=False, allow_unicode=True, width=116)
    with boundary(RunFolderError, f"{path}: cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {head}\n{text}", encoding="utf-8")
