"""Runs recipes at another revision and here, and compares every number that they log, to the last bit.

    python -m tests.helpers.same_numbers --base REV [--steps 5] [--only WORD ...]

Both runs have the same seed, the same starter checkpoint and this Python's packages; the other revision is checked out
into its own work tree. Compared are all metrics but times, bytes and memory, and the rollouts token by token.
An asynchronous run has no order: what the other revision has run is replayed here by its schedule. Prints
the first number that differs of each recipe; exit code 1 when there is one. A change that renames or adds
metrics says so on the command line: `--renamed old=new`, `--added NAME`. One that gives a key another default is told
apart by giving it a value: `--set grpo.drop_zero_advantage_groups=true`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.runs import ROOT, logged_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A recipe that is run at both revisions."""

    file: str
    starter: str = "starter_sort"
    """Its model, of `checkpoints/`."""
    settings: tuple[str, ...] = ()
    is_replayed: bool = False
    """The run of the base is done again by its schedule, in place of its own run."""


ON_MEGATRON = (
    *("policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true", "policy.optimizer=null"),
    *(
        "policy.scheduler=null",
        "policy.megatron_cfg.optimizer.lr=3.0e-3",
        "policy.megatron_cfg.optimizer.weight_decay=0",
    ),
)
RECIPES: Mapping[str, Recipe] = {
    "demo": Recipe(file="configs/grpo_sort_cpu.yaml"),
    "tp2": Recipe(file="configs/recipes/grpo_sort_tp2_cpu.yaml"),
    "megatron_tp2": Recipe(file="configs/recipes/grpo_sort_megatron_tp2_cpu.yaml"),
    "megatron_pp2": Recipe(file="configs/recipes/grpo_sort_megatron_pp2_cpu.yaml"),
    "moe_r3_megatron": Recipe(file="configs/recipes/grpo_sort_moe_r3_megatron_cpu.yaml", starter="starter_sort_moe"),
    "moe_r3_dtensor": Recipe(file="configs/recipes/grpo_sort_moe_r3_dtensor_cpu.yaml", starter="starter_sort_moe"),
    "async_bound_0": Recipe(file="configs/recipes/grpo_sort_async_cpu.yaml", settings=("grpo.async.max_staleness=0",)),
    "async_replayed": Recipe(file="configs/recipes/grpo_sort_async_cpu.yaml", is_replayed=True),
    "lora": Recipe(file="configs/recipes/grpo_sort_lora_cpu.yaml"),
    "lora_megatron": Recipe(
        file="configs/recipes/grpo_sort_lora_cpu.yaml",
        # Adapters of the head have no counterpart there.
        settings=(*ON_MEGATRON, "policy.lora.targets=[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]"),
    ),
    "images": Recipe(file="configs/recipes/grpo_vlm_shapes_cpu.yaml", starter="starter_shapes"),
    "conversations": Recipe(
        file="configs/recipes/grpo_guess_cpu.yaml",
        starter="starter_guess",
        settings=("policy.generation.batch_invariant=true",),
    ),
}
COUNTS_OF_TRANSPORT = "data_plane/"
"""Bytes, calls and times of the data plane, which a change of its code may change."""
APART = ("key", "group", "number", "answer", "messages", "seconds")
"""Keys of a rollout row that are random, times, or repeat the data; no number depends on them."""
APART_OF_A_TURN = ("engine", "waited_s", "sampled_s", "tool_s")
"""Whichever engine is free samples a turn, and rows are the same on all."""
RUN_S = 900.0
"""Longest run, on a machine that does much else."""

