"""Sites of a pipeline stage in megatron-core, whose tensors lie positions before rows.

Called by `MegatronEngine.hook_points`. Under sequence parallelism what lies between the blocks, and what routers see,
is a part of the positions. With Transformer Engine norms are computed inside the projections behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from nemo_rl.models.megatron.convert import export_gradients
from nemo_rl.models.megatron.mcore import MLP, TopKRouter
from nemo_rl.models.megatron.setup import MegatronModel
from nemo_rl.models.policy.hooks import Deliver, Detach, HookPoints, Order, TapList, TokenPositions, at_input, at_output
from nemo_rl.models.policy.steps import RankInfo
from nemo_rl.records.record import DimSplit
from nemo_rl.records.sites import SiteKind

__all__ = ["hook_points_of"]

Pick = Callable[[Any], torch.Tensor]


def hook_points_of(
    model: MegatronModel, here: RankInfo, *, weights: Callable[[], Iterator[tuple[str, torch.Tensor]]]
) -> HookPoints:
    """Return the sites of this rank.

    Args:
        weights: (collective) full weights by name.
    """
    found = _Finder(model, here)
    module = model.module
    if module.pre_process:
        found.add(SiteKind.EMBED, None, at_output(module.embedding), tokens=found.between)
    for layer in module.decoder.layers:
        found.layer(int(layer.layer_number) - 1, layer)
    if module.post_process:
        found.add(SiteKind.LOGITS, None, at_output(module.output_layer), tokens=TokenPositions.KEPT, split=found.part)
    if model.ddp.ddp_config.use_distributed_optimizer:
        found.cannot("the distributed optimizer leaves each rank a part of the gradients only", SiteKind.GRAD)
    return HookPoints(
        hook_points=tuple(found.hook_points),
        unobserved=found.unobserved,
        chunk=(here.coordinates.tp, here.layout.tp) if here.layout.sequence_parallel else (0, 1),
        place=here.coordinates,
        weights=weights,
        gradients=partial(iter, ()) if SiteKind.GRAD in found.unobserved else partial(export_gradients, model),
    )


class _Finder(TapList):
    def __init__(self, model: MegatronModel, here: RankInfo) -> None:
        super().__init__(order=Order.POSITIONS)
        self._model = model
        self.between = TokenPositions.CHUNK if here.layout.sequence_parallel else TokenPositions.ALL
        self.part = DimSplit(index=here.coordinates.tp, count=here.layout.tp)

    def layer(self, number: int, layer: Any) -> None:
        self.add(SiteKind.LAYER_IN, number, at_input(layer), tokens=self.between)
        attention, mlp = layer.self_attention, layer.mlp
        projections = {SiteKind.ATTN_Q: 0, SiteKind.ATTN_K: 1, SiteKind.ATTN_V: 2}
        if self._model.shape.num_groups % self.part.count:
            self.cannot("tensor ranks share key-value heads, of which none projects a whole one", *projections)
        else:
            for kind, place in projections.items():
                self.add(kind, number, at_output(attention.linear_qkv, self._projection(place)), split=self.part)
        self.add(SiteKind.ATTN_CONTEXT, number, at_input(attention.linear_proj), split=self.part)
        self.add(SiteKind.ATTN_OUT, number, at_output(attention), tokens=self.between)
        if any(True for _ in layer.pre_mlp_layernorm.parameters()):
            self.add(SiteKind.MLP_IN, number, at_input(mlp), tokens=self.between)
        else:
            self.cannot("Transformer Engine computes the norm inside the projection behind it", SiteKind.MLP_IN)
        for router in (part for part in mlp.modules() if isinstance(part, TopKRouter)):
            self._router(number, router)
        self._products(number, mlp)
        self.add(SiteKind.MLP_OUT, number, at_output(mlp), tokens=self.between)
        self.add(SiteKind.LAYER_OUT, number, at_output(layer), tokens=self.between)

    def _products(self, number: int, mlp: Any) -> None:
        """Add the tensors that the MLP multiplies; experts see the tokens that were sent to them, in no order of
        rows."""
        if not isinstance(mlp, MLP):
            self.cannot(
                "in layers with experts these see tokens in no order of rows",
                SiteKind.MLP_GATE,
                SiteKind.MLP_UP,
                SiteKind.MLP_ACT,
            )
            return
        if mlp.config.gated_linear_unit:
            for kind, place in ((SiteKind.MLP_GATE, 0), (SiteKind.MLP_UP, 1)):
                self.add(kind, number, at_output(mlp.linear_fc1, partial(_half, place)), split=self.part)
        else:
            self.cannot("the MLP has no gate", SiteKind.MLP_GATE)
            self.add(SiteKind.MLP_UP, number, at_output(mlp.linear_fc1), split=self.part)
        self.add(SiteKind.MLP_ACT, number, at_input(mlp.linear_fc2), split=self.part)

    def _projection(self, place: int) -> Pick:
        """Return queries, keys or values of this tensor rank, out of groups that hold their queries, a key and a
        value."""
        shape = self._model.shape
        queries = shape.num_heads // shape.num_groups

        def pick(output: Any) -> torch.Tensor:
            mixed = output[0].unflatten(-1, (-1, queries + 2, shape.head_dim))
            parts = mixed.split((queries, 1, 1), dim=-2)
            return parts[place].flatten(-3)

        return pick

    def _router(self, number: int, router: Any) -> None:
        self.add(SiteKind.ROUTER_LOGITS, number, _at_gating(router), tokens=self.between)
        for kind, pick in ((SiteKind.ROUTER_IDS, _ids), (SiteKind.ROUTER_WEIGHTS, _weights)):
            attach = at_output(router, partial(pick, int(router.topk)))
            self.add(kind, number, attach, tokens=self.between, order=Order.POSITIONS_FLAT)


def _half(place: int, output: Any) -> torch.Tensor:
    """Return gate or up, which lie one after the other on each tensor rank."""
    return output[0].chunk(2, dim=-1)[place]


def _ids(top_k: int, output: Any) -> torch.Tensor:
    """Return `[T, K]`, ascending, from the map `[T, E]` of experts that are used."""
    _, used = output
    return used.nonzero(as_tuple=True)[1].view(-1, top_k)


def _weights(top_k: int, output: Any) -> torch.Tensor:
    weights, used = output
    return weights.gather(1, _ids(top_k, (weights, used)))


def _at_gating(router: Any) -> Callable[[Deliver], Detach]:
    """Reach the scores of a router: it computes its scores in a method, not in a module."""

    def attach(deliver: Deliver) -> Detach:
        gating = router.gating

        def look(hidden: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = gating(hidden)
            deliver(scores)
            return scores

        router.gating = look
        return lambda: router.__dict__.pop("gating", None)

    return attach
