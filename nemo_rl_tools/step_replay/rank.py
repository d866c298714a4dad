"""One rank of a replay: builds its worker, loads the start, and runs the kept steps one after another.

`RankJob.run` calls `replay_rank` on every rank, without Ray and a data plane. Invariant: the worker is given what
the data plane gave it in the run: the same rows in the same order, the same columns, the same padding. `KeptRates` are
the learning rates of the kept steps in place of a schedule, for a worker that has other schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

import torch

from nemo_rl.algorithms.kept_steps.folder import StepError
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.data_plane.column_io import extra_names
from nemo_rl.data_plane.schema import LP_SEED_FIELDS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.collectives import RankSpec
from nemo_rl.distributed.local_job import run_job
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.errors import NonFiniteError
from nemo_rl.experience.payload import run_extras
from nemo_rl.models.head.logits import SUPPORT
from nemo_rl.models.policy.interfaces import TOKEN_ADVANTAGES, LossFunction, TrainResult
from nemo_rl.models.policy.recording import RecordSpec
from nemo_rl.models.policy.routes.worker_replay import ROUTES
from nemo_rl.models.policy.workers.base import WorkerState
from nemo_rl.models.policy.workers.compose import worker_of_job
from nemo_rl.models.policy.workers.engine import Schedule
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.models.weight_sync.weights_digest import WeightsDigest
from nemo_rl.routes.shape import MISSING
from nemo_rl.utils.metrics import merge_metrics
from nemo_rl_tools.step_replay.chain import ReplayChain, ReplayProblem, SnapshotColumns
from nemo_rl_tools.step_replay.settings import ReplaySettings
from nemo_rl_tools.step_replay.work import StepWork
from nemo_rl_tools.verdict import Verdict

__all__ = ["RankJob", "RankStep", "ReplayRank", "ReplayedValues", "replay_rank"]


class KeptRates(Schedule):
    """One rate per training call.

    Args:
        own: of the worker, which sets whatever else follows a schedule.
        groups: of the optimizer.
    """

    def __init__(self, own: Schedule, groups: Callable[[], list[dict[str, Any]]], rates: Sequence[float]) -> None:
        self._own, self._groups, self._rates = own, groups, list(rates)
        self._calls = 0

    def apply(self) -> float:
        self._own.apply()
        # A step that did not end has kept no rate.
        rate = self._rates[min(self._calls, len(self._rates) - 1)]
        for group in self._groups():
            group["lr"] = rate
        return rate

    def advance(self) -> None:
        self._own.advance()
        self._calls += 1


SAMPLE_MASK = "sample_mask"
Visit: TypeAlias = "Callable[[ReplayRank, int], None]"
"""(collective) Given a rank and the version of its weights; pickled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankJob:
    """The work of every rank."""

    settings: ReplaySettings
    chain: ReplayChain
    steps: tuple[StepWork, ...]
    loss_fn: LossFunction
    stages: tuple[str, ...] = ()
    """Passes of log-probabilities that are run again; the kept columns of the others are taken."""
    train_fields: tuple[str, ...]
    record: RecordSpec | None = None
    """Recording of the passes of the last step; None records nothing."""
    visit: Visit | None = None
    """Called at the start, and after each step that has ended."""

    def run(self) -> list[list[RankStep]]:
        """Start the ranks in processes of this machine, and return the steps of each.

        Raises:
            ChildFailed: a rank ended with something that is no error of a step.
        """
        timeout_s = self.settings.config.cluster.stage_timeout_s
        found = run_job(self.settings.layout.world_size, replay_rank, self, timeout_s=timeout_s)
        return cast("list[list[RankStep]]", found)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedValues:
    """Replayed log-probabilities of one rank that writes, or routes of one rank's layers and tokens, against the kept
    ones."""

    num_values: int
    num_different: int = 0
    largest: float = 0.0
    """Largest absolute difference of log-probabilities; inf for NaN."""
    key: str = ""
    """Row where it is."""
    has_kept: bool = True
    """False: there is nothing to compare with."""


@dataclass(kw_only=True, slots=True)
class RankStep:
    """The results of one rank in one step; None where a stage was not run."""

    number: int
    routes: ReplayedValues | None = None
    """Routes, where the log-probability pass records them; every rank has a part of them."""
    logprobs: dict[str, ReplayedValues] = field(default_factory=dict)
    """Log-probabilities by the stages that compute them."""
    train: TrainResult | None = None
    weights: WeightsDigest | None = None
    """Digest of the weights; rank 0 has it."""
    error: StepError | None = None