Steps = Sequence[Mapping[str, object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """The metrics that a change renames or adds."""

    renamed: Mapping[str, str]
    """Name at the other revision -> name here."""
    added: frozenset[str]


def first_difference(base: Steps, here: Steps, changes: Changes) -> str | None:
    """Return the first step and name whose values differ, in words, or None where all are equal."""
    if len(base) != len(here):
        return f"{len(base)} steps at the base, {len(here)} here"
    for number, (before, after) in enumerate(zip(base, here, strict=True)):
        expected = {changes.renamed.get(name, name): value for name, value in before.items()}
        for name in (*expected, *(name for name in after if name not in expected and name not in changes.added)):
            # Words of JSON: floats are written with all their digits, and NaN equals itself.
            old, new = (json.dumps(values.get(name, "missing"), sort_keys=True) for values in (expected, after))
            if old != new:
                return f"line {number + 1}, {name}: {_short(old)} at the base, {_short(new)} here"
    return None


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def numbers_of(log_dir: Path) -> list[dict[str, object]]:
    """Return the logged metrics without times and bytes, then the rollouts of each step, a line each."""
    metrics: list[dict[str, object]] = [
        {name: value for name, value in step.items() if not name.startswith(COUNTS_OF_TRANSPORT)}
        for step in logged_steps(log_dir)
    ]
    files = sorted(log_dir.glob("rollouts/*.jsonl"))
    rows = [(path.name, json.loads(line)) for path in files for line in path.read_text().splitlines()]
    rollouts: list[dict[str, object]] = [{name: _row_numbers(row)} for name, row in rows]
    assert metrics, f"{log_dir} holds no metrics"
    return [*metrics, *rollouts]


def _row_numbers(row: Mapping[str, Any]) -> dict[str, object]:
    kept = {name: value for name, value in row.items() if name not in APART}
    if isinstance(kept.get("turns"), list):
        turns: list[Mapping[str, object]] = kept["turns"]
        kept["turns"] = [{name: value for name, value in turn.items() if name not in APART_OF_A_TURN} for turn in turns]
    return kept


@contextmanager
def tree_at(revision: str, folder: Path) -> Iterator[Path]:
    """Check out another revision of this repository into a work tree."""
    tree = folder / "base"
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), revision], cwd=ROOT, check=True)
    try:
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def run_recipe(tree: Path, recipe: Recipe, *, steps: int, log_dir: Path, more: Sequence[str] = ()) -> None:
    """Run a recipe with a tree's own code; `more` are settings `KEY=VALUE` besides."""
    settings = {
        "policy.model_name": ROOT / "checkpoints" / recipe.starter,
        "grpo.max_num_steps": steps,
        "checkpointing.enabled": "false",
        "logger.log_dir": log_dir,
    }
    pairs = [*(f"{k}={v}" for k, v in settings.items()), *recipe.settings, *more]
    run_here(tree, "examples/run_grpo.py", "--config", recipe.file, *pairs)


def run_here(tree: Path, *words: str) -> None:
    """Run Python with a tree's own code."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    loaded = subprocess.run(
        [sys.executable, "-c", "import nemo_rl; print(nemo_rl.__path__[0])"],
        cwd=tree,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    assert Path(loaded).is_relative_to(tree), f"{tree} would run the code of {loaded}"
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_S,
    )
    assert done.returncode == 0, f"{words} in {tree} ended with {done.returncode}:\n{done.stdout[-3000:]}"


def difference_of(recipe: Recipe, base: Path, folder: Path, *, given: argparse.Namespace, changes: Changes) -> str:
    """Run a recipe at both revisions; return what differs, empty where nothing does."""
    logs = {name: folder / name for name in ("base", "here")}
    run_recipe(base, recipe, steps=given.steps, log_dir=logs["base"], more=given.set)
    if recipe.is_replayed:
        # It ends with another code where a number or a weight differs.
        run_here(ROOT, "-m", "nemo_rl.cli.main", "compare", str(logs["base"]), "replay", "--to", str(given.steps))
        return ""
    run_recipe(ROOT, recipe, steps=given.steps, log_dir=logs["here"], more=given.set)
    return first_difference(numbers_of(logs["base"]), numbers_of(logs["here"]), changes) or ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="revision to compare with")
    parser.add_argument("--steps", type=int, default=5, help="of each run")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help=f"of {', '.join(RECIPES)}: those with such a word"
    )
    parser.add_argument("--renamed", nargs="+", default=[], metavar="OLD=NEW", help="metrics with another name here")
    parser.add_argument("--added", nargs="+", default=[], metavar="NAME", help="metrics that the base lacks")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of both runs")
    given = parser.parse_args(arguments)
    changes = Changes(renamed=dict(pair.split("=", 1) for pair in given.renamed), added=frozenset(given.added))
    recipes = {name: recipe for name, recipe in RECIPES.items() if any(word in name for word in given.only)}
    num_different = 0
    # `make` that is stopped sends it; the folder and the tree of git go with the blocks below.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as root, tree_at(given.base, Path(root)) as base:
        for name, recipe in recipes.items():
            started = time.monotonic()
            try:
                difference = difference_of(recipe, base, Path(root) / "logs" / name, given=given, changes=changes)
            except AssertionError as error:
                difference = str(error)
            num_different += bool(difference)
            print(f"{name}: {difference or 'equal'} ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"{len(recipes) - num_different} of {len(recipes)} recipes equal")
    return 1 if num_different or not recipes else 0


if __name__ == "__main__":
    sys.exit(main())
