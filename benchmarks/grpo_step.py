"""Where the time and the bytes of a GRPO step go, with every payload store side by side.

    python benchmarks/grpo_step.py --json FILE [--steps N] [--rows N] [--model DIR] [--only RUN ...]

`noop` (one process) and `transfer_queue` (Ray) train one data-parallel rank on the same model and seed, so their work
is equal; `transfer_queue_2_workers` is the demo. Exit code 1 when the numbers make no sense, see `step_report`.
"""

from __future__ import annotations

import argparse
import io
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

# A script's own folder is on the path, its package is not; Ray hands the path on to the workers.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import ROOT, Spread, environment, load_average, write_json
from benchmarks.step_report import (
    GroupStatistics,
    RunResult,
    group_statistics_problems,
    pair_problems,
    run_problems,
    stage_table,
    step_sample,
)
from benchmarks.tiny_model import write_random_model
from nemo_rl.algorithms.advantage_estimator import group_statistics
from nemo_rl.algorithms.estimators import estimate_advantages
from nemo_rl.algorithms.setup import open_trainer
from nemo_rl.config.load import load_config
from nemo_rl.config.schema import MasterConfig
from nemo_rl.errors import NemoRLError
from nemo_rl.utils.console import configure_logging, make_console
from nemo_rl.utils.trackers import read_metrics

__all__ = ["PAIRS", "RUNS", "Options", "Run", "main", "measure", "measure_group_statistics"]

RECIPE = ROOT / "configs" / "grpo_sort_cpu.yaml"
STARTER = ROOT / "checkpoints" / "starter_sort"
GROUP_SIZE = 8
TABLE_WIDTH = 170
"""Columns where the output is no terminal."""

COMMON = (
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "data.validation=null",
    f"grpo.num_generations_per_prompt={GROUP_SIZE}",
    "policy.scheduler.decay_steps=60",
    "checkpointing.enabled=false",
    "logger.tensorboard_enabled=false",
    "logger.reward_curve=false",
)
NOOP = (
    "cluster.launcher=local",
    "cluster.cpu_workers_per_node=1",
    "policy.generation.num_replicas=1",
    "data_plane.impl=noop",
)
ONE_WORKER = ("cluster.cpu_workers_per_node=1", "policy.generation.num_replicas=1")
ALL_STAGES = ("grpo.use_generation_logprobs_as_prev=false", "loss_fn.reference_policy_kl_penalty=0.01")
ANY_TEXT = ("env.name=custom", "env.reward_function=benchmarks.rewards:odd_share")
LONG = (
    *ANY_TEXT,
    "policy.generation.stop_token_ids=[]",
    "policy.generation.max_new_tokens=520",
    "policy.max_total_sequence_length=552",
)
LONG_STEPS, LONG_ROWS = 2, 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One way to run the recipe."""

    impl: str
    overrides: tuple[str, ...]
    is_long: bool = False
    """Responses never stop: for the driver's share of the bytes."""


RUNS = {
    "noop": Run(impl="noop", overrides=NOOP),
    "transfer_queue": Run(impl="transfer_queue", overrides=ONE_WORKER),
    "transfer_queue_2_workers": Run(impl="transfer_queue", overrides=()),
    "noop_all_stages": Run(impl="noop", overrides=(*NOOP, *ALL_STAGES)),
    "transfer_queue_all_stages": Run(impl="transfer_queue", overrides=(*ONE_WORKER, *ALL_STAGES)),
    "long": Run(impl="noop", overrides=(*NOOP, *LONG), is_long=True),
    "long_all_stages": Run(impl="noop", overrides=(*NOOP, *LONG, *ALL_STAGES), is_long=True),
    "long_2_workers": Run(impl="transfer_queue", overrides=LONG, is_long=True),
}
PAIRS = (("noop", "transfer_queue"), ("noop_all_stages", "transfer_queue_all_stages"))
"""Equal work: their losses must be bit-identical."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the command line asks for."""

    model: Path
    is_random: bool
    """The model knows nothing: rewards must not ask for right answers."""
    steps: int
    rows: int
    """Samples per step of the runs that are not long."""
    overrides: tuple[str, ...] = ()
    """Further changes to every run."""


def measure(name: str, options: Options, folder: Path) -> RunResult:
    """Runs one entry of `RUNS` and reads its samples from the metrics that it logged."""
    run = RUNS[name]
    config = load_config(RECIPE, _overrides(run, options, folder / name))
    before = load_average()
    with open_trainer(config, console=Console(file=io.StringIO())) as trainer:
        trainer.fit()
    return RunResult(
        name=name,
        impl=run.impl,
        is_long=run.is_long,
        config=_shown(config),
        load_before=before,
        load_after=load_average(),
        samples=tuple(step_sample(row) for row in read_metrics(config.logger.log_dir / "metrics.jsonl")),
    )


def measure_group_statistics(*, num_groups: int = 128, group_size: int = 16, repeats: int = 200) -> GroupStatistics:
    """Times what the driver computes from the rewards of a step."""
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randint(0, 2, (num_groups * group_size,), generator=generator).float()
    uids = [group for group in range(num_groups) for _ in range(group_size)]

    def advantages() -> None:
        estimate_advantages(rewards, group_statistics(rewards, uids), leave_one_out=True, normalize=True)

    return GroupStatistics(
        num_groups=num_groups,
        group_size=group_size,
        statistics_ms=_repeat(lambda: group_statistics(rewards, uids), repeats),
        total_ms=_repeat(advantages, repeats),
    )