def replay_rank(spec: RankSpec, job: RankJob) -> list[RankStep]:
    """(collective) Every step up to the last, or to the one that fails."""
    settings, config = job.settings, job.settings.config
    with worker_of_job(
        spec,
        settings.policy,
        uses_gpu=settings.uses_gpu,
        num_threads=config.cluster.threads_per_worker,
        timeout_s=config.cluster.collective_timeout_s,
        num_steps=config.grpo.max_num_steps,
        seed=config.grpo.seed,
        keep_reference=config.loss_fn.reference_policy_kl_penalty > 0,
        layout=settings.layout,
        record=job.record,
    ) as worker:
        _start(worker, job)
        rank = ReplayRank(worker, job)
        rank.visit(0 if job.chain.checkpoint is None else job.chain.checkpoint.step)
        found: list[RankStep] = []
        for work in job.steps:
            found.append(rank.run(work))
            if found[-1].error is not None:
                break
            rank.visit(work.step.number)
        return found


def _start(worker: PolicyWorker, job: RankJob) -> None:
    """(collective) Give a fresh worker the kept rates, and the checkpoint of the start."""
    if job.settings.is_other_worker:
        # Its schedules have other shapes. Nothing else of a worker is changed after it was made.
        rates = [work.step.outcome.learning_rate for work in job.steps if work.step.outcome is not None]
        given = [rate for rate in rates if rate is not None]
        worker.engine.schedule = KeptRates(worker.engine.schedule, worker.engine.param_groups, given or [0.0])
    checkpoint = job.chain.checkpoint
    if checkpoint is not None:
        optimizer = checkpoint.optimizer if job.chain.with_optimizer else None
        worker.load_checkpoint(weights=checkpoint.weights, optimizer=optimizer)


