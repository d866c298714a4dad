"""`replay_run`: an asynchronous run again, from its prompts and its schedule, and the first thing that differs.

Everything is done anew: groups are sampled, scored, trained and sent to the engines. What each step reports, and a
digest of the weights after it, are compared with those of the run, to the last bit. `compare_runs` compares two runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from nemo_rl.algorithms.kept_steps.folder import StepsFolder
from nemo_rl.algorithms.processes import worker_forks
from nemo_rl.algorithms.run_folder import CONFIG_FILE
from nemo_rl.algorithms.schedule_file import RunSchedule, read_schedule
from nemo_rl.algorithms.scheduled_batches import ScheduledBatches
from nemo_rl.algorithms.setup import FollowedSchedule, open_trainer
from nemo_rl.config.load import load_config
from nemo_rl.diagnostics.compare.folders import compare_folders
from nemo_rl.diagnostics.step_replay.chain import ReplayProblem
from nemo_rl.diagnostics.verdict import Comparison, Finding, SiteCheck, Verdict
from nemo_rl.errors import CheckpointError, name_some
from nemo_rl.utils.trackers import METRICS_FILE, metrics_by_step

__all__ = ["compare_runs", "replay_run"]

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
            config = load_config(run / CONFIG_FILE, [*quiet, *ONE_VALIDATION])
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


def compare_runs(a: Path, b: Path) -> Comparison:
    """Compare the numbers of two runs, to the last bit, and what both have recorded of the first step that differs."""
    theirs, ours = (metrics_by_step(folder / METRICS_FILE) for folder in (a, b))
    sites = [site for step in sorted({*theirs} & {*ours}) for site in _numbers(step, theirs[step], ours[step])]
    apart = sorted({*theirs} ^ {*ours})
    missing = [Finding(verdict=Verdict.INCOMPLETE, text=f"one run alone has steps {name_some(apart)}")] if apart else []
    first = next((site for site in sites if not site.agrees), None)
    tensors = [] if first is None else [StepsFolder(folder).records().get(first.step or 0) for folder in (a, b)]
    found = [folder for folder in tensors if folder is not None]
    recorded = compare_folders(*found) if len(found) == 2 else None
    return Comparison(title=f"numbers of A {a}, B {b}", sites=sites, findings=missing, recorded=recorded)
