"""`ComparedSite`: a place of a recording over all ranks and microbatches, and the order in which passes meet sites."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl.records.record import RecordPlace
from nemo_rl.records.selector import Selector
from nemo_rl.records.sites import Direction, SiteKind, execution_order

__all__ = ["PHASES", "ComparedSite"]

PHASES = ("prev_logprobs", "reference_logprobs", "forward", "train")
"""Passes in the order in which a step runs them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedSite:
    """A `RecordPlace` without its microbatch.

    Example:
        >>> ComparedSite(phase="train", kind=SiteKind.MLP_OUT, layer=3, direction=Direction.BACKWARD).label
        'train/mlp.out[3] backward'
    """

    phase: str
    kind: SiteKind
    layer: int | None = None
    name: str | None = None
    direction: Direction = Direction.FORWARD
    update: int = 0
    is_recomputed: bool = False

    @classmethod
    def of_place(cls, place: RecordPlace) -> ComparedSite:
        """Raises:
        ValueError: the record names no such place.
        """
        layer, name = place.layer, place.name
        numbers = (place.update, place.microbatch, 0 if layer is None else layer)
        if not all(isinstance(number, int) and number >= 0 for number in numbers) or not isinstance(place.phase, str):
            raise ValueError(f"unknown site: {place}")
        return cls(
            phase=place.phase,
            kind=place.kind,
            layer=layer,
            name=None if name is None else str(name),
            direction=place.direction,
            update=place.update,
            is_recomputed=bool(place.is_recomputed),
        )

    @property
    def short(self) -> str:
        """The name without its pass."""
        at = self.layer if self.name is None else self.name
        return f"{self.kind.value}{'' if at is None else f'[{at}]'}"

    @property
    def label(self) -> str:
        """The name shown in reports."""
        update = f"#{self.update}" if self.update else ""
        backward = " backward" if self.direction is Direction.BACKWARD else ""
        return f"{self.phase}{update}/{self.short}{backward}{' recomputed' if self.is_recomputed else ''}"

    @property
    def order(self) -> tuple[int, str, int, bool, tuple[int, int, int], str]:
        """Sorts sites as a step meets them; what is recomputed comes after all that is not."""
        phase = PHASES.index(self.phase) if self.phase in PHASES else len(PHASES)
        place = execution_order(self.kind, self.layer, self.direction)
        return (phase, self.phase, self.update, self.is_recomputed, place, self.name or "")

    @property
    def in_pass(self) -> tuple[str, int, bool, Direction]:
        """The identity of a pass, which sites share when one runs into the next."""
        return (self.phase, self.update, self.is_recomputed, self.direction)

    def is_taken_by(self, selector: Selector) -> bool:
        """Return whether a selector asks for the site."""
        if self.kind is SiteKind.GRAD and self.name is not None:
            return selector.takes_parameter(self.name)
        return selector.takes(self.kind, self.layer, self.direction)
