"""The catalogue of sites: stable places of a model at which a tensor can be recorded, and what each means.

Engines attach to sites (`HookPoint` in `nemo_rl.models.policy.hooks`), `nemo_rl.diagnostics` compares them.
Invariant: one site means one quantity in every model, engine and layout; what an engine cannot give in this meaning it
does not record, and says why. Shapes: R tokens, h hidden size, f of the MLP, H query heads and G key heads of dimension
D, E experts, K chosen ones, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["SITES", "Direction", "SiteKind", "execution_order"]


class SiteKind(StrEnum):
    """Names of the sites, in the order of a forward pass."""

    TOKENS = "tokens"
    EMBED = "embed"
    LAYER_IN = "layer.in"
    ATTN_Q = "attn.q"
    ATTN_K = "attn.k"
    ATTN_V = "attn.v"
    ATTN_CONTEXT = "attn.context"
    ATTN_OUT = "attn.out"
    MLP_IN = "mlp.in"
    ROUTER_LOGITS = "moe.logits"
    ROUTER_IDS = "moe.topk_ids"
    ROUTER_WEIGHTS = "moe.topk_weights"
    MLP_GATE = "mlp.gate"
    MLP_UP = "mlp.up"
    MLP_ACT = "mlp.act"
    MLP_OUT = "mlp.out"
    LAYER_OUT = "layer.out"
    LOGITS = "logits"
    LOGPROB = "logprob"
    TOKEN_LOSS = "token_loss"
    LOSS = "loss"
    GRAD = "grad"
    PARAM = "param"


class Direction(StrEnum):
    """The direction of a pass."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteMeaning:
    """The meaning of a site."""

    text: str
    dims: str
    """Dims of the whole tensor; `R` are tokens."""
    in_layers: bool = True
    """One in every layer, rather than one in the model."""
    has_backward: bool = False
    """True where the gradient of the loss with respect to the site is recorded, too, where a backward pass runs."""


SITES: Mapping[SiteKind, SiteMeaning] = {
    SiteKind.TOKENS: SiteMeaning(text="ids of the input tokens", dims="[R]", in_layers=False),
    SiteKind.EMBED: SiteMeaning(
        text="token embeddings, before the first layer", dims="[R, h]", in_layers=False, has_backward=True
    ),
    SiteKind.LAYER_IN: SiteMeaning(text="residual stream into a layer", dims="[R, h]", has_backward=True),
    SiteKind.ATTN_Q: SiteMeaning(text="queries as projected: before their norm and before rotation", dims="[R, H * D]"),
    SiteKind.ATTN_K: SiteMeaning(text="keys as projected: before their norm and before rotation", dims="[R, G * D]"),
    SiteKind.ATTN_V: SiteMeaning(text="values as projected", dims="[R, G * D]"),
    SiteKind.ATTN_CONTEXT: SiteMeaning(text="what attention gathers, before the output projection", dims="[R, H * D]"),
    SiteKind.ATTN_OUT: SiteMeaning(
        text="output of the attention block, before it is added to the residual stream",
        dims="[R, h]",
        has_backward=True,
    ),
    SiteKind.MLP_IN: SiteMeaning(text="input of the MLP or of the experts, after its norm", dims="[R, h]"),
    SiteKind.ROUTER_LOGITS: SiteMeaning(text="scores of the router before softmax or sigmoid", dims="[R, E]"),
    SiteKind.ROUTER_IDS: SiteMeaning(text="experts that are used, ascending ids", dims="[R, K]"),
    SiteKind.ROUTER_WEIGHTS: SiteMeaning(text="weights of these experts, in the order of their ids", dims="[R, K]"),
    SiteKind.MLP_GATE: SiteMeaning(text="first product of a gated MLP, before its activation", dims="[R, f]"),
    SiteKind.MLP_UP: SiteMeaning(text="first product of the MLP; in a gated one the factor of the gate", dims="[R, f]"),
    SiteKind.MLP_ACT: SiteMeaning(text="what enters the last product of the MLP", dims="[R, f]"),
    SiteKind.MLP_OUT: SiteMeaning(
        text="output of the MLP or of the experts, before it is added to the residual stream",
        dims="[R, h]",
        has_backward=True,
    ),
    SiteKind.LAYER_OUT: SiteMeaning(text="residual stream out of a layer", dims="[R, h]", has_backward=True),
    SiteKind.LOGITS: SiteMeaning(
        text="logits at positions that predict a token whose log-probability is wanted; no temperature",
        dims="[R, V]",
        in_layers=False,
    ),
    SiteKind.LOGPROB: SiteMeaning(
        text="log-probability of the token itself given those before it, under the sampling settings",
        dims="[R]",
        in_layers=False,
        has_backward=True,
    ),
    SiteKind.TOKEN_LOSS: SiteMeaning(
        text="what each trained token adds to the loss, before it is divided by the size of the batch",
        dims="[R]",
        in_layers=False,
    ),
    SiteKind.LOSS: SiteMeaning(
        text="loss of one microbatch, its share of the global batch", dims="[]", in_layers=False
    ),
    SiteKind.GRAD: SiteMeaning(
        text="gradient of a parameter over the whole batch, before clipping, by its Hugging Face name",
        dims="shape of the parameter",
        in_layers=False,
    ),
    SiteKind.PARAM: SiteMeaning(
        text="a parameter as the passes of the step used it, by its Hugging Face name",
        dims="shape of the parameter",
        in_layers=False,
    ),
}

ORDER_IN_LAYER: Mapping[SiteKind, int] = {kind: place for place, kind in enumerate(SiteKind)}
_BEFORE, _AFTER = -1, 1 << 20
"""Layer numbers of sites outside the layers."""


def execution_order(kind: SiteKind, layer: int | None, direction: Direction) -> tuple[int, int, int]:
    """Sort sites as a pass meets them: forward from the embedding to the loss, then backward, then gradients.

    Example:
        >>> execution_order(SiteKind.EMBED, None, Direction.FORWARD) < execution_order(SiteKind.LAYER_IN, 0, "forward")
        True
    """
    place = ORDER_IN_LAYER[kind]
    at = layer if layer is not None else _BEFORE if kind in (SiteKind.TOKENS, SiteKind.EMBED) else _AFTER
    if kind is SiteKind.GRAD:
        return (2, at, place)
    if kind is SiteKind.PARAM:
        # Parameters come before what is computed with them.
        return (-1, at, place)
    return (0, at, place) if direction == Direction.FORWARD else (1, -at, -place)
