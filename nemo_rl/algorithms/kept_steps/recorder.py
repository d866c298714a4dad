"""`StepRecorder`: writes each step of a run to disk while it goes on.

    GRPOTrainer.step
      |- after "score"        record; the rollout worker writes columns of all rows       (StepRecorder.after_stage)
      |- after "advantages"   it writes those of the trained rows, while they are trained
      |- at the end           waits for both; outcome, digest of the weights, manifest    (StepRecorder.end)
      `- or on an error       the same as far as it came                                  (StepRecorder.failed)

The driver holds no column: the rollout worker's process reads and writes them. Invariant: keeping changes no number of
the run, and an error while a failed step is kept never hides the one that ended it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from nemo_rl.algorithms.kept_steps.folder import (
    CONVERSATION_FILE,
    ROLLOUT_FILE,
    STEP_FILE,
    UPDATE_FILE,
    RunFacts,
    SnapshotOutcome,
    SnapshotPlan,
    SnapshotRows,
    StepError,
    StepsFolder,
    StepSnapshot,
    record_text,
)
from nemo_rl.algorithms.observers import StepObserver
from nemo_rl.algorithms.stages.columns import REWRITTEN, StageColumns, fetched_fields
from nemo_rl.algorithms.stages.stage import StageTools, StepState
from nemo_rl.config.run import KeepStepsConfig
from nemo_rl.distributed.worker_groups import Pending
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.errors import ResourceError, WorkerError
from nemo_rl.experience.conversation_log import CONVERSATION
from nemo_rl.experience.rollout_handle import RolloutHandle
from nemo_rl.models.policy.tq_policy import TQPolicy
from nemo_rl.utils.exits import machine_problem
from nemo_rl.utils.files import write_text
from nemo_rl.utils.memory import package_versions
from nemo_rl.utils.metrics import values

__all__ = ["StepRecorder", "build_recorders"]

logger = logging.getLogger(__name__)

FAILED_STEP_S = 30.0
"""Deadline for keeping a step that has failed: its workers may be gone, and somebody waits for the error."""


class StepRecorder(StepObserver):
    """Keeps the steps of one run.

    Args:
        run: what every step's record says of the run.
        seed: `grpo.seed`.
        log_dir: of the run.
        keeps_replies: replies of environments and tools are written as well.
    """

    def __init__(
        self,
        config: KeepStepsConfig,
        *,
        run: RunFacts,
        seed: int,
        log_dir: Path,
        rollout: RolloutHandle,
        policy: TQPolicy,
        keeps_replies: bool = False,
    ) -> None:
        self._config, self._run, self._seed, self._keeps_replies = config, run, seed, keeps_replies
        self._rollout, self._policy = rollout, policy
        self._folder = StepsFolder(log_dir)
        self._writing: list[Pending[int]] = []
        self._path: Path | None = None
        """Folder of the step in flight, once it has one."""
        self._rows: SnapshotRows | None = None
        """Rows of the step in flight, once they are there."""
        self._seconds = 0.0
        self._bytes = 0
        self._has_warned = False

    def after_stage(self, stage: str, step: StepState) -> None:
        if stage == "score":
            with self._timed(step):
                self._begin(step)
        elif stage == "advantages" and step.chosen is not None:
            with self._timed(step):
                self._submit_update(step)

    def end(self, step: StepState, *, last_checkpoint: int) -> None:
        """Waits for the columns, adds what the step gave, and lets old steps fall out.

        Args:
            last_checkpoint: its step, 0 where there is none.

        Raises:
            ResourceError: they could not be written; says why.
        """
        with self._timed(step):
            self._wait()
            self._end(self._record(step).ended(outcome=self._outcome(step)))
            lost = self._folder.prune(max_bytes=self._config.max_bytes, since=last_checkpoint)
            if lost and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "kept steps since the checkpoint of step %d are more than diagnostics.keep_steps.max_bytes=%d: "
                    "step %d falls out, and the steps after it cannot be replayed; raise it, or save more often",
                    *(last_checkpoint, self._config.max_bytes, lost[0]),
                )

    def failed(self, step: StepState, error: BaseException, *, stage: str) -> None:
        """The step has failed in `stage`: keeps it as far as it came, within a deadline. Raises nothing.

        Called before the rows are cleared.
        """
        if not self._config.on_failure:
            self._folder.drop(step.number)
            return
        # A thread that is given up may still be waiting for a worker that is gone.
        keeping = threading.Thread(
            target=self._keep_failed, args=(step, error, stage), name="keep failed step", daemon=True
        )
        keeping.start()
        keeping.join(FAILED_STEP_S)
        if keeping.is_alive():
            logger.warning("step %d: gave up keeping it after %.0f s", step.number, FAILED_STEP_S)

    def metrics(self) -> dict[str, float]:
        """Return numbers of the last step: seconds that the run has spent on keeping it, and its bytes."""
        seconds, self._seconds = self._seconds, 0.0
        return {"timing/keep_step_s": seconds, "keep/step_bytes": float(self._bytes)}

    # Private parts.

    @contextmanager
    def _timed(self, step: StepState) -> Iterator[None]:
        """Counts the seconds; what a file system refuses is the user's to mend."""
        started = time.perf_counter()
        try:
            yield
        except OSError as error:
            raise ResourceError(
                f"step {step.number} cannot be kept in {self._folder.path}: {machine_problem(error) or error}; or set "
                "diagnostics.keep_steps.enabled=false"
            ) from error
        finally:
            self._seconds += time.perf_counter() - started

    def _begin(self, step: StepState) -> None:
        self._writing = []
        self._path = self._folder.begin(step.number)
        self._rows = SnapshotRows.of(step.rows.meta, step.rows.sample_stats)
        write_text(self._path / STEP_FILE, record_text(self._record(step)))
        meta = step.rows.meta
        # A later stage may rewrite the others before they are read.
        fields = [name for name in meta.fields if name not in (*REWRITTEN, CONVERSATION)]
        self._writing.append(self._rollout.submit_keep_columns(meta, fields=fields, path=self._path / ROLLOUT_FILE))
        if self._keeps_replies and CONVERSATION in meta.fields:
            self._writing.append(self._rollout.submit_keep_conversations(meta, path=self._path / CONVERSATION_FILE))

    def _submit_update(self, step: StepState) -> None:
        assert self._path is not None, "the step has begun"
        meta, rolled = step.update.meta, set(step.rows.meta.fields) - set(REWRITTEN) | {CONVERSATION}
        fields = [name for name in meta.fields if name not in rolled]
        self._writing.append(self._rollout.submit_keep_columns(meta, fields=fields, path=self._path / UPDATE_FILE))

    def _wait(self) -> None:
        with ExitStack() as waiting:
            # The last one first; an error of one leaves none of the others unfinished.
            for pending in self._writing:
                waiting.callback(pending.result)
            self._writing = []

    def _end(self, record: StepSnapshot) -> None:
        assert self._path is not None, "the step has begun"
        write_text(self._path / STEP_FILE, record_text(record))
        self._bytes = self._folder.end(record.number).num_bytes
        self._path = self._rows = None

    def _keep_failed(self, step: StepState, error: BaseException, stage: str) -> None:
        try:
            if self._path is None:
                self._path = self._folder.begin(step.number)
                if step.rolled is not None:
                    self._begin(step)
            try:
                self._wait()
            finally:
                self._end(self._record(step).ended(error=_kept_error(error, stage)))
        except Exception as problem:  # noqa: BLE001  (the error that ended the step is the one to be seen)
            logger.warning("step %d has failed and could not be kept whole: %s", step.number, problem)

    def _record(self, step: StepState) -> StepSnapshot:
        record = StepSnapshot(
            number=step.number,
            partition=step.partition,
            prompts=tuple(draw.prompt for draw in step.drawn),
            ordinals=tuple(draw.ordinal for draw in step.drawn),
            uids=step.uids,
            keys=step.keys,
            weight_version=step.weight_version,
            policy_version=step.policy_version,
            seed=self._seed,
            run=self._run,
            rows=self._rows,
        )
        chosen = step.chosen
        if chosen is None:
            return record
        places = {key: row for row, key in enumerate(step.rows.meta.keys)}
        return replace(
            record,
            trained=tuple(places[key] for key in chosen.meta.keys),
            plan=SnapshotPlan.of(chosen.plan),
            logprob_plan=None if chosen.logprob_plan is None else SnapshotPlan.of(chosen.logprob_plan),
            update_versions=dict(chosen.meta.versions),
        )

    def _outcome(self, step: StepState) -> SnapshotOutcome:
        if step.train is None:
            return SnapshotOutcome()
        return SnapshotOutcome(
            losses=step.train.losses,
            grad_norms=step.train.grad_norms,
            microbatch_losses=step.train.microbatch_losses,
            learning_rate=step.train.learning_rate,
            metrics=values(step.train.metrics),
            weights=self._policy.weights_digest(),
        )


