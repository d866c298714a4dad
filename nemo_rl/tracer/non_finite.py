"""`FirstNonFinite`: which site was the first to hold NaN or infinities, out of frames that come in any order.

Called by the hub, by `nemo-rl trace ls` and by clients. Invariant: the answer does not depend on the order of frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nemo_rl.records.sites import SiteKind
from nemo_rl.tracer.frame import Frame, Where
from nemo_rl.tracer.watch import GENERATION, PHASES

__all__ = ["FirstNonFinite", "NonFinite"]

RUN_ORDER: Mapping[str, int] = {
    phase: place for place, phase in enumerate((GENERATION, *(phase for phase in PHASES if phase != GENERATION)))
}
"""Phases as a step runs them: it generates before it scores and trains."""
REFERENCE = "reference_logprobs"
"""Its passes use other parameters than those of the other phases."""
BEFORE_BACKWARD = 1 << 20
"""More than there are kinds of sites: what is recomputed comes before the backward pass of its layer."""

Order = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A site that held NaN or infinities."""

    where: Where
    num: int
    """Values that are NaN or infinite."""

    @property
    def text(self) -> str:
        """For people.

        Example: `step 5, train, mlp.out[2]: 4096 values are NaN or infinite; first seen there`.
        """
        at = self.where
        update = f", update {at.update}" if at.update else ""
        values = "1 value is" if self.num == 1 else f"{self.num} values are"
        head = f"step {at.step}, {at.phase}{update}, {at.site.text}: {values} NaN or infinite"
        if at.site.kind is SiteKind.PARAM:
            return f"{head} in the parameter itself; what was computed with it comes after"
        return f"{head}; first seen there"

    @property
    def order(self) -> Order:
        """Sorts by when a run met it."""
        at, site = self.where, self.where.site
        phase = RUN_ORDER.get(at.phase, len(RUN_ORDER))
        if site.kind is SiteKind.PARAM and at.update == 0 and at.phase != REFERENCE:
            # All passes before the first update of a step use the same parameters.
            phase = -1
        passes = site.order
        if site.is_recomputed:
            passes = (1, -passes[1], passes[2] - BEFORE_BACKWARD)
        return (at.step, phase, at.update, *passes, site.text, str(at.reducer))

    def as_record(self) -> dict[str, object]:
        """For JSON."""
        return {
            "step": self.where.step,
            "phase": self.where.phase,
            "update": self.where.update,
            "site": self.where.site.as_record(),
            "site_text": self.where.site.text,
            "num": self.num,
            "text": self.text,
        }


@dataclass(slots=True)
class FirstNonFinite:
    """The first of each run.

    Example:
        >>> first = FirstNonFinite()
        >>> first.of("run 1") is None
        True
    """

    _found: dict[str, NonFinite] = field(default_factory=dict)

    def add(self, frame: Frame) -> bool:
        """Whether this frame is the first of its run, of those seen so far."""
        if frame.num_not_finite == 0:
            return False
        new, old = NonFinite(frame.where, frame.num_not_finite), self._found.get(frame.where.run)
        if old is not None and old.order <= new.order:
            return False
        self._found[frame.where.run] = new
        return True

    def of(self, run: str) -> NonFinite | None:
        """None: all values of this run were finite, as far as looked at."""
        return self._found.get(run)