class ReplayRank:
    """The steps of one rank."""

    def __init__(self, worker: PolicyWorker, job: RankJob) -> None:
        self.worker, self._job = worker, job
        self._at = job.settings.layout.coordinates(worker.rank)
        self._extras = run_extras(job.settings.config.data, job.settings.config.policy)
        tokenizer = job.settings.policy.tokenizer
        named = load_tokenizer(tokenizer.name or job.settings.policy.model_name, chat_template=tokenizer.chat_template)
        self._pad_token_id = int(named.pad_token_id)
        replay = job.settings.policy.router_replay
        self._records_routes = replay.enabled and not replay.records_at_rollout

    def visit(self, version: int) -> None:
        """(collective) The weights are those of this version: so many steps are done."""
        if self._job.visit is not None:
            self._job.visit(self, version)

    def run(self, work: StepWork) -> RankStep:
        found = RankStep(number=work.step.number, error=work.error)
        if work.error is not None or not work.trained:
            return found
        columns = SnapshotColumns.read(work.folder, work.step, extras=self._extras)
        fresh: dict[str, torch.Tensor] = {}
        stage = WorkerPass.PREV_LOGPROBS
        if self._job.record is not None and work is self._job.steps[-1]:
            self.worker.begin_recording(work.step.number)
        try:
            for stage in (WorkerPass.PREV_LOGPROBS, WorkerPass.REFERENCE_LOGPROBS):
                if stage.value not in self._job.stages:
                    continue
                rows, got_NT = self.logprobs(stage, work, columns, found)
                fresh[stage.column] = torch.zeros(len(columns.keys), got_NT.shape[1])
                fresh[stage.column][torch.tensor(rows)] = got_NT
                if self._job.settings.layout.is_writer(self.worker.rank):
                    found.logprobs[stage.value] = _compared(stage.column, got_NT, columns, rows)
            stage = WorkerPass.TRAIN
            found.train = self._train(work, columns, fresh)
        except NonFiniteError as error:
            found.error = StepError(kind=type(error).__name__, text=str(error), stage=stage.value)
            return found
        self.worker.end_recording()
        if not work.is_subset:
            found.weights = self.worker.weights_digest()
        return found

    def logprobs(
        self, stage: WorkerPass, work: StepWork, columns: SnapshotColumns, found: RankStep | None = None
    ) -> tuple[list[int], torch.Tensor]:
        """(collective) Return the pass of a stage under the present weights: this rank's rows, and `[rows, T]`.

        Args:
            found: gets the routes of a pass that chooses and records them; None: kept routes are used.
        """
        assert work.logprob_plan is not None, "there are rows"
        self.worker.enter(WorkerState.LOGPROBS)
        rows, plan = self._share(work, work.logprob_plan)
        fields = [*LP_SEED_FIELDS, *extra_names(self._extras, stage.value)]
        if stage is WorkerPass.PREV_LOGPROBS and columns.has(SUPPORT, rows):
            fields.append(SUPPORT)
        batch = self._seed_batch(work, columns, fields, rows, width=plan.pad_to)
        if stage is WorkerPass.REFERENCE_LOGPROBS:
            return rows, self.worker.get_reference_policy_logprobs(batch, plan=plan)
        if found is None or not self._records_routes:
            self._add_routes(batch, columns, rows)
            return rows, self.worker.get_logprobs(batch, plan=plan)
        [logprobs_NT], routes_NTLK = self.worker.record_routes(batch, plan=plan)
        self._add_routes(batch, columns, rows)
        if ROUTES in batch:
            is_own = routes_NTLK != MISSING
            kept, made = batch.tensor(ROUTES)[is_own], routes_NTLK[is_own]
            found.routes = ReplayedValues(num_values=kept.numel(), num_different=int((made != kept).sum()))
        return rows, logprobs_NT

    def _seed_batch(
        self, work: StepWork, columns: SnapshotColumns, fields: Sequence[str], rows: list[int], *, width: int
    ) -> BatchedDataDict:
        """Return the batch of a log-probability pass; weights of rows are kept only of steps that wrote them."""
        kept = [name for name in fields if columns.has(name, rows)]
        batch = columns.batch(kept, rows, width=width, pad_token_id=self._pad_token_id)
        if SAMPLE_MASK not in batch:
            places = {row: place for place, row in enumerate(work.trained)}
            batch[SAMPLE_MASK] = work.sample_mask[torch.tensor([places[row] for row in rows])]
        return batch

    def _train(self, work: StepWork, columns: SnapshotColumns, fresh: dict[str, torch.Tensor]) -> TrainResult:
        assert work.plan is not None, "there are rows"
        rows, plan = self._share(work, work.plan)
        made = {"advantages": work.advantages, SAMPLE_MASK: work.sample_mask}
        if work.token_advantages is not None:
            made[TOKEN_ADVANTAGES] = _to_width(work.token_advantages, plan.pad_to)
        places = {row: place for place, row in enumerate(work.trained)}
        index = torch.tensor([places[row] for row in rows])
        # What was kept is the fact; what was not kept, the replay has made itself.
        kept = [name for name in self._job.train_fields if name not in made and columns.has(name, rows)]
        batch = columns.batch(kept, rows, width=plan.pad_to, pad_token_id=self._pad_token_id)
        batch.update({name: column[index] for name, column in made.items() if name in self._job.train_fields})
        for name in self._job.train_fields:
            if name not in batch and name not in fresh:
                raise ReplayProblem(f"step {work.step.number} ended before {name} was kept", verdict=Verdict.INCOMPLETE)
            if name not in batch:
                batch[name] = _to_width(fresh[name][torch.tensor(rows)], plan.pad_to)
        self._add_routes(batch, columns, rows)
        if not work.is_subset:
            self.worker.prepare_for_training()
        result = self.worker.train(batch, self._job.loss_fn, plan=plan, eval_mode=work.is_subset)
        # The driver of a run gets the metrics of a rank as one, too.
        return replace(result, metrics=(merge_metrics(result.metrics),))

    def _share(self, work: StepWork, plan: PackPlan) -> tuple[list[int], PackPlan]:
        """Return rows of this rank, counted in the rollout's order, and its part of the plan."""
        return [work.trained[place] for place in plan.rows_of_rank(self._at.dp)], plan.for_rank(self._at.dp)

    def _add_routes(self, batch: BatchedDataDict, columns: SnapshotColumns, rows: list[int]) -> None:
        """Add the kept routes, where there are any and the worker can replay them."""
        if self.worker.replay is not None:
            width = batch.tensor("input_ids").shape[1]
            routes = columns.routes(rows, self.worker.replay.shape, width=width)
            if routes is not None:
                batch[ROUTES] = routes


def _to_width(column_NT: torch.Tensor, width: int) -> torch.Tensor:
    cut = column_NT[:, :width]
    return torch.nn.functional.pad(cut, (0, width - cut.shape[1]))


def _compared(name: str, got_NT: torch.Tensor, columns: SnapshotColumns, rows: list[int]) -> ReplayedValues:
    lengths = torch.tensor([columns.lengths[row] for row in rows])
    is_token_NT = torch.arange(got_NT.shape[1]) < lengths[:, None]
    got = got_NT[is_token_NT]
    if not columns.has(name, rows):
        return ReplayedValues(num_values=got.numel(), has_kept=False)
    kept = columns.rows(name, rows).values()
    apart = (got - kept).abs().nan_to_num(nan=float("inf"))
    worst = int(apart.argmax()) if apart.numel() else 0
    row = int(torch.searchsorted(lengths.cumsum(0), worst, right=True))
    return ReplayedValues(
        num_values=got.numel(),
        num_different=int((got != kept).sum()),
        largest=float(apart.max()) if apart.numel() else 0.0,
        key=columns.keys[rows[row]] if apart.numel() else "",
    )
