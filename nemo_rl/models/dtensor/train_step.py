"""Forward and backward passes of one rank: a global batch with its optimizer step, and log-probabilities.

Called by the DTensor worker. Invariant: all ranks pass through the same collectives in the same order, also when a
rank meets a NaN; whether to stop is decided together, after the last microbatch. Shapes: N rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.collectives import ParallelGroups
from nemo_rl.models.dtensor.optim import LossScaler
from nemo_rl.models.dtensor.parallelize import PolicyModel, reduce_gradients
from nemo_rl.models.head.logprobs import TopTokens
from nemo_rl.models.hf.files import local_shard
from nemo_rl.models.policy.interfaces import LossFunction, LossScale
from nemo_rl.models.policy.microbatch import Microbatch, build_microbatch, row_names
from nemo_rl.models.policy.observer import NO_OBSERVER, PassObserver
from nemo_rl.models.policy.routes.worker_replay import OWN_ROUTES, PassRoutes
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
from nemo_rl.models.vision import VisionFamily, row_tensors
from nemo_rl.torch_private import norms_of, scale_

__all__ = ["OptimizerStep", "StepRunner", "place_images"]

CLIP_EPSILON = 1e-6
"""Epsilon of torch's own clipping."""


class StepRunner(Runner):
    """The `Runner` of a sharded model."""

    def __init__(
        self,
        model: PolicyModel,
        layout: BatchForm,
        here: RankInfo,
        optimizer_step: OptimizerStep,
        routes: PassRoutes,
        observer: PassObserver = NO_OBSERVER,
    ) -> None:
        super().__init__(layout, here, observer)
        self._model, self._optimizer_step, self._routes = model, optimizer_step, routes
        reason = "routers are told their routes" if routes is not OWN_ROUTES else None
        self._why_eager = "a pass is recorded or watched" if observer is not NO_OBSERVER else reason

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
        select_NT, fields, sampling = trained_tokens(batch), stored_fields(loss_fn), self._layout.sampling
        computed = computed_fields(loss_fn, sampling)
        # FSDP averages gradients over data x context ranks, while the loss is divided by the global count already. Each
        # context rank has the whole loss, of which only its own tokens' part flows back.
        averaged_over = self._optimizer_step.groups.fsdp_mesh.size()
        self._model.train(is_training)
        while True:
            numbers, last, loss_scale = StepNumbers(), len(microbatches) - 1, self._optimizer_step.scaler.scale
            for i, rows in enumerate(microbatches):
                reduce_gradients(self._model, i == last or not self._optimizer_step.keeps_whole)
                micro = self._build(batch, rows, select_NT, fields=fields)
                # Layers that the backward pass runs again need the same routes.
                with torch.set_grad_enabled(is_training), self._pass_of(micro):
                    found_cM = self._model(micro.inputs, sampling=sampling, computed=computed)
                    loss = self._loss(micro, found_cM, loss_fn, scale, numbers)
                    if is_training:
                        (loss * (averaged_over * loss_scale)).backward()
            total, metrics = self._read(numbers, batch)
            if not is_training:
                return StepOutcome(loss=total, grad_norm=0.0, metrics=metrics)
            self._observer.gradients()
            grad_norm = self._optimizer_step.finish()
            if grad_norm is not None:
                if self._model.compiled is not None:
                    metrics = (*metrics, self._model.compiled.metrics())
                return StepOutcome(loss=total, grad_norm=grad_norm, metrics=metrics)
            if not self._optimizer_step.retry():
                self._refuse_norm(batch, microbatches)

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
        self._model.eval()
        with torch.no_grad():
            for rows in microbatches:
                micro = self._build(batch, rows, select_NT, is_padded=isinstance(top_k, int))
                with self._pass_of(micro):
                    found = self._model(micro.inputs, sampling=self._layout.sampling, top_k=top_k, computed=computed)
                    if micro.rows:
                        keep(micro, found)

    def _drop_gradients(self) -> None:
        self._model.zero_grad(set_to_none=True)

    @contextmanager
    def _pass_of(self, micro: Microbatch) -> Iterator[None]:
        compiled = self._model.compiled
        with (
            nullcontext() if compiled is None else compiled.pass_of(self._why_eager),
            self._routes.pass_of(micro),
            self._observer.pass_of(micro),
        ):
            yield

    def _build(
        self,
        batch: BatchedDataDict,
        rows: Sequence[int],
        select_NT: torch.Tensor,
        *,
        fields: Sequence[str] = (),
        is_padded: bool = False,
    ) -> Microbatch:
        micro = build_microbatch(
            batch,
            rows,
            select_NT=select_NT,
            fields=fields,
            is_packed=self._layout.is_packed and not is_padded,
            shape=self._layout.shape,
            device=self._here.device,
        )
        if self._model.vision is not None:
            micro = place_images(micro, batch, self._model.vision, names=row_names(batch, rows))
        return micro.to(self._here.device)


