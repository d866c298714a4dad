"""`ScoreSetting`: everything that decides the log-probability of a given token, as one of the two sides may have had
it.

The hypotheses on the engine are `SettingChange`s of a setting, and the fits of those that are numbers; the greedy
search (`parts`) calls them. Invariant: a change names one cause and changes one field of the setting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from nemo_rl.models.head.logprobs import Sampling

__all__ = [
    "CAUSES",
    "Cause",
    "Cut",
    "Routes",
    "ScoreSetting",
    "Sets",
    "SettingChange",
    "Stated",
    "refined",
    "sampling_changes",
    "stated_changes",
    "supposed_changes",
]

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
    """The way from logits to a distribution."""

    sampling: Sampling
    sets: Sets


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreSetting:
    """The settings under which rows are scored.

    Example:
        >>> from dataclasses import replace
        >>> setting = ScoreSetting(lag=None, precision="float32", routes="own", sampling=Sampling())
        >>> setting.passes == replace(setting, sampling=Sampling(top_p=0.9)).passes
        True
    """

    lag: int | None
    """Weights: None are those that the trainer had, a number is added to the version by each row's tag."""
    precision: str
    routes: Routes
    sampling: Sampling
    sets: Sets = "own"
    """Sets that a filter keeps: of the setting's own logits, or the engine's, recorded, else those of its weights."""
    rope: float = 1.0
    """Factor on the base of rotary embeddings."""
    shift: int = 0
    """A token gets the log-probability of the one so many places before it."""

    @property
    def passes(self) -> tuple[object, ...]:
        """The part of the setting that needs forward passes of its own; the rest follows from their logits."""
        return self.lag, self.precision, self.routes, self.rope

    @property
    def cut(self) -> Cut:
        """The way from the logits of the passes to a distribution."""
        return Cut(sampling=self.sampling, sets=self.sets if self.sampling.has_filter else "own")


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingChange:
    """One step from the trainer's setting towards the engine's."""

    cause: Cause
    text: str
    """The change in words, from -> to."""
    setting: ScoreSetting
    is_stated: bool
    """True where config and tags say it of the engine; else it is a supposition."""


