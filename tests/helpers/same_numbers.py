"""Runs six recipes at another revision and here, and compares every number that they log, to the last bit.

    python -m tests.helpers.same_numbers --base REV [--steps 5] [--only WORD ...]

Both runs have the same seed, the same starter checkpoint and this Python's packages; the other revision is checked out
into a work tree of its own. Compared are all metrics but times, bytes and memory, and the rollouts token by token.
Prints the first number that differs of each recipe; exit code 1 when there is one. A change that renames or adds
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

from tests.helpers.runs import ROOT, logged_steps

RECIPES: Mapping[str, str] = {
    "configs/grpo_sort_cpu.yaml": "starter_sort",
    "configs/recipes/grpo_sort_tp2_cpu.yaml": "starter_sort",
    "configs/recipes/grpo_sort_megatron_tp2_cpu.yaml": "starter_sort",
    "configs/recipes/grpo_sort_megatron_pp2_cpu.yaml": "starter_sort",
    "configs/recipes/grpo_sort_moe_r3_megatron_cpu.yaml": "starter_sort_moe",
    "configs/recipes/grpo_sort_moe_r3_dtensor_cpu.yaml": "starter_sort_moe",
}
"""Recipe -> starter checkpoint of `checkpoints/`."""
COUNTS_OF_TRANSPORT = "data_plane/"
"""Bytes, calls and times of the data plane, which a change of its code may change."""
APART = ("key", "group", "number", "answer", "messages")
"""Keys of a rollout row that are random, or repeat the data; no number depends on them."""
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
    metrics = [
        {name: value for name, value in step.items() if not name.startswith(COUNTS_OF_TRANSPORT)}
        for step in logged_steps(log_dir)
    ]
    files = sorted(log_dir.glob("rollouts/*.jsonl"))
    rows = [(path.name, json.loads(line)) for path in files for line in path.read_text().splitlines()]
    rollouts = [{name: {k: v for k, v in row.items() if k not in APART}} for name, row in rows]
    assert metrics, f"{log_dir} holds no metrics"
    return [*metrics, *rollouts]


@contextmanager
def tree_at(revision: str, folder: Path) -> Iterator[Path]:
    """Check out another revision of this repository into a work tree."""
    tree = folder / "base"
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), revision], cwd=ROOT, check=True)
    try:
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def run_recipe(tree: Path, recipe: str, *, steps: int, log_dir: Path, more: Sequence[str] = ()) -> None:
    """Run a recipe with a tree's own code; `more` are settings `KEY=VALUE` besides."""
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
    settings = {
        "policy.model_name": ROOT / "checkpoints" / RECIPES[recipe],
        "grpo.max_num_steps": steps,
        "checkpointing.enabled": "false",
        "logger.log_dir": log_dir,
    }
    done = subprocess.run(
        [sys.executable, "examples/run_grpo.py", "--config", recipe, *(f"{k}={v}" for k, v in settings.items()), *more],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_S,
    )
    assert done.returncode == 0, f"{recipe} in {tree} ended with {done.returncode}:\n{done.stdout[-3000:]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="revision to compare with")
    parser.add_argument("--steps", type=int, default=5, help="of each run")
    parser.add_argument("--only", nargs="+", default=[""], help="recipes with one of these words in their name")
    parser.add_argument("--renamed", nargs="+", default=[], metavar="OLD=NEW", help="metrics with another name here")
    parser.add_argument("--added", nargs="+", default=[], metavar="NAME", help="metrics that the base lacks")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of both runs")
    given = parser.parse_args(arguments)
    changes = Changes(
        renamed=dict(pair.split("=", 1) for pair in given.renamed),
        added=frozenset(given.added),
    )
    recipes = [recipe for recipe in RECIPES if any(word in recipe for word in given.only)]
    num_different = 0
    # `make` that is stopped sends it; the folder and the tree of git go with the blocks below.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as root, tree_at(given.base, Path(root)) as base:
        for recipe in recipes:
            started = time.monotonic()
            logs = {name: Path(root) / "logs" / name / Path(recipe).stem for name in ("base", "here")}
            for name, tree in (("base", base), ("here", ROOT)):
                run_recipe(tree, recipe, steps=given.steps, log_dir=logs[name], more=given.set)
            numbers = {name: numbers_of(log_dir) for name, log_dir in logs.items()}
            difference = first_difference(numbers["base"], numbers["here"], changes)
            num_different += difference is not None
            count = sum(map(len, numbers["here"]))
            print(f"{recipe}: {difference or f'{count} values equal'} ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"{len(recipes) - num_different} of {len(recipes)} recipes equal")
    return 1 if num_different or not recipes else 0


if __name__ == "__main__":
    sys.exit(main())
