"""`TrainingWorker`: training calls and log-probabilities of a policy worker, whatever engine holds the model.

A worker adds model, optimizer and a `Runner` for one plan. Invariant: weights, optimizer and learning rate depend on
the global batches alone, not on their split into ranks or microbatches.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.collectives import RankSpec, init_process_group
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.models.logprobs import SamplingView
from nemo_rl.models.policy.interfaces import LossFunction, TensorInfo, TrainResult
from nemo_rl.models.policy.microbatch import PassShape, fixed_plan, steps_of
from nemo_rl.models.policy.routes import RouteSlices
from nemo_rl.models.policy.steps import BatchLayout, Runner, check_same_plan, loss_scales
from nemo_rl.models.policy.worker_replay import ROUTES, StageReplay, WorkerReplay
from nemo_rl.models.policy.workers.base import WorkerState
from nemo_rl.models.policy.workers.refit_source import RefitSource
from nemo_rl.utils.flops import TransformerShape, theoretical_tflops, transformer_flops

__all__ = ["RecordedRoutes", "Schedule", "TrainingWorker", "ensure_process_group", "pick_device"]

TOKEN_MASK = "token_mask"
"""Where a batch has this column, only its tokens' log-probabilities are computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRoutes:
    """What a rank recorded."""

    logprobs_NT: torch.Tensor
    """`[N, T]` float32."""
    routes_NTLK: torch.Tensor
    """`[N, T, L, K]` int16: its layers of its tokens, -1 elsewhere."""


class Schedule(Protocol):
    """Learning rate, one step per training call."""

    def apply(self) -> float:
        """The settings of the next call are in the optimizer; returns its learning rate."""

    def advance(self) -> None:
        """One training call is done."""


