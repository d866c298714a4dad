"""`GRPOTrainer`: takes batches from a source and trains on them, one step at a time.

    GRPOTrainer.fit
      |- open_run        partition, checkpoint, first weights              (declare_partition, WeightSync.sync)
      |- validate        held-out prompts -> mean reward                   (RolloutHandle.validate)
      `- step            once per step                                     (GRPOTrainer.step)
           |- source     a step whose rows are in the data plane           (BatchSource.next)
           |- sleep      engines free their memory for the policy          (WeightSync.sleep_engines)
           |- open_step  these rows are cleared at its end, also after an error     (open_step)
           |    |- stages  score, logprobs, advantages, train, log; see stages/bodies.py   (Stage.submit)
           |    |- observers  follow every stage: kept steps, live tracer, panel    (StepObservers.after_stage)
           |    `- clear   rows that were not trained, with the reason     (clear_untrained)
           `- end_step   workers forget what they fetched                  (TQWorker.end_step)
         then refit, validate, log, save                                   (step_metrics, Saver.save)

What is known of a step is in its `StepState`; the trainer holds what outlives a step, and has no branch on its source.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from nemo_rl.algorithms.batches import BatchSource, NoStepLeft
from nemo_rl.algorithms.observers import MISMATCH_METRIC, StepObservers
from nemo_rl.algorithms.saver import Saver
from nemo_rl.algorithms.stages.bodies import clear_untrained
from nemo_rl.algorithms.stages.columns import ROLLOUT, StageColumns, declare_partition
from nemo_rl.algorithms.stages.stage import Stage, StepState
from nemo_rl.algorithms.step_metrics import (
    data_plane_metrics,
    ending_texts,
    engine_speeds,
    informative_kl,
    step_metrics,
)
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data_plane.factory import check_empty, open_step
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.distributed.worker_groups import Pending, ask
from nemo_rl.errors import UserError
from nemo_rl.experience.evaluation.evaluator import EvaluationTask, SampleFile, ValidationResult
from nemo_rl.experience.rollout_handle import RolloutHandle
from nemo_rl.models.policy.tq_policy import TQPolicy
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.models.policy.workers.tq_worker import TQWorker
from nemo_rl.models.weight_sync.base import WeightSync
from nemo_rl.utils import interrupt
from nemo_rl.utils.checkpoint import Checkpoint, CheckpointManager
from nemo_rl.utils.deadlines import SaveDeadline
from nemo_rl.utils.logger import REWARD_METRIC, VAL_REWARD_METRIC, Logger
from nemo_rl.utils.memory import frozen_startup_objects
from nemo_rl.utils.metrics import Timer, values
from nemo_rl.utils.panel import Panel, StepReport
from nemo_rl.utils.rollout_file import ROLLOUTS
from nemo_rl.utils.run_lock import stopped_early

__all__ = ["GRPOTrainer", "RowParts", "RunSummary", "TrainerParts"]

ENGINES_METRIC = "rollout/engines"
"""Engines alive at the end of a rollout, as `EngineScheduler` counts them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerParts:
    """Everything that a trainer drives; built by `setup`."""

    config: MasterConfig
    source: BatchSource
    columns: tuple[StageColumns, ...]
    """Columns of all stages, that of the source included."""
    stages: tuple[Stage, ...]
    client: DataPlaneClient
    policy: TQPolicy
    teacher: TQPolicy | None = None
    """The workers of a teacher; None without distillation."""
    weight_sync: WeightSync
    rollout: RolloutHandle
    checkpoints: CheckpointManager | None
    logger: Logger
    panel: Panel
    resume_from: Checkpoint | None = None
    run_state: Mapping[str, object] = field(default_factory=dict)
    """The section that `identity_state` makes for checkpoints."""
    step_metrics: Callable[[StepState], dict[str, float]] = step_metrics
    """Returns the metrics of a step that has ended."""
    observers: StepObservers = field(default_factory=StepObservers)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowParts:
    """The parts by which a run comes to its rows."""

    rollout: RolloutHandle
    weight_sync: WeightSync
    step_metrics: Callable[[StepState], dict[str, float]] = step_metrics
    """See `TrainerParts`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """The end of a run."""

    first_reward: float | None
    """Mean reward of the validation before training; None without it."""
    last_reward: float | None
    num_steps: int
    seconds: float
    last_checkpoint: str | Path | None
    """Its folder, or its URL."""
    best_checkpoint: str | Path | None
    """The best of the kept checkpoints by `checkpointing.metric_name`."""
    is_out_of_time: bool = False
    """Ended before its last step, to be saved by `checkpointing.must_save_by`."""
    is_interrupted: bool = False
    """Ended before its last step, after SIGTERM or SIGUSR1."""


class GRPOTrainer:
    """Runs GRPO step by step.

    Args:
        parts: engines and settings, already started.
    """

    def __init__(self, parts: TrainerParts) -> None:
        self._parts = parts
        self._deadline = SaveDeadline()
        self._is_out_of_time = False
        self._saver = Saver(
            parts.checkpoints,
            parts.policy,
            parts.config.checkpointing,
            timeout_s=parts.config.cluster.stage_timeout_s,
        )
        self._config = parts.config
        self._timer = Timer(on_enter=parts.panel.stage)
        self._step = 0
        self._reported_bytes = 0
        self._first_val_reward: float | None = None
        self._val_reward: float | None = None
        self._has_looked = False
        """True once a save has looked for the metric that ranks checkpoints."""
        self._validation: tuple[int, Pending[ValidationResult]] | None = None
        """Step and result of the validation that runs beside the training."""

    def fit(self, *, deadline: SaveDeadline | None = None) -> RunSummary:
        """Trains to the last step, to the accuracy that stops early, or as long as it may.

        Args:
            deadline: when it must have saved.
        """
        started = time.monotonic()
        self._deadline = self._saver.deadline = deadline or self._deadline
        with self._saver.waited_for(), closing(self._parts.source):
            self.open_run()
            self._parts.panel.begin()
            self._check_time()
            grace_s, note = self._config.cluster.grace_s, self._parts.panel.note
            with frozen_startup_objects(), interrupt.finishing(grace_s, tell=note):
                self._steps()
        best = None if self._parts.checkpoints is None else self._parts.checkpoints.best()
        if not self._is_done():
            why = "at its time limit (checkpointing.must_save_by)" if self._is_out_of_time else "by a signal"
            stopped_early(self._config.logger.log_dir, f"{why}, after step {self._step}")
        return RunSummary(
            first_reward=self._first_val_reward,
            last_reward=self._val_reward,
            num_steps=self._step,
            seconds=time.monotonic() - started,
            last_checkpoint=self._saver.last_path,
            best_checkpoint=None if best is None else best.url or best.path,
            is_out_of_time=self._is_out_of_time and not self._is_done(),
            is_interrupted=interrupt.is_noticed() and not self._is_done(),
        )

    def _steps(self) -> None:
        metrics: Mapping[str, float] = {}
        while not self._is_done() and not self._is_out_of_time:
            interrupt.raise_if_received()
            began = time.monotonic()
            try:
                if interrupt.is_noticed():
                    raise NoStepLeft
                step = self.step()
            except NoStepLeft:
                self._end_after(metrics)
                break
            metrics = self._after_step(step)
            self._deadline.step_took(time.monotonic() - began)
            self._save_if_due(metrics)
            self._parts.source.settle(self._saver.last_step)
        if self._is_done():
            self._parts.source.run_is_done()

    def _end_after(self, metrics: Mapping[str, float]) -> None:
        """Validate and save as after a last step: that the step before is the last one was not known then."""
        config = self._config
        self._end_validation()
        has_validated = config.grpo.val_period > 0 and self._step % config.grpo.val_period == 0
        if not has_validated and self._validation_is_due():
            validated = self._validate().metrics()
            self._parts.logger.log_metrics(validated, step=self._step)
            metrics = {**metrics, **validated}
        if self._step % config.checkpointing.save_period and self._step != self._saver.last_step:
            self._save_if_due(metrics)

    def step(self) -> StepState:
        """Run one step, from rollout to optimizer update. No row of it is left in the data plane, also after an error.

        Raises:
            UserError, WorkerError: the source or a stage failed.
        """
        parts, observers, started = self._parts, self._parts.observers, time.monotonic()
        step = self._next_batch(self._step + 1)
        if parts.weight_sync.engines_sleep:
            parts.weight_sync.sleep_engines()
        with open_step(parts.client, step.partition, step.keys):
            try:
                for stage in parts.stages:
                    observers.before_stage(stage.name)
                    step = stage.submit(step).result()
                    observers.after_stage(stage.name, step)
                observers.end(step, last_checkpoint=self._saver.last_step)
            except BaseException as error:
                observers.failed(step, error, stage=stage.name)
                raise
            clear_untrained(parts.client, step)
        parts.policy.run(ask(TQWorker.end_step), "end of step")
        parts.source.trained(step)
        self._step = step.number
        return replace(step, seconds=time.monotonic() - started)

    def _next_batch(self, number: int) -> StepState:
        source, observers = self._parts.source, self._parts.observers
        observers.begin(number)
        observers.before_stage(ROLLOUT)
        try:
            step = source.next(number)
        except BaseException as error:
            if source.unfinished is not None:
                observers.failed(source.unfinished, error, stage=ROLLOUT)
            raise
        observers.after_stage(ROLLOUT, step)
        return step

    @property
    def source(self) -> BatchSource:
        return self._parts.source

    def data_plane_stats(self) -> dict[str, object]:
        """Live rows and bytes over the whole cluster."""
        return self._parts.client.stats()

    def _driver_bytes(self) -> int:
        """Bytes about rows that the driver has sent or received since the last look."""
        parts = self._parts
        total = parts.rollout.driver_bytes + parts.policy.driver_bytes
        total += sum(stage.driver_bytes for stage in parts.stages)
        new, self._reported_bytes = total - self._reported_bytes, total
        return new

    def open_run(self) -> None:
        """Declares the partition, resumes if asked, brings the engines to the current weights, validates."""
        parts, config = self._parts, self._config
        declare_partition(
            parts.client,
            parts.columns,
            config.grpo,
            rows_per_conversation=config.rows_per_conversation,
            smallest_group=config.smallest_group,
        )
        if parts.resume_from is not None:
            self._resume(parts.resume_from)
        self._refit()
        report = self._parts.weight_sync.report
        if report is not None and report.receipt is not None:
            self._parts.panel.note(report.receipt.tolerance_text())
        if config.data.validation is not None and config.grpo.val_at_start and parts.resume_from is None:
            result = self._validate()
            self._first_val_reward = result.reward
            parts.logger.log_metrics(result.metrics(), step=0)
            parts.panel.validation(0, result.reward, measure=config.measure)
        self._timer.reset()

    def _refit(self) -> None:
        """Bring the engines to the current weights, from which the source may sample then."""
        sync = self._parts.weight_sync
        sync.sync(self._step)
        receipt = None if sync.report is None else sync.report.receipt
        self._parts.source.updated(self._step, weights=None if receipt is None else receipt.weights)

    def _check_time(self) -> None:
        """A job that is requeued at its limit would start for ever."""
        left_s, reserve_s = self._deadline.left_s(), self._deadline.reserve_s
        if left_s < reserve_s and not self._is_done():
            raise UserError(
                f"checkpointing.must_save_by: {left_s:.0f} s are left before the first step of this start, and the end "
                f"of a run takes {reserve_s:.0f} s; give the job more time"
            )

    def _after_step(self, step: StepState) -> Mapping[str, float]:
        """Refit, validate, log; the metrics. Saved is after it: no kill leaves a checkpoint whose step has no line.

        So the seconds of a save stand in the line of the next step.
        """
        self._end_validation()
        with self._timer.time("refit"):
            self._refit()
        metrics = self._parts.step_metrics(step) | self._parts.policy.memory_metrics() | self._refit_metrics()
        if self._config.policy.router_replay.enabled:
            replay = self._parts.policy.router_replay_metrics()
            metrics.update({f"r3/{name}": value for name, value in values(replay).items()})
        if self._validation_is_due():
            metrics.update(self._begin_validation())
        stage_seconds = {**step.stage_seconds, **self._timer.seconds()}
        snapshots = [self._parts.client.snapshot(reset=True), *self._parts.rollout.data_plane_snapshots()]
        snapshots += self._parts.policy.data_plane_snapshots()
        if self._parts.teacher is not None:
            snapshots += self._parts.teacher.data_plane_snapshots()
        stats = self.data_plane_stats()
        if stats["live_rows"] != self._parts.source.num_waiting_rows:
            check_empty(self._parts.client, _mapping(stats["partitions"]), lost_of=self._parts.source.lost_rows)
        traffic = data_plane_metrics(
            snapshots,
            stats,
            driver_bytes=self._driver_bytes(),
            step_seconds=step.seconds,
        )
        metrics.update({f"timing/{name}_s": value for name, value in stage_seconds.items()})
        metrics.update(traffic.metrics)
        metrics.update(self._parts.observers.metrics())
        self._timer.reset()
        self._parts.logger.log_metrics(metrics, step=self._step)
        self._parts.panel.step(self._report(step, metrics, stage_seconds, traffic.stage_bytes))
        self._parts.observers.report(self._step, metrics)
        return metrics

    def _refit_metrics(self) -> dict[str, float]:
        report = self._parts.weight_sync.report
        return {} if report is None else report.metrics()

    def _save_if_due(self, metrics: Mapping[str, float]) -> None:
        if self._parts.checkpoints is None:
            return
        with self._timer.time("checkpoint"):
            self._saver.look()
            is_noticed = interrupt.is_noticed()
            is_last = self._is_done() or self._deadline.is_reached() or is_noticed
            if not is_last and self._step % self._config.checkpointing.save_period:
                return
            with interrupt.saving():
                self._save(metrics, waits=is_last)
        if is_noticed:
            self._parts.panel.note(f"saved step {self._step} and ending")
            return
        self._is_out_of_time = self._deadline.is_reached()
        if self._is_out_of_time and not self._is_done():
            self._parts.panel.note(
                f"saved step {self._step} and ending, {self._deadline.left_s():.0f} s before "
                f"checkpointing.must_save_by: one more step needs {self._deadline.reserve_s:.0f} s"
            )

    def _report(
        self,
        step: StepState,
        metrics: Mapping[str, float],
        stage_seconds: Mapping[str, float],
        stage_bytes: Mapping[str, int],
    ) -> StepReport:
        engines = metrics.get(ENGINES_METRIC)
        return StepReport(
            step=self._step,
            num_steps=self._config.grpo.max_num_steps,
            reward=metrics.get(REWARD_METRIC),
            val_reward=metrics.get(VAL_REWARD_METRIC, metrics.get("val/loss")),
            loss=metrics.get("train/loss"),
            kl=informative_kl(step.train, metrics, self._config.grpo),
            mismatch=metrics.get(MISMATCH_METRIC),
            num_engines=None if engines is None else int(engines),
            all_engines=self._config.policy.generation.num_replicas,
            engine_speeds=engine_speeds(metrics),
            endings=ending_texts(metrics),
            refit=None if self._parts.weight_sync.report is None else self._parts.weight_sync.report.text(),
            account=self._parts.observers.text(),
            tokens_per_s=step.num_tokens / step.seconds,
            stage_seconds=dict(stage_seconds),
            stage_bytes=dict(stage_bytes),
        )

    def _validate(self) -> ValidationResult:
        with self._timer.time("validation"):
            result = self._parts.rollout.validate(self._validation_task())
        self._val_reward = result.reward
        return result

    def _validation_task(self) -> EvaluationTask:
        path = self._config.logger.log_dir / ROLLOUTS / f"val_step_{self._step}.jsonl"
        num_shown = self._config.logger.num_rollouts_to_log
        return EvaluationTask(
            step=self._step,
            version=self._parts.weight_sync.version,
            max_prompts=self._config.grpo.max_val_samples,
            samples=SampleFile(path=path, max_rows=num_shown) if num_shown else None,
        )

    def _begin_validation(self) -> Mapping[str, float]:
        """Validate; return the metrics. Where groups are sampled ahead, training goes on meanwhile and there are none
        yet, unless something waits for them: a checkpoint, or the end of the run."""
        saves = self._parts.checkpoints is not None and self._step % self._config.checkpointing.save_period == 0
        limit = self._config.grpo.stop_at_validation_accuracy
        if saves or limit is not None or self._is_done() or not self._parts.source.samples_ahead:
            return self._validate().metrics()
        self._validation = self._step, self._parts.rollout.begin_validation(self._validation_task())
        return {}

    def _end_validation(self) -> None:
        """Log the validation that runs, before the engines get other weights."""
        if self._validation is None:
            return
        (step, pending), self._validation = self._validation, None
        with self._timer.time("validation"):
            result = pending.result()
        self._val_reward = result.reward
        self._parts.logger.log_metrics(result.metrics(), step=step)
        self._parts.panel.validation(step, result.reward, measure=self._config.measure)

    def _validation_is_due(self) -> bool:
        config = self._config.grpo
        if self._config.data.validation is None or interrupt.is_noticed():
            return False
        is_last = self._step >= config.max_num_steps or self._parts.source.is_exhausted
        return (config.val_period > 0 and self._step % config.val_period == 0) or (config.val_at_end and is_last)

    def _is_done(self) -> bool:
        limit = self._config.grpo.stop_at_validation_accuracy
        is_good_enough = limit is not None and self._val_reward is not None and self._val_reward >= limit
        return self._step >= self._config.grpo.max_num_steps or self._parts.source.is_exhausted or is_good_enough

    def _tell_missing_metric(self, metrics: Mapping[str, float]) -> None:
        """Say once that checkpoints are ranked by a metric that nothing logs."""
        name = self._config.checkpoint_metric.replace(":", "/", 1)
        known = [each for each in metrics if each.partition("/")[0] == name.partition("/")[0]]
        if self._has_looked or self._config.checkpointing.keep_top_k is None or not known:
            return  # without validation in this step a later one may tell
        self._has_looked = True
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3) or sorted(known)[:3]
            shown = ", ".join(each.replace("/", ":", 1) for each in near)
            self._parts.panel.note(
                f"WARNING: checkpointing.metric_name: {self._config.checkpoint_metric!r} is not logged in step "
                f"{self._step}, so the newest checkpoints are kept and not the best; set one that is, such as {shown}"
            )

    def _save(self, metrics: Mapping[str, float], *, waits: bool) -> None:
        self._tell_missing_metric(metrics)
        state = {
            "step": self._step,
            **self._parts.source.state_dict(),
            "metrics": dict(metrics),
            "val_reward": self._val_reward,
            "first_val_reward": self._first_val_reward,
            **self._parts.run_state,
        }
        with self._parts.weight_sync.engines_aside():
            # Workers gather their weights on the devices.
            self._saver.save(self._step, state=state, also=self._parts.source.save_into, waits=waits)

    def _resume(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        optimizer = checkpoint.optimizer if self._config.checkpointing.load_optimizer else None
        load = ask(PolicyWorker.load_checkpoint, weights=checkpoint.weights, optimizer=optimizer)
        self._parts.policy.run(load, "resume")
        self._parts.source.load_state_dict(state, step=checkpoint.step, folder=checkpoint.path)
        self._step = checkpoint.step
        self._saver.resumed(checkpoint)
        self._val_reward = _number(state.get("val_reward"))
        self._first_val_reward = _number(state.get("first_val_reward"))


def _mapping(value: object) -> Mapping[str, object]:
    assert isinstance(value, Mapping), f"expected an object, got {type(value).__name__}"
    return value


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
