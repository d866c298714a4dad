"""What the driver itself does in a step, without any model: scores, plans, metas, advantages, clearing, metrics.

    python benchmarks/driver_step.py --json FILE [--quick] [--without-plan] [--unfrozen]

The very stages and calls of a run, over rows of a store in this process. Figures are medians of the sums over the
parts, `driver_ms_2048` and `driver_ms_16384`, and how far the slowest steps are from them, with a table of the parts.
Exit code 1 when a bound is missed. Each figure finds a fault that is planted: `--without-plan` plans nothing, so that
a part is not measured; `--unfrozen` lets the garbage collector visit all that was loaded in the midst of a step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar, cast

# A script's own folder is on the path, its package is not.
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import ROOT, Hold, check_figures, environment, figures_table, load_average, write_json
from benchmarks.scale_actors import rolled_rows
from nemo_rl.algorithms.losses.policy_loss import build_loss
from nemo_rl.algorithms.stages.bodies import build_stages, clear_untrained
from nemo_rl.algorithms.stages.columns import declare_partition, stage_columns
from nemo_rl.algorithms.stages.stage import StageTools, StepState, begin_step
from nemo_rl.algorithms.step_metrics import step_metrics
from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.config.load import load_config
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data.sampler import SampledPrompt
from nemo_rl.data_plane.batch_meta import shard_meta_for_dp
from nemo_rl.data_plane.factory import build_data_plane_client, open_step
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.experience.rollout_handle import RolloutHandle
from nemo_rl.models.policy.tq_policy import TQPolicy
from nemo_rl.utils.memory import frozen_startup_objects

__all__ = ["HOLDS", "PARTS", "DriverSample", "figures_of", "main", "measure", "step_config"]

RECIPE = ROOT / "configs" / "grpo_sort_cpu.yaml"
GROUP, RANKS, REPEATS = 16, 8, 20
PARTS = ("begin", "score and plan", "metas of ranks", "advantages", "clear", "metrics")
HOLDS: Mapping[str, Hold] = {
    "driver_ms_2048": Hold(most=60.0),
    "driver_ms_16384": Hold(most=200.0),
    "driver_p95_vs_median_16384": Hold(most=1.3),
}
QUICK_ROWS, ROWS = (128,), (2048, 16384)

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """What the stages that run here ask a policy for."""

    layout: ParallelLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverSample:
    """One step."""

    rows: int
    ms: Mapping[str, float]
    """By part."""

    @property
    def total_ms(self) -> float:
        return sum(self.ms.values())

    def as_record(self) -> dict[str, object]:
        return {"rows": self.rows, "ms": dict(self.ms), "total_ms": self.total_ms}


@dataclass(slots=True)
class _Clock:
    """Milliseconds by part."""

    ms: dict[str, float] = field(default_factory=dict)

    def time(self, part: str, call: Callable[[], _T]) -> _T:
        started = time.perf_counter()
        result = call()
        self.ms[part] = self.ms.get(part, 0.0) + 1e3 * (time.perf_counter() - started)
        return result


def measure(
    num_rows: int, *, repeats: int = REPEATS, with_plan: bool = True, frozen: bool = True
) -> list[DriverSample]:
    """Steps of so many rows, one after the other, after one that is left out, as a trainer's loop runs them.

    Args:
        frozen: False lets the garbage collector visit all that was loaded, in the midst of a step.
    """
    config = step_config(num_rows)
    client = build_data_plane_client(DataPlaneConfig(impl="noop"), run_id=f"bench-{uuid.uuid4().hex[:8]}")
    try:
        loss_fn = build_loss(config.loss_fn, config.grpo)
        columns = stage_columns(config, loss_fn)
        declare_partition(client, columns, config.grpo)
        tools = StageTools(
            grpo=config.grpo,
            settings=config.policy,
            logger=config.logger,
            client=client,
            # Stages that ask workers are not run.
            policy=cast(TQPolicy, _Layout(layout=ParallelLayout(dp=RANKS))),
            rollout=cast(RolloutHandle, None),
            loss_fn=loss_fn,
        )
        stages = {stage.name: stage for stage in build_stages(columns, tools)}
        run = [lambda step, stage=stages[name]: stage.submit(step).result() for name in ("score", "advantages")]
        with frozen_startup_objects() if frozen else nullcontext():
            found = [_step(number, config, client, run, with_plan=with_plan) for number in range(1, repeats + 2)]
    finally:
        client.close()
    return found[1:]


def figures_of(samples: Sequence[DriverSample]) -> dict[str, float]:
    """Medians; a size in which a part was not measured has no figure."""
    figures: dict[str, float] = {}
    for rows in dict.fromkeys(each.rows for each in samples):
        chosen = [each for each in samples if each.rows == rows]
        if all(set(each.ms) == set(PARTS) for each in chosen):
            totals = [each.total_ms for each in chosen]
            figures[f"driver_ms_{rows}"] = statistics.median(totals)
            figures[f"driver_p95_vs_median_{rows}"] = float(np.quantile(totals, 0.95)) / statistics.median(totals)
    return figures


def _step(
    number: int,
    config: MasterConfig,
    client: DataPlaneClient,
    stages: Sequence[Callable[[StepState], StepState]],
    *,
    with_plan: bool,
) -> DriverSample:
    grpo, clock = config.grpo, _Clock()
    group = grpo.num_generations_per_prompt
    drawn = [SampledPrompt(place, place) for place in range(grpo.num_prompts_per_step)]
    step = clock.time("begin", lambda: begin_step(number, drawn, group_size=group, version=number))
    opened = open_step(client, step.partition, step.keys)
    opened.__enter__()
    # Written and handed over by a rollout worker: not the driver's work, and not timed.
    step = replace(
        step,
        rolled=rolled_rows(client, step.keys, partition_id=step.partition, version=step.policy_version, seed=number),
    )
    score, write_advantages = stages
    if with_plan:
        step = clock.time("score and plan", lambda: score(step))
        clock.time("metas of ranks", lambda: shard_meta_for_dp(step.update.meta, step.update.plan))
        step = clock.time("advantages", lambda: write_advantages(step))
        clock.time("clear", lambda: clear_untrained(client, step))
        ended = replace(step, seconds=1.0)
        clock.time("metrics", lambda: step_metrics(ended))
    clock.time("clear", lambda: opened.__exit__(None, None, None))
    return DriverSample(rows=len(step.keys), ms=clock.ms)


def step_config(num_rows: int, *more: str) -> MasterConfig:
    """Return the recipe of a step of so many rows.

    Args:
        more: further overrides.
    """
    overrides = [
        f"grpo.num_prompts_per_step={num_rows // GROUP}",
        f"grpo.num_generations_per_prompt={GROUP}",
        f"policy.train_global_batch_size={num_rows // 2}",
        "policy.max_total_sequence_length=2048",
        "policy.dynamic_batching.train_mb_tokens=4096",
        "policy.dynamic_batching.logprob_mb_tokens=8192",
        f"data.train.size={num_rows}",
        *more,
    ]
    return load_config(RECIPE, overrides)


def _parts_table(samples: Sequence[DriverSample]) -> Table:
    table = Table(title="milliseconds of the driver, medians")
    sizes = list(dict.fromkeys(each.rows for each in samples))
    for name in ("part", *(f"{rows} rows" for rows in sizes)):
        table.add_column(name)
    for part in PARTS:
        cells = [[each.ms[part] for each in samples if each.rows == rows and part in each.ms] for rows in sizes]
        table.add_row(part, *(f"{statistics.median(found):.2f}" if found else "not measured" for found in cells))
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file for raw samples and figures")
    parser.add_argument("--quick", action="store_true", help="few rows; the bounds are not measured")
    parser.add_argument("--without-plan", action="store_true", help="plant a fault: nothing is scored and planned")
    parser.add_argument("--unfrozen", action="store_true", help="plant a fault: collections visit all loaded objects")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    load_before = load_average()
    sizes = QUICK_ROWS if given.quick else ROWS
    planted = {"with_plan": not given.without_plan, "frozen": not given.unfrozen}
    samples = [each for rows in sizes for each in measure(rows, **planted)]
    figures = figures_of(samples)
    console = Console()
    console.print(_parts_table(samples))
    console.print(figures_table(figures, HOLDS))
    missed = check_figures(figures, HOLDS)
    report = {
        **environment(),
        "load_before": load_before,
        "load_after": load_average(),
        "figures": figures,
        "problems": missed,
        "samples": [each.as_record() for each in samples],
    }
    console.print(f"written to {write_json(given.json, report)}")
    for line in missed:
        console.print(line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