class TrainingWorker(RefitSource):
    """Methods of `PolicyWorker` that are the same for every engine."""

    layout: ParallelLayout
    world_size: int
    _flops_shape: TransformerShape
    _schedule: Schedule
    _context: dist.ProcessGroup | None
    """Ranks that share this rank's sequences; None on one."""
    _replay: WorkerReplay | None = None
    """None unless `policy.router_replay.enabled`."""

    def _runner(self, layout: BatchLayout, replay: StageReplay | None = None) -> Runner:
        """Runs one call's microbatches, with the routes of a stage where there are any."""
        raise NotImplementedError

    def prepare_refit_info(self) -> dict[str, TensorInfo]:
        """Name, shape and dtype of every weight in HF naming, in export order."""
        raise NotImplementedError

    def save_checkpoint(self, *, weights: Path, optimizer: Path | None, tokenizer: Path | None) -> None:
        """(collective) HF folder at `weights`, sharded optimizer state at `optimizer`."""
        raise NotImplementedError

    def load_checkpoint(self, *, weights: Path, optimizer: Path | None) -> None:
        """(collective) Continues from a checkpoint."""
        raise NotImplementedError

    # Training and log-probabilities.

    def train(
        self,
        batch: BatchedDataDict,
        loss_fn: LossFunction,
        *,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        plan: PackPlan | None = None,
        routes: RouteSlices | None = None,
    ) -> TrainResult:
        """(collective) One optimizer step per global batch over this rank's rows.

        Args:
            eval_mode: loss and metrics only; weights, optimizer and schedule stay.
            gbs: rows per optimizer step over all ranks; null uses `policy.train_global_batch_size`.
            mbs: rows per microbatch; null uses `policy.train_micro_batch_size`.
            plan: this rank's view (`PackPlan.for_rank`), in indices into `batch`; overrides both.
            routes: this rank's, with router replay; None takes them from the column `routed_experts` of the batch,
                `[N, T, L, K]` int16 with -1 where a route is missing.

        Raises:
            NonFiniteError: on every rank; names the samples.
            FieldNotProduced: router replay is on, and there are no routes.
        """
        self._require("train", WorkerState.TRAINING, *([WorkerState.LOGPROBS] if eval_mode else []))
        if self._is_reference_in_use:
            raise RuntimeError("train: the reference weights are in place; leave use_reference_model first")
        if plan is None:
            rows_per_step = (gbs or self.config.train_global_batch_size) / self.layout.dp
            plan = self._fixed_plan(batch, rows_per_step, mbs or self.config.train_micro_batch_size)
        steps = steps_of(plan, num_rows=batch.size)
        check_same_plan([len(microbatches) for microbatches in steps], device=self.device)
        with self._stage_replay("train", batch, plan, routes) as replay:
            batch = _without_routes(batch).to(self.device)
            learning_rate = self._schedule.apply()
            scales = loss_scales(batch, steps, is_writer=self.layout.is_writer(self.rank), device=self.device)
            runner = self._runner(self._batch_layout(plan), replay)
            outcomes = [
                runner.run(batch, microbatches, loss_fn, scale, is_training=not eval_mode)
                for microbatches, scale in zip(steps, scales, strict=True)
            ]
        if not eval_mode:
            self._schedule.advance()
        lengths = [int(n) for n in batch.tensor("input_lengths").tolist()]
        return TrainResult(
            loss=tuple(outcome.loss for outcome in outcomes),
            grad_norm=tuple(outcome.grad_norm for outcome in outcomes),
            rank=self.rank,
            metrics=tuple(metrics for outcome in outcomes for metrics in outcome.metrics),
            total_flops=transformer_flops(self._flops_shape, lengths, with_backward=not eval_mode),
            theoretical_tflops=theoretical_tflops(self._device_side.name, dtype=self.config.precision),
            learning_rate=learning_rate,
            num_tokens=sum(lengths),
        )

    def get_logprobs(
        self,
        batch: BatchedDataDict,
        *,
        mbs: int | None = None,
        plan: PackPlan | None = None,
        routes: RouteSlices | None = None,
        replay: bool = True,
    ) -> torch.Tensor:
        """(collective) `[N, T]` float32 on the CPU under the distribution that was sampled from.

        Computed for the tokens of `token_mask` where the batch has that column, else for all; 0 elsewhere.

        Args:
            routes: as in `train`.
            replay: False lets the routers choose for themselves.

        Raises:
            FieldNotProduced: router replay is on, and there are no routes.
        """
        self._require("get_logprobs", WorkerState.TRAINING, WorkerState.LOGPROBS)
        plan = plan or self._inference_plan(batch, mbs)
        if not replay:
            return self._logprobs(batch, plan, None)
        with self._stage_replay("prev_logprobs", batch, plan, routes) as stage:
            return self._logprobs(batch, plan, stage)

    def record_routes(self, batch: BatchedDataDict, *, plan: PackPlan | None = None) -> RecordedRoutes:
        """(collective) Log-probabilities as `get_logprobs`, and the routes that the routers chose for themselves.

        Raises:
            RuntimeError: router replay is off.
        """
        self._require("record_routes", WorkerState.TRAINING, WorkerState.LOGPROBS)
        if self._replay is None:
            raise RuntimeError("record_routes: set policy.router_replay.enabled=true")
        plan = plan or self._inference_plan(batch, None)
        with self._replay.stage("prev_logprobs", plan, None, batch) as stage:
            logprobs_NT = self._logprobs(batch, plan, stage)
            routes_NTLK = self._replay.recorded(stage, batch)
        return RecordedRoutes(logprobs_NT=logprobs_NT, routes_NTLK=routes_NTLK)

    def _logprobs(self, batch: BatchedDataDict, plan: PackPlan, replay: StageReplay | None) -> torch.Tensor:
        microbatches = [rows for step in steps_of(plan, num_rows=batch.size) for rows in step]
        check_same_plan([len(microbatches)], device=self.device)
        batch = _without_routes(batch).to(self.device)
        if TOKEN_MASK in batch:
            select_NT = batch.tensor(TOKEN_MASK).bool()
        else:
            select_NT = torch.ones_like(batch.tensor("input_ids"), dtype=torch.bool)
        return self._runner(self._batch_layout(plan), replay).logprobs(batch, microbatches, select_NT).cpu()

    def get_reference_policy_logprobs(
        self, batch: BatchedDataDict, *, mbs: int | None = None, plan: PackPlan | None = None
    ) -> torch.Tensor:
        """(collective) As `get_logprobs` under the reference weights, whose routers choose for themselves."""
        with self.use_reference_model():
            return self.get_logprobs(batch, mbs=mbs, plan=plan, replay=False)

    def get_topk_logits(
        self, batch: BatchedDataDict, *, k: int, mbs: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(collective) The k largest logits at each position, which predict the next token, and their ids.

        Values `[N, T, k]` float32 and ids `[N, T, k]` int64 on the CPU, without temperature; 0 in the padding.
        """
        self._require("get_topk_logits", WorkerState.TRAINING, WorkerState.LOGPROBS)
        plan = self._inference_plan(batch, mbs)
        check_same_plan([len(plan.microbatches[0])], device=self.device)
        values, ids = self._runner(self._batch_layout(plan)).topk_logits(
            batch.to(self.device), plan.microbatches[0], k=k
        )
        return values.cpu(), ids.cpu()

    # Private parts.

    def _stage_replay(
        self, stage: str, batch: BatchedDataDict, plan: PackPlan, routes: RouteSlices | None
    ) -> AbstractContextManager[StageReplay | None]:
        if self._replay is None:
            return nullcontext()
        if routes is None:
            routes = self._replay.slices_of_batch(stage, batch, plan, self._batch_layout(plan).shape)
        return self._replay.stage(stage, plan, routes, batch)

    def _load_tokenizer(self) -> None:
        tokenizer = self.config.tokenizer
        self._tokenizer = load_tokenizer(
            tokenizer.name or self.config.model_name, chat_template=tokenizer.chat_template
        )

    def _batch_layout(self, plan: PackPlan) -> BatchLayout:
        generation, multiple = self.config.generation, self.config.make_sequence_length_divisible_by
        return BatchLayout(
            is_packed=plan.packed,
            shape=PassShape.of(self.layout, rank=self.rank, context=self._context, configured_multiple=multiple),
            # Greedy rollouts have no distribution of their own; the model's is taken.
            view=SamplingView(
                temperature=generation.temperature or 1.0, top_k=generation.top_k, top_p=generation.top_p
            ),
        )

    def _fixed_plan(self, batch: BatchedDataDict, rows_per_step: float, mbs: int) -> PackPlan:
        if rows_per_step != int(rows_per_step):
            raise ValueError(
                f"a global batch of {int(rows_per_step * self.layout.dp)} samples does not divide by "
                f"{self.layout.dp} data-parallel ranks; change policy.train_global_batch_size"
            )
        plan = fixed_plan(
            batch.size,
            rows_per_step=int(rows_per_step),
            rows_per_microbatch=mbs,
            pad_to=batch.tensor("input_ids").shape[1],
        )
        return replace(plan, packed=self.config.sequence_packing.enabled)

    def _inference_plan(self, batch: BatchedDataDict, mbs: int | None) -> PackPlan:
        rows = mbs or self.config.logprob_batch_size or self.config.train_micro_batch_size
        return self._fixed_plan(batch, max(1, batch.size), rows)


def _without_routes(batch: BatchedDataDict) -> BatchedDataDict:
    """Whole routes stay where they are: passes get their part."""
    return BatchedDataDict({name: column for name, column in batch.items() if name != ROUTES})


def ensure_process_group(rank: int, world_size: int, timeout_s: float, device: torch.device) -> bool:
    """Makes a one-rank group where none exists; True if it did.

    Raises:
        ValueError: the group that exists says otherwise.
        RuntimeError: several ranks and no group.
    """
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise ValueError(
                f"expected rank {rank} of {world_size} as in the process group, which says "
                f"{dist.get_rank()} of {dist.get_world_size()}"
            )
        return False
    if world_size != 1:
        raise RuntimeError(f"rank {rank} of {world_size}: initialise the default process group before the worker")
    init_process_group(RankSpec(rank=0, world_size=1), device=device, timeout_s=timeout_s)
    return True


def pick_device(name: str | None) -> torch.device:
    """The device by name; None takes the current CUDA device where there is one."""
    if name is not None:
        return torch.device(name)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