class OptimizerStep:
    """Gradient norm, clipping and the optimizer's step after the last microbatch."""

    def __init__(
        self,
        model: PolicyModel,
        optimizer: torch.optim.Optimizer,
        scaler: LossScaler,
        *,
        groups: ParallelGroups,
        max_grad_norm: float | None,
        keeps_whole: bool = False,
    ) -> None:
        """Args:
        keeps_whole: ranks add up gradients of full weights, and reduce them after the last microbatch; False reduces
            them after each one.
        """
        self._model = model
        self._optimizer = optimizer
        # Alone a rank holds whole gradients in any case, and saves the copies of a reduction.
        self.keeps_whole = keeps_whole or groups.fsdp_mesh.size() == 1
        self.groups = groups
        self._max_grad_norm = max_grad_norm
        self.scaler = scaler

    def finish(self) -> float | None:
        """Clip and step (collective). Return the global norm before clipping, or None if it is not finite: no step
        then."""
        grads = [p.grad for p in self._model.parameters() if p.grad is not None]
        if self.scaler.scale != 1.0:
            scale_([local_shard(grad) for grad in grads], 1.0 / self.scaler.scale)
        norm = grad_norm(grads, self.groups)
        if norm - norm != 0.0:
            self._optimizer.zero_grad(set_to_none=True)
            return None
        if self._max_grad_norm is not None and norm > self._max_grad_norm:
            scale_([local_shard(grad) for grad in grads], self._max_grad_norm / (norm + CLIP_EPSILON))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.scaler.on_clean_step()
        return norm

    def retry(self) -> bool:
        """Lower the loss scale; False when it cannot be the cause."""
        if not self.scaler.can_retry():
            return False
        self.scaler.on_overflow()
        return True


def grad_norm(grads: Sequence[torch.Tensor], groups: ParallelGroups) -> float:
    """Return the 2-norm of the whole gradient (collective over all ranks).

    Weights that every tensor-parallel rank holds count once, the parts of split ones are added up.
    """
    device = groups.fsdp_mesh.device_type
    squares = torch.zeros(2, dtype=torch.float64, device=device)
    for is_split in (False, True):
        mine = [local_shard(grad) for grad in grads if _is_split_over_tensor_axis(grad) == is_split]
        filled = [part for part in mine if part.numel()]
        if filled:
            squares[int(is_split)] = torch.stack(norms_of(filled)).double().square().sum().to(device)
    dist.all_reduce(squares, group=groups.fsdp_mesh.get_group())
    if groups.tensor_mesh is not None:
        split = squares[1:].clone()
        dist.all_reduce(split, group=groups.tensor_mesh.get_group())
        squares[1:] = split
    return float(squares.sum().sqrt())


def _is_split_over_tensor_axis(grad: torch.Tensor) -> bool:
    if not isinstance(grad, DTensor):
        return False
    names = grad.device_mesh.mesh_dim_names or ()
    return "tp" in names and not grad.placements[names.index("tp")].is_replicate()


def place_images(
    micro: Microbatch, batch: BatchedDataDict, family: VisionFamily, *, names: Sequence[str]
) -> Microbatch:
    """Return the microbatch with the places of its images and the positions of its tokens. What a row computes depends
    on its own images alone, however rows are laid out.

    A batch without columns of images is left as it is: all its ranks run the language model alone.

    Args:
        names: of the rows, for errors.

    Raises:
        ValueError: tokens and images of a row do not fit.
    """
    missing = [column.name for column in family.columns if column.name not in batch]
    if missing and len(missing) < len(family.columns):
        raise ValueError(
            f"columns of images: {family.config.model_type!r} needs {[column.name for column in family.columns]}, "
            f"and the rows lack {missing}"
        )
    if missing:
        return micro
    extras = {column.name: micro.inputs.extras.get(column.name, ()) for column in family.columns}
    inputs = micro.inputs
    width = micro.ids_nt.shape[1]
    rows, spans = list(row_tensors(extras)), [slice(length) for length in micro.lengths]
    ids = [row_ids[span] for row_ids, span in zip(micro.ids_nt, spans, strict=True)]
    for name, row, ids_L in zip(names, rows, ids, strict=True):
        problem = family.row_problem(ids_L, row)
        if problem is not None:
            raise ValueError(f"images of {name}: {problem}")
    counted_rt = torch.arange(width, device=micro.ids_nt.device).repeat(max(1, len(rows)), 1)
    feature_rt, position_3rt = family.places_of_rows(rows, ids, spans, counted_rt)
    is_none_ns = inputs.row_ns < 0
    at = inputs.row_ns.clamp(min=0), inputs.column_ns
    return replace(
        micro,
        inputs=replace(
            inputs,
            extras=extras,
            feature_ns=feature_rt[at].masked_fill(is_none_ns, -1),
            position_ids=inputs.position_ids if position_3rt is None else position_3rt[:, at[0], at[1]],
        ),
    )
