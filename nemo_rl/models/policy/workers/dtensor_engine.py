"""`DTensorEngine`: one rank of a Hugging Face policy under FSDP2.

A part of the worker, made in a process whose default process group exists. Invariant: methods marked collective in the
`Engine` protocol are called on every rank in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.collectives import ParallelGroups
from nemo_rl.models.adapters.folder import base_identity
from nemo_rl.models.adapters.lora import adapter_places, initial_adapter, named_adapters, without_adapters
from nemo_rl.models.dtensor import checkpoint
from nemo_rl.models.dtensor.parallelize import PolicyModel, full_weight, parallelize
from nemo_rl.models.dtensor.train_step import LearningRate, LossScaler, OptimizerStep, StepRunner, build_optimizer
from nemo_rl.models.dtensor.weights import box_of, fill_adapters, fill_shards, gather_weights, make_room, open_source
from nemo_rl.models.hf.checkpoint_folder import AdapterBase, AdapterPart
from nemo_rl.models.hf.files import Box, local_shard
from nemo_rl.models.hf.loading import DTYPES, build_meta_model, decoder_sizes, named_weights
from nemo_rl.models.hf.modules import HFRouters, HFSites
from nemo_rl.models.hf.writing import Givers, ModelDescription, ModelPart, agree_on_givers
from nemo_rl.models.policy.hooks import HookPoints, TokenPositions
from nemo_rl.models.policy.interfaces import TensorInfo
from nemo_rl.models.policy.observer import NO_OBSERVER, PassObserver
from nemo_rl.models.policy.routes.replay import RouteReplayer
from nemo_rl.models.policy.routes.worker_replay import PassRoutes, Routers
from nemo_rl.models.policy.steps import BatchForm, RankInfo
from nemo_rl.models.policy.workers.base import (
    HostBuffers,
    Placement,
    check_placement,
    move_model,
    move_optimizer_state,
    optimizer_tensors,
)
from nemo_rl.models.policy.workers.engine import Engine, Snapshot
from nemo_rl.records.record import DimSplit
from nemo_rl.routes.shape import RouteShape
from nemo_rl.utils.flops import TransformerShape

__all__ = ["DTensorEngine", "hook_points_of"]

Weights = Callable[[], Iterator[tuple[str, torch.Tensor]]]


def hook_points_of(
    model: PolicyModel, here: RankInfo, groups: ParallelGroups, scaler: LossScaler, *, weights: Weights
) -> HookPoints:
    """Return the sites of this rank.

    Args:
        weights: (collective) full weights by name.
    """
    between = TokenPositions.CHUNK if here.layout.sequence_parallel else TokenPositions.ALL
    found = HFSites(model.hf, between=between, split_of=partial(_split_of, here))
    return HookPoints(
        hook_points=tuple(found.hook_points),
        unobserved=found.unobserved,
        chunk=(here.coordinates.tp, here.layout.tp) if here.layout.sequence_parallel else (0, 1),
        # FSDP averages over its ranks, which the train step makes up for in the loss.
        loss_factor=lambda: groups.fsdp_mesh.size() * scaler.scale,
        gradients=partial(_gradients, model, scaler),
        weights=weights,
        place=here.coordinates,
    )


def _gradients(model: PolicyModel, scaler: LossScaler) -> Iterator[tuple[str, torch.Tensor]]:
    """(collective) Yield the gradients of what is trained: FSDP's mean has undone the factor of the train step; the
    loss scale is left."""
    for name, weight in chain(named_weights(model.hf), named_adapters(model.hf)):
        if weight.grad is not None:
            gradient = full_weight(weight.grad)
            yield name, gradient if scaler.scale == 1.0 else gradient / scaler.scale


def _split_of(here: RankInfo, module: torch.nn.Module, dim: int) -> DimSplit | None:
    """Return this rank's part of the features, as the module's weight has been split over the tensor axis."""
    weight = module._parameters.get("weight")
    if not isinstance(weight, DTensor):
        return None
    names = weight.device_mesh.mesh_dim_names or ()
    if "tp" not in names or not weight.placements[names.index("tp")].is_shard(dim):
        return None
    return DimSplit(index=here.coordinates.tp, count=here.layout.tp)


class DTensorEngine(Engine):
    """FSDP2 over data x context ranks, with tensor and sequence parallelism."""

    def __init__(
        self, config: PolicyConfig, here: RankInfo, *, num_steps: int, collective_timeout_s: float, seed: int
    ) -> None:
        """(collective) Make the engine of this rank; its groups have the deadline of the default one."""
        self._config, self._here, self._device = config, here, here.device
        hf = build_meta_model(config.model_name)
        source = open_source(config.model_name, hf)
        # Tensor parallel ranks hold the same activations, so they must drop the same ones.
        torch.manual_seed(seed + here.rank // here.layout.tp)
        self._groups = ParallelGroups.build(here.layout, rank=here.rank, device=here.device)
        self.context = self._groups.context
        self.flops_shape = TransformerShape.from_config(decoder_sizes(hf.config))
        self.model = parallelize(hf, groups=self._groups, config=config, source=source)
        make_room(self.model, torch.device("cpu") if config.dtensor_cfg.cpu_offload else here.device)
        fill_shards(self.model.hf, source)
        self._adapter_infos = checkpoint.adapter_infos_of(self.model)
        # Modules stay, where FSDP may replace their parameters.
        self._adapter_places = list(adapter_places(self.model.hf))
        self._base = self._base_of_adapter() if config.lora.enabled else None
        self._start_adapter(seed)
        self.optimizer = build_optimizer(config.optimizer, self.model.parameters())
        self.schedule: LearningRate = LearningRate(config.scheduler, self.optimizer, num_steps=num_steps)
        self.scaler = LossScaler(precision=config.precision)
        self.pass_dtype = DTYPES[config.precision]

    def _base_of_adapter(self) -> AdapterBase:
        name = self._config.model_name

        @functools.cache
        def identity() -> str:
            return base_identity(open_source(name, self.model.hf))

        return AdapterBase(config=self._config.lora, model_name=name, identity=identity)

    def _start_adapter(self, seed: int) -> None:
        if self._base is None:
            return
        lora = self._config.lora
        if lora.adapter is not None:
            checkpoint.load_adapter(self.model, Path(lora.adapter), self._base)
        else:
            fill_adapters(self.model.hf, dict(initial_adapter(self.adapter_infos(), lora, seed=seed)))

    def runner(self, layout: BatchForm, routes: PassRoutes, observer: PassObserver = NO_OBSERVER) -> StepRunner:
        step = OptimizerStep(
            self.model,
            self.optimizer,
            self.scaler,
            groups=self._groups,
            max_grad_norm=self._config.max_grad_norm,
            keeps_whole=self._config.dtensor_cfg.gradient_accumulation == "whole",
        )
        return StepRunner(self.model, layout, self._here, step, routes, observer)

    def hook_points(self) -> HookPoints:
        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            return chain(self.full_weights(), self.full_adapter())

        return hook_points_of(self.model, self._here, self._groups, self.scaler, weights=weights)

    def routers(self, *, validates: bool) -> Routers:
        routers = HFRouters(self.model.hf)
        shape = RouteShape(layers=routers.layers, top_k=routers.top_k, num_experts=routers.num_experts)
        return Routers(
            replayer=RouteReplayer(shape.layers, top_k=shape.top_k, num_experts=shape.num_experts, validates=validates),
            shape=shape,
            routing=lambda asked: routers.choosing(lambda layer, own: asked.choose(layer, lambda: own)),
        )

    # Places of tensors.

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return named_weights(self.model.hf)

    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def moments(self) -> Iterator[torch.Tensor]:
        return (value for _, value in optimizer_tensors(self.optimizer))

    @property
    def cpu_offload(self) -> bool:
        return self._config.dtensor_cfg.cpu_offload

    def move(self, placement: Placement, host: HostBuffers) -> None:
        if placement.optimizer is not None:
            target = self._device if placement.optimizer else torch.device("cpu")
            move_optimizer_state(self.optimizer, target, host)
        move_model(self.model, placement, self._device, host)

    def check_placement(self, placement: Placement) -> None:
        check_placement(
            placement,
            model=self.model,
            optimizer=optimizer_tensors(self.optimizer),
            device=self._device,
            trained=[weight for group in self.optimizer.param_groups for weight in group["params"]],
        )

    # Full weights and checkpoints.

    def weight_infos(self) -> dict[str, TensorInfo]:
        return checkpoint.weight_infos(self.model)

    def full_weights(self, dtypes: Mapping[str, torch.dtype] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        # With CPU offload the shards are on the CPU, but are gathered on the device.
        return gather_weights(named_weights(self.model.hf), device=self._device, dtypes=dtypes or {})

    def shards(self, kind: Literal["weights", "adapter"]) -> Iterator[tuple[str, Box, torch.Tensor]]:
        for name, weight in self.adapters() if kind == "adapter" else named_weights(self.model.hf):
            box = box_of(weight, rank=self._here.rank)
            if box is not None and box.count:
                yield name, box, local_shard(weight).detach()

    def adapter_infos(self) -> dict[str, TensorInfo]:
        return self._adapter_infos

    def adapters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, module.A if matrix == "A" else module.B) for name, module, matrix in self._adapter_places)

    def full_adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        return gather_weights(self.adapters(), device=self._device, dtypes={})

    def without_adapter(self) -> AbstractContextManager[None]:
        return without_adapters(self.model.hf)

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return checkpoint.export(self.model)

    def snapshot(self, *, with_optimizer: bool, copies: bool) -> Snapshot:
        trainer_state = {
            **self.schedule.state_dict(),
            "loss_scale": self.scaler.scale,
            "loss_scale_clean_steps": float(self.scaler.clean_steps),
        }
        optimizer = self.optimizer if with_optimizer else None
        part: ModelPart | AdapterPart
        if self._base is None:
            config = self.model.hf.config
            model = ModelDescription(
                config=config, infos=self.weight_infos(), generation_config=self.model.hf.generation_config
            )
            part = ModelPart.of(model, self.shards("weights"), self._givers, copies=copies)
        else:
            part = AdapterPart.of(self.full_adapter(), self._base, copies=copies)
        return checkpoint.DTensorSnapshot.of(part, self.model, optimizer, trainer_state, copies=copies)

    @functools.cached_property
    def _givers(self) -> Givers:
        """(collective)"""
        return agree_on_givers(self.shards("weights"))

    def load(self, *, weights: Path, optimizer: Path | None) -> None:
        if self._base is None:
            checkpoint.load_weights(self.model, weights)
        else:
            checkpoint.load_adapter(self.model, weights, self._base)
        if optimizer is not None:
            trainer_state = checkpoint.load_optimizer(self.model, self.optimizer, optimizer)
            self.schedule.load_state_dict(trainer_state)
            self.scaler.scale = trainer_state["loss_scale"]
            self.scaler.clean_steps = int(trainer_state["loss_scale_clean_steps"])

    def close(self) -> None:
        """Do nothing: the groups end with the default one."""
