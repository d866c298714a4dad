"""Microbatches of one rank through megatron-core's schedules: global batches with optimizer steps, log-probabilities.

Called by the Megatron worker. Every rank runs the same microbatches in the same order; the first pipeline stage reads
the tokens, the last one computes log-probabilities and loss. Invariant: all ranks pass through the same collectives,
also when a rank meets a NaN; whether to stop is decided together, after the last microbatch. Shapes: N rows, T tokens,
n rows of a microbatch, K positions whose logits are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.head.logprobs import TopTokens, VocabShard
from nemo_rl.models.megatron.attention import PackedSegments
from nemo_rl.models.megatron.balance import AuxiliaryLoss, biases_kept_on_error
from nemo_rl.models.megatron.mcore import finalize_model_grads, get_forward_backward_func, parallel_state
from nemo_rl.models.megatron.optim import PolicyOptimizer
from nemo_rl.models.megatron.setup import MegatronModel
from nemo_rl.models.policy.interfaces import LossFunction, LossScale
from nemo_rl.models.policy.microbatch import (
    Microbatch,
    build_microbatch,
    selected_logprobs,
    selected_top_k,
    top_k_logits,
)
from nemo_rl.models.policy.observer import NO_OBSERVER, PassObserver
from nemo_rl.models.policy.routes.worker_replay import PassRoutes
from nemo_rl.models.policy.steps import (
    BatchForm,
    Keep,
    Microbatches,
    RankInfo,
    Runner,
    StepNumbers,
    StepOutcome,
    computed_fields,
    stored_fields,
    trained_tokens,
)

__all__ = ["PipelineRunner"]

OnOutput = Callable[[Microbatch, torch.Tensor], torch.Tensor]
"""Makes a scalar to run backwards from out of a microbatch's output of the last stage: what the head multiplies,
`[n, K, H]`, or logits `[n, s, V]` at all positions."""


class PipelineRunner(Runner):
    """The `Runner` of this rank's pipeline stage; all but the last stage return zeros."""

    def __init__(
        self,
        model: MegatronModel,
        layout: BatchForm,
        here: RankInfo,
        optimizer: PolicyOptimizer,
        routes: PassRoutes,
        observer: PassObserver = NO_OBSERVER,
    ) -> None:
        super().__init__(layout, here, observer)
        self._model, self._optimizer, self._routes = model, optimizer, routes
        self._balance = AuxiliaryLoss(model.config, num_shards=here.layout.dp, device=here.device)
        self._shard = _vocab_shard(model, here)
        model.config.finalize_model_grads_func = _finalize

    def run(
        self,
        batch: BatchedDataDict,
        microbatches: Microbatches,
        loss_fn: LossFunction,
        scale: LossScale,
        *,
        is_training: bool,
    ) -> StepOutcome:
        if scale.valid_tokens == 0:
            return StepOutcome(loss=0.0, grad_norm=0.0, metrics=())
        with biases_kept_on_error(self._model.module):
            return self._one_batch(batch, microbatches, loss_fn, scale, is_training=is_training)

    # Private parts.

    def _infer(
        self,
        batch: BatchedDataDict,
        microbatches: Microbatches,
        select_NT: torch.Tensor,
        keep: Keep,
        *,
        computed: Sequence[str] = (),
        top_k: TopTokens | int | None = None,
    ) -> None:
        def find(micro: Microbatch, output: torch.Tensor) -> torch.Tensor:
            found: Any
            if isinstance(top_k, int):
                found = top_k_logits(output, micro.inputs.segments, k=top_k, shard=self._shard)
            elif top_k is not None:
                logits, temperature = self._model.module.logits_of(output), self._layout.sampling.temperature
                found = selected_top_k(logits, micro.inputs, top_k, temperature=temperature, shard=self._shard)
            else:
                found = self._logprobs(micro, output, computed)
            if micro.rows:
                keep(micro, found)
            return found[0].sum()

        at_all_positions = isinstance(top_k, int)
        micros = self._build(batch, microbatches, select_NT, is_padded=at_all_positions)
        self._run(micros, len(microbatches), find, is_training=False, at_all_positions=at_all_positions)

    def _one_batch(
        self,
        batch: BatchedDataDict,
        microbatches: Microbatches,
        loss_fn: LossFunction,
        scale: LossScale,
        *,
        is_training: bool,
    ) -> StepOutcome:
        numbers, computed = StepNumbers(), computed_fields(loss_fn, self._layout.sampling)

        def loss_of(micro: Microbatch, hidden: torch.Tensor) -> torch.Tensor:
            return self._loss(micro, self._logprobs(micro, hidden, computed), loss_fn, scale, numbers)

        self._balance.begin(len(microbatches))
        self._optimizer.zero_grad()
        # The last stage alone has the masks, and computes a loss.
        is_last = self._here.is_last_stage
        select_NT = trained_tokens(batch) if is_last else torch.zeros_like(batch.tensor("input_ids"), dtype=torch.bool)
        micros = self._build(batch, microbatches, select_NT, fields=stored_fields(loss_fn) if is_last else ())
        self._run(micros, len(microbatches), loss_of, is_training=is_training)
        loss, metrics = self._read(numbers, batch)
        if not is_training:
            return StepOutcome(loss=loss, grad_norm=0.0, metrics=metrics)
        self._observer.gradients()
        grad_norm = self._optimizer.finish()
        if grad_norm is None:
            self._refuse_norm(batch, microbatches)
        return StepOutcome(loss=loss, grad_norm=grad_norm, metrics=(*metrics, *self._balance.metrics()))

    def _drop_gradients(self) -> None:
        self._optimizer.zero_grad()

    def _logprobs(self, micro: Microbatch, hidden_nKH: torch.Tensor, computed: Sequence[str]) -> torch.Tensor:
        """Return `[1 + c, M]`: log-probabilities, and the `COMPUTED_FIELDS` that are asked for."""
        logits, sampling = self._model.module.logits_of(hidden_nKH), self._layout.sampling
        return selected_logprobs(logits, micro.inputs, sampling=sampling, shard=self._shard, computed=computed)

    def _run(
        self,
        micros: Iterator[Microbatch],
        count: int,
        on_output: OnOutput,
        *,
        is_training: bool,
        at_all_positions: bool = False,
    ) -> None:
        """Run one pass of megatron-core's schedule over so many microbatches, which are built when they are due."""
        module = self._model.ddp
        module.train(is_training)
        with torch.set_grad_enabled(is_training):
            get_forward_backward_func()(
                forward_step_func=partial(self._forward, on_output, at_all_positions),
                data_iterator=micros,
                model=[module],
                num_microbatches=count,
                # Unused: the widths of microbatches differ and travel with the activations.
                seq_length=1,
                micro_batch_size=1,
                forward_only=not is_training,
            )

    def _forward(
        self, on_output: OnOutput, at_all_positions: bool, micros: Iterator[Microbatch], module: Any
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, None]]]:
        micro = next(micros)
        asks_again = self._model.config.recompute_granularity is not None and torch.is_grad_enabled()
        routes = self._routes.pass_of(micro, backward_follows=asks_again)
        observed = self._observer.pass_of(micro, backward_follows=asks_again)
        with routes as on_backward, observed as observe_backward:
            output = self._through(micro, module, at_all_positions)
        on_backward(output)
        observe_backward(output)

        def finish(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
            # The count is megatron-core's divisor of gradients, which have theirs already.
            return self._balance.scaled(on_output(micro, output)), torch.zeros((), dtype=torch.int), None

        return output, finish

    def _through(self, micro: Microbatch, module: Any, at_all_positions: bool) -> torch.Tensor:
        inputs = micro.inputs
        return module(
            inputs.input_ids,
            inputs.position_ids,
            None,
            packed_seq_params=PackedSegments(
                segments=inputs.segments,
                position_s=inputs.position_ids[0],
                keep_K=None if at_all_positions else inputs.keep_K,
            ),
            padding_mask=self._balance.padding(
                micro, tp_rank=self._here.coordinates.tp, is_first_stage=self._here.coordinates.pp == 0
            ),
            **({"fp32_output": False} if self._model.config.bf16 else {}),
        )

    def _build(
        self,
        batch: BatchedDataDict,
        microbatches: Microbatches,
        select_NT: torch.Tensor,
        *,
        fields: Sequence[str] = (),
        is_padded: bool = False,
    ) -> Iterator[Microbatch]:
        if not self._here.is_last_stage:
            select_NT = torch.zeros_like(select_NT)
        for rows in microbatches:
            micro = build_microbatch(
                batch,
                rows,
                select_NT=select_NT,
                fields=fields,
                is_packed=self._layout.is_packed and not is_padded,
                shape=self._layout.shape,
                device=self._here.device,
            )
            yield micro.to(self._here.device)


def _vocab_shard(model: MegatronModel, here: RankInfo) -> VocabShard | None:
    if here.layout.tp == 1:
        return None
    group = parallel_state.get_tensor_model_parallel_group()
    return VocabShard(group=group, first=group.rank() * (model.shape.vocab_size // here.layout.tp))


def _finalize(modules: list[Any], num_tokens: object = None, **kwargs: Any) -> None:
    """Reduce gradients over all ranks that share a weight, without megatron-core's division by tokens."""
    with torch.no_grad():
        finalize_model_grads(modules, None, **kwargs)