STEPS = (0.03, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 1.2, 1.4)
TEMPERATURES = tuple(math.exp(sign * step) for step in STEPS for sign in (-1, 1))
"""Factors, closer to one another near 1: a small fault must not lie between two of them."""
TOP_PS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 0.995)
TOP_KS = (1, 2, 3, 5, 8, 10, 20, 30, 40, 50, 64, 100, 200)
ROPE_FACTORS = (0.01, 0.05, 0.1, 0.25, 0.5, 2.0, 4.0, 10.0, 20.0, 100.0)
PRECISIONS = ("float32", "bfloat16", "float16")
REFINEMENTS = 4
"""Each narrows a fitted number to a fifth of its neighbourhood."""
POINTS = (-0.8, -0.6, -0.4, -0.2, 0.2, 0.4, 0.6, 0.8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stated:
    """The setting of the engine that config and tags state."""

    setting: ScoreSetting
    """Its routes are `replayed` where the rollout's were kept and the trainer should take them; its sets `engine` where
    the rollout's were kept and the trainer scores under them."""
    can_replay: bool
    has_sets: bool
    """The rollout's sets were kept."""


def stated_changes(at: ScoreSetting, stated: Stated, *, is_lagging: bool) -> list[SettingChange]:
    """Towards what the run says of its engine.

    Args:
        is_lagging: the tags name other weights than the trainer's.
    """
    given = stated.setting
    found = [
        _change(at, cause, f"{text} (as configured)", is_stated=True, sampling=sampling)
        for cause, text, sampling in _towards(at.sampling, given.sampling)
    ]
    found += _sets(at, stated)
    if is_lagging and at.lag is None:
        text = "the trainer's weights -> those that each row is tagged with"
        found.append(_change(at, "weights", text, is_stated=True, lag=0))
    if at.precision != given.precision:
        text = f"{at.precision} -> {given.precision} (as configured)"
        found.append(_change(at, "precision", text, is_stated=True, precision=given.precision))
    if at.routes != given.routes:
        found.append(_routes(at, given.routes, is_stated=True))
    return found


def supposed_changes(
    at: ScoreSetting, stated: Stated, *, has_weights: Callable[[int], bool], has_rope: bool
) -> list[SettingChange]:
    found = []
    lag = at.lag or 0
    for other in (-1, 1):
        if has_weights(lag + other):
            text = f"weights {_versions(lag)} -> {_versions(lag + other)}"
            found.append(_change(at, "weights", text, lag=lag + other))
    for precision in PRECISIONS:
        if precision not in (at.precision, stated.setting.precision):
            text = f"{at.precision} -> {precision}, against the config"
            found.append(_change(at, "precision", text, precision=precision))
    if stated.can_replay and at.routes == stated.setting.routes:
        found.append(_routes(at, "own" if at.routes == "replayed" else "replayed", is_stated=False))
    for shift in (-1, 1):
        text = f"each token -> the one {'before' if shift > 0 else 'behind'} it"
        found.append(_change(at, "shift", text, shift=at.shift + shift))
    if has_rope:
        found += [_rope(at, factor) for factor in ROPE_FACTORS]
    return [*found, *sampling_changes(at)]


def sampling_changes(at: ScoreSetting) -> list[SettingChange]:
    now = at.sampling
    samplings: list[tuple[Cause, Sampling]] = [
        ("temperature", replace(now, temperature=now.temperature * factor)) for factor in TEMPERATURES
    ]
    samplings += [("top_p", replace(now, top_p=top_p)) for top_p in (*TOP_PS, 1.0) if top_p != now.top_p]
    samplings += [("top_k", replace(now, top_k=top_k)) for top_k in (*TOP_KS, None) if top_k != now.top_k]
    return [_sampling(at, cause, sampling) for cause, sampling in samplings]


def refined(
    best: SettingChange, at: ScoreSetting, cost: Callable[[Sequence[SettingChange]], Sequence[float]], *, enough: float
) -> SettingChange:
    """Return a change of a number, nearer to where the cost is least; another change as it is.

    Args:
        at: setting that `best` changes.
        cost: of changes.
        enough: cost at which the search ends.
    """
    if best.cause not in ("temperature", "top_p", "rope"):
        return best
    width = {"temperature": 0.1, "rope": math.log(2.5), "top_p": 0.05}[best.cause]
    lowest = cost([best])[0]
    for _ in range(REFINEMENTS):
        if lowest <= enough:
            break
        around = [moved for point in POINTS if (moved := _moved(best, at, point * width)) is not None]
        costs = cost(around)
        if min(costs, default=lowest) < lowest:
            lowest = min(costs)
            best = around[list(costs).index(lowest)]
        width /= 5
    return best


def _moved(best: SettingChange, at: ScoreSetting, by: float) -> SettingChange | None:
    sampling = best.setting.sampling
    if best.cause == "rope":
        return _rope(at, best.setting.rope / at.rope * math.exp(by))
    if best.cause == "temperature":
        return _sampling(at, "temperature", replace(sampling, temperature=sampling.temperature * math.exp(by)))
    top_p = sampling.top_p + by
    return _sampling(at, "top_p", replace(sampling, top_p=top_p)) if 0 < top_p < 1 else None


def _sets(at: ScoreSetting, stated: Stated) -> list[SettingChange]:
    """Return changes to the engine's sets, which a trainer without recorded sets cannot know."""
    now, given = at.sampling, stated.setting.sampling
    if at.sets == "engine" or not now.has_filter or (now.top_k, now.top_p) != (given.top_k, given.top_p):
        return []
    cut = [f"top-p {at.sampling.top_p:.4g}"] if at.sampling.top_p < 1 else []
    cut += [] if at.sampling.top_k is None else [f"top-k {at.sampling.top_k}"]
    engines = "that the rollout recorded" if stated.has_sets else "of the engine's weights"
    text = f"{' and '.join(cut)} without recorded sets: the trainer's own sets -> those {engines}"
    return [_change(at, "sets", text, is_stated=True, sets="engine")]


def _towards(now: Sampling, wanted: Sampling) -> Iterator[tuple[Cause, str, Sampling]]:
    if now.temperature != wanted.temperature:
        sampling = replace(now, temperature=wanted.temperature)
        yield ("temperature", f"{now.temperature:.4g} -> {wanted.temperature:.4g}", sampling)
    if now.top_k != wanted.top_k:
        yield ("top_k", f"{now.top_k} -> {wanted.top_k}", replace(now, top_k=wanted.top_k))
    if now.top_p != wanted.top_p:
        yield ("top_p", f"{now.top_p:.4g} -> {wanted.top_p:.4g}", replace(now, top_p=wanted.top_p))


def _sampling(at: ScoreSetting, cause: Cause, sampling: Sampling) -> SettingChange:
    text = "; ".join(text for _, text, _ in _towards(at.sampling, sampling))
    return _change(at, cause, f"{text}, fitted", sampling=sampling)


def _rope(at: ScoreSetting, factor: float) -> SettingChange:
    return _change(at, "rope", f"base x {at.rope * factor:.4g}, fitted", rope=at.rope * factor)


def _routes(at: ScoreSetting, routes: Routes, *, is_stated: bool) -> SettingChange:
    words = {"own": "the trainer's own", "replayed": "those that the rollout recorded"}
    text = f"{words[at.routes]} -> {words[routes]}"
    return _change(at, "routes", text, is_stated=is_stated, routes=routes)


def _change(at: ScoreSetting, cause: Cause, text: str, *, is_stated: bool = False, **changed: Any) -> SettingChange:
    return SettingChange(cause=cause, text=text, setting=replace(at, **changed), is_stated=is_stated)


def _versions(lag: int) -> str:
    if lag == 0:
        return "as tagged"
    return f"{abs(lag)} version{'s' if abs(lag) > 1 else ''} {'before' if lag < 0 else 'after'} the tags"
