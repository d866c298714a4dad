"""`TimeConstants`: what the parts of a step take per unit of work, from measured runs or from a GPU's data sheet.

Read by `time_model.py`. Each part of a step is a sum of amounts times constants. A run gives one number for each part,
the median over its steps, so that one run tells one constant of each part: the first of those in `PARTS`. Several runs
of different sizes tell more. Invariant: no constant is negative, and one that no run tells is 0.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path

import numpy as np

from nemo_rl.algorithms.run_folder import CONFIG_FILE
from nemo_rl.config.load import parse_tree
from nemo_rl.config.yaml_text import parse_yaml
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.errors import ConfigError, boundary
from nemo_rl.utils.files import open_plain
from nemo_rl.utils.trackers import METRICS_FILE, metrics_by_step
from nemo_rl_tools.known_models import planned_model_config
from nemo_rl_tools.plan.setting import GPU, Model, PlanSetting
from nemo_rl_tools.plan.time_work import Workload, decode_amounts, pass_amounts, refit_bytes, rows_of_step

__all__ = ["Measured", "TimeConstants", "assumed_constants", "constants_of", "measured_run", "measured_step_s"]

WARM_UP_STEPS = 3
"""First steps of a run, which are slower: processes connect and memory is taken."""
WORTH = 0.02
"""A further constant of a part must bring the mean relative error down by so much."""
EFFICIENCY, MEMORY_EFFICIENCY = 0.4, 0.6
"""Shares of peak arithmetic and of memory bandwidth that are assumed where nothing was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeConstants:
    """Seconds per unit of work of one engine, one policy rank and the driver, each with its processors to itself."""

    source: str
    """Where they come from, in words."""
    is_measured: bool
    decode_flop_s: float = 0.0
    """Per operation of a decoded token, its prompt's share included."""
    row_turn_s: float = 0.0
    """Per row of a turn, whatever the model's size."""
    turn_layer_s: float = 0.0
    """Per layer of a turn, whatever the number of its rows."""
    turn_byte_s: float = 0.0
    """Per byte of weights and cache that a turn reads."""
    train_flop_s: float = 0.0
    """Per operation of a pass on a policy rank."""
    token_layer_s: float = 0.0
    """Per token, padding included, layer, and third of a training pass; a log-probability pass is one third."""
    microbatch_layer_s: float = 0.0
    """Per microbatch, layer, and third of a training pass."""
    update_s: float = 0.0
    """Per optimizer step."""
    write_row_s: Mapping[str, float] = field(default_factory=dict)
    """Environment -> per row that is scored and written to the data plane."""
    driver_row_s: float = 0.0
    """Per row of a step, on the driver."""
    driver_step_s: float = 0.0
    refit_byte_s: float = 0.0
    """Per byte that an engine takes."""
    refit_s: float = 0.0
    """Per refit."""
    checkpoint_byte_s: float = 0.0
    """Per byte of weights, of the part of a save that holds up the step."""

    @classmethod
    def read(cls, path: Path) -> TimeConstants:
        """Raise ConfigError where the file is none that `as_json` has written."""
        with boundary(ConfigError, f"{path}: expected constants, as `nemo-rl plan --time --json` prints them"):
            found = json.loads(path.read_text())["constants"]
            return cls(**found)

    def seconds(self, amounts: Mapping[str, float]) -> float:
        """Return the seconds of so many units of each constant."""
        values = asdict(self)
        return sum(float(values[name]) * units for name, units in amounts.items())

    def row_write_s(self, environment: str) -> float:
        """Return the seconds to score and write a row; the mean of the known environments for another one."""
        known = self.write_row_s.values()
        return self.write_row_s.get(environment, statistics.fmean(known) if known else 0.0)

    def as_json(self) -> dict[str, object]:
        return asdict(self)


PARTS: Mapping[str, tuple[str, ...]] = {
    "decode": ("decode_flop_s", "turn_layer_s", "row_turn_s", "turn_byte_s"),
    "passes": ("train_flop_s", "token_layer_s", "microbatch_layer_s", "update_s"),
    "driver": ("driver_row_s", "driver_step_s"),
    "refit": ("refit_byte_s", "refit_s"),
}
"""The measured parts of a step, with their constants in the order in which they are preferred."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a run tells."""

    seconds: Mapping[str, float]
    """Median seconds of each part of `PARTS` in a step, as if it had its processors to itself."""
    amounts: Mapping[str, Mapping[str, float]]
    """Part -> constant -> its units in such a step."""
    workload: Workload
    step_s: float
    """Median seconds from one step to the next."""
    checkpoint_byte_s: float
    environment: str
    write_row_s: float


