"""Predicted over measured seconds of a step, of five recipes on the cores of this machine.

    python benchmarks/plan_time.py --fit [--quick]          measure three recipes, write benchmarks/plan_time.json
    python benchmarks/plan_time.py --json FILE [--quick]    measure all five beside what that file predicts

The constants are those of `nemo-rl plan --time`, found in the medians of the fitted recipes alone; commit the file
before the others run. Of these `medium` has another model, and `async` samples while it trains. Runs are taken in
turns, so that what slows the machine for a while slows all recipes; a run's figure is the median over its steps, a
recipe's the median over its runs. `async / sync` is the ratio of both steps, of runs of the same turn. Exit code 1 when
a bound is missed, except with `--quick`. The machine must be idle: what else runs there is no part of the model.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

# A script's own folder is on the path, its package is not.
sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console

from benchmarks.common import (
    ROOT,
    Hold,
    check_figures,
    environment,
    figures_table,
    load_average,
    paired_ratio,
    write_json,
)
from examples.starter import STARTER_TASKS, make_starter
from nemo_rl.algorithms.run import run
from nemo_rl.config.load import load_config
from nemo_rl_tools.known_models import planned_model_config
from nemo_rl_tools.plan.setting import Model, PlanSetting
from nemo_rl_tools.plan.time_constants import Measured, TimeConstants, constants_of, measured_run, measured_step_s
from nemo_rl_tools.plan.time_model import estimate
from nemo_rl_tools.plan.time_work import Workload

__all__ = ["FILE", "FITTED", "HOLDS", "RECIPES", "figures_of", "main"]

FILE = ROOT / "benchmarks" / "plan_time.json"
DEMO, CHAIN_SUM = ROOT / "configs" / "grpo_sort_cpu.yaml", ROOT / "configs" / "recipes" / "grpo_chain_sum_cpu.yaml"
ASYNC = ROOT / "configs" / "recipes" / "grpo_sort_async_cpu.yaml"
BOUND = 0.15
SIZES: Mapping[str, tuple[int, int]] = {"wide": (256, 2), "medium": (192, 3)}
"""Recipe -> width and layers of its model, a starter of the sort task."""
COMMON = (
    *("grpo.val_period=0", "grpo.val_at_start=false", "checkpointing.enabled=false"),
    *("logger.tensorboard_enabled=false", "logger.reward_curve=false", "logger.num_rollouts_to_log=64"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One recipe and its part in the benchmark."""

    file: Path
    overrides: tuple[str, ...] = ()
    rows_of: str
    """The fitted recipe whose rows it samples."""
    is_fitted: bool = False


def _model(name: str) -> str:
    width, layers = SIZES[name]
    return f"policy.model_name=checkpoints/starter_sort_{width}x{layers}"


ONE_RANK = ("cluster.cpu_workers_per_node=1", "grpo.num_prompts_per_step=64", "policy.train_global_batch_size=256")
RECIPES: Mapping[str, Recipe] = {
    "sort": Recipe(file=DEMO, rows_of="sort", is_fitted=True),
    "wide": Recipe(file=DEMO, overrides=(_model("wide"), *ONE_RANK), rows_of="wide", is_fitted=True),
    "chain_sum": Recipe(file=CHAIN_SUM, rows_of="chain_sum", is_fitted=True),
    "medium": Recipe(file=DEMO, overrides=(_model("medium"),), rows_of="sort"),
    "async": Recipe(file=ASYNC, rows_of="sort"),
}
FITTED = tuple(name for name, recipe in RECIPES.items() if recipe.is_fitted)
HOLDS: Mapping[str, Hold] = {
    **{f"{name}: |predicted / measured - 1|": Hold(most=BOUND) for name in RECIPES},
    "async / sync: |predicted / measured - 1|": Hold(most=BOUND),
    "load before": Hold(most=2.5),
}


def write_models() -> None:
    """Write the starters of other sizes, where they are not there."""
    task = STARTER_TASKS["sort"]
    for width, layers in SIZES.values():
        folder = ROOT / "checkpoints" / f"starter_sort_{width}x{layers}"
        if not (folder / "config.json").exists():
            make_starter(folder, task, config=replace(task.config, hidden_size=width, num_layers=layers))


def measure(names: Sequence[str], folder: Path, *, repeats: int, steps: int) -> dict[str, list[Path]]:
    """Run the recipes in turns; return the folders of each."""
    write_models()
    found: dict[str, list[Path]] = {name: [] for name in names}
    for turn in range(repeats):
        for name in names:
            recipe, log_dir = RECIPES[name], folder / f"{name}_{turn}"
            given = (*COMMON, *recipe.overrides, f"grpo.max_num_steps={steps}", f"logger.log_dir={log_dir}")
            run(load_config(recipe.file, given), console=Console(file=io.StringIO()))
            found[name].append(log_dir)
    return found


