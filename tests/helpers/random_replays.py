"""Runs four recipes that keep their steps, draws steps at random, and replays each in several ways.

    python -m tests.helpers.random_replays [--steps 10] [--draws 20] [--seed 0] [--starter FOLDER] [--folder FOLDER]

Every drawn step is replayed in the layout of its run, to the last bit, and in one process, within the bounds; with
`--other-worker` also with the other worker in one process. Prints a line per replay; exit code 1 when one is out of its
bounds, or takes more than 30 seconds.
"""

from __future__ import annotations

import argparse
import io
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from nemo_rl.algorithms.kept_steps.folder import StepsFolder
from nemo_rl.algorithms.run import run
from nemo_rl_tools.step_replay.chain import ReplayProblem, ReplayRequest
from nemo_rl_tools.step_replay.replay import replay_step
from nemo_rl_tools.verdict import Comparison, Verdict
from tests.helpers.model_families import write_family
from tests.helpers.runs import ROOT, SMALL, load_recipe, logged_steps
from tests.helpers.tiny_model import write_tiny_folder

MOST_S = 30.0
"""Longest replay of one step."""
RECIPES = (
    "configs/grpo_sort_cpu.yaml",
    "configs/recipes/grpo_sort_tp2_cpu.yaml",
    "configs/recipes/grpo_sort_megatron_pp2_cpu.yaml",
    "configs/recipes/grpo_sort_moe_r3_dtensor_cpu.yaml",
)
SAVES = {"checkpointing.enabled": "true", "checkpointing.save_period": "4", "checkpointing.keep_top_k": "null"}


def kept_run(recipe: str, folder: Path, *, steps: int, starter: Path | None) -> Path:
    """Run the recipe for a few steps and return its log folder."""
    name = Path(recipe).stem
    if "moe" in name:
        model = write_family(folder / f"model_{name}", "qwen3_moe")
    else:
        model = starter or write_tiny_folder(folder / f"model_{name}")
    changes = {
        **SMALL,
        **SAVES,
        "grpo.max_num_steps": str(steps),
        "policy.model_name": str(model),
        "logger.log_dir": str(folder / name),
        "diagnostics.keep_steps.enabled": "true",
    }
    if "pp2" not in name and "sort_cpu" not in name:
        changes |= {
            "policy.sequence_packing.train_mb_tokens": "256",
            "policy.sequence_packing.logprob_mb_tokens": "512",
        }
    config = load_recipe(ROOT / recipe, changes)
    run(config, console=Console(file=io.StringIO()))
    return config.logger.log_dir


def requests(log_dir: Path, step: int, *, other_worker: bool) -> Iterator[tuple[str, ReplayRequest]]:
    yield "as in the run", ReplayRequest(run=log_dir, step=step)
    yield "one process", ReplayRequest(run=log_dir, step=step, in_one_process=True)
    if other_worker:
        worker = "dtensor" if "megatron" in log_dir.name else "megatron"
        yield f"{worker}, one process", ReplayRequest(run=log_dir, step=step, in_one_process=True, worker=worker)


def problem_of(report: Comparison, seconds: float) -> str:
    """Return the problem of a replay, or an empty text."""
    if report.verdict is not Verdict.PASS:
        return "\n".join(report.lines())
    if not report.inexact and any(site.difference for site in report.sites):
        return "not to the last bit:\n" + "\n".join(report.lines())
    return f"took more than {MOST_S:.0f} s" if seconds > MOST_S else ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="of each run")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--starter", type=Path, help="model of the dense recipes; default: a tiny random one")
    parser.add_argument("--folder", type=Path, help="keeps the runs here, and uses those that are there")
    parser.add_argument("--other-worker", action="store_true")
    parser.add_argument("--only", nargs="*", default=[], help="words in the names of recipes")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="replay_draw_") as temporary:
        folder = (given.folder or Path(temporary)).absolute()
        runs: dict[str, Path] = {}
        for recipe in RECIPES:
            if given.only and not any(word in recipe for word in given.only):
                continue
            runs[recipe] = folder / Path(recipe).stem
            if not StepsFolder(runs[recipe]).all():
                kept_run(recipe, folder, steps=given.steps, starter=given.starter)
            show_cost(recipe, runs[recipe])
        return replay_draws(runs, given)


def show_cost(recipe: str, log_dir: Path) -> None:
    rows = [row for row in logged_steps_with_times(log_dir) if "timing/keep_step_s" in row][1:]
    if rows:
        share = sum(row["timing/keep_step_s"] / row["timing/step_s"] for row in rows) / len(rows)
        size = sum(row["keep/step_bytes"] for row in rows) / len(rows)
        print(f"{recipe}: keeping takes {share:.2%} of a step, {size / 1024:.0f} KiB each")


def logged_steps_with_times(log_dir: Path) -> list[Mapping[str, float]]:
    from nemo_rl.utils.trackers import read_metrics

    assert logged_steps(log_dir), f"{log_dir} has no metrics"
    return list(read_metrics(log_dir / "metrics.jsonl"))


def replay_draws(runs: Mapping[str, Path], given: argparse.Namespace) -> int:
    chosen, failed, slowest = random.Random(given.seed), 0, 0.0
    there = [(path, kept.number) for path in runs.values() for kept in StepsFolder(path).all()]
    per_run = -(-given.draws // max(1, len(runs)))
    draws = []
    for path in runs.values():
        steps = [number for of, number in there if of == path]
        draws += [(path, number) for number in chosen.sample(steps, min(per_run, len(steps)))]
    for path, number in draws[: given.draws]:
        for how, request in requests(path, number, other_worker=given.other_worker):
            started = time.perf_counter()
            try:
                report = replay_step(request)
                seconds = time.perf_counter() - started
                problem = problem_of(report, seconds)
            except ReplayProblem as error:
                seconds, problem = time.perf_counter() - started, f"{error.verdict.label}: {error}"
            slowest, failed = max(slowest, seconds), failed + bool(problem)
            print(f"{path.name:<36} step {number:>3}  {how:<24} {seconds:5.1f} s  {problem or 'ok'}", flush=True)
    print(f"{len(draws[: given.draws])} steps, {failed} replays out of bounds, the slowest took {slowest:.1f} s")
    return 1 if failed or not draws else 0


if __name__ == "__main__":
    sys.exit(main())