def measured_run(folder: Path, *, cores: float | None) -> Measured:
    """Read a synchronous run.

    Args:
        cores: processors that its workers shared; None where each had its own.

    Raises:
        ConfigError: something lacks in the folder, or the run was asynchronous.
    """
    path = _file(folder, CONFIG_FILE)
    with boundary(ConfigError, f"--from {path}: expected the config that a run of this version has written"):
        # A resolved config names keys that others switch off, so that the rules of recipes would refuse it.
        config = parse_tree(parse_yaml(path.read_text(encoding="utf-8")))
    if config.grpo.async_.takes_stale_rows:
        raise ConfigError(
            f"--from {folder}: expected a synchronous run, got an asynchronous one, in which the seconds of a stage "
            "are also those of what runs beside it; measure its recipe with grpo.async.enabled=false"
        )
    setting = PlanSetting(config=config, model=Model(planned_model_config(config.policy.model_name)), gpu=None)
    engines, ranks = config.policy.generation.num_replicas, setting.layout.world_size
    steps, kept = _steps(folder)
    passes = [f"timing/{part}_s" for part in WorkerPass if any(f"timing/{part}_s" in row for row in kept)]
    speeds = [f"rollout/engine_{number}/tokens_per_s" for number in range(engines)] if engines > 1 else []
    needed = ["timing/step_s", "timing/rollout_s", "timing/train_s", "timing/refit_s", "rollout/response_tokens"]
    needed += ["rollout/trivial_group_share", *speeds]
    lacking = [name for name in dict.fromkeys([*needed, *passes]) if not any(name in row for row in kept)]
    if lacking:
        raise ConfigError(
            f"--from {folder}: {len(kept)} steps behind the first ones lack {', '.join(lacking)} in {METRICS_FILE}; "
            "expected a run of at least 2 steps with rollouts and training (8 or more are better)"
        )
    whole = [row for row in kept if all(name in row for name in (*needed, *passes))]

    def median(seconds: Sequence[float]) -> float:
        return statistics.median(seconds)

    # A rollout ends with its slowest engine; tokens are spread evenly.
    decode = [
        max(row["rollout/response_tokens"] / engines / row[name] for name in speeds)
        if speeds
        else row["timing/rollout_s"]
        for row in whole
    ]
    write = [max(0.0, row["timing/rollout_s"] - one) for row, one in zip(whole, decode, strict=True)]
    trained = [sum(row[name] for name in passes) for row in whole]
    driver = [row["timing/step_s"] - row["timing/rollout_s"] - one for row, one in zip(whole, trained, strict=True)]
    saved = sum(row.get("timing/checkpoint_s", 0.0) for row in steps)
    saves = len(steps) // config.checkpointing.save_period if config.checkpointing.enabled else 0
    share = statistics.median(row["rollout/trivial_group_share"] for row in whole)
    workload = Workload(rows=_rows(folder), trained_share=1.0 - share)
    return Measured(
        seconds={
            "decode": median(decode) * shared(engines, cores),
            "passes": median(trained) * shared(ranks, cores),
            "driver": max(0.0, median(driver)),
            "refit": median([row["timing/refit_s"] for row in whole]),
        },
        amounts=_amounts(setting, workload),
        workload=workload,
        step_s=measured_step_s(folder),
        checkpoint_byte_s=saved / saves / refit_bytes(setting) if saves else 0.0,
        environment=config.env.name,
        write_row_s=median(write) / (config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt),
    )


def measured_step_s(folder: Path) -> float:
    """Return the median seconds from one step of a run, of any kind, to the next."""
    _, kept = _steps(folder)
    return statistics.median(row["timing/step_s"] + row["timing/refit_s"] for row in kept)


