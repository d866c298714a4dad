"""The wall time of a synchronous and of an asynchronous run that train the same groups, with an engine that sleeps.

    python benchmarks/async_vs_sync.py --json FILE [--quick] [--without-overlap]

The batch source, rollout worker, the engine's batch, data plane and refits are those of a run; a sleep stands for the
forward passes of the engine (`SleepEngine`) and for the training of a step. Lengths are log-normal, and one row of a
thousand is longer than 30 medians. A step trains for the mean rollout time of a group, which is that of its longest
row; against the rollout of a whole step, which waits for the longest row of all, overlap alone can never reach 2.

- `async_vs_sync`: wall time of the synchronous run over that of the asynchronous one.
- `vs_bound`: wall time of `ideal_run`, in which nothing but sampling and training takes time, over that of the run.
- `ks_lengths`: largest distance between the distributions of the lengths of trained rows and of all rows of the prompts
  that were drawn (two-sample Kolmogorov-Smirnov statistic).
- `over_age`: rows that were older than `max_staleness` when they were trained.

Exit code 1 when a bound is missed. `--without-overlap` plants the fault that the figures must find: lookahead 0.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

# A script's own folder is on the path, its package is not.
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from rich.console import Console

from benchmarks.common import ROOT, Hold, check_figures, environment, figures_table, load_average, write_json
from benchmarks.sleep_engine import SleepOptions
from benchmarks.tiny_model import write_random_model
from nemo_rl.algorithms.async_account import Pipeline, SimulatedRun, ideal_run
from nemo_rl.algorithms.async_selection import AsyncLimits
from nemo_rl.algorithms.grpo_sync import TrainerParts
from nemo_rl.algorithms.setup import open_parts
from nemo_rl.algorithms.stages.columns import declare_partition
from nemo_rl.config.load import load_config
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data_plane.factory import open_step
from nemo_rl.experience.rollouts import row_seeds

__all__ = ["HOLDS", "Setting", "TimedRun", "figures_of", "ks_statistic", "main", "measure"]

RECIPE = ROOT / "configs" / "grpo_sort_cpu.yaml"
HOLDS: Mapping[str, Hold] = {
    "async_vs_sync": Hold(least=2.0),
    "vs_bound": Hold(least=0.9),
    "ks_lengths": Hold(most=0.02),
    "over_age": Hold(most=0.0),
}
SEED = 1234
OPTIONS = SleepOptions(median_tokens=20.0, tail_ratio=30.0, tokens_per_s=200.0)
MAX_NEW_TOKENS = 960
"""Forty-eight medians: about one row of three thousand is cut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The sizes of both runs."""

    num_steps: int = 24
    num_groups: int = 16
    group_size: int = 8
    max_staleness: int = 2
    lookahead: int = 2
    options: SleepOptions = OPTIONS

    @property
    def places(self) -> int:
        """Rows that the engine decodes at once: no group waits for a place in either run."""
        return self.num_groups * (1 + self.max_staleness) * self.group_size

    def lengths(self, ordinal: int) -> list[int]:
        """Return the tokens of each row of a group, as the engine makes them of the seeds."""
        first = row_seeds(SEED, "group", ordinal, count=1)[0]
        rows = [self.options.length_of(first + row) for row in range(self.group_size)]
        return [int(min(length, MAX_NEW_TOKENS)) for length in rows]

    def row_seconds(self, ordinal: int) -> list[float]:
        return [length / self.options.tokens_per_s for length in self.lengths(ordinal)]

    @property
    def train_s(self) -> float:
        """Mean rollout time of a group."""
        return statistics.mean(max(self.row_seconds(ordinal)) for ordinal in range(self.num_steps * self.num_groups))

    def ideal(self, *, is_async: bool) -> SimulatedRun:
        """Return the run in which only sampling and training take time."""
        limits = AsyncLimits(
            num_groups=self.num_groups,
            max_staleness=self.max_staleness if is_async else 0,
            lookahead=self.lookahead if is_async else 0,
            max_num_steps=self.num_steps,
        )
        return ideal_run(
            Pipeline(
                limits=limits,
                row_seconds=self.row_seconds,
                train_s=self.train_s,
                places=self.places,
            )
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedStep:
    """One step of a run."""

    number: int
    waited_s: float
    """Time that the trainer waited for the groups of the step."""
    refit_s: float
    lengths: tuple[int, ...]
    """Tokens of each row."""
    staleness: tuple[int, ...]
    """Of each row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedRun:
    """One run."""

    seconds: float
    """From the first wait for groups to the last update."""
    steps: tuple[TimedStep, ...]

    @property
    def lengths(self) -> list[int]:
        return [length for step in self.steps for length in step.lengths]


