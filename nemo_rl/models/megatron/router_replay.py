"""Router replay in megatron-core: each router's `RouterReplay`, found by the number of its layer.

megatron-core's own instances stand in a list of the process and take recomputed routes in the order in which they were
set (0.16.1). Ours ask the rank's `RouteReplayer`, which knows the microbatch; weights stay those of the live scores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from nemo_rl.errors import ConfigError
from nemo_rl.models.megatron.mcore import RouterReplay, TopKRouter
from nemo_rl.models.megatron.setup import MegatronModel
from nemo_rl.models.policy.routes.replay import RouteReplayer

__all__ = ["attach_replay"]

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class LayerReplay(RouterReplay):  # type: ignore[misc]
    """What one router asks for its experts."""

    def __init__(self, layer: int, replayer: RouteReplayer) -> None:
        super().__init__()
        # Another model of this process has nothing to do with it.
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
        """Scores and ids `[T, K]` of the experts that are used, from scores `[T, E]`."""
        assert default_compute_topk is not None, "the router gave no choice of its own"
        own = cache(lambda: default_compute_topk(scores, topk, num_groups, group_topk))
        ids = self._replayer.choose(self._layer, lambda: own()[1])
        return own() if ids is None else (scores.gather(1, ids), ids)


def attach_replay(model: MegatronModel, *, validates: bool) -> RouteReplayer:
    """Lets the routers of this rank ask a replayer of their own, which is idle at first.

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
