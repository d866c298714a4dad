"""`Setting`: everything that decides the log-probability of a given token, as one of the two sides may have had it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nemo_rl.models.logprobs import Sampling

__all__ = ["CAUSES", "Cause", "Change", "Cut", "Routes", "Sets", "Setting"]

Routes = Literal["own", "replayed"]
Sets = Literal["own", "engine"]
Cause = Literal[
    "weights", "temperature", "top_k", "top_p", "sets", "routes", "precision", "batching", "shift", "rope", "engine"
]
CAUSES: dict[Cause, str] = {
    "weights": "stale weights",
    "temperature": "sampling support: temperature",
    "top_k": "sampling support: top-k",
    "top_p": "sampling support: top-p",
    "sets": "sampling support: sets not recorded",
    "routes": "routes",
    "precision": "precision",
    "batching": "batching",
    "shift": "token shift",
    "rope": "positions: rope base",
    "engine": "rest: the engine's weights or computation",
}
"""Cause -> its name for people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """From logits to a distribution."""

    sampling: Sampling
    sets: Sets


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How rows are scored.

    Example:
        >>> from dataclasses import replace
        >>> setting = Setting(lag=None, precision="float32", routes="own", sampling=Sampling())
        >>> setting.passes == replace(setting, sampling=Sampling(top_p=0.9)).passes
        True
    """

    lag: int | None
    """Weights: None are those that the trainer had, a number is added to the version by each row's tag."""
    precision: str
    routes: Routes
    sampling: Sampling
    sets: Sets = "own"
    """What a filter keeps: of the setting's own logits; or the engine's sets, recorded, else those of its weights."""
    rope: float = 1.0
    """Factor on the base of rotary embeddings."""
    shift: int = 0
    """A token gets the log-probability of the one so many places before it."""

    @property
    def passes(self) -> tuple[object, ...]:
        """What needs forward passes of its own; the rest follows from their logits."""
        return self.lag, self.precision, self.routes, self.rope

    @property
    def cut(self) -> Cut:
        """What is made of their logits."""
        return Cut(sampling=self.sampling, sets=self.sets if self.sampling.has_filter else "own")


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One step from the trainer's setting towards the engine's."""

    cause: Cause
    text: str
    """What is changed, from -> to."""
    setting: Setting
    is_stated: bool
    """What config and tags say of the engine; else a supposition."""
