"""`nemo-rl plan --time`: seconds of a step by stage, who waits, and other splits of the same workers.

time_recipe -> measured_run, constants_of | assumed_constants   what a unit of work takes
            -> estimate                                         the recipe in virtual time
            -> estimate, once for each other split of the same number of workers
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from nemo_rl.config.load import load_config
from nemo_rl.config.rules.policy import packing_decided
from nemo_rl.errors import ConfigError
from nemo_rl_tools.known_models import planned_model_config
from nemo_rl_tools.plan.command import planned_gpu
from nemo_rl_tools.plan.setting import Model, PlanSetting
from nemo_rl_tools.plan.time_constants import TimeConstants, assumed_constants, constants_of, measured_run
from nemo_rl_tools.plan.time_model import TimeEstimate, estimate
from nemo_rl_tools.plan.time_work import Workload, workload_of

__all__ = ["Split", "TimePlan", "TimeRequest", "show_times", "time_recipe"]

FORMAT_VERSION = 1
"""Version of the format of `--json`."""
MOST_SPLITS = 16
"""Splits that are simulated; of more workers some numbers are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeRequest:
    """What the command was asked."""

    recipe: Path
    overrides: tuple[str, ...] = ()
    sources: tuple[Path, ...] = ()
    """Folders of measured runs, or one file with constants."""
    gpu: str | None = None
    cores: float | None = None
    """Processors that all processes share; None: those of this machine for a recipe of CPUs, else each has its own."""
    lengths: str | None = None
    """Response lengths as in `workload_of`; None: those of the first measured run, or full ones."""
    model_config: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Policy workers and engines."""

    ranks: int
    engines: int
    estimate: TimeEstimate


@dataclass(frozen=True, kw_only=True, slots=True)
class TimePlan:
    """The answer of the command."""

    request: TimeRequest
    constants: TimeConstants
    as_given: Split
    splits: tuple[Split, ...]
    """All splits of the same number of workers that the recipe can run in, its own among them."""
    notes: tuple[str, ...]

    @property
    def best(self) -> Split:
        return min(self.splits, key=lambda split: split.estimate.step_s)

    def as_json(self) -> dict[str, object]:
        def of(split: Split) -> dict[str, object]:
            return {"ranks": split.ranks, "engines": split.engines, **split.estimate.as_json()}

        return {
            "version": FORMAT_VERSION,
            "constants": self.constants.as_json(),
            "cores": self.request.cores,
            "estimate": of(self.as_given),
            "splits": [of(split) for split in self.splits],
            "best": {"ranks": self.best.ranks, "engines": self.best.engines},
            "notes": list(self.notes),
        }


def time_recipe(request: TimeRequest) -> TimePlan:
    """Raise ConfigError where the recipe cannot run, or the model does not know a part of it, or a source is no run."""
    config = load_config(request.recipe, request.overrides)
    model = Model(planned_model_config(config.policy.model_name, given=request.model_config))
    if request.cores is None and not config.cluster.gpus_per_node:
        request = replace(request, cores=float(len(os.sched_getaffinity(0))))
    setting = _setting(request, model)
    constants, workload = _constants(request, setting)
    if workload is None or request.lengths is not None:
        share = 1.0 if workload is None else workload.trained_share
        workload = workload_of(request.lengths or str(setting.policy.longest_response), setting, trained_share=share)
    as_given = _split(setting, constants, workload, cores=request.cores)
    splits = {as_given.engines: as_given}
    workers = as_given.ranks + as_given.engines
    for engines in _engine_counts(setting, workers):
        # The layout, or the rules of the recipe, may not allow it.
        with suppress(ConfigError):
            other = _setting(request, model, _split_overrides(setting, workers - engines, engines))
            splits.setdefault(engines, _split(other, constants, workload, cores=request.cores))
    return TimePlan(
        request=request,
        constants=constants,
        as_given=as_given,
        splits=tuple(splits[engines] for engines in sorted(splits)),
        notes=tuple(_notes(setting, constants, workload, num_splits=len(splits))),
    )


def _setting(request: TimeRequest, model: Model, overrides: Sequence[str] = ()) -> PlanSetting:
    config = load_config(request.recipe, (*request.overrides, *overrides))
    # A measured run stands for its own GPUs, which need no name.
    is_named = request.gpu is not None or not request.sources
    gpu = planned_gpu(request.gpu, config.cluster.gpus_per_node) if is_named else None
    return PlanSetting(config=packing_decided(config, fits=lambda _: True), model=model, gpu=gpu)


def _constants(request: TimeRequest, setting: PlanSetting) -> tuple[TimeConstants, Workload | None]:
    """Return constants and, of measured runs, the rows of the first one."""
    if not request.sources:
        if setting.gpu is None:
            raise ConfigError(
                "--time: expected --from with a measured run, since the rates of CPUs are not known (or --gpu for a "
                "recipe with GPUs); run the recipe for 10 steps first and give its logger.log_dir"
            )
        return assumed_constants(setting.gpu, setting), None
    if len(request.sources) == 1 and request.sources[0].is_file():
        return TimeConstants.read(request.sources[0]), None
    runs = [measured_run(folder, cores=request.cores) for folder in request.sources]
    names = ", ".join(map(str, request.sources))
    return constants_of(runs, source=f"measured in {names}"), runs[0].workload


def _split(setting: PlanSetting, constants: TimeConstants, workload: Workload, *, cores: float | None) -> Split:
    found = estimate(setting, constants, workload, cores=cores)
    generation = setting.policy.generation
    return Split(ranks=setting.layout.world_size, engines=generation.num_replicas, estimate=found)


def _engine_counts(setting: PlanSetting, workers: int) -> Sequence[int]:
    """Return the numbers of engines to try; none where engines share the GPUs of the policy, or on several nodes."""
    shares_gpus = setting.config.cluster.gpus_per_node > 0 and setting.policy.generation.colocated.enabled
    if shares_gpus or setting.config.cluster.num_nodes > 1 or setting.policy.generation.ranks_per_engine > 1:
        return ()
    every = max(1, workers // MOST_SPLITS)
    return range(1, workers, every)


def _split_overrides(setting: PlanSetting, ranks: int, engines: int) -> tuple[str, ...]:
    replicas = f"policy.generation.num_replicas={engines}"
    if not setting.config.cluster.gpus_per_node:
        return (f"cluster.cpu_workers_per_node={ranks}", replicas)
    return (f"cluster.gpus_per_node={ranks}", f"policy.generation.colocated.gpus_per_node={engines}", replicas)


def _notes(setting: PlanSetting, constants: TimeConstants, workload: Workload, *, num_splits: int) -> list[str]:
    mean = sum(response for _, response in workload.rows) / len(workload.rows)
    notes = [
        f"{len(workload.rows)} lengths of rows, mean response {mean:.4g} tokens; {workload.trained_share:.0%} of the "
        "groups are trained",
        "not counted: validation, waiting for the disk, the network between nodes but for refits, failures",
    ]
    if setting.config.checkpointing.enabled and not constants.checkpoint_byte_s:
        notes.append("checkpoints take no time here: no measured run has saved one")
    environment = setting.config.env.name
    if environment not in constants.write_row_s:
        notes.append(f"a row of {environment!r} is scored as fast as one of {', '.join(constants.write_row_s)}")
    if num_splits == 1:
        notes.append("no other split: engines share the policy's GPUs, have several, or there are several nodes")
    return notes


def show_times(plan: TimePlan, console: Console) -> None:
    found, constants = plan.as_given.estimate, plan.constants
    console.print(f"constants: {constants.source}" + ("" if constants.is_measured else " (NOT MEASURED)"))
    stages = Table(title="A step", title_justify="left", box=None, pad_edge=False)
    for name in ("stage", "seconds", "share"):
        stages.add_column(name, justify="left" if name == "stage" else "right")
    for name, seconds in found.stages.items():
        stages.add_row(name, f"{seconds:.3f}", f"{seconds / found.step_s:.0%}")
    stages.add_row("all", f"{found.step_s:.3f}", "", style="bold")
    splits = Table(title="Splits of the same workers", title_justify="left", box=None, pad_edge=False)
    for name in ("policy ranks", "engines", "seconds", "policy idle", "engines idle", "tokens/s", ""):
        splits.add_column(name, justify="right")
    for split in plan.splits:
        each = split.estimate
        marks = [
            text for text, is_it in (("this recipe", split is plan.as_given), ("best", split is plan.best)) if is_it
        ]
        numbers = f"{each.step_s:.3f}", f"{each.policy_idle_share:.0%}", f"{each.engine_idle_share:.0%}"
        splits.add_row(str(split.ranks), str(split.engines), *numbers, f"{each.tokens_s:,.0f}", ", ".join(marks))
    console.print(stages, "", splits, "")
    for note in plan.notes:
        console.print(f"assumed: {note}")