def measure(setting: Setting, *, is_async: bool) -> TimedRun:
    """Run one of the two loops."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        config = _config(setting, folder, write_random_model(folder / "model"), is_async=is_async)
        with open_parts(config, console=Console(file=io.StringIO())) as parts, closing(parts.source):
            return _loop(parts, setting)


def figures_of(setting: Setting, sync: TimedRun, overlapped: TimedRun) -> dict[str, float]:
    drawn = [length for ordinal in range(setting.num_steps * setting.num_groups) for length in setting.lengths(ordinal)]
    ages = [age for step in overlapped.steps for age in step.staleness]
    # The bound that was asked for, also where a fault is planted.
    ideal = replace(setting, lookahead=setting.max_staleness).ideal(is_async=True)
    return {
        "async_vs_sync": sync.seconds / overlapped.seconds,
        "vs_bound": ideal.seconds / overlapped.seconds,
        "ks_lengths": ks_statistic(overlapped.lengths, drawn),
        "over_age": float(sum(age > setting.max_staleness for age in ages)),
        "sync_vs_bound": setting.ideal(is_async=False).seconds / sync.seconds,
        "sync_s": sync.seconds,
        "async_s": overlapped.seconds,
        "mean_staleness": statistics.mean(ages),
        "trainer_idle_share_sync": sum(step.waited_s for step in sync.steps) / sync.seconds,
        "trainer_idle_share_async": sum(step.waited_s for step in overlapped.steps) / overlapped.seconds,
        "tail_ratio_p999": float(np.quantile(drawn, 0.999) / np.median(drawn)),
    }


def ks_statistic(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest distance between the two empirical distribution functions.

    Example:
        >>> ks_statistic([1, 2, 3, 4], [1, 2, 3, 40]), ks_statistic([1, 2], [3, 4])
        (0.25, 1.0)
    """
    values = np.unique(np.concatenate([one, other]))
    shares = [np.searchsorted(np.sort(each), values, side="right") / len(each) for each in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())


def _loop(parts: TrainerParts, setting: Setting) -> TimedRun:
    """Do what `GRPOTrainer` does with a source, and sleep where it trains."""
    source, steps, train_s = parts.source, list[TimedStep](), setting.train_s
    declare_partition(parts.client, parts.columns, parts.config.grpo)
    _refit(parts, 0)
    began = time.monotonic()
    for number in range(1, setting.num_steps + 1):
        asked = time.monotonic()
        step = source.next(number)
        got = time.monotonic()
        with open_step(parts.client, step.partition, step.keys):
            time.sleep(train_s)
        source.trained(step)
        updated = time.monotonic()
        if number < setting.num_steps:
            _refit(parts, number)
        rows = step.rows
        steps.append(
            TimedStep(
                number=number,
                waited_s=got - asked,
                refit_s=time.monotonic() - updated,
                lengths=tuple(map(int, rows.sample_stats.response_lengths)),
                staleness=tuple(number - 1 - int(version) for version in rows.weight_versions),
            )
        )
    return TimedRun(seconds=updated - began, steps=tuple(steps))


def _refit(parts: TrainerParts, version: int) -> None:
    parts.weight_sync.sync(version)
    parts.source.updated(version, weights=None)


def _config(setting: Setting, folder: Path, model: Path, *, is_async: bool) -> MasterConfig:
    options = {name: value for name, value in asdict(setting.options).items() if name not in ("lengths", "real_time")}
    asynchronous = (
        "grpo.async.enabled=true",
        f"grpo.async.max_staleness={setting.max_staleness}",
        f"grpo.async.lookahead={setting.lookahead}",
        "grpo.use_generation_logprobs_as_prev=false",
        "loss_fn.use_importance_sampling_correction=true",
        "loss_fn.truncated_importance_sampling_type=tis",
        "loss_fn.truncated_importance_sampling_ratio=2.0",
    )
    overrides = [
        "cluster.launcher=local",
        "cluster.cpu_workers_per_node=1",
        "data_plane.impl=noop",
        "checkpointing.enabled=false",
        f"logger.log_dir={folder / 'logs'}",
        "logger.tensorboard_enabled=false",
        "logger.reward_curve=false",
        "data.validation=null",
        "grpo.val_period=0",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
        f"grpo.seed={SEED}",
        f"grpo.max_num_steps={setting.num_steps}",
        f"grpo.num_prompts_per_step={setting.num_groups}",
        f"grpo.num_generations_per_prompt={setting.group_size}",
        f"policy.train_global_batch_size={setting.num_groups * setting.group_size}",
        f"policy.model_name={model}",
        f"policy.max_total_sequence_length={MAX_NEW_TOKENS + 64}",
        f"policy.generation.max_new_tokens={MAX_NEW_TOKENS}",
        f"policy.generation.max_batch_size={setting.places}",
        "policy.generation.num_replicas=1",
        "policy.generation.backend=benchmarks.sleep_engine:build_sleep_engine",
        "policy.generation.receipt.enabled=false",
        *(f"+policy.generation.options.{name}={value}" for name, value in options.items()),
        "env.name=custom",
        "env.reward_function=benchmarks.rewards:odd_share",
        *(asynchronous if is_async else ()),
    ]
    return load_config(RECIPE, overrides)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file for raw samples and figures")
    parser.add_argument("--quick", action="store_true", help="few steps; the bounds are not checked")
    parser.add_argument("--without-overlap", action="store_true", help="plant a fault: no group is sampled ahead")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    load_before = load_average()
    setting = Setting(num_steps=4) if given.quick else Setting()
    if given.without_overlap:
        setting = replace(setting, lookahead=0)
    sync, overlapped = measure(setting, is_async=False), measure(setting, is_async=True)
    figures = figures_of(setting, sync, overlapped)
    holds = {} if given.quick else HOLDS
    console = Console()
    console.print(figures_table(figures, holds))
    missed = check_figures(figures, holds)
    report = {
        **environment(),
        "load_before": load_before,
        "load_after": load_average(),
        "setting": {**asdict(setting), "train_s": setting.train_s, "places": setting.places},
        "figures": figures,
        "problems": missed,
        "sync": asdict(sync),
        "async": asdict(overlapped),
    }
    console.print(f"written to {write_json(given.json, report)}")
    for line in missed:
        console.print(line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
