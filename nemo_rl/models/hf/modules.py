"""Modules of a Hugging Face model by their usual names: its routers (`HFRouters`) and its sites (`HFSites`).

The embedded engine records routes, the DTensor worker replays them; both show sites, and the ranks of the worker may
hold parts of tensors. Invariants: only the choice of experts is replaced; their weights come from the scores of this
forward pass, so gradients reach the router. A site that a module does not give in its meaning is no tap, and
`unobserved` says why. Shapes: T tokens in the order in which the model flattens them, E experts, K chosen ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

from nemo_rl.errors import ConfigError
from nemo_rl.models.policy.hooks import Order, TapList, TokenPositions, at_input, at_output
from nemo_rl.models.vision import family_of, is_in_tower
from nemo_rl.records.record import DimSplit
from nemo_rl.records.sites import SiteKind

__all__ = ["ROUTER_KINDS", "Choose", "HFRouters", "HFSites"]

Choose: TypeAlias = Callable[[int, torch.Tensor], torch.Tensor | None]
"""(number of the layer in the model, from 0; `[T, K]` ids of the model's own choice) -> the ids to use, None to keep
them."""
Weigh: TypeAlias = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
"""(router, `[T, E]` its logits, `[T, K]` ids) -> `[T, K]` weights, in the dtype that the router gives them."""

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def _softmax_weights(router: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    chosen = torch.softmax(logits, dim=-1, dtype=torch.float).gather(1, ids)
    if router.norm_topk_prob:
        chosen = chosen / chosen.sum(dim=-1, keepdim=True)
    return chosen.to(logits.dtype)


def _mixtral_weights(_: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    chosen = torch.softmax(logits.float(), dim=-1).gather(1, ids)
    return chosen / chosen.sum(dim=-1, keepdim=True)


def _sigmoid_weights(router: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    # The bias of the experts counts in the choice alone.
    chosen = logits.sigmoid().gather(1, ids)
    if router.norm_topk_prob:
        chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
    return chosen * router.routed_scaling_factor


ROUTER_KINDS: Mapping[str, Weigh] = {
    "Qwen3MoeTopKRouter": _softmax_weights,
    "Qwen2MoeTopKRouter": _softmax_weights,
    "OlmoeTopKRouter": _softmax_weights,
    "MixtralTopKRouter": _mixtral_weights,
    "Glm4MoeTopkRouter": _sigmoid_weights,
    "DeepseekV3TopkRouter": _sigmoid_weights,
}
"""Class name of a router that gives (logits, weights, ids) -> how its weights follow from its logits."""


class HFRouters:
    """Routers of one model.

    Example:
        >>> routers = HFRouters(model)                                     # doctest: +SKIP
        >>> with routers.choosing(lambda layer, own: forced[layer]):       # doctest: +SKIP
        ...     logits = model(ids).logits
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises:
        ConfigError: the model has no experts, or routers of a kind that is not known here.
        """
        found = _routers(model)
        if not found:
            raise ConfigError(
                f"policy.router_replay.enabled: {model.config.model_type!r} has no routed experts; set it to false"
            )
        self.layers: tuple[int, ...] = tuple(found)
        """Numbers of the layers with routed experts, counted from 0."""
        first: Any = next(iter(found.values()))
        self.num_experts, self.top_k = int(first.num_experts), int(first.top_k)
        self._choose: Choose | None = None
        for layer, router in found.items():
            router.register_forward_hook(self._hook(layer, ROUTER_KINDS[type(router).__name__]))

    @contextmanager
    def choosing(self, choose: Choose) -> Iterator[None]:
        """Let every router ask `choose` inside the block; a backward pass that recomputes layers must run inside as
        well."""
        assert self._choose is None, "the routers of this model are in use already"
        self._choose = choose
        try:
            yield
        finally:
            self._choose = None

    def _hook(self, layer: int, weigh: Weigh) -> Callable[..., object]:
        def after_forward(router: Any, _: object, output: tuple[torch.Tensor, ...]) -> object:
            if self._choose is None:
                return None
            logits, _weights, own = output
            ids = self._choose(layer, own)
            return None if ids is None else (logits, weigh(router, logits, ids), ids)

        return after_forward


def _routers(model: PreTrainedModel) -> dict[int, torch.nn.Module]:
    found: dict[int, torch.nn.Module] = {}
    with_experts: set[int] = set()
    for name, module in model.named_modules():
        match = LAYER.search(name)
        if match is not None and type(module).__name__ in ROUTER_KINDS:
            found[int(match[1])] = module
        if match is not None and name.endswith(".experts"):
            with_experts.add(int(match[1]))
    if with_experts - found.keys():
        raise ConfigError(
            f"policy.router_replay.enabled: the routers of {model.config.model_type!r} are not known, only "
            f"{', '.join(ROUTER_KINDS)}; set it to false"
        )
    return dict(sorted(found.items()))


SplitOf = Callable[[torch.nn.Module, int], DimSplit | None]
"""(module, dimension of its weight) -> this rank's part of that dimension; None has all of it."""
DECODER_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)$")
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


def _is_whole(_: torch.nn.Module, __: int) -> DimSplit | None:
    return None


class HFSites(TapList):
    """The taps of a model, found when it is made.

    Args:
        between: positions of what lies between the blocks.
        split_of: how the weights are split over ranks.
    """

    def __init__(
        self, model: PreTrainedModel, *, between: TokenPositions = TokenPositions.ALL, split_of: SplitOf = _is_whole
    ) -> None:
        super().__init__(order=Order.ROWS)
        self._between, self._split_of = between, split_of
        self.add(SiteKind.EMBED, None, at_output(model.get_input_embeddings()), tokens=between)
        head = model.get_output_embeddings()
        self.add(SiteKind.LOGITS, None, at_output(head), tokens=TokenPositions.KEPT, split=split_of(head, 0))
        vision = family_of(model.config)
        for name, part in model.named_modules():
            # A vision tower has layers of its own, whose rows are patches.
            match = None if vision is not None and is_in_tower(name, vision) else DECODER_LAYER.search(name)
            if match:
                self._layer(int(match[1]), part)

    def _layer(self, number: int, layer: torch.nn.Module) -> None:
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
        """Add the tensors that the MLP multiplies; experts see the tokens that were sent to them, in no order of
        rows."""
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
