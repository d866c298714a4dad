"""The catalogue of sites: stable places of a model at which a tensor can be recorded, and what each means.

Engines attach to sites (`HookPoint` in `nemo_rl.models.policy.hooks`), `nemo_rl.diagnostics` compares them.
Invariant: one site means one quantity in every model, engine and layout; what an engine cannot give in this meaning it
does not record, and says why. Shapes: R tokens, h hidden size, f of the MLP, H query heads and G key heads of dimension
D, E experts, K chosen ones, V vocabulary.

`Selector`: which sites are recorded, as a text that is parsed and never evaluated.

    layer.out, attn.*                  kinds, `*` stands for any part of a name
    moe.* & layer in 0..3              only these layers, both ends included
    layer.out & layer in 0,5           only these two
    logits & forward                   without gradients with respect to it
    grad, param & name=model.layers.0.*      gradients and values of these parameters

Terms after `&` narrow all kinds before them; `;` separates selections, and a site is recorded if any takes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from nemo_rl.errors import UserError

__all__ = ["SITES", "Direction", "Selector", "SiteKind", "execution_order"]


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


LAYERS = re.compile(r"layer\s+in\s+(.+)")
LAYER_OF_NAME = re.compile(r"(?:^|\.)layers\.(\d+)\.")
"""Pattern of the layer in the name of a parameter."""
SPAN = re.compile(r"(\d+)\s*(?:\.\.\s*(\d+))?")
MAX_TEXT = 10_000
"""Characters; more is no selection that somebody wrote."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Selection:
    """One of the parts between `;`."""

    kinds: frozenset[SiteKind]
    layers: tuple[tuple[int, int], ...] = ()
    """First and last layer of each span; empty takes all."""
    name: str = "*"
    direction: Direction | None = None

    def takes(self, kind: SiteKind, layer: int | None, direction: Direction | None = None) -> bool:
        """Args:
        direction: None takes any.
        """
        if kind not in self.kinds or (direction is not None and self.direction not in (None, direction)):
            return False
        # A site outside the layers is in none of them.
        return not self.layers or (layer is not None and any(a <= layer <= b for a, b in self.layers))


@dataclass(frozen=True, slots=True)
class Selector:
    """A choice of sites to record.

    Example:
        >>> chosen = Selector.parse("layer.out & layer in 0..1; logits")
        >>> chosen.takes(SiteKind.LAYER_OUT, 1), chosen.takes(SiteKind.LAYER_OUT, 2), chosen.takes(SiteKind.LOGITS)
        (True, False, True)
    """

    text: str
    selections: tuple[_Selection, ...]

    @classmethod
    def parse(cls, text: str) -> Selector:
        """Raises:
        UserError: an unknown site or term; names what is known.
        """
        if not text.strip() or len(text) > MAX_TEXT:
            raise UserError(f"selector: expected sites such as 'layer.out, logits', got {text[:100]!r}; {_known()}")
        return cls(text=text, selections=tuple(_selection(part) for part in text.split(";") if part.strip()))

    def takes(self, kind: SiteKind, layer: int | None = None, direction: Direction = Direction.FORWARD) -> bool:
        """Return whether a site is recorded."""
        return any(selection.takes(kind, layer, direction) for selection in self.selections)

    def takes_parameter(self, name: str, kind: SiteKind = SiteKind.GRAD) -> bool:
        """Return whether the parameter of this Hugging Face name is recorded, or its gradient."""
        match = LAYER_OF_NAME.search(name)
        layer = int(match[1]) if match is not None else None
        return any(part.takes(kind, layer) and fnmatchcase(name, part.name) for part in self.selections)

    def kinds(self) -> tuple[SiteKind, ...]:
        """Return every kind that is recorded somewhere, in the order of the catalogue."""
        return tuple(kind for kind in SiteKind if any(kind in part.kinds for part in self.selections))


def _selection(text: str) -> _Selection:
    first, *terms = (part.strip() for part in text.split("&"))
    kinds = frozenset(kind for pattern in first.split(",") for kind in _kinds(pattern.strip()))
    layers: tuple[tuple[int, int], ...] = ()
    name, direction = "*", None
    for term in terms:
        if match := LAYERS.fullmatch(term):
            layers += _spans(match[1], term)
        elif term in tuple(Direction):
            direction = Direction(term)
        elif term.startswith("name=") and term != "name=":
            name = term.removeprefix("name=").strip()
        else:
            raise UserError(
                f"selector: expected 'layer in 0..3', 'name=PATTERN', 'forward' or 'backward' after '&', got {term!r}"
            )
    if name != "*" and not kinds <= {SiteKind.GRAD, SiteKind.PARAM}:
        raise UserError(
            f"selector: {text!r}: 'name=' chooses among parameters and their gradients: write 'grad & name={name}'"
        )
    if direction is Direction.BACKWARD and not any(SITES[kind].has_backward for kind in kinds - {SiteKind.GRAD}):
        known = ", ".join(kind for kind, meaning in SITES.items() if meaning.has_backward)
        raise UserError(f"selector: {text!r}: no gradient is recorded at these sites, only at {known}, and as grad")
    return _Selection(kinds=kinds, layers=layers, name=name, direction=direction)


def _kinds(pattern: str) -> Sequence[SiteKind]:
    found = [kind for kind in SITES if fnmatchcase(kind.value, pattern)]
    if not found:
        raise UserError(f"selector: no site is called {pattern!r}; {_known()}")
    return found


def _spans(text: str, term: str) -> tuple[tuple[int, int], ...]:
    spans = []
    for part in text.split(","):
        match = SPAN.fullmatch(part.strip())
        if match is None:
            raise UserError(f"selector: expected layer numbers such as '0..3' or '0,5', got {term!r}")
        first = int(match[1])
        spans.append((first, int(match[2]) if match[2] else first))
    return tuple(spans)


def _known() -> str:
    return f"known are {', '.join(SITES)}"
