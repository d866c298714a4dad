"""`MegatronEngine`: one rank of a policy on megatron-core.

A part of the worker, made in a process whose default process group exists. Invariant: methods marked collective in the
`Engine` protocol are called on every rank in the same order, and give the numbers of `DTensorEngine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.errors import ConfigError, ModelFolderError
from nemo_rl.models.adapters.folder import base_identity
from nemo_rl.models.adapters.lora import initial_adapter, without_adapters
from nemo_rl.models.hf.checkpoint_folder import AdapterBase, AdapterPart, raise_together, read_adapter_together
from nemo_rl.models.hf.files import Box
from nemo_rl.models.hf.folder import open_weights
from nemo_rl.models.hf.loading import ADAPTER_PART, DTYPES, load_model_config
from nemo_rl.models.hf.writing import Givers, ModelDescription, ModelPart, agree_on_givers
from nemo_rl.models.megatron import checkpoint
from nemo_rl.models.megatron.architecture import Architecture, check_fits
from nemo_rl.models.megatron.convert import (
    adapter_infos,
    export_adapter,
    export_weights,
    fill_adapters,
    held_shards,
    load_weights,
    weight_infos,
)
from nemo_rl.models.megatron.mcore import RouterReplay, TopKRouter, parallel_state
from nemo_rl.models.megatron.optim import PolicyOptimizer
from nemo_rl.models.megatron.setup import (
    MegatronModel,
    build_model,
    destroy_parallel,
    forget_last_pass,
    initialize_parallel,
)
from nemo_rl.models.megatron.sites import hook_points_of
from nemo_rl.models.megatron.train_step import PipelineRunner
from nemo_rl.models.policy.hooks import HookPoints
from nemo_rl.models.policy.interfaces import TensorInfo
from nemo_rl.models.policy.observer import NO_OBSERVER, PassObserver
from nemo_rl.models.policy.routes.replay import RouteReplayer
from nemo_rl.models.policy.routes.worker_replay import PassRoutes, Routers
from nemo_rl.models.policy.steps import BatchForm, RankInfo
from nemo_rl.models.policy.workers.base import HostBuffers, Placement, check_placement
from nemo_rl.models.policy.workers.engine import Engine, Snapshot
from nemo_rl.routes.shape import RouteShape
from nemo_rl.utils.flops import TransformerShape

__all__ = ["MegatronEngine", "attach_replay", "collect_gradients"]

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class LayerReplay(RouterReplay):  # type: ignore[misc]
    """Chooses the experts of one router."""

    def __init__(self, layer: int, replayer: RouteReplayer) -> None:
        super().__init__()
        # Not in the global list, by which other models of this process would drive it.
        RouterReplay.global_router_replay_instances.remove(self)
        self._layer, self._replayer = layer, replayer

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and ids `[T, K]` of the experts that are used, from scores `[T, E]`."""
        assert default_compute_topk is not None, "the router gave no choice of its own"
        own = cache(lambda: default_compute_topk(scores, topk, num_groups, group_topk))
        ids = self._replayer.choose(self._layer, lambda: own()[1])
        return own() if ids is None else (scores.gather(1, ids), ids)


def attach_replay(model: MegatronModel, *, validates: bool) -> RouteReplayer:
    """Let the routers of this rank ask their own replayer, which is idle at first.

    Raises:
        ConfigError: the model has no experts, or routers that leave the choice to a kernel or are of an unknown kind.
    """
    config, mixture = model.config, model.shape.mixture
    if mixture is None:
        raise ConfigError(
            f"policy.router_replay.enabled: {model.shape.model_type!r} has no routed experts; set it to false"
        )
    if config.moe_router_fusion or "sinkhorn" in config.moe_router_load_balancing_type:
        raise ConfigError(
            "policy.router_replay.enabled: fused and sinkhorn routers do not take routes; set "
            "policy.megatron_cfg.moe_router_load_balancing_type to none or aux_loss"
        )
    routers = {int(part.layer_number) - 1: part for part in model.module.modules() if isinstance(part, TopKRouter)}
    held = [int(layer.layer_number) - 1 for layer in model.module.decoder.layers]
    if without := [layer for layer in held if model.shape.expert_layers[layer] and layer not in routers]:
        raise ConfigError(
            f"policy.router_replay.enabled: expected a {TopKRouter.__name__}, which takes routes, in every layer with "
            f"experts; layers {without} have none; set it to false"
        )
    replayer = RouteReplayer(sorted(routers), top_k=mixture.top_k, num_experts=mixture.num_experts, validates=validates)
    for layer, router in routers.items():
        router.router_replay = LayerReplay(layer, replayer)
    return replayer


