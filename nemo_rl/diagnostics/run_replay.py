"""`replay_run`: an asynchronous run again, from its prompts and its schedule, and the first thing that differs.

Everything is done anew: groups are sampled, scored, trained and sent to the engines. What each step reports, and a
digest of the weights after it, are compared with those of the run, to the last bit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from nemo_rl.algorithms.processes import worker_forks
from nemo_rl.algorithms.run_folder import CONFIG_FILE
from nemo_rl.algorithms.schedule_file import RunSchedule, read_schedule
from nemo_rl.algorithms.scheduled_batches import ScheduledBatches
from nemo_rl.algorithms.setup import FollowedSchedule, open_trainer
from nemo_rl.config.load import load_config
from nemo_rl.diagnostics.step_replay.chain import ReplayProblem
from nemo_rl.diagnostics.verdict import Verdict
from nemo_rl.errors import CheckpointError
from nemo_rl.utils.trackers import METRICS_FILE, read_metrics

__all__ = ["RunReplayReport", "StepDifference", "replay_run"]

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


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDifference:
    """A number of a step that is not that of the run."""

    step: int
    what: str
    expected: object
    got: object

    @property
    def text(self) -> str:
        return f"step {self.step}: {self.what}: expected {self.expected!r}, got {self.got!r}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReplayReport:
    """The outcome of the replay of a run."""

    run: Path
    last_step: int
    num_groups: int
    num_values: int
    """Numbers that were compared."""
    num_weights: int
    """Versions of the weights that were compared."""
    differences: tuple[StepDifference, ...]
    """Differences by step; the first one is the place to look at."""

    @property
    def verdict(self) -> Verdict:
        if self.differences:
            return Verdict.MISMATCH
        return Verdict.PASS if self.num_values and self.num_weights else Verdict.VACUOUS

    def lines(self) -> list[str]:
        """Return the report for people."""
        what = (
            f"{self.verdict.label}: steps 1 to {self.last_step} of {self.run}: {self.num_groups} groups sampled and "
            f"trained again, {self.num_values} numbers and the weights of {self.num_weights} versions compared"
        )
        return [what, *(difference.text for difference in self.differences)]

    def as_record(self) -> dict[str, object]:
        """Return the report as a JSON object."""
        return {
            "verdict": self.verdict.label,
            "run": str(self.run),
            "last_step": self.last_step,
            "num_groups": self.num_groups,
            "num_values": self.num_values,
            "num_weights": self.num_weights,
            "differences": [
                {"step": each.step, "what": each.what, "expected": each.expected, "got": each.got}
                for each in self.differences
            ],
        }


def replay_run(run: Path, *, start: int, stop: int, overrides: Sequence[str] = (), console: Console) -> RunReplayReport:
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


def _compared(run: Path, again: Path, schedule: RunSchedule, digests: Mapping[int, str], stop: int) -> RunReplayReport:
    found, expected = _steps(again), _steps(run)
    differences: list[StepDifference] = []
    num_values = 0
    for step in range(1, stop + 1):
        theirs, ours = expected.get(step, {}), found.get(step, {})
        names = [name for name in COMPARED if name in theirs]
        num_values += len(names)
        differences += [
            StepDifference(step=step, what=name, expected=theirs[name], got=ours.get(name))
            for name in names
            if theirs[name] != ours.get(name)
        ]
        if step in schedule.weights and schedule.weights[step] != digests.get(step):
            digest = digests.get(step)
            differences.append(StepDifference(step=step, what="weights", expected=schedule.weights[step], got=digest))
    return RunReplayReport(
        run=run,
        last_step=stop,
        num_groups=sum(len(schedule.steps.get(step, ())) for step in range(1, stop + 1)),
        num_values=num_values,
        num_weights=sum(step in schedule.weights for step in range(1, stop + 1)),
        differences=tuple(differences),
    )


def _steps(folder: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of each step; those of several lines are joined."""
    steps: dict[int, dict[str, float]] = {}
    for row in read_metrics(folder / METRICS_FILE):
        steps.setdefault(int(row["step"]), {}).update(row)
    return steps
