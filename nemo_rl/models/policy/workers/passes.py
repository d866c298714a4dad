"""`Passes`: training calls and log-probabilities of a policy worker, whatever engine holds the model.

A base of `PolicyWorker`. Invariant: weights, optimizer and learning rate depend on the global batches alone, not on
their split into ranks or microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.errors import NonFiniteError
from nemo_rl.models.head.logits import SUPPORT
from nemo_rl.models.head.logprobs import Sampling, TopTokens
from nemo_rl.models.policy.interfaces import ADVANTAGES, SQUARED_PROBS, TOKEN_ADVANTAGES, LossFunction, TrainResult
from nemo_rl.models.policy.microbatch import PassShape, fixed_plan, steps_of
from nemo_rl.models.policy.observer import NO_HOOK_OBSERVERS, HookObservers
from nemo_rl.models.policy.routes.slices import RouteSlices
from nemo_rl.models.policy.routes.worker_replay import OWN_ROUTES, ROUTES, PassRoutes, WorkerReplay
from nemo_rl.models.policy.steps import BatchForm, StepOutcome, check_same_plan, loss_scales
from nemo_rl.models.policy.workers.base import (
    WorkerState,
    deterministic_algorithms,
    device_name,
    largest_microbatch,
    lowering_keys,
)
from nemo_rl.models.policy.workers.device_states import DeviceStates
from nemo_rl.utils.flops import theoretical_tflops, transformer_flops

__all__ = ["Passes"]

TOKEN_MASK = "token_mask"
"""Name of a column; where a batch has it, only its tokens' log-probabilities are computed."""


