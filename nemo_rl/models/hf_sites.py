"""Sites of a Hugging Face model: modules by their usual names.

Used by the DTensor worker, whose ranks may hold parts of tensors (`nemo_rl.models.dtensor.sites`), and by the embedded
generation engine, which has them whole. Invariant: a site that a module does not give in its meaning is no tap, and
`unobserved` says why.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from transformers import PreTrainedModel

from nemo_rl.models.hf_routers import ROUTER_KINDS
from nemo_rl.models.policy.hooks import Order, TapList, Tokens, at_input, at_output
from nemo_rl.records.record import Split
from nemo_rl.records.sites import SiteKind

__all__ = ["HFSites", "SplitOf"]

SplitOf = Callable[[torch.nn.Module, int], Split | None]
"""(module, dimension of its weight) -> this rank's part of that dimension; None has all of it."""
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


def _is_whole(_: torch.nn.Module, __: int) -> Split | None:
    return None


class HFSites(TapList):
    """The taps of a model, found when it is made.

    Args:
        between: positions of what lies between the blocks.
        split_of: how the weights are split over ranks.
    """

    def __init__(self, model: PreTrainedModel, *, between: Tokens = Tokens.ALL, split_of: SplitOf = _is_whole) -> None:
        super().__init__(order=Order.ROWS)
        self._between, self._split_of = between, split_of
        self.add(SiteKind.EMBED, None, at_output(model.get_input_embeddings()), tokens=between)
        head = model.get_output_embeddings()
        self.add(SiteKind.LOGITS, None, at_output(head), tokens=Tokens.KEPT, split=split_of(head, 0))
        for name, part in model.named_modules():
            if match := LAYER.search(name):
                self._layer(int(match[1]), part)

    def _layer(self, number: int, layer: torch.nn.Module) -> None:
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
                self.add(kind, number, at_output(children[name]), split=self._split_of(children[name], 0))
            else:
                self.cannot(f"attention has no part named {name}", kind)
        if "o_proj" in children:
            last = children["o_proj"]
            self.add(SiteKind.ATTN_CONTEXT, number, at_input(last), split=self._split_of(last, 1))
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
                self.add(kind, number, at_input(children[name]), split=self._split_of(children[name], 1))
            else:
                self.add(kind, number, at_output(children[name]), split=self._split_of(children[name], 0))

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


def _weights_by_id(output: tuple[torch.Tensor, ...]) -> torch.Tensor:
    _, weights, ids = output
    return weights.gather(1, ids.argsort(dim=1))