def check(results: Sequence[RunResult], statistics: GroupStatistics, options: Options) -> list[str]:
    """Everything that is wrong with a report."""
    by_name = {result.name: result for result in results}
    problems = group_statistics_problems(statistics)
    for result in results:
        problems += run_problems(result, num_steps=_num_steps(RUNS[result.name], options))
    for reference, other in PAIRS:
        if reference in by_name and other in by_name:
            problems += pair_problems(by_name[reference], by_name[other])
    return problems


def main(argv: Sequence[str]) -> int:
    args = _parse(argv)
    console = make_console()
    if not console.is_terminal:
        console.width = TABLE_WIDTH
    configure_logging(console, level=logging.ERROR)
    torch.set_num_threads(1)
    before, started = load_average(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="grpo_step-") as temporary:
        folder = Path(temporary)
        options = _options(args, folder)
        results = []
        statistics = measure_group_statistics()
        try:
            for name in args.only or RUNS:
                console.print(f"running {name}")
                results.append(measure(name, options, folder))
        except NemoRLError as error:
            console.print(f"error: {error}")
            return 1
    problems = check(results, statistics, options)
    report = {
        **environment(),
        "load_before": before,
        "load_after": load_average(),
        "seconds": round(time.monotonic() - started, 1),
        "model": "random" if options.is_random else _relative(options.model),
        "steps": options.steps,
        "rows": options.rows,
        "problems": problems,
        "group_statistics": statistics.to_json(),
        "runs": {result.name: result.to_json() for result in results},
    }
    write_json(args.json, report)
    _show(console, results, statistics, options)
    for problem in problems:
        console.print(f"FAILED: {problem}")
    console.print(f"{args.json}: written, load {before[0]} before and {load_average()[0]} after")
    return 1 if problems else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="seconds and bytes of a GRPO step, store by store")
    parser.add_argument("--json", type=Path, required=True, help="report with raw samples")
    parser.add_argument("--steps", type=int, default=8, help="steps per run, the first of which is a warm-up")
    parser.add_argument("--rows", type=int, default=1024, help=f"samples per step, a multiple of {2 * GROUP_SIZE}")
    parser.add_argument("--model", type=Path, help="model folder; default: the starter checkpoint, else a random model")
    parser.add_argument("--only", nargs="+", choices=RUNS, help="only these runs")
    args = parser.parse_args(list(argv))
    if args.steps < 1 or args.rows < 1 or args.rows % (2 * GROUP_SIZE):
        parser.error(f"expected --steps of at least 1 and --rows in multiples of {2 * GROUP_SIZE}")
    return args


def _options(args: argparse.Namespace, folder: Path) -> Options:
    model = args.model or (STARTER if (STARTER / "config.json").is_file() else None)
    return Options(
        model=model.resolve() if model is not None else write_random_model(folder / "model"),
        is_random=model is None,
        steps=args.steps,
        rows=args.rows,
    )


def _overrides(run: Run, options: Options, folder: Path) -> list[str]:
    rows = LONG_ROWS if run.is_long else options.rows
    return [
        *COMMON,
        f"grpo.num_prompts_per_step={rows // GROUP_SIZE}",
        f"policy.train_global_batch_size={rows // 2}",
        f"grpo.max_num_steps={_num_steps(run, options)}",
        f"policy.model_name={options.model}",
        f"logger.log_dir={folder}",
        *(ANY_TEXT if options.is_random else ()),
        *run.overrides,
        *options.overrides,
    ]


def _num_steps(run: Run, options: Options) -> int:
    return min(options.steps, LONG_STEPS) if run.is_long else options.steps


def _shown(config: MasterConfig) -> dict[str, object]:
    """The resolved config without folders of this machine."""
    shown = config.model_dump(mode="json", exclude={"logger", "checkpointing"})
    shown["policy"]["model_name"] = _relative(Path(config.policy.model_name))
    return shown


def _relative(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def _repeat(action: Callable[[], object], repeats: int) -> tuple[float, ...]:
    """Milliseconds of each call, after a few that are not counted."""
    samples = []
    for number in range(repeats + 10):
        started = time.perf_counter()
        action()
        if number >= 10:
            samples.append((time.perf_counter() - started) * 1e3)
    return tuple(samples)


def _show(console: Console, results: Sequence[RunResult], statistics: GroupStatistics, options: Options) -> None:
    short = [result for result in results if not result.is_long]
    long = [result for result in results if result.is_long]
    if short:
        console.print(stage_table(short, title=f"one step of {options.rows} samples"))
    if long:
        console.print(stage_table(long, title=f"one step of {LONG_ROWS} samples with 520 tokens each"))
    console.print(
        f"{statistics.num_groups} groups x {statistics.group_size}: statistics "
        f"{Spread.of(statistics.statistics_ms)} ms, with advantages {Spread.of(statistics.total_ms)} ms"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
