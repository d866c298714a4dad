"""`replay_run`: an asynchronous run again, from its prompts and its schedule, and the first thing that differs.

Everything is done anew: groups are sampled, scored, trained and sent to the engines. What each step reports, and a
digest of the weights after it, are compared with those of the run, to the last bit. `compare_runs` compares two runs:
what they have learned, their settings and steps, and then their numbers in the same way.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

from rich.console import Console

from nemo_rl.algorithms.kept_steps.folder import StepsFolder
from nemo_rl.algorithms.processes import worker_forks
from nemo_rl.algorithms.run_folder import CONFIG_FILE
from nemo_rl.algorithms.scheduled_batches import RunSchedule, ScheduledBatches, read_schedule
from nemo_rl.algorithms.setup import open_trainer
from nemo_rl.algorithms.sources import FollowedSchedule
from nemo_rl.config.load import load_config
from nemo_rl.config.schema import MasterConfig
from nemo_rl.errors import CheckpointError, name_some
from nemo_rl.utils.console import printable
from nemo_rl.utils.trackers import METRICS_FILE, metrics_by_step
from nemo_rl_tools.compare.folders import compare_folders
from nemo_rl_tools.step_replay.chain import ReplayProblem
from nemo_rl_tools.verdict import Comparison, Finding, SiteCheck, Verdict, table_lines
from nemo_rl_tools.view.runs import ViewedRun

__all__ = ["RunsComparison", "compare_runs", "replay_run"]

QUIET = (
    "logger.overwrite=true",
    "logger.live_panel=false",
    "logger.tensorboard_enabled=false",
    "logger.wandb_enabled=false",
    "logger.mlflow_enabled=false",
    "logger.trackers=[]",
    "logger.reward_curve=false",
    "logger.num_rollouts_to_log=0",
    "checkpointing.enabled=false",
    "cluster.spare_nodes=0",
    "diagnostics.keep_steps.enabled=false",
)
"""Settings of the replay: none of them changes a number of a step."""
ONE_VALIDATION = ("grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=true")
"""Settings of a replay whose run has held-out prompts: these decide which prompts are trained on, so they stay."""
COMPARED = (
    "train/loss",
    "train/grad_norm",
    "train/reward",
    "train/reward_std",
    "train/tokens",
    "train/rows",
    "train/gen_probs_ratio",
    "train/policy_kl",
    "rollout/response_tokens",
    "rollout/max_response_tokens",
    "rollout/mean_response_tokens",
    "rollout/mean_generation_logprob",
    "rollout/truncated_share",
    "rollout/staleness_min",
    "rollout/staleness_max",
    "rollout/staleness_mean",
)
"""Metrics of a step that are compared where the run has them: rows, versions, losses."""
WEIGHTS = "weights"
NUM_ENDS = 5
"""Steps at the start and at the end of a run whose mean is shown."""
STEPS = (
    *("rollout/mean_response_tokens", "train/policy_kl", "train/reference_kl", "train/approx_entropy"),
    *("train/grad_norm", "train/loss", "timing/step_s"),
)
"""Metrics of two runs that are shown behind their rewards."""
PATHS = ("logger.log_dir", "checkpointing.checkpoint_dir")
"""Settings in which two runs always differ."""


def replay_run(run: Path, *, start: int, stop: int, overrides: Sequence[str] = (), console: Console) -> Comparison:
    """Do the steps `start` + 1 to `stop` of an asynchronous run again.

    Raises:
        ReplayProblem: the folder has no schedule, or one that cannot be followed.
    """
    if start != 0:
        raise ReplayProblem(
            f"--from {start}: a schedule is followed from the start of its run, expected --from 0; single steps are "
            "replayed with --step",
            verdict=Verdict.UNSUPPORTED,
        )
    try:
        schedule = read_schedule(run, start=start)
    except CheckpointError as problem:
        raise ReplayProblem(str(problem), verdict=Verdict.INCOMPLETE) from problem
    known = max(schedule.steps, default=0)
    if not 1 <= stop <= known:
        raise ReplayProblem(f"--to {stop}: expected 1 to {known}, the steps of {run}", verdict=Verdict.USAGE)
    if not schedule.scripts:
        raise ReplayProblem(
            f"{run}: its engines kept no schedule; expected a run with policy.generation.backend=torch",
            verdict=Verdict.UNSUPPORTED,
        )
    with tempfile.TemporaryDirectory(prefix="nemo_rl_replay_") as folder:
        quiet = [*QUIET, f"logger.log_dir={folder}", *overrides]
        config = load_config(run / CONFIG_FILE, quiet)
        if config.data.validation is not None:
            quiet += ONE_VALIDATION
        config = load_config(run / CONFIG_FILE, [*quiet, *_kept_verdicts(run, config)])
        follows = FollowedSchedule(schedule=schedule, last_step=stop)
        with (
            worker_forks(config) as forks,
            open_trainer(config, console=console, forks=forks, follows=follows) as trainer,
        ):
            trainer.fit()
            source = trainer.source
            assert isinstance(source, ScheduledBatches), "open_trainer follows the schedule"
            digests = dict(source.digests)
        return _compared(run, Path(folder), schedule, digests, stop)


def _kept_verdicts(run: Path, config: MasterConfig) -> list[str]:
    """Return the settings that take the verdicts of judges from the run, where it has some."""
    found = []
    for path, env in config.envs.items():
        file = run / ("verdicts.jsonl" if path == "env" else f"verdicts.{path}.jsonl")
        if env.judges and file.is_file():
            found += [f"{path}.judges.{name}.verdicts={file.absolute()}" for name in env.judges]
            found.append(f"{path}.preflight_reward=false")
    return found


def _compared(run: Path, again: Path, schedule: RunSchedule, digests: Mapping[int, str], stop: int) -> Comparison:
    found, expected = (metrics_by_step(folder / METRICS_FILE) for folder in (again, run))
    sites: list[SiteCheck] = []
    for step in range(1, stop + 1):
        sites += _numbers(step, expected.get(step, {}), found.get(step, {}))
        if step in schedule.weights:
            sites.append(_number(step, WEIGHTS, schedule.weights[step], digests.get(step)))
    num_weights = sum(site.name == WEIGHTS for site in sites)
    num_groups = sum(len(schedule.steps.get(step, ())) for step in range(1, stop + 1))
    is_whole = 0 < num_weights < len(sites) or not all(site.agrees for site in sites)
    return Comparison(
        title=f"steps 1 to {stop} of {run}: {num_groups} groups sampled and trained again",
        sites=sites,
        findings=() if is_whole else [Finding(verdict=Verdict.VACUOUS, text="the run has no numbers or no weights")],
        facts={"last_step": stop, "num_groups": num_groups, "num_weights": num_weights},
    )


def _numbers(step: int, kept: Mapping[str, float], made: Mapping[str, float]) -> list[SiteCheck]:
    return [_number(step, name, kept[name], made.get(name)) for name in COMPARED if name in kept]


def _number(step: int, name: str, kept: object, made: object) -> SiteCheck:
    difference = "" if kept == made else f"expected {kept!r}, got {made!r}"
    return SiteCheck(name=name, step=step, a=repr(kept), b=repr(made), agrees=not difference, difference=difference)


Pairs: TypeAlias = dict[str, tuple[float | str | None, float | str | None]]
"""Name -> the value of A and of B; None where one has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunsComparison(Comparison):
    """Two runs: their rewards, settings and steps, then the verdict on their numbers, to the last bit."""

    learned: Mapping[str, Pairs]

    def lines(self, *, is_all: bool = False) -> list[str]:
        """Return the report in text, without the sites."""
        lines, outcome = [self.title], self.outcome
        for title, pairs in self.learned.items():
            head = f"{title} that differ" if title == "settings" else title
            rows = [(f"  {name}", *_cells(a, b)) for name, (a, b) in pairs.items()] or [("  none", "", "", "")]
            lines += ["", *table_lines([(head, "A", "B", "B - A"), *rows])]
        said = (*(each.text for each in self.findings), "--bits shows them site by site")
        lines += ["", f"bits: {outcome.verdict.name}: {outcome.text}", *(f"  {text}" for text in said)]
        return [printable(line, limit=len(line)).rstrip() for line in lines]


