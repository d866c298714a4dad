"""One observation against the rollout: slot by slot, token and route; and which known mistake explains a difference.

Called by `chain`. For the first difference of a trace each known mistake is replayed on the rollout's routes and has to
give what was seen. A guess is made only when it explains every differing slot that it speaks about, and speaks about
most of them. Shapes: S slots, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from nemo_rl_tools.route_chain.observe import Hop, Observation, RolloutSample, digest_of

__all__ = ["RouteComparison", "compare", "guess", "lookup"]

Kind = Literal["tokens", "routes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DifferencePlace:
    """The place of the first difference."""

    slot: int
    key: str
    position: int
    column: int
    """Among the layers of the observation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteComparison:
    """The content of an observation, that of the rollout at the same places, and where they differ."""

    seen: Observation
    kind: Kind
    got: np.ndarray
    """`[S, L]` int64: digests of routes; of tokens `[S, 1]` their ids."""
    expected: np.ndarray
    """Values of the rollout, in the shape of `got`; 0 where nothing is compared."""
    is_compared: np.ndarray
    """`[S, L]` bool."""
    is_bad: np.ndarray
    """`[S, L]` bool."""
    num_routes: int
    """Compared places at which the rollout has a route."""

    @property
    def first(self) -> DifferencePlace:
        """The first position of the first sample that differs."""
        bad = self.is_bad.any(axis=1)
        owner = self.seen.key_index[int(bad.argmax())]
        slots = np.flatnonzero(bad & (self.seen.key_index == owner))
        slot = int(slots[self.seen.positions[slots].argmin()])
        return DifferencePlace(
            slot=slot,
            key=self.seen.keys[int(owner)],
            position=int(self.seen.positions[slot]),
            column=int(self.is_bad[slot].argmax()),
        )


