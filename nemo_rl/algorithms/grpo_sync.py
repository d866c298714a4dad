"""The synchronous GRPO trainer.

    SyncGRPOTrainer.fit
      |- refit            weights of version 0 -> engines                   (WeightSync.sync)
      |- validate         held-out prompts -> mean reward                   (RolloutHandle.validate)
      `- step             once per step, inside open_step: rows are cleared also after an error
           |- rollout     prompts -> samples -> rewards -> columns          (RolloutHandle.rollout)
           |- score       RowScalars -> group statistics, weights, tags    (score_rows)
           |- plan        lengths -> rows of each rank and microbatch       (select_train_rows, plan_train, ...)
           |- logprobs    workers write prev_ and reference log-probs       (TQPolicy.get_logprobs_from_meta, ...)
           |- advantages  row scalars -> data plane                         (write_columns)
           |- train       workers fetch and train                           (TQPolicy.train_from_meta)
           `- log_rollouts  readable samples                                (RolloutHandle.log_rollouts)
         then refit, validate, save, report

The driver holds keys, lengths, tags and per-row scalars, never a per-token tensor.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from nemo_rl.algorithms.grpo import ScoredRows, plan_logprobs, plan_train, score_rows, select_train_rows
from nemo_rl.algorithms.run_folder import ROLLOUTS
from nemo_rl.algorithms.stages import Stage, fetched_fields, written_fields
from nemo_rl.algorithms.step_metrics import StepRecord, data_plane_metrics, step_metrics
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data.sampler import PromptSampler
from nemo_rl.data_plane.column_io import write_columns
from nemo_rl.data_plane.factory import check_empty, open_step
from nemo_rl.data_plane.interfaces import KVBatchMeta
from nemo_rl.data_plane.observability import MetricsDataPlaneClient, columns_bytes
from nemo_rl.data_plane.schema import ROUTE_FIELDS
from nemo_rl.data_plane.wire import pickled_size
from nemo_rl.distributed.packing import DEFAULT_COST, PackPlan
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.experience.payload import RowScalars, row_record
from nemo_rl.experience.sync_rollout_actor import RolloutHandle, ValidationResult
from nemo_rl.models.policy.interfaces import LossFunction
from nemo_rl.models.policy.lm_policy import TrainSummary
from nemo_rl.models.policy.tq_policy import TQPolicy
from nemo_rl.models.weight_sync.base import WeightSync
from nemo_rl.utils import interrupt
from nemo_rl.utils.checkpoint import Checkpoint, CheckpointManager
from nemo_rl.utils.logger import REWARD_METRIC, Logger
from nemo_rl.utils.metrics import values
from nemo_rl.utils.panel import Panel, StepReport
from nemo_rl.utils.r3_trace import trace_plan, trace_retired
from nemo_rl.utils.timer import Timer

__all__ = ["RunSummary", "SyncGRPOTrainer", "TrainerParts"]

logger = logging.getLogger(__name__)

PARTITION = "train"
TASKS = tuple(each.task for each in WorkerPass)
NOT_TRAINED = "not trained: no weight (equal rewards in its group)"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerParts:
    """What a trainer drives; built by `setup`."""

    config: MasterConfig
    stages: tuple[Stage, ...]
    loss_fn: LossFunction
    client: MetricsDataPlaneClient
    policy: TQPolicy
    weight_sync: WeightSync
    rollout: RolloutHandle
    sampler: PromptSampler
    checkpoints: CheckpointManager | None
    logger: Logger
    panel: Panel
    cost: tuple[float, float] = DEFAULT_COST
    """(a, b) of the cost a s + b s^2 of a row of s tokens, by which rows are shared among the ranks."""
    resume_from: Checkpoint | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """How a run ended."""

    first_reward: float | None
    """Mean reward of the validation before training; None without it."""
    last_reward: float | None
    num_steps: int
    seconds: float
    last_checkpoint: Path | None
    best_checkpoint: Path | None
    """By `checkpointing.metric_name`, of those that are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chosen:
    """The rows of a step that are trained."""

    meta: KVBatchMeta
    plan: PackPlan
    logprob_plan: PackPlan | None
    """Microbatches of the log-probability stages; None when the step has none."""
    advantages: torch.Tensor
    sample_mask: torch.Tensor