def _kept_error(error: BaseException, stage: str) -> StepError:
    if isinstance(error, WorkerError):
        stage = error.stage or stage
    return StepError(kind=type(error).__name__, text=str(error), stage=stage)


def build_recorders(
    config: KeepStepsConfig,
    tools: StageTools,
    columns: Sequence[StageColumns],
    *,
    recipe: Mapping[str, object],
    started_from: int | None,
    with_optimizer: bool,
    identity: Mapping[str, str],
    keeps_replies: bool,
) -> list[StepRecorder]:
    """Return the recorder of a run that keeps its steps; none otherwise.

    Args:
        recipe: the resolved one as plain values, without secrets.
        started_from: step of the checkpoint that the run has resumed from.
    """
    if not config.enabled:
        return []
    train = next(stage for stage in columns if stage.name == WorkerPass.TRAIN)
    facts = RunFacts(
        config=recipe,
        world_size=tools.policy.layout.world_size,
        stages=tuple(stage.name for stage in columns),
        train_fields=fetched_fields(train),
        cost=tools.cost,
        started_from=started_from,
        with_optimizer=with_optimizer,
        packages=package_versions(),
        identity=identity,
    )
    return [
        StepRecorder(
            config,
            run=facts,
            seed=tools.grpo.seed,
            log_dir=tools.logger.log_dir,
            rollout=tools.rollout,
            policy=tools.policy,
            keeps_replies=keeps_replies,
        )
    ]