class Passes(DeviceStates):
    """Training calls and log-probabilities of one rank."""

    def __init__(
        self, config: PolicyConfig, *, replay: WorkerReplay | None, hook_observers: HookObservers = NO_HOOK_OBSERVERS
    ) -> None:
        self.config, self.replay, self._hook_observers = config, replay, hook_observers

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
        """(collective) Train one optimizer step per global batch over this rank's rows.

        Args:
            eval_mode: loss and metrics only; weights, optimizer and schedule stay.
            gbs: rows per optimizer step over all ranks; null uses `policy.train_global_batch_size`.
            mbs: rows per microbatch; null uses `policy.train_micro_batch_size`.
            plan: this rank's part (`PackPlan.for_rank`), in indices into `batch`; overrides both.
            routes: this rank's, with router replay; None takes them from the column `routed_experts` of the batch,
                `[N, T, L, K]` int16 with -1 where a route is missing.

        Raises:
            NonFiniteError: on every rank; names the samples.
            FieldNotProduced: router replay is on, and there are no routes.
        """
        self.require("train", WorkerState.TRAINING, *([WorkerState.LOGPROBS] if eval_mode else []))
        self.require_policy_weights("train")
        if plan is None:
            rows_per_step = (gbs or self.config.train_global_batch_size) / self._here.layout.dp
            plan = self._fixed_plan(batch, rows_per_step, mbs or self.config.train_micro_batch_size)
        steps = steps_of(plan, num_rows=batch.size)
        check_same_plan([len(microbatches) for microbatches in steps])
        layout, outcomes = self.batch_layout(plan), list[StepOutcome]()
        with (
            self.replaying(WorkerPass.TRAIN, batch, plan, routes) as pass_routes,
            self._hook_observers.phase(WorkerPass.TRAIN, batch) as observer,
            self._guarding("train", batch, plan, [] if eval_mode else outcomes),
        ):
            batch = _without(batch, ROUTES).to("cpu")
            if TOKEN_ADVANTAGES in batch:
                # The name by which losses know them.
                batch[ADVANTAGES] = batch.pop(TOKEN_ADVANTAGES)
            learning_rate = self.engine.schedule.apply()
            scales = loss_scales(batch, steps, is_writer=self._here.is_writer)
            runner = self.engine.runner(layout, pass_routes, observer)
            observer.parameters()
            for number, (microbatches, scale) in enumerate(zip(steps, scales, strict=True)):
                observer.update(number)
                outcomes.append(runner.run(batch, microbatches, loss_fn, scale, is_training=not eval_mode))
        if not eval_mode:
            self.engine.schedule.advance()
        lengths = [int(n) for n in batch.tensor("input_lengths").tolist()]
        metrics = tuple(metrics for outcome in outcomes for metrics in outcome.metrics)
        return TrainResult(
            loss=tuple(outcome.loss for outcome in outcomes),
            grad_norm=tuple(outcome.grad_norm for outcome in outcomes),
            rank=self._here.rank,
            metrics=metrics,
            microbatch_losses=tuple(part["loss"].value for part in metrics if "loss" in part),
            total_flops=transformer_flops(
                self.engine.flops_shape,
                lengths,
                with_backward=not eval_mode,
                trains_weights=not self.config.lora.enabled,
                num_head_tokens=sum(batch.tensor("token_mask").sum(1).tolist()),
            ),
            theoretical_tflops=theoretical_tflops(device_name(self._here.device), dtype=self.config.precision),
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
        phase: WorkerPass | None = WorkerPass.PREV_LOGPROBS,
    ) -> torch.Tensor:
        """(collective) Return `[N, T]` float32 on the CPU under the distribution that was sampled from.

        Computed for the tokens of `token_mask` where the batch has that column, else for all; 0 elsewhere.

        Args:
            routes: as in `train`.
            replay: False lets the routers choose for themselves.
            phase: as which observers see the pass; None: nobody looks on.

        Raises:
            FieldNotProduced: router replay is on, and there are no routes.
        """
        self.require("get_logprobs", WorkerState.TRAINING, WorkerState.LOGPROBS)
        plan = plan or self._inference_plan(batch, mbs)
        if not replay:
            return self._logprobs(batch, plan, OWN_ROUTES, phase)[0]
        with self.replaying(WorkerPass.PREV_LOGPROBS, batch, plan, routes) as pass_routes:
            return self._logprobs(batch, plan, pass_routes, phase)[0]

    def get_logprobs_with_squares(
        self, batch: BatchedDataDict, *, plan: PackPlan | None = None, routes: RouteSlices | None = None
    ) -> torch.Tensor:
        """(collective) Return `[2, N, T]`: as `get_logprobs`, and the sum of squared probabilities of each token's
        whole distribution."""
        self.require("get_logprobs_with_squares", WorkerState.TRAINING, WorkerState.LOGPROBS)
        plan = plan or self._inference_plan(batch, None)
        phase = WorkerPass.PREV_LOGPROBS
        with self.replaying(phase, batch, plan, routes) as pass_routes:
            return self._logprobs(batch, plan, pass_routes, phase, computed=(SQUARED_PROBS,))

    def get_topk_logprobs(
        self,
        batch: BatchedDataDict,
        wanted: TopTokens,
        *,
        plan: PackPlan | None = None,
        routes: RouteSlices | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(collective) Return the most likely tokens of the distribution that each token of `get_logprobs` was drawn
        from, before a filter of top-k or top-p: ids `[N, T, k]` int32 and log-probabilities `[N, T, k + 1]` float32,
        the last of all other tokens together, on the CPU.

        Args:
            routes: as in `train`.

        Raises:
            FieldNotProduced: router replay is on, and there are no routes.
        """
        self.require("get_topk_logprobs", WorkerState.TRAINING, WorkerState.LOGPROBS)
        plan = plan or self._inference_plan(batch, None)
        microbatches = [rows for step in steps_of(plan, num_rows=batch.size) for rows in step]
        check_same_plan([len(microbatches)])
        layout, stage = self.batch_layout(plan), WorkerPass.TOPK_LOGITS
        with (
            self.replaying(stage, batch, plan, routes) as pass_routes,
            self._hook_observers.phase(stage, batch) as observer,
            self._guarding(stage.value, batch, plan),
        ):
            # Sampling masks belong to a filter, which a comparison of whole distributions leaves out.
            batch = _without(_without(batch, SUPPORT), ROUTES).to("cpu")
            runner = self.engine.runner(layout, pass_routes, observer)
            top_NTk, more_NTk = runner.top_k(batch, microbatches, _scored_tokens(batch), wanted)
        return more_NTk[..., :-1].int(), torch.cat([top_NTk[..., :-1], more_NTk[..., -1:]], dim=-1)

    def score(self, batch: BatchedDataDict) -> torch.Tensor:
        """(collective) Return `[N, T]` as `get_logprobs`, under the model's own distribution; nobody looks on.

        All rows run at once, and the routers choose for themselves.
        """
        self.require("score", WorkerState.TRAINING, WorkerState.LOGPROBS, WorkerState.REFIT)
        return self._logprobs(batch, self._inference_plan(batch, batch.size), OWN_ROUTES, None, sampling=Sampling())[0]

    def record_routes(
        self, batch: BatchedDataDict, *, plan: PackPlan | None = None, with_squares: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(collective) Return log-probabilities `[1, N, T]`, with squares as `get_logprobs_with_squares`, and the
        routes that the routers chose for themselves: `[N, T, L, K]` int16, this rank's layers of its tokens, -1
        elsewhere.

        Raises:
            RuntimeError: router replay is off.
        """
        self.require("record_routes", WorkerState.TRAINING, WorkerState.LOGPROBS)
        plan = plan or self._inference_plan(batch, None)
        if self.replay is None:
            raise RuntimeError("record_routes: set policy.router_replay.enabled=true")
        with self.replay.recording(WorkerPass.PREV_LOGPROBS, batch, plan) as stage:
            computed = (SQUARED_PROBS,) if with_squares else ()
            found_cNT = self._logprobs(batch, plan, stage, WorkerPass.PREV_LOGPROBS, computed=computed)
            return found_cNT, stage.recorded(batch)

    def replaying(
        self, stage: WorkerPass, batch: BatchedDataDict, plan: PackPlan, routes: RouteSlices | None
    ) -> AbstractContextManager[PassRoutes]:
        """Surround the passes of a call, whose routers get these routes, or with router replay those of the batch."""
        if self.replay is None:
            return nullcontext(OWN_ROUTES)
        return self.replay.replaying(stage, batch, plan, self.batch_layout(plan).shape, routes)

    def _logprobs(
        self,
        batch: BatchedDataDict,
        plan: PackPlan,
        routes: PassRoutes,
        phase: WorkerPass | None,
        *,
        sampling: Sampling | None = None,
        computed: Sequence[str] = (),
    ) -> torch.Tensor:
        """Return `[c, N, T]`, see `Runner.logprobs`."""
        microbatches = [rows for step in steps_of(plan, num_rows=batch.size) for rows in step]
        check_same_plan([len(microbatches)])
        layout = self.batch_layout(plan, sampling)
        if not layout.sampling.has_filter:
            batch = _without(batch, SUPPORT)
        batch = _without(batch, ROUTES).to("cpu")
        select_NT = _scored_tokens(batch)
        hook_observers = self._hook_observers if phase is not None else NO_HOOK_OBSERVERS
        with (
            hook_observers.phase(phase or WorkerPass.PREV_LOGPROBS, batch) as observer,
            self._guarding("logprobs", batch, plan),
        ):
            runner = self.engine.runner(layout, routes, observer)
            return runner.logprobs(batch, microbatches, select_NT, computed=computed)

    def get_reference_policy_logprobs(
        self, batch: BatchedDataDict, *, mbs: int | None = None, plan: PackPlan | None = None
    ) -> torch.Tensor:
        """(collective) Return `get_logprobs` under the reference weights, whose routers choose for themselves;
        without the filter of top-k and top-p."""
        plan = plan or self._inference_plan(batch, mbs)
        with self.use_reference_model():
            self.require("get_reference_policy_logprobs", WorkerState.TRAINING, WorkerState.LOGPROBS)
            # The KL compares whole distributions; a filter would leave each policy its own set.
            whole = self.batch_layout(plan).sampling.unfiltered
            return self._logprobs(batch, plan, OWN_ROUTES, WorkerPass.REFERENCE_LOGPROBS, sampling=whole)[0]

    def get_topk_logits(
        self, batch: BatchedDataDict, *, k: int, mbs: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(collective) Return the k largest logits at each position, which predict the next token, and their ids.

        Values `[N, T, k]` float32 and ids `[N, T, k]` int64 on the CPU, without temperature; 0 in the padding.
        """
        self.require("get_topk_logits", WorkerState.TRAINING, WorkerState.LOGPROBS)
        plan = self._inference_plan(batch, mbs)
        check_same_plan([len(plan.microbatches[0])])
        runner = self.engine.runner(self.batch_layout(plan), OWN_ROUTES)
        return runner.topk_logits(batch.to("cpu"), plan.microbatches[0], k=k)

    def batch_layout(self, plan: PackPlan, sampling: Sampling | None = None) -> BatchForm:
        """Return how rows of a plan become forward passes.

        Args:
            sampling: None takes that of the rollouts.
        """
        generation, multiple = self.config.generation, self.config.make_sequence_length_divisible_by
        return BatchForm(
            is_packed=plan.packed,
            shape=PassShape.of(
                self._here.layout, rank=self._here.rank, context=self.engine.context, configured_multiple=multiple
            ),
            # Greedy rollouts have no distribution of their own; the model's is taken.
            sampling=sampling
            or Sampling(temperature=generation.temperature or 1.0, top_k=generation.top_k, top_p=generation.top_p),
        )

    # Private parts.

    @contextmanager
    def _guarding(
        self, stage: str, batch: BatchedDataDict, plan: PackPlan, updates: Sequence[StepOutcome] | None = None
    ) -> Iterator[None]:
        """Surround a pass, which makes these updates, with torch's flags of deterministic ones where asked for."""
        keys = lowering_keys(self.config, is_training=stage == "train")
        try:
            with (
                self.guarding(stage, keys, microbatch=partial(largest_microbatch, batch, plan)),
                deterministic_algorithms() if self.config.deterministic else nullcontext(),
            ):
                yield
        except NonFiniteError as error:
            raise NonFiniteError(f"{error}; {self._what_helps(updates)}") from error

    def _what_helps(self, updates: Sequence[StepOutcome] | None) -> str:
        """Say what NaN or inf has left of the weights, and what can be done in this run."""
        is_megatron, is_float32 = self.config.megatron_cfg.enabled, self.config.precision == "float32"
        rate = "policy.megatron_cfg.optimizer.lr" if is_megatron else "policy.optimizer.kwargs.lr"
        precision = "" if is_float32 else ", or use policy.precision=float32"
        if updates is None:
            return (
                "no loss had a part in it: these samples or the weights have. Check policy.model_name at the first "
                f"step; later resume from a checkpoint with a lower {rate}{precision}"
            )
        done = f"{len(updates)} earlier updates of this step have changed the weights, this one has not"
        return f"{done if updates else 'the weights were not changed'}. Look at these samples, lower {rate}{precision}"

    def _fixed_plan(self, batch: BatchedDataDict, rows_per_step: float, mbs: int) -> PackPlan:
        if rows_per_step != int(rows_per_step):
            raise ValueError(
                f"a global batch of {int(rows_per_step * self._here.layout.dp)} samples does not divide by "
                f"{self._here.layout.dp} data-parallel ranks; change policy.train_global_batch_size"
            )
        plan = fixed_plan(
            batch.size,
            rows_per_step=int(rows_per_step),
            rows_per_microbatch=mbs,
            pad_to=batch.tensor("input_ids").shape[1],
        )
        return replace(plan, packed=self.config.sequence_packing.is_on)

    def _inference_plan(self, batch: BatchedDataDict, mbs: int | None) -> PackPlan:
        rows = mbs or self.config.logprob_batch_size or self.config.train_micro_batch_size
        return self._fixed_plan(batch, max(1, batch.size), rows)


def _scored_tokens(batch: BatchedDataDict) -> torch.Tensor:
    """Return `[N, T]` bool: the tokens of `token_mask` where the batch has that column, else all."""
    if TOKEN_MASK in batch:
        return batch.tensor(TOKEN_MASK).bool()
    return torch.ones_like(batch.tensor("input_ids"), dtype=torch.bool)


def _without(batch: BatchedDataDict, name: str) -> BatchedDataDict:
    """Whole routes stay where they are, passes get their part; sampling masks belong to a filter."""
    return BatchedDataDict({other: column for other, column in batch.items() if other != name})
