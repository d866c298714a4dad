"""Microbatches of one rank through megatron-core's schedules: global batches with optimizer steps, log-probabilities.

Called by the Megatron worker. Every rank runs the same microbatches in the same order; the first pipeline stage reads
the tokens, the last one computes log-probabilities and loss. Invariant: all ranks pass through the same collectives,
also when a rank meets a NaN; whether to stop is decided together, after the last microbatch. Shapes: N rows, T tokens,
n rows of a microbatch, K positions whose logits are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.errors import NonFiniteError
from nemo_rl.models.logprobs import VocabShard
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
    Microbatches,
    PassResult,
    RankInfo,
    StepNumbers,
    StepOutcome,
    computed_fields,
    loss_columns,
    raise_together,
    stored_fields,
    sum_over_shards,
    trained_tokens,
)
from nemo_rl.models.top_k import TopTokens

__all__ = ["PipelineRunner"]

OnOutput = Callable[[Microbatch, torch.Tensor], torch.Tensor]
"""Makes a scalar to run backwards from out of a microbatch's output of the last stage: what the head multiplies,
`[n, K, H]`, or logits `[n, s, V]` at all positions."""


class PipelineRunner:
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
        self._model, self._layout, self._here, self._optimizer = model, layout, here, optimizer
        self._routes, self._observer = routes, observer
        self._balance = AuxiliaryLoss(model.config, num_shards=here.layout.dp, device=here.device)
        self._shard = _vocab_shard(model, here)
        model.config.finalize_model_grads_func = _finalize

    def logprobs(
        self,
        batch: BatchedDataDict,
        microbatches: Microbatches,
        select_NT: torch.Tensor,
        *,
        computed: Sequence[str] = (),
    ) -> torch.Tensor:
        result = PassResult((1 + len(computed), *select_NT.shape), self._here.device)

        def keep(micro: Microbatch, hidden: torch.Tensor) -> torch.Tensor:
            found = self._logprobs(micro, hidden, computed)
            if micro.rows:
                self._observer.logprobs(micro, found[0])
                result.keep(micro, found)
            return found[0].sum()

        self._run(self._build(batch, microbatches, select_NT), len(microbatches), keep, is_training=False)
        values_cNT, bad = result.read()
        self._raise_together("log-probabilities", batch, bad)
        return values_cNT

    def top_k(
        self, batch: BatchedDataDict, microbatches: Microbatches, select_NT: torch.Tensor, wanted: TopTokens
    ) -> torch.Tensor:
        result = PassResult((2, *select_NT.shape, wanted.k + 1), self._here.device)

        def keep(micro: Microbatch, hidden: torch.Tensor) -> torch.Tensor:
            temperature, logits = self._layout.sampling.temperature, self._model.module.logits_of(hidden)
            found_cM = selected_top_k(logits, micro.inputs, wanted, temperature=temperature, shard=self._shard)
            if micro.rows:
                result.keep(micro, [micro.to_rows(part_kM.T) for part_kM in found_cM.chunk(2)])
            return found_cM.sum()

        self._run(self._build(batch, microbatches, select_NT), len(microbatches), keep, is_training=False)
        values_cNTk, bad = result.read()
        self._raise_together("top-k log-probabilities", batch, bad)
        return values_cNTk

    def topk_logits(
        self, batch: BatchedDataDict, microbatches: Microbatches, *, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids_NT = batch.tensor("input_ids")
        values_NTk = torch.zeros(*ids_NT.shape, k, dtype=torch.float32)
        tokens_NTk = torch.zeros(*ids_NT.shape, k, dtype=torch.int64)

        def keep(micro: Microbatch, logits: torch.Tensor) -> torch.Tensor:
            values, tokens = top_k_logits(logits, micro.inputs.segments, k=k, shard=self._shard)
            for i, (row, length) in enumerate(zip(micro.rows, micro.lengths, strict=True)):
                values_NTk[row, :length] = values[i, :length]
                tokens_NTk[row, :length] = tokens[i, :length]
            return values.sum()

        nothing_NT = torch.zeros_like(ids_NT, dtype=torch.bool)
        padded = replace(self._layout, is_packed=False)
        micros = self._build(batch, microbatches, nothing_NT, layout=padded)
        self._run(micros, len(microbatches), keep, is_training=False, at_all_positions=True)
        return values_NTk, tokens_NTk

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

    def _one_batch(
        self,
        batch: BatchedDataDict,
        microbatches: Microbatches,
        loss_fn: LossFunction,
        scale: LossScale,
        *,
        is_training: bool,
    ) -> StepOutcome:
        numbers = StepNumbers()
        self._balance.begin(len(microbatches))
        self._optimizer.zero_grad()
        micros = self._build(batch, microbatches, self._trained(batch), fields=self._fields(loss_fn))
        self._run(micros, len(microbatches), partial(self._loss, loss_fn, scale, numbers), is_training=is_training)
        total, metrics, bad = numbers.read()
        try:
            self._raise_together("the loss", batch, bad)
        except NonFiniteError:
            self._optimizer.zero_grad()
            raise
        [loss] = sum_over_shards([total], is_writer=self._here.is_writer)
        if not is_training:
            return StepOutcome(loss=loss, grad_norm=0.0, metrics=metrics)
        self._observer.gradients()
        grad_norm = self._optimizer.finish()
        if grad_norm is None:
            # The norm is global: every rank comes here together.
            self._raise_together(
                "the gradient norm, not in a loss; one of", batch, [row for rows in microbatches for row in rows]
            )
            raise AssertionError("a batch without rows has no gradient")
        return StepOutcome(loss=loss, grad_norm=grad_norm, metrics=(*metrics, *self._balance.metrics()))

    def _loss(
        self, loss_fn: LossFunction, scale: LossScale, numbers: StepNumbers, micro: Microbatch, hidden: torch.Tensor
    ) -> torch.Tensor:
        computed = computed_fields(loss_fn, self._layout.sampling)
        found = self._logprobs(micro, hidden, computed)
        if not micro.rows:
            return found[0].sum()
        self._observer.logprobs(micro, found[0])
        output = loss_fn(found[0], loss_columns(micro, found, computed), scale=scale)
        self._observer.loss(micro, output)
        numbers.add(micro, found[0], output)
        return output.loss

    def _logprobs(
        self, micro: Microbatch, hidden_nKH: torch.Tensor, computed: Sequence[str] = ()
    ) -> tuple[torch.Tensor, ...]:
        """Return `[n, t]`, and of `COMPUTED_FIELDS` those that are asked for; for a microbatch without rows no
        token, connected to the weights."""
        logits, sampling = self._model.module.logits_of(hidden_nKH), self._layout.sampling
        found_cM = selected_logprobs(logits, micro.inputs, sampling=sampling, shard=self._shard, computed=computed)
        return tuple(micro.to_rows(part_M) if micro.rows else part_M for part_M in found_cM)

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
        """Return the forward pass of this rank's stage."""
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
        layout: BatchForm | None = None,
    ) -> Iterator[Microbatch]:
        layout = layout or self._layout
        if not self._here.is_last_stage:
            select_NT = torch.zeros_like(select_NT)
        for rows in microbatches:
            micro = build_microbatch(
                batch,
                rows,
                select_NT=select_NT,
                fields=fields,
                is_packed=layout.is_packed,
                shape=layout.shape,
                device=self._here.device,
            )
            yield micro.to(self._here.device)

    def _trained(self, batch: BatchedDataDict) -> torch.Tensor:
        """Return the number of trained tokens; the last stage alone has the masks."""
        if self._here.is_last_stage:
            return trained_tokens(batch)
        return torch.zeros_like(batch.tensor("input_ids"), dtype=torch.bool)

    def _fields(self, loss_fn: LossFunction) -> tuple[str, ...]:
        return stored_fields(loss_fn) if self._here.is_last_stage else ()

    def _raise_together(self, what: str, batch: BatchedDataDict, rows: Sequence[int]) -> None:
        raise_together(what, batch, rows, is_writer=self._here.is_writer)


def _vocab_shard(model: MegatronModel, here: RankInfo) -> VocabShard | None:
    if here.layout.tp == 1:
        return None
    group = parallel_state.get_tensor_model_parallel_group()
    return VocabShard(group=group, first=group.rank() * (model.shape.vocab_size // here.layout.tp))


def _finalize(modules: list[Any], num_tokens: object = None, **kwargs: Any) -> None:
    """Reduce gradients over all ranks that share a weight, without megatron-core's division by tokens."""
    with torch.no_grad():
        finalize_model_grads(modules, None, **kwargs)
