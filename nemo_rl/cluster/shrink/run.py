"""`shrink`: a recipe for a cluster, made small and run on this machine; called by `nemo-rl shrink`.

shrink
  |- load_config                   every rule, on the real sizes                       (config)
  |- check_planned_model_fits      the real model in the real layout                   (models.policy.fit)
  |- small_layout                  two ranks along each axis                           (changes)
  |- write_small_model             random weights of the family, a tokenizer           (model)
  |- changes_of, write_recipe      what else is other here, as a recipe                (changes)
  |- run                           the very same trainer                               (algorithms.run)
  `- checks_of                     against one process, engines, the checkpoint        (checks)

The shrunk recipe is a child of the user's recipe; `python examples/run_grpo.py --config DIR/shrunk.yaml` is the run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from nemo_rl.algorithms.run import run
from nemo_rl.cluster.known_models import planned_model_config
from nemo_rl.cluster.shrink.changes import TEACHER, Changes, changes_of, small_layout, teacher_sizes
from nemo_rl.cluster.shrink.checks import ShrinkReport, checks_of, stages_of
from nemo_rl.config.compose import COMMAND_LINE, apply_overrides, compose
from nemo_rl.config.load import load_config
from nemo_rl.config.schema import MasterConfig
from nemo_rl.config.schema_walk import default_tree, lookup, place_of
from nemo_rl.data.datasets import raw_prompts
from nemo_rl.errors import RunFolderError, boundary
from nemo_rl.models.policy.fit import check_planned_model_fits
from nemo_rl.models.tiny_model import write_small_model

__all__ = ["SHRUNK", "ShrinkRequest", "shrink", "write_recipe"]

GIVEN, SHRUNK = "recipe.yaml", "shrunk.yaml"
DELETES = "~"


def write_recipe(folder: Path, recipe: Path, overrides: Sequence[str], changes: Changes) -> MasterConfig:
    """Write both files and load the small one, so that every rule has checked it.

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
    """Return the overrides of a command line as a recipe; a deleted key has its default again."""
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


WORKERS_PER_CPU, MAX_WORKERS = 4, 8
"""Processes of the policy that a core bears in a run of so few numbers, and the most of them anywhere."""
MODEL = "model"
TEACHER_SEED = 1
"""Seed of a teacher's weights: other ones than the model's, from which it would learn nothing."""
PROMPTS_READ = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ShrinkRequest:
    """The request to shrink one recipe."""

    recipe: Path
    overrides: tuple[str, ...] = ()
    cpus: int = 2
    """Cores of this machine that the run may use."""
    out: Path
    """Folder of the small recipe, its model and its run."""
    steps: int = 3
    is_run: bool = True
    model_config: Path | None = None
    """`config.json` of the real model, in place of a folder or a known name."""


def shrink(request: ShrinkRequest, *, console: Console) -> ShrinkReport:
    """Check the real recipe, write a small one, run it and check the run.

    Raises:
        UserError: the recipe is at fault, as it is or made small; the message is that of the rule or the run.
        NemoRLError: a worker or the data plane of the small run failed.
    """
    started = time.monotonic()
    config = load_config(request.recipe, request.overrides)
    real = planned_model_config(config.policy.model_name, given=request.model_config)
    check_planned_model_fits(real, config.policy)
    notes = _prompt_notes(config)
    most = min(MAX_WORKERS, WORKERS_PER_CPU * request.cpus)
    layout = small_layout(config.policy.parallel_sizes, config.cluster.num_workers, max_workers=most)
    model = write_small_model(request.out / MODEL, real, layout.sizes, real_sizes=layout.real)
    if config.loss_fn.distillation.enabled:
        sizes = teacher_sizes(config)
        write_small_model(request.out / TEACHER, real, sizes, real_sizes=sizes, seed=TEACHER_SEED)
    changes = changes_of(
        config, layout, steps=request.steps, out=request.out, model=model.folder, num_layers=model.num_layers
    )
    small = write_recipe(request.out, request.recipe, request.overrides, changes)
    report = ShrinkReport(
        recipe=request.recipe,
        out=request.out,
        model=f"{config.policy.model_name} ({real.model_type}, {real.num_hidden_layers} layers) fits its layout; here "
        f"{model.num_layers} layers, {model.num_parameters} parameters, random",
        layout=layout.text,
        reduced=layout.reduced,
        changes=tuple(changes.found),
        notes=notes,
    )
    if not request.is_run:
        return report
    run(small, console=console)
    return replace(
        report,
        stages=stages_of(small),
        steps=request.steps,
        checks=checks_of(small, steps=request.steps),
        seconds=time.monotonic() - started,
    )


def _prompt_notes(config: MasterConfig) -> tuple[str, ...]:
    """Open the files of prompts that are here, so that a wrong key shows; raise a DatasetError of theirs."""
    notes = []
    for key, source in (("data.train", config.data.train), ("data.validation", config.data.validation)):
        if source is None or source.data_path is None:
            continue
        if source.data_path.exists():
            list(islice(raw_prompts(source, key), PROMPTS_READ))
            notes.append(f"{key}: {source.data_path} was opened, but is not what the small model reads")
        else:
            notes.append(f"{key}: {source.data_path} is not here and was not looked at")
    return tuple(notes)