def lookup(
    samples: Mapping[str, RolloutSample],
    seen: Observation,
    kind: Kind,
    key_index: np.ndarray,
    positions: np.ndarray,
    layers: Sequence[int] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Look up the rollout's values at any places, and whether it has one: both `[n, L]`.

    Args:
        key_index: `[n]` int64, into the keys of the observation; -1 for none.
        positions: `[n]` int64, any values.
        layers: None takes those of the observation.
    """
    layers = seen.layers if layers is None else layers
    found = np.zeros((len(positions), 1 if kind == "tokens" else len(layers)), dtype=np.int64)
    is_there = np.zeros(found.shape, dtype=bool)
    for index, key in enumerate(seen.keys):
        if key in samples:
            values, is_known = _values(samples[key], kind, layers)
            slots = np.flatnonzero((key_index == index) & (positions >= 0) & (positions < len(values)))
            found[slots], is_there[slots] = values[positions[slots]], is_known
    return found, is_there


def _values(sample: RolloutSample, kind: Kind, layers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return `[T, L]` int64 of a sample, 0 in layers that it does not have, and `[L]` bool: which it has."""
    if kind == "tokens":
        return sample.tokens.astype(np.int64)[:, None], np.ones(1, dtype=bool)
    sources = np.array(sample.columns(layers), dtype=np.int64)
    return np.where(sources >= 0, sample.digests[:, sources], 0), sources >= 0


def compare(samples: Mapping[str, RolloutSample], seen: Observation) -> list[RouteComparison]:
    """Compare tokens, where the record has them, and routes; slots of samples that no rollout recorded are left out."""
    known = np.array([key in samples for key in seen.keys] + [False])[seen.key_index]
    found: list[RouteComparison] = []
    no_route = [digest_of([-1] * top_k) for top_k in {sample.top_k for sample in samples.values()}]
    kinds: list[tuple[Kind, np.ndarray]] = [("routes", seen.digests)]
    if seen.tokens is not None:
        kinds.insert(0, ("tokens", seen.tokens.astype(np.int64)[:, None]))
    for kind, got in kinds:
        expected, is_there = lookup(samples, seen, kind, seen.key_index, seen.positions)
        is_compared = np.repeat(known[:, None], got.shape[1], axis=1)
        is_missing = is_there & np.isin(expected, no_route)
        num_routes = int((is_compared & is_there & ~is_missing).sum()) if kind == "routes" else 0
        if seen.hop in (Hop.FORWARD, Hop.RECOMPUTE) and kind == "routes":
            # Where the rollout has no route the model uses its own choice.
            is_compared &= ~is_missing
        # A place that the rollout does not have, such as a position behind the end, is a difference too.
        is_bad = is_compared & (~is_there | (got != expected))
        found.append(
            RouteComparison(
                seen=seen,
                kind=kind,
                got=got,
                expected=expected,
                is_compared=is_compared,
                is_bad=is_bad,
                num_routes=num_routes,
            )
        )
    return found


Samples = Mapping[str, RolloutSample]
SHIFTS = (1, -1, 2, -2)
UNKNOWN = "no known mistake explains it"


def guess(found: RouteComparison, samples: Samples) -> str:
    for explain in MISTAKES:
        guess = explain(found, samples)
        if guess is not None:
            return guess
    return UNKNOWN


def _narrow_integer(found: RouteComparison, samples: Samples) -> str | None:
    """Return ids beyond what 8 or 16 bits hold."""
    seen, first = found.seen, found.first
    if found.kind == "tokens":
        return None
    if seen.ids is not None:
        pairs = _expected_ids(found, samples)
        if pairs is None:
            return None
        got, expected = pairs
        for bits in (8, 16):
            if bool(((got - expected) % (1 << bits) == 0).all()):
                return f"narrow integer: the ids are equal modulo {1 << bits}, they went through {bits} bits"
        return None
    if seen.lowest < -1:
        return f"narrow integer: the smallest id is {seen.lowest}, as if large ids had become negative"
    if seen.highest < 256 <= samples[first.key].highest:
        return f"narrow integer: the rollout has ids up to {samples[first.key].highest}, here is none above 255"
    return None


def _lost(found: RouteComparison, samples: Samples) -> str | None:
    top_k = samples[found.first.key].top_k
    bad = found.is_bad
    if found.kind == "tokens":
        return None
    missing = digest_of([-1] * top_k)
    if bool((found.got[bad] == missing).all()):
        return "lost route: -1 where the rollout has a route"
    if bool((found.expected[bad] == missing).all()):
        return "made-up route: the rollout has none for this token (-1)"
    if bool((found.got[bad] == digest_of(range(top_k))).all()):
        return "padding leak: the row of padding, 0 to K - 1, at a token"
    return None


def _layer_map(found: RouteComparison, samples: Samples) -> str | None:
    seen, column = found.seen, found.first.column
    if found.kind == "tokens":
        return None
    layer = seen.layers[column]
    slots = np.flatnonzero(found.is_compared[:, column])
    for other in samples[found.first.key].layers:
        values, is_there = lookup(samples, seen, found.kind, seen.key_index[slots], seen.positions[slots], [other])
        if other != layer and _explains(found.got[slots, column], values[:, 0], is_there[:, 0]):
            return f"wrong layer map: layer {layer} holds the routes of layer {other}"
    return None


def _shift(found: RouteComparison, samples: Samples) -> str | None:
    seen = found.seen
    slots = np.flatnonzero(found.is_bad.any(axis=1))
    for shift in SHIFTS:
        places = seen.key_index[slots], seen.positions[slots] + shift
        if _explains(found.got[slots], *lookup(samples, seen, found.kind, *places)):
            first = found.first.position
            return f"shift by {abs(shift)}: position {first} holds the {found.kind} of position {first + shift}"
    return None


def _contiguous(found: RouteComparison, samples: Samples) -> str | None:
    """Return one run of tokens where the record names the two of a zigzag split; each sequence split by itself."""
    seen, key = found.seen, found.first.key
    slots = np.flatnonzero(seen.key_index == seen.keys.index(key))
    named, local = seen.positions[slots], np.arange(len(slots))
    # The two runs of the last rank touch: there the contiguous share begins twice as far from the start.
    starts = range(len(samples[key].digests)) if _has_gap(named) else [2 * int(named[0])]
    if not _has_gap(named) and not seen.coords.get("cp"):
        return None
    for start in starts:
        values, is_there = lookup(samples, seen, found.kind, seen.key_index[slots], start + local)
        if _explains(found.got[slots], values, is_there):
            return f"contiguous instead of zigzag: the {found.kind} run from position {start} on without a gap"
    return None


def _has_gap(positions: np.ndarray) -> bool:
    return bool((np.diff(positions) != 1).any())


def _swapped_samples(found: RouteComparison, samples: Samples) -> str | None:
    seen, key = found.seen, found.first.key
    slots = np.flatnonzero(found.is_bad.any(axis=1) & (seen.key_index == seen.keys.index(key)))
    for other, sample in samples.items():
        positions = np.minimum(seen.positions[slots], len(sample.digests) - 1)
        is_inside = np.repeat((seen.positions[slots] < len(sample.digests))[:, None], found.got.shape[1], axis=1)
        values, _ = _values(sample, found.kind, seen.layers)
        if other != key and _explains(found.got[slots], values[positions], is_inside):
            return f"swapped rows: {key} holds the {found.kind} of {other}"
    return None


def _moved(found: RouteComparison, samples: Samples) -> str | None:
    """Return rows that lie at other places of any sample."""
    seen = found.seen
    places = {
        row.tobytes(): (key, position)
        for key, sample in reversed(list(samples.items()))
        for position, row in reversed(list(enumerate(_values(sample, found.kind, seen.layers)[0])))
    }
    slots = np.flatnonzero(found.is_bad.any(axis=1))
    origins = [places.get(row.tobytes()) for row in np.ascontiguousarray(found.got[slots])]
    if None in origins or not len(slots):
        return None
    first = next(place for slot, place in zip(slots, origins, strict=True) if slot == found.first.slot)
    assert first is not None
    if _is_one_run(origins) and _has_gap(seen.positions[seen.key_index >= 0]):
        return f"contiguous instead of zigzag: the {found.kind} run from position {first[1]} of {first[0]} on"
    here = [(seen.keys[seen.key_index[slot]], int(seen.positions[slot])) for slot in slots]
    name = "swapped rows" if set(here) == set(origins) else "rows from elsewhere"
    return f"{name}: position {found.first.position} of {found.first.key} holds position {first[1]} of {first[0]}"


def _is_one_run(origins: Sequence[tuple[str, int] | None]) -> bool:
    """Return consecutive places, sample after sample."""
    pairs = [(a, b) for a, b in pairwise(origins) if a and b]
    return len(pairs) > 1 and all(b[1] == a[1] + 1 if a[0] == b[0] else b[1] == 0 for a, b in pairs)


MISTAKES: Sequence[Callable[[RouteComparison, Samples], str | None]] = (
    _narrow_integer,
    _lost,
    _layer_map,
    _contiguous,
    _shift,
    _swapped_samples,
    _moved,
)


def _explains(got: np.ndarray, values: np.ndarray, is_there: np.ndarray) -> bool:
    """Return whether a mistake gives what was seen wherever it says something, and says something about most of it."""
    return bool(is_there.sum() * 2 > is_there.size and (got == values)[is_there].all())


def _expected_ids(found: RouteComparison, samples: Samples) -> tuple[np.ndarray, np.ndarray] | None:
    """Return `[n, K]` ids of the differing places, seen and of the rollout; None where a record has no ids."""
    seen, got, expected = found.seen, [], []
    assert seen.ids is not None
    for slot, column in np.argwhere(found.is_bad):
        sample = samples[seen.keys[seen.key_index[slot]]]
        source, position = sample.columns(seen.layers)[column], seen.positions[slot]
        if sample.ids is None or source < 0 or position >= len(sample.ids):
            return None
        got.append(seen.ids[slot, column])
        expected.append(sample.ids[position, source])
    return np.stack(got), np.stack(expected)