def collect_gradients(ddp: Any) -> None:
    """Let the gradients of trained weights go into the buffers of megatron-core again.

    A weight whose data moves to another device gets a new accumulator of gradients from torch, without the hook by
    which megatron-core collects them: the next step would find gradients of zero, and nobody would say so.
    """
    ddp.grad_accs = []
    for weight in ddp.module.parameters():
        if weight.requires_grad and weight in ddp.param_to_bucket_group:
            accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]
            accumulator.register_hook(ddp._make_backward_post_hook(weight))
            ddp.grad_accs.append(accumulator)


class MegatronEngine(Engine):
    """megatron-core's schedules over all parallel axes.

    With pipeline parallelism only the last stage computes log-probabilities; results are zeros elsewhere.
    """

    def __init__(
        self, config: PolicyConfig, here: RankInfo, *, num_steps: int, collective_timeout_s: float, seed: int
    ) -> None:
        """(collective) Make the engine of this rank."""
        self._config, self._here = config, here
        self._is_closed = False
        if here.device.type == "cpu" and torch.cuda.is_available():
            raise ConfigError(
                "policy.megatron_cfg.enabled: megatron-core allocates on a GPU wherever it sees one, so that a worker "
                "on the CPU cannot run beside it; hide the GPUs (CUDA_VISIBLE_DEVICES=), or set cluster.gpus_per_node"
            )
        self._hf_config = load_model_config(config.model_name)
        check_fits(Architecture.of(self._hf_config), config)
        source = open_weights(Path(config.model_name), self._hf_config)
        try:
            # Tensor parallel ranks hold the same activations, so they must drop the same ones.
            torch.manual_seed(seed + here.rank // here.layout.tp)
            initialize_parallel(config, timeout_s=collective_timeout_s, seed=seed)
            self.context = parallel_state.get_context_parallel_group() if here.layout.cp > 1 else None
            self.flops_shape = TransformerShape.from_config(self._hf_config.to_dict())
            self.model = build_model(self._hf_config, config, device=here.device)
            load_weights(self.model, source)
            if config.lora.enabled:
                self._start_adapters(seed)
            self.optimizer = PolicyOptimizer(self.model, config, num_steps=num_steps)
            self.schedule: PolicyOptimizer = self.optimizer
        except BaseException:
            destroy_parallel()
            raise

    def runner(self, layout: BatchForm, routes: PassRoutes, observer: PassObserver = NO_OBSERVER) -> PipelineRunner:
        return PipelineRunner(self.model, layout, self._here, self.optimizer, routes, observer)

    def hook_points(self) -> HookPoints:
        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            return chain(self.full_weights(), self.full_adapter())

        return hook_points_of(self.model, self._here, weights=weights)

    def routers(self, *, validates: bool) -> Routers:
        replayer = attach_replay(self.model, validates=validates)
        mixture = self.model.shape.mixture
        assert mixture is not None
        return Routers(
            replayer=replayer,
            shape=RouteShape(
                layers=tuple(i for i, has_experts in enumerate(self.model.shape.expert_layers) if has_experts),
                top_k=mixture.top_k,
                num_experts=mixture.num_experts,
            ),
            routing=lambda _: nullcontext(),
            positions_first=True,
            chunks_tokens=self._here.layout.sequence_parallel,
        )

    # Places of tensors.

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in self.model.module.named_parameters():
            if f".{ADAPTER_PART}." not in name:
                yield name, weight
        yield from self.model.module.named_buffers()

    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def drop_gradients(self) -> None:
        buffers = (*self.model.ddp.buffers, *self.model.ddp.expert_parallel_buffers)
        # To write zeros into a buffer that was freed is an illegal access on a GPU.
        if all(buffer.grad_data.untyped_storage().size() for buffer in buffers):
            self.optimizer.zero_grad()

    def moments(self) -> Iterator[torch.Tensor]:
        if not self._config.megatron_cfg.optimizer.optimizer_cpu_offload:
            yield from (value for _, value in self.optimizer.state_tensors())

    def move(self, placement: Placement, host: HostBuffers) -> None:
        if placement.optimizer is not None:
            self.optimizer.move_state(self._here.device if placement.optimizer else torch.device("cpu"), host)
        target = self._here.device if placement.weights else torch.device("cpu")
        for buffer in (*self.model.ddp.buffers, *self.model.ddp.expert_parallel_buffers):
            # Gradients live in buffers of their own; with a distributed optimizer the weights do, too.
            move = buffer.reload_from_cpu if placement.weights else buffer.offload_to_cpu
            move(move_params=True, move_grads=False)
            move = buffer.reload_from_cpu if placement.has_gradients else buffer.offload_to_cpu
            move(move_params=False, move_grads=True)
        leaving = [weight for weight in self._outside_buffers() if weight.device.type != target.type]
        for weight, moved in zip(leaving, host.moved("parameters", leaving, target), strict=True):
            weight.data = moved
        if leaving:
            collect_gradients(self.model.ddp)

    def check_placement(self, placement: Placement) -> None:
        if self.model.ddp.ddp_config.use_distributed_optimizer:
            # Trained weights are views of a buffer that is freed in place: their device does not change.
            expected = self._here.device.type if placement.weights else "cpu"
            for name, weight in self.model.module.named_parameters():
                found = weight.device.type
                assert weight.requires_grad or found == expected, f"{name} is on {found}, expected {expected}"
            return
        is_offloaded = self._config.megatron_cfg.optimizer.optimizer_cpu_offload
        check_placement(
            placement,
            model=self.model.module,
            optimizer=() if is_offloaded else self.optimizer.state_tensors(),
            device=self._here.device,
        )

    # Full weights and checkpoints.

    def weight_infos(self) -> dict[str, TensorInfo]:
        return weight_infos(self._hf_config, DTYPES[self._config.precision])

    def full_weights(self, dtypes: Mapping[str, torch.dtype] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        given = dtypes or {}
        return ((name, weight.to(given.get(name, weight.dtype))) for name, weight in export_weights(self.model))

    def shards(self, kind: Literal["weights", "adapter"]) -> Iterator[tuple[str, Box, torch.Tensor]]:
        return held_shards(self.model, kind)

    def adapter_infos(self) -> dict[str, TensorInfo]:
        return adapter_infos(self.model)

    def full_adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        return export_adapter(self.model)

    def adapters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in self.model.module.named_parameters():
            if f".{ADAPTER_PART}." in name:
                yield name, weight

    def without_adapter(self) -> AbstractContextManager[None]:
        return without_adapters(self.model.module)

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(collective) Yield full weights on the CPU, one at a time, as copies."""
        for name, weight in export_weights(self.model):
            yield name, weight.to("cpu")

    def snapshot(self, *, with_optimizer: bool, copies: bool) -> Snapshot:
        optimizer = None
        if with_optimizer:
            state = self.optimizer.state_dict()
            optimizer = checkpoint.OptimizerSnapshot.of(self.model, self.optimizer, state, copies=copies)
        return checkpoint.MegatronSnapshot(part=self._part(copies=copies), optimizer=optimizer)

    def load(self, *, weights: Path, optimizer: Path | None) -> None:
        if self.model.adapters:
            fill_adapters(self.model, read_adapter_together(weights, self.adapter_infos(), self._base))
        else:
            self._load_weights(weights)
        self.optimizer.take_weights()
        if optimizer is not None:
            self.optimizer.load_state_dict(checkpoint.load_optimizer(self.model, self.optimizer, optimizer))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            forget_last_pass(self.model)
            destroy_parallel()

    # Private parts.

    def _outside_buffers(self) -> Iterator[torch.Tensor]:
        in_buffers = self.model.ddp.ddp_config.use_distributed_optimizer
        for weight in self.model.module.parameters():
            if not (in_buffers and weight.requires_grad):
                yield weight
        yield from self.model.module.buffers()

    def _start_adapters(self, seed: int) -> None:
        lora = self._config.lora
        if lora.adapter is None:
            start = dict(initial_adapter(self.adapter_infos(), lora, seed=seed))
        else:
            start = read_adapter_together(Path(lora.adapter), self.adapter_infos(), self._base)
        fill_adapters(self.model, start)

    def _part(self, *, copies: bool) -> ModelPart | AdapterPart:
        """(collective) Return what is trained, for a checkpoint."""
        if self.model.adapters:
            return AdapterPart.of(self.full_adapter(), self._base, copies=copies)
        model = ModelDescription(config=self._hf_config, infos=self.weight_infos())
        return ModelPart.of(model, self.shards("weights"), self._givers, copies=copies)

    @cached_property
    def _givers(self) -> Givers:
        """(collective)"""
        return agree_on_givers(self.shards("weights"))

    @cached_property
    def _base(self) -> AdapterBase:
        folder, hf_config = self._config.model_name, self._hf_config

        @cache
        def identity() -> str:
            return base_identity(open_weights(Path(folder), hf_config))

        return AdapterBase(config=self._config.lora, model_name=folder, identity=identity)

    def _load_weights(self, folder: Path) -> None:
        problem = None
        try:
            load_weights(self.model, open_weights(folder, self._hf_config))
        except ModelFolderError as error:
            problem = str(error)
        raise_together(problem, folder, doing="read")