def fit(folder: Path, *, repeats: int, steps: int, cores: float) -> dict[str, object]:
    """Measure the fitted recipes and return what the file holds."""
    before, where = load_average(), environment()
    folders = measure(FITTED, folder, repeats=repeats, steps=steps)
    runs: dict[str, list[Measured]] = {
        name: [measured_run(each, cores=cores) for each in folders[name]] for name in FITTED
    }
    constants = constants_of([one for each in runs.values() for one in each], source="benchmarks/plan_time.py")
    return {
        "constants": constants.as_json(),
        "cores": cores,
        "workloads": {name: _as_counts(each[0].workload) for name, each in runs.items()},
        "raw_parts_s": {name: [dict(one.seconds) for one in each] for name, each in runs.items()},
        "raw_step_s": {name: [one.step_s for one in each] for name, each in runs.items()},
        "setting": {"repeats": repeats, "steps": steps},
        "load_before": before,
        "load_after": load_average(),
        "environment": where,
    }


def predictions(known: Mapping[str, object], constants: TimeConstants, *, cores: float) -> dict[str, float]:
    """Return the seconds of a step of every recipe."""
    found, workloads = {}, known["workloads"]
    assert isinstance(workloads, Mapping), "the file has the rows of each fitted recipe"
    for name, recipe in RECIPES.items():
        config = load_config(recipe.file, (*COMMON, *recipe.overrides))
        setting = PlanSetting(config=config, model=Model(planned_model_config(config.policy.model_name)), gpu=None)
        workload = _of_counts(workloads[recipe.rows_of])
        found[name] = estimate(setting, constants, workload, cores=cores).step_s
    return found


def _as_counts(workload: Workload) -> dict[str, object]:
    """Return the rows as `prompt+response` -> number of rows of these lengths."""
    counts = Counter(f"{prompt}+{response}" for prompt, response in workload.rows)
    return {"rows": dict(sorted(counts.items())), "trained_share": workload.trained_share}


def _of_counts(kept: Mapping[str, object]) -> Workload:
    counts, share = kept["rows"], kept["trained_share"]
    assert isinstance(counts, Mapping) and isinstance(share, float), "written by _as_counts"
    rows = [
        (int(prompt), int(response))
        for lengths, count in counts.items()
        for prompt, response in [lengths.split("+")] * int(count)
    ]
    return Workload(rows=tuple(rows), trained_share=share)


def figures_of(
    predicted: Mapping[str, float], measured: Mapping[str, Sequence[float]], *, load: float
) -> dict[str, float]:
    """Return the ratios of predicted to measured seconds, and how far they are from 1.

    Args:
        measured: seconds of a step of each run, in turns.
        load: of the machine before the runs, over a minute.
    """
    figures = {"load before": load}
    pairs = {name: (predicted[name], statistics.median(measured[name])) for name in RECIPES}
    pairs["async / sync"] = predicted["async"] / predicted["sort"], paired_ratio(measured["async"], measured["sort"])
    for name, (expected, found) in pairs.items():
        figures |= {f"{name}: predicted": expected, f"{name}: measured": found}
        figures[f"{name}: |predicted / measured - 1|"] = abs(expected / found - 1)
    return figures


def main(arguments: Sequence[str]) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="measure the fitted recipes and write the constants")
    parser.add_argument("--constants", type=Path, default=FILE, help="the file of --fit")
    parser.add_argument("--json", type=Path, help="write figures and raw samples here")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--cores", type=float, default=2.0, help="processors that all processes share")
    parser.add_argument("--quick", action="store_true", help="one short run of each, without bounds")
    given = parser.parse_args(arguments)
    repeats, steps = (1, 3) if given.quick else (given.repeats, given.steps)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if given.fit:
            write_json(given.constants, fit(folder, repeats=repeats, steps=steps, cores=given.cores))
            return 0
        write_models()
        known = json.loads(given.constants.read_text())
        predicted = predictions(known, TimeConstants.read(given.constants), cores=given.cores)
        # The checked-out commit may be another one when the runs are over.
        before, where = load_average(), environment()
        folders = measure(tuple(RECIPES), folder, repeats=repeats, steps=steps)
        measured = {name: [measured_step_s(each) for each in of_name] for name, of_name in folders.items()}
    figures = figures_of(predicted, measured, load=before[0])
    Console().print(figures_table(figures, HOLDS))
    if given.json is not None:
        record = {"figures": figures, "predicted_s": predicted, "raw_step_s": measured, "load_before": before}
        setting = {"repeats": repeats, "steps": steps, "cores": given.cores}
        write_json(given.json, {**record, "setting": setting, "load_after": load_average(), "environment": where})
    problems = check_figures(figures, HOLDS)
    for line in problems:
        Console().print(line)
    return 1 if problems and not given.quick else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
