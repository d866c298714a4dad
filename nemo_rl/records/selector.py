"""`Selector`: which sites are recorded, as a text that is parsed and never evaluated.

    layer.out, attn.*                  kinds, `*` stands for any part of a name
    moe.* & layer in 0..3              only these layers, both ends included
    layer.out & layer in 0,5           only these two
    logits & forward                   without gradients with respect to it
    grad, param & name=model.layers.0.*      gradients and values of these parameters

Terms after `&` narrow all kinds before them; `;` separates selections, and a site is recorded if any takes it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from nemo_rl.errors import UserError
from nemo_rl.records.sites import SITES, Direction, SiteKind

__all__ = ["Selector"]

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
