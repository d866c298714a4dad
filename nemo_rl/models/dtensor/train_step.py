"""Forward and backward passes of one rank: a global batch with its optimizer step, and log-probabilities.

Called by the DTensor worker. Invariant: all ranks pass through the same collectives in the same order, also when a
rank meets a NaN; whether to stop is decided together, after the last microbatch. Beside it: the worker's optimizer,
learning rate and loss scale. Shapes: N rows, T tokens.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR

from nemo_rl.config.backends import OptimizerConfig, SchedulerConfig, SchedulerPhase
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.collectives import ParallelGroups
from nemo_rl.errors import ConfigError
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

__all__ = [
    "LearningRate",
    "LossScaler",
    "OptimizerStep",
    "StepRunner",
    "build_optimizer",
    "learning_rate_factor",
    "place_images",
]


# Dynamic loss scale of float16: start high, halve on overflow, double after this many clean steps.
INITIAL_SCALE = 2.0**15
GROWTH_INTERVAL = 1000
MIN_SCALE = 1.0
MAX_SCALE = 2.0**24


_T = TypeVar("_T")


def class_at(path: str, base: type[_T], *, key: str, example: str) -> type[_T]:
    """Return the class at an import path.

    Args:
        base: what it must be derived from.
        key: config key for the error.

    Raises:
        ConfigError: no such class, or none of the kind.
    """
    module_name, _, class_name = path.rpartition(".")
    try:
        kind = vars(importlib.import_module(module_name))[class_name] if module_name else None
    except (ImportError, KeyError) as error:
        raise ConfigError(f"{key}: cannot find {path!r}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise ConfigError(f"{key}: expected a torch {base.__name__} such as {example}, got {path!r}")
    return kind


def build_optimizer(config: OptimizerConfig, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of the trained parameters, named by import path, in its fused form where class and device
    have one.

    Raises:
        ConfigError: no such class, or it refuses the arguments.
    """
    weights = [parameter for parameter in parameters if parameter.requires_grad]
    kind = class_at(config.name, torch.optim.Optimizer, key="policy.optimizer.name", example="torch.optim.AdamW")
    kwargs: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in config.kwargs.items()
    }
    kwargs = {**_implementation(kind, weights, kwargs), **kwargs}
    try:
        return kind(weights, **kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"policy.optimizer.kwargs: {config.name} refuses {config.kwargs}: {error}") from error


def _implementation(
    kind: type[torch.optim.Optimizer], weights: list[torch.nn.Parameter], kwargs: dict[str, Any]
) -> dict[str, bool]:
    """Return the keyword of a fused step: one kernel over all weights on CUDA; weight by weight where sharded and
    plain ones are mixed, which no kernel over lists takes. The user's own choice is left alone."""
    known = inspect.signature(kind).parameters
    if {"fused", "foreach"} & kwargs.keys() or "foreach" not in known:
        return {}
    if len({isinstance(weight, DTensor) for weight in weights}) > 1:
        return {"foreach": False}
    is_cuda = all(weight.device.type == "cuda" for weight in weights)
    return {"fused": True} if is_cuda and "fused" in known else {}


class LossScaler:
    """Loss scale: 1 unless the precision is float16, whose small gradients would vanish."""

    def __init__(self, *, precision: str) -> None:
        self.is_dynamic = precision == "float16"
        self.scale = INITIAL_SCALE if self.is_dynamic else 1.0
        self.clean_steps = 0

    def can_retry(self) -> bool:
        """Return whether an overflow may be the scale's fault."""
        return self.is_dynamic and self.scale > MIN_SCALE

    def on_overflow(self) -> None:
        self.scale, self.clean_steps = max(MIN_SCALE, self.scale / 2), 0

    def on_clean_step(self) -> None:
        self.clean_steps += 1
        if self.is_dynamic and self.clean_steps >= GROWTH_INTERVAL:
            self.scale, self.clean_steps = min(MAX_SCALE, self.scale * 2), 0