def _steps(folder: Path) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Return the metrics of all steps, and of those behind the first ones."""
    steps = [row for number, row in sorted(metrics_by_step(_file(folder, METRICS_FILE)).items()) if number > 0]
    return steps, steps[WARM_UP_STEPS:] if len(steps) > 2 * WARM_UP_STEPS else steps[1:]


def shared(processes: int, cores: float | None) -> float:
    """Return the share of its time that each of these processes has a processor."""
    return 1.0 if cores is None else min(1.0, cores / processes)


def _amounts(setting: PlanSetting, workload: Workload) -> dict[str, Mapping[str, float]]:
    rows = rows_of_step(setting, workload)
    count, engines = len(rows), setting.policy.generation.num_replicas
    return {
        "decode": decode_amounts(setting, rows),
        "passes": pass_amounts(setting, rows),
        "driver": {"driver_row_s": count, "driver_step_s": 1.0},
        "refit": {"refit_byte_s": refit_bytes(setting) * engines, "refit_s": 1.0},
    }


def _file(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        raise ConfigError(f"--from {folder}: expected the folder of a run with {name}, which is not there")
    return folder / name


def _rows(folder: Path) -> tuple[tuple[int, int], ...]:
    """Return tokens of prompt and response of the rows that the run has kept, every step alike."""
    found = []
    for path in sorted((folder / "rollouts").glob("step_*.jsonl")):
        with open_plain(path) as file:
            for line in map(json.loads, file):
                response = int(line["response_tokens"])
                found.append((len(line["token_ids"]) - response, response))
    if not found:
        raise ConfigError(
            f"--from {folder}: expected the lengths of rows in rollouts/step_*.jsonl, which are not there; set "
            "logger.num_rollouts_to_log to 16 or more in the measured run"
        )
    return tuple(found)


def constants_of(runs: Sequence[Measured], *, source: str) -> TimeConstants:
    """Return the constants that come nearest to the runs, by relative error."""
    found: dict[str, float] = {}
    for part, names in PARTS.items():
        seconds = [run.seconds[part] for run in runs]
        found |= _fitted(names, [run.amounts[part] for run in runs], seconds)
    written: dict[str, list[float]] = {}
    for run in runs:
        written.setdefault(run.environment, []).append(run.write_row_s)
    return TimeConstants(
        source=source,
        is_measured=True,
        checkpoint_byte_s=statistics.median(run.checkpoint_byte_s for run in runs),
        write_row_s={name: statistics.median(seconds) for name, seconds in written.items()},
        **found,
    )


def _fitted(names: Sequence[str], amounts: Sequence[Mapping[str, float]], seconds: Sequence[float]) -> dict[str, float]:
    """Return constants of least relative error that are not negative; of as few as serve, earlier ones first."""
    scale = np.maximum(np.array(seconds), 1e-9)
    best: dict[str, float] = {}
    best_error = float("inf")
    for size in range(1, min(len(names), len(seconds)) + 1):
        least = best_error
        for chosen in combinations(names, size):
            matrix = np.array([[row.get(name, 0.0) for name in chosen] for row in amounts]) / scale[:, None]
            if np.linalg.matrix_rank(matrix / np.abs(matrix).max(axis=0).clip(1e-300), tol=1e-3) < size:
                continue
            solution, *_ = np.linalg.lstsq(matrix, np.array(seconds) / scale, rcond=None)
            error = float(np.abs(matrix @ solution - np.array(seconds) / scale).mean())
            if (solution >= 0).all() and error < min(best_error, least - WORTH if size > 1 else float("inf")) - 1e-9:
                best, best_error = dict(zip(chosen, map(float, solution), strict=True)), error
    return best


def assumed_constants(gpu: GPU, setting: PlanSetting) -> TimeConstants:
    """Return constants from a data sheet and assumed shares of it: nothing of them is measured."""
    generation = setting.policy.generation.precision or setting.policy.precision
    rate = gpu.memory_rate * MEMORY_EFFICIENCY
    return TimeConstants(
        source=f"assumed from the data sheet of {gpu.name}: {EFFICIENCY:.0%} of its arithmetic, "
        f"{MEMORY_EFFICIENCY:.0%} of its memory bandwidth, fixed times of usual size; nothing is measured",
        is_measured=False,
        decode_flop_s=1 / (gpu.tflops(generation) * 1e12 * EFFICIENCY),
        turn_layer_s=5e-5,
        turn_byte_s=1 / rate,
        train_flop_s=1 / (gpu.tflops(setting.policy.precision) * 1e12 * EFFICIENCY),
        microbatch_layer_s=2e-4,
        update_s=0.05,
        write_row_s={setting.config.env.name: 2e-4},
        driver_row_s=4e-5,
        driver_step_s=0.1,
        refit_byte_s=1 / gpu.link_rate,
        refit_s=0.5,
        checkpoint_byte_s=1 / rate,
    )