class SyncGRPOTrainer:
    """Runs GRPO step by step.

    Args:
        parts: engines and settings, already started.
    """

    def __init__(self, parts: TrainerParts) -> None:
        self._parts = parts
        self._config = parts.config
        self._stage_names = {stage.name for stage in parts.stages}
        self._train_fields = next(fetched_fields(stage) for stage in parts.stages if stage.name == "train")
        self._timer = Timer(on_enter=parts.panel.stage)
        self._step = 0
        self._put_bytes = 0
        self._first_val_reward: float | None = None
        self._val_reward: float | None = None
        self._last_checkpoint: Path | None = None

    def fit(self) -> RunSummary:
        """Trains to the last step, or to the accuracy that stops early."""
        started = time.monotonic()
        self.open_run()
        self._parts.panel.begin()
        while not self._is_done():
            interrupt.raise_if_received()
            record = self.step()
            self._after_step(record)
        return RunSummary(
            first_reward=self._first_val_reward,
            last_reward=self._val_reward,
            num_steps=self._step,
            seconds=time.monotonic() - started,
            last_checkpoint=self._last_checkpoint,
            best_checkpoint=self._best_checkpoint(),
        )

    def step(self) -> StepRecord:
        """One step: rollout to optimizer update. No row of it is left in the data plane, also after an error."""
        config, number = self._config.grpo, self._step + 1
        prompts = self._parts.sampler.next(config.num_prompts_per_step)
        started, bytes_before = time.monotonic(), self._driver_bytes()
        with self._parts.client.stage("clear"), open_step(self._parts.client, PARTITION):
            with self._timer.time("rollout"):
                rolled = self._parts.rollout.rollout(prompts, step=number, version=self._parts.weight_sync.version)
            self._show_printed(rolled.printed)
            scored = score_rows(rolled.carry, config)
            chosen = self._choose(rolled.meta, scored)
            summary = self._update(chosen) if chosen is not None else None
            self._log_rollouts(number, rolled.meta, rolled.carry, scored)
            self._drop_untrained(rolled.meta, chosen)
        self._parts.policy.end_step()
        self._step = number
        return StepRecord(
            step=number,
            carry=rolled.carry,
            scored=scored,
            rollout_metrics=rolled.metrics,
            num_tokens=sum(rolled.meta.sequence_lengths or ()),
            train=summary,
            plan=chosen.plan if chosen is not None else None,
            logprob_plan=chosen.logprob_plan if chosen is not None else None,
            driver_bytes=self._driver_bytes() - bytes_before,
            seconds=time.monotonic() - started,
            train_seconds=self._timer.seconds().get("train", 0.0),
        )

    def _drop_untrained(self, meta: KVBatchMeta, chosen: _Chosen | None) -> None:
        """Clears the rows that were not trained first, so that their history says why."""
        kept = set(chosen.meta.keys) if chosen is not None else set()
        dropped = [key for key in meta.keys if key not in kept]
        if dropped:
            self._parts.client.kv_clear(dropped, PARTITION, reason=NOT_TRAINED)
            trace_retired(keys=dropped, reason=NOT_TRAINED)

    def data_plane_stats(self) -> dict[str, object]:
        """Live rows and bytes over the whole cluster."""
        return self._parts.client.stats()

    def _driver_bytes(self) -> int:
        """Bytes about rows that the driver has sent or received since the start."""
        return self._parts.rollout.driver_bytes + self._parts.policy.driver_bytes + self._put_bytes

    def _choose(self, meta: KVBatchMeta, scored: ScoredRows) -> _Chosen | None:
        """Rows with weight, tagged and planned; None when no row carries a gradient."""
        tagged = meta.with_tags({"group_std": [round(value, 6) for value in scored.stats.row_std.tolist()]})
        policy, layout, cost = self._config.policy, self._parts.policy.layout, self._parts.cost
        chosen = select_train_rows(scored, meta.sequence_lengths or (), policy, layout=layout)
        if not chosen.rows:
            logger.warning("step %d: every group has equal rewards; no update", self._step + 1)
            return None
        kept = tagged.subset(chosen.rows)
        index = torch.tensor(chosen.rows)
        lengths = kept.sequence_lengths or ()
        plan = plan_train(lengths, chosen.batch_sizes, policy, layout=layout, cost=cost)
        has_logprobs = {"prev_logprobs", "reference_logprobs"} & self._stage_names
        return _Chosen(
            meta=kept,
            plan=plan,
            logprob_plan=plan_logprobs(plan, lengths, policy, layout=layout, cost=cost) if has_logprobs else None,
            advantages=scored.advantages[index],
            sample_mask=scored.sample_mask[index],
        )

    def _update(self, chosen: _Chosen) -> TrainSummary:
        meta = self._logprobs(chosen.meta, chosen.logprob_plan) if chosen.logprob_plan is not None else chosen.meta
        with self._timer.time("advantages"), self._parts.client.stage("advantages"):
            columns = {"advantages": chosen.advantages, "sample_mask": chosen.sample_mask}
            meta = write_columns(self._parts.client, meta, columns)
            self._put_bytes += pickled_size(meta.keys) + columns_bytes(columns)
        with self._timer.time("train"):
            return self._parts.policy.train_from_meta(meta, chosen.plan, self._parts.loss_fn, fields=self._train_fields)

    def _logprobs(self, meta: KVBatchMeta, microbatches: PackPlan) -> KVBatchMeta:
        policy = self._parts.policy
        if "prev_logprobs" in self._stage_names:
            with self._timer.time("prev_logprobs"):
                meta = policy.get_logprobs_from_meta(meta, microbatches)
        if "reference_logprobs" in self._stage_names:
            with self._timer.time("reference_logprobs"):
                meta = policy.get_reference_policy_logprobs_from_meta(meta, microbatches)
        return meta

    def _log_rollouts(self, number: int, meta: KVBatchMeta, carry: RowScalars, scored: ScoredRows) -> None:
        rows = range(min(self._config.logger.num_rollouts_to_log, len(meta)))
        if not rows:
            return
        records = [
            row_record(
                reward=carry.rewards[row],
                components={name: part[row] for name, part in carry.components.items()},
                response_tokens=carry.response_lengths[row],
                truncated=carry.truncated[row],
            )
            | {"advantage": float(scored.advantages[row])}
            for row in rows
        ]
        with self._timer.time("log"):
            path = self._rollouts_folder() / f"step_{number}.jsonl"
            self._parts.rollout.log_rollouts(meta.subset(rows), path=path, records=records)

    def _rollouts_folder(self) -> Path:
        return self._config.logger.log_dir / ROLLOUTS

    def _show_printed(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._parts.panel.note(f"reward: {line}")

    def open_run(self) -> None:
        """Declares the partition, resumes if asked, brings the engines to the current weights, validates."""
        parts, config = self._parts, self._config
        trace_plan(stages=[stage.name for stage in parts.stages if set(stage.reads) & set(ROUTE_FIELDS)])
        parts.client.register_partition(
            PARTITION,
            written_fields(parts.stages),
            config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt,
            TASKS,
            grpo_group_size=config.grpo.num_generations_per_prompt,
        )
        if parts.resume_from is not None:
            self._resume(parts.resume_from)
        parts.weight_sync.sync(self._step)
        if config.data.validation is not None and config.grpo.val_at_start and parts.resume_from is None:
            result = self._validate()
            self._first_val_reward = result.reward
            parts.logger.log_metrics(result.metrics(), step=0)
            parts.panel.validation(0, result.reward, measure=config.env.measure)
        self._timer.reset()

    def _after_step(self, record: StepRecord) -> None:
        """Refit, validate, log, save, in that order: no kill leaves a checkpoint whose step has no line.

        So the seconds of a save stand in the line of the next step.
        """
        with self._timer.time("refit"):
            self._parts.weight_sync.sync(self._step)
        metrics = step_metrics(record, self._config) | self._parts.policy.memory_metrics()
        if self._config.policy.router_replay.enabled:
            replay = self._parts.policy.router_replay_metrics()
            metrics.update({f"r3/{name}": value for name, value in values(replay).items()})
        if self._validation_is_due():
            metrics.update(self._validate().metrics())
        stage_seconds = self._timer.seconds()
        snapshots = [self._parts.client.snapshot(reset=True), self._parts.rollout.data_plane_snapshot()]
        snapshots += self._parts.policy.data_plane_snapshots()
        stats = self.data_plane_stats()
        if stats["live_rows"]:
            check_empty(self._parts.client, _mapping(stats["partitions"]))
        traffic = data_plane_metrics(
            snapshots,
            stats,
            driver_bytes=record.driver_bytes,
            step_seconds=record.seconds,
        )
        metrics.update({f"timing/{name}_s": value for name, value in stage_seconds.items()})
        metrics.update(traffic.metrics)
        self._timer.reset()
        self._parts.logger.log_metrics(metrics, step=self._step)
        self._parts.panel.step(self._report(record, metrics, stage_seconds, traffic.stage_bytes))
        if self._checkpoint_is_due():
            with self._timer.time("checkpoint"):
                self._save(metrics)

    def _report(
        self,
        record: StepRecord,
        metrics: Mapping[str, float],
        stage_seconds: Mapping[str, float],
        stage_bytes: Mapping[str, int],
    ) -> StepReport:
        return StepReport(
            step=self._step,
            num_steps=self._config.grpo.max_num_steps,
            reward=metrics[REWARD_METRIC],
            val_reward=self._val_reward,
            loss=metrics.get("train/loss"),
            kl=metrics.get("train/reference_kl", metrics.get("train/policy_kl")),
            tokens_per_s=record.num_tokens / record.seconds,
            stage_seconds=dict(stage_seconds),
            stage_bytes=dict(stage_bytes),
        )

    def _validate(self) -> ValidationResult:
        with self._timer.time("validation"):
            path = self._rollouts_folder() / f"val_step_{self._step}.jsonl"
            result = self._parts.rollout.validate(
                step=self._step,
                version=self._parts.weight_sync.version,
                path=path if self._config.logger.num_rollouts_to_log else None,
            )
        self._val_reward = result.reward
        self._show_printed(result.printed)
        return result

    def _validation_is_due(self) -> bool:
        config = self._config.grpo
        if self._config.data.validation is None:
            return False
        is_last = self._step >= config.max_num_steps or self._parts.sampler.is_exhausted
        return (config.val_period > 0 and self._step % config.val_period == 0) or (config.val_at_end and is_last)

    def _checkpoint_is_due(self) -> bool:
        if self._parts.checkpoints is None:
            return False
        return self._step % self._config.checkpointing.save_period == 0 or self._is_done()

    def _is_done(self) -> bool:
        limit = self._config.grpo.stop_at_validation_accuracy
        is_good_enough = limit is not None and self._val_reward is not None and self._val_reward >= limit
        return self._step >= self._config.grpo.max_num_steps or self._parts.sampler.is_exhausted or is_good_enough

    def _save(self, metrics: Mapping[str, float]) -> None:
        assert self._parts.checkpoints is not None
        save_optimizer = self._config.checkpointing.save_optimizer

        def write(folder: Path) -> None:
            self._parts.policy.save_checkpoint(
                weights=folder / "policy" / "weights",
                optimizer=folder / "policy" / "optimizer" if save_optimizer else None,
                tokenizer=folder / "policy" / "weights",
            )

        state = {
            "step": self._step,
            "sampler": self._parts.sampler.state_dict(),
            "metrics": dict(metrics),
            "val_reward": self._val_reward,
            "first_val_reward": self._first_val_reward,
        }
        self._last_checkpoint = self._parts.checkpoints.save(self._step, write=write, state=state)

    def _best_checkpoint(self) -> Path | None:
        best = None if self._parts.checkpoints is None else self._parts.checkpoints.best()
        return None if best is None else best.path

    def _resume(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        optimizer = checkpoint.optimizer if self._config.checkpointing.load_optimizer else None
        self._parts.policy.load_checkpoint(weights=checkpoint.weights, optimizer=optimizer)
        self._parts.sampler.load_state_dict(_mapping(state["sampler"]))
        self._step = checkpoint.step
        self._val_reward = _number(state.get("val_reward"))
        self._first_val_reward = _number(state.get("first_val_reward"))
        self._last_checkpoint = checkpoint.path


def _mapping(value: object) -> Mapping[str, object]:
    assert isinstance(value, Mapping), f"expected an object, got {type(value).__name__}"
    return value


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