def _cells(a: float | str | None, b: float | str | None) -> tuple[str, ...]:
    """Return both values as text, and their difference where they are numbers."""
    less = b - a if isinstance(a, float) and isinstance(b, float) else None
    return tuple(f"{each:.4g}" if isinstance(each, float) else each or "" for each in (a, b, less))


def compare_runs(a: Path, b: Path, *, bits: bool = False) -> Comparison:
    """Compare two runs.

    Args:
        bits: the last part alone: numbers, to the last bit, and records of the first step that differs.
    """
    both = [metrics_by_step(folder / METRICS_FILE) for folder in (a, b)]
    theirs, ours = both
    sites = [site for step in sorted({*theirs} & {*ours}) for site in _numbers(step, theirs[step], ours[step])]
    apart = sorted({*theirs} ^ {*ours})
    missing = [Finding(verdict=Verdict.INCOMPLETE, text=f"one run alone has steps {name_some(apart)}")] if apart else []
    first = next((site for site in sites if not site.agrees), None)
    tensors = [] if first is None else [StepsFolder(folder).records().get(first.step or 0) for folder in (a, b)]
    found = [folder for folder in tensors if folder is not None]
    recorded = compare_folders(*found) if len(found) == 2 else None
    title = f"numbers of A {a}, B {b}"
    if bits:
        return Comparison(title=title, sites=sites, findings=missing, recorded=recorded)
    runs = [ViewedRun(name=str(folder), folder=folder) for folder in (a, b)]
    mine, other = (run.settings() for run in runs)
    ends = [max(steps, default=0) for steps in both]
    states = runs[0].outcome(ends[0], mine).state, runs[1].outcome(ends[1], other).state
    names = dict.fromkeys(name for run in both for row in run.values() for name in row)
    components = [name for name in names if name.startswith("train/reward/")]
    measure = "val/accuracy" if "val/accuracy" in names else "val/reward"
    keys = [key for key in sorted({*mine, *other} - {*PATHS}) if mine.get(key) != other.get(key)]
    learned: dict[str, Pairs] = {
        "rewards": _pairs(both, ("train/reward", *components, measure)),
        "settings": {key: (mine.get(key), other.get(key)) for key in keys},
        "steps": {"state": states, "steps": (float(ends[0]), float(ends[1])), **_pairs(both, STEPS)},
    }
    return RunsComparison(title=title, sites=sites, findings=missing, recorded=recorded, learned=learned, facts=learned)


def _pairs(both: Sequence[Mapping[int, Mapping[str, float]]], names: Sequence[str]) -> Pairs:
    """Return the mean of each metric over the first and over the last steps of both runs; of a validation the value."""
    found = Pairs()
    for name in names:
        a, b = ([steps[step][name] for step in sorted(steps) if name in steps[step]] for steps in both)
        num, words = (1, "") if name.startswith("val/") else (NUM_ENDS, f" {NUM_ENDS} steps")
        for where, part in (("first", slice(num)), ("last", slice(-num, None))):
            if a or b:
                found[f"{name}, {where}{words}"] = (fmean(a[part]) if a else None, fmean(b[part]) if b else None)
    return found