class LearningRate:
    """Sets the groups of an optimizer before each training call.

    Torch schedulers run on a shadow of the optimizer's settings, without weights: a load of the optimizer cannot
    disturb them, and a resume replays them.

    Example:
        >>> rate = LearningRate(config.scheduler, optimizer, num_steps=100)    # doctest: +SKIP
        >>> rate.apply(); optimizer.step(); rate.advance()                     # doctest: +SKIP
    """

    def __init__(self, config: SchedulerConfig, optimizer: torch.optim.Optimizer, *, num_steps: int) -> None:
        """Args:
        num_steps: training calls of the whole run, where a decay ends unless the config says so.

        Raises:
            ConfigError: no such scheduler, or it refuses the arguments.
        """
        self._config, self._optimizer, self._num_steps = config, optimizer, num_steps
        self._settings = [_settings(group) for group in optimizer.param_groups]
        self._calls_done = 0
        self._chain = _PhaseChain(config, self._settings) if config.phases else None

    @property
    def calls_done(self) -> int:
        return self._calls_done

    def apply(self) -> float:
        """Write the settings of the next call into the optimizer; return the first group's learning rate."""
        for group, values in zip(self._optimizer.param_groups, self._next(), strict=True):
            group.update(values)
        return float(self._optimizer.param_groups[0]["lr"])

    def advance(self) -> None:
        self._calls_done += 1
        if self._chain is not None:
            self._chain.advance()

    def state_dict(self) -> dict[str, float]:
        return {"calls_done": float(self._calls_done)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue the curve after as many calls; replay torch schedulers from the start."""
        self._calls_done = int(state["calls_done"])
        if self._chain is not None:
            self._chain = _PhaseChain(self._config, self._settings)
            for _ in range(self._calls_done):
                self._chain.advance()

    def _next(self) -> list[dict[str, Any]]:
        if self._chain is not None:
            return self._chain.settings()
        factor = learning_rate_factor(self._config, calls_done=self._calls_done, num_steps=self._num_steps)
        return [{"lr": settings["lr"] * factor} for settings in self._settings]


def learning_rate_factor(config: SchedulerConfig, *, calls_done: int, num_steps: int) -> float:
    """Return factor of the optimizer's learning rate in the next training call.

    Rises over `warmup_steps` to 1, then follows the shape down to `min_factor` at `decay_steps` and stays there.
    """
    if calls_done < config.warmup_steps:
        return (calls_done + 1) / config.warmup_steps
    if config.name == "constant":
        return 1.0
    end = config.decay_steps or num_steps
    progress = min(1.0, (calls_done - config.warmup_steps) / max(1, end - config.warmup_steps))
    shape = 1.0 - progress if config.name == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    return config.min_factor + (1.0 - config.min_factor) * shape


class _PhaseChain:
    """`SequentialLR` over the phases, on its own optimizer that has the same settings and no weights."""

    def __init__(self, config: SchedulerConfig, settings: list[dict[str, Any]]) -> None:
        self._names = [set(values) for values in settings]
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], **values} for values in settings]
        self._shadow = _Shadow(groups, dict(settings[0]))
        # Before the schedulers exist, since torch wants this order; a shadow's step does nothing.
        self._shadow.step()
        made = [_build_phase(phase, self._shadow) for phase in config.phases]
        self._schedule = made[0] if len(made) == 1 else SequentialLR(self._shadow, made, list(config.milestones))

    def advance(self) -> None:
        self._shadow.step()
        self._schedule.step()

    def settings(self) -> list[dict[str, Any]]:
        """Return what the schedulers have set, for each group: learning rate, and momentum where a scheduler moves
        it."""
        return [
            {name: group[name] for name in names}
            for names, group in zip(self._names, self._shadow.param_groups, strict=True)
        ]


class _Shadow(torch.optim.Optimizer):
    """Settings without weights."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Do nothing: the shadow has no weights."""


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a torch scheduler may move, read from a new optimizer: its learning rate is the
    configured one."""
    return {name: group[name] for name in ("lr", "betas", "momentum") if name in group}


def _build_phase(phase: SchedulerPhase, optimizer: torch.optim.Optimizer) -> LRScheduler:
    kind = class_at(phase.name, LRScheduler, key="policy.scheduler.phases", example="torch.optim.lr_scheduler.LinearLR")
    if issubclass(kind, ReduceLROnPlateau):
        raise ConfigError(f"policy.scheduler.phases: {phase.name} follows a metric, not the steps; choose another")
    kwargs: dict[str, Any] = phase.kwargs
    try:
        return kind(optimizer, **kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"policy.scheduler.phases: {phase.name} refuses {phase.kwargs}: {error}") from error


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
                is_last = i == last
                over_shards = is_last or not self._optimizer_step.keeps_whole
                reduce_gradients(self._model, over_shards=over_shards, over_copies=is_last)
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

    Each copy of the weights adds up its own shards. Weights that every tensor-parallel rank holds count once, the parts
    of split ones are added up.
    """
    device = groups.fsdp_mesh.device_type
    squares = torch.zeros(2, dtype=torch.float64, device=device)
    for is_split in (False, True):
        mine = [local_shard(grad) for grad in grads if _is_split_over_tensor_axis(grad) == is_split]
        filled = [part for part in mine if part.numel()]
        if filled:
            squares[int(is_split)] = torch.stack(norms_of(filled)).double().square().sum().to(device)
    dist.all_reduce(squares, group=groups.shard_group)
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
