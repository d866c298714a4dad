"""Sites of a Hugging Face model under FSDP2: modules by their usual names, layouts by how their weights are split.

Called by `DTensorEngine.taps`. Under sequence parallelism what lies between the blocks is a part of the positions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nemo_rl.distributed.parallel_groups import ParallelGroups
from nemo_rl.models.dtensor.optim import LossScaler
from nemo_rl.models.dtensor.parallelize import PolicyModel, full_weight
from nemo_rl.models.hf_routers import ROUTER_KINDS
from nemo_rl.models.loading import named_weights
from nemo_rl.models.policy.recording.hooks import at_input, at_output
from nemo_rl.models.policy.recording.taps import Order, TapList, Taps, Tokens
from nemo_rl.models.policy.steps import ThisRank
from nemo_rl.records.record import Split
from nemo_rl.records.sites import SiteKind

__all__ = ["taps_of"]

Weights = Callable[[], Iterator[tuple[str, torch.Tensor]]]
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)$")
PROJECTIONS: Mapping[SiteKind, str] = {
    SiteKind.ATTN_Q: "q_proj",
    SiteKind.ATTN_K: "k_proj",
    SiteKind.ATTN_V: "v_proj",
}
MLP_PARTS: Mapping[SiteKind, str] = {
    SiteKind.MLP_GATE: "gate_proj",
    SiteKind.MLP_UP: "up_proj",
    SiteKind.MLP_ACT: "down_proj",
}


def taps_of(
    model: PolicyModel, here: ThisRank, groups: ParallelGroups, scaler: LossScaler, *, weights: Weights
) -> Taps:
    """The sites of this rank.

    Args:
        weights: (collective) whole weights by name.
    """
    found = _Finder(model, here)
    found.model()
    layers = [(int(match[1]), part) for name, part in model.hf.named_modules() if (match := LAYER.search(name))]
    for number, layer in layers:
        found.layer(number, layer)
    return Taps(
        taps=tuple(found.taps),
        unobserved=found.unobserved,
        chunk=(here.coordinates.tp, here.layout.tp) if here.layout.sequence_parallel else (0, 1),
        # FSDP averages over its ranks, which the train step makes up for in the loss.
        loss_factor=lambda: groups.fsdp_mesh.size() * scaler.scale,
        gradients=partial(_gradients, model, scaler),
        weights=weights,
        place=here.coordinates,
    )


def _gradients(model: PolicyModel, scaler: LossScaler) -> Iterator[tuple[str, torch.Tensor]]:
    """(collective) FSDP's mean has undone the factor of the train step; the loss scale is left."""
    for name, weight in named_weights(model.hf):
        if weight.grad is not None:
            gradient = full_weight(weight.grad)
            yield name, gradient if scaler.scale == 1.0 else gradient / scaler.scale


class _Finder(TapList):
    """Looks for sites by the usual names of modules."""

    def __init__(self, model: PolicyModel, here: ThisRank) -> None:
        super().__init__(order=Order.ROWS)
        self._hf = model.hf
        self._between = Tokens.CHUNK if here.layout.sequence_parallel else Tokens.ALL
        self._tp = here.coordinates.tp, here.layout.tp

    def model(self) -> None:
        """Sites outside the layers."""
        self.add(SiteKind.EMBED, None, at_output(self._hf.get_input_embeddings()), tokens=self._between)
        head = self._hf.get_output_embeddings()
        self.add(SiteKind.LOGITS, None, at_output(head), tokens=Tokens.KEPT, split=self._split_of(head, dim=0))

    def layer(self, number: int, layer: torch.nn.Module) -> None:
        """Sites of one layer."""
        children = dict(layer.named_children())
        self.add(SiteKind.LAYER_IN, number, at_input(layer), tokens=self._between)
        attention, mlp = children.get("self_attn"), children.get("mlp")
        if attention is None:
            self.cannot("layers have no part named self_attn", *PROJECTIONS, SiteKind.ATTN_CONTEXT, SiteKind.ATTN_OUT)
        else:
            self._attention(number, attention)
        if mlp is None:
            self.cannot("layers have no part named mlp", SiteKind.MLP_IN, *MLP_PARTS, SiteKind.MLP_OUT)
        else:
            self.add(SiteKind.MLP_IN, number, at_input(mlp), tokens=self._between)
            self._router(number, mlp)
            self._products(number, mlp)
            self.add(SiteKind.MLP_OUT, number, at_output(mlp), tokens=self._between)
        self.add(SiteKind.LAYER_OUT, number, at_output(layer), tokens=self._between)

    def _attention(self, number: int, attention: torch.nn.Module) -> None:
        children = dict(attention.named_children())
        for kind, name in PROJECTIONS.items():
            if name in children:
                self.add(kind, number, at_output(children[name]), split=self._split_of(children[name], dim=0))
            else:
                self.cannot(f"attention has no part named {name}", kind)
        if "o_proj" in children:
            last = children["o_proj"]
            self.add(SiteKind.ATTN_CONTEXT, number, at_input(last), split=self._split_of(last, dim=1))
        else:
            self.cannot("attention has no part named o_proj", SiteKind.ATTN_CONTEXT)
        self.add(SiteKind.ATTN_OUT, number, at_output(attention), tokens=self._between)

    def _products(self, number: int, mlp: torch.nn.Module) -> None:
        """What the MLP multiplies; a mixture's experts see the tokens that were sent to them, in no order of rows."""
        children = dict(mlp.named_children())
        for kind, name in MLP_PARTS.items():
            if name not in children or not isinstance(children[name], torch.nn.Linear):
                self.cannot(f"the MLP has no projection named {name}", kind)
            elif kind is SiteKind.MLP_ACT:
                self.add(kind, number, at_input(children[name]), split=self._split_of(children[name], dim=1))
            else:
                self.add(kind, number, at_output(children[name]), split=self._split_of(children[name], dim=0))

    def _router(self, number: int, mlp: torch.nn.Module) -> None:
        routers = [part for part in mlp.children() if type(part).__name__ in ROUTER_KINDS]
        if not routers:
            return
        picks = {
            SiteKind.ROUTER_LOGITS: lambda output: output[0],
            SiteKind.ROUTER_IDS: lambda output: output[2].sort(dim=1).values,
            SiteKind.ROUTER_WEIGHTS: _weights_by_id,
        }
        for kind, pick in picks.items():
            self.add(kind, number, at_output(routers[0], pick), order=Order.ROWS_FLAT)

    def _split_of(self, module: Any, *, dim: int) -> Split | None:
        """This rank's part of the features, as the module's weight has been split over the tensor axis."""
        weight = module._parameters.get("weight")
        if not isinstance(weight, DTensor):
            return None
        names = weight.device_mesh.mesh_dim_names or ()
        if "tp" not in names or not weight.placements[names.index("tp")].is_shard(dim):
            return None
        index, count = self._tp
        return Split(index=index, count=count)


def _weights_by_id(output: tuple[torch.Tensor, ...]) -> torch.Tensor:
    _, weights, ids = output
    return weights.gather(1, ids.argsort(dim=1))
