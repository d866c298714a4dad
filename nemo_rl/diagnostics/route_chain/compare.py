"""One observation against the rollout: slot by slot, token and route.

Called by `chain`; `guess` explains what is found here. Shapes: S slots, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nemo_rl.diagnostics.route_chain.observe import Hop, Observation, Sample

__all__ = ["Comparison", "Place", "compare", "lookup"]

Kind = Literal["tokens", "routes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the first difference lies."""

    slot: int
    key: str
    position: int
    column: int
    """Among the layers of the observation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What an observation has, what the rollout has at the same places, and where they differ."""

    seen: Observation
    kind: Kind
    got: np.ndarray
    """`[S, L]` int64: digests of routes; of tokens `[S, 1]` their ids."""
    expected: np.ndarray
    """As `got`; 0 where nothing is compared."""
    is_compared: np.ndarray
    """`[S, L]` bool."""
    is_bad: np.ndarray
    """`[S, L]` bool."""
    num_routes: int
    """Compared places at which the rollout has a route."""

    @property
    def first(self) -> Place:
        """The first position of the first sample that differs."""
        bad = self.is_bad.any(axis=1)
        owner = self.seen.key_index[int(bad.argmax())]
        slots = np.flatnonzero(bad & (self.seen.key_index == owner))
        slot = int(slots[self.seen.positions[slots].argmin()])
        return Place(
            slot=slot,
            key=self.seen.keys[int(owner)],
            position=int(self.seen.positions[slot]),
            column=int(self.is_bad[slot].argmax()),
        )


def lookup(
    samples: Mapping[str, Sample], seen: Observation, kind: Kind, key_index: np.ndarray, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What the rollout has at any places, and where it has something: both `[n, L]`.

    Args:
        key_index: `[n]` int64, into the keys of the observation; -1 for none.
        positions: `[n]` int64, any values.
    """
    width = 1 if kind == "tokens" else len(seen.layers)
    found = np.zeros((len(positions), width), dtype=np.int64)
    is_there = np.zeros(found.shape, dtype=bool)
    for index, key in enumerate(seen.keys):
        sample = samples.get(key)
        if sample is None:
            continue
        slots = np.flatnonzero((key_index == index) & (positions >= 0) & (positions < len(sample.digests)))
        if kind == "tokens":
            found[slots, 0], is_there[slots] = sample.tokens[positions[slots]], True
            continue
        for column, source in enumerate(sample.columns(seen.layers)):
            if source >= 0:
                found[slots, column] = sample.digests[positions[slots], source]
                is_there[slots, column] = True
    return found, is_there


def compare(samples: Mapping[str, Sample], seen: Observation) -> list[Comparison]:
    """Tokens, where the record has them, and routes; slots of samples that no rollout recorded are left out."""
    known = np.array([key in samples for key in seen.keys] + [False])[seen.key_index]
    found: list[Comparison] = []
    is_missing = _is_missing(samples, seen)
    kinds: list[tuple[Kind, np.ndarray]] = [("routes", seen.digests)]
    if seen.tokens is not None:
        kinds.insert(0, ("tokens", seen.tokens.astype(np.int64)[:, None]))
    for kind, got in kinds:
        expected, is_there = lookup(samples, seen, kind, seen.key_index, seen.positions)
        is_compared = np.repeat(known[:, None], got.shape[1], axis=1)
        num_routes = int((is_compared & is_there & ~is_missing).sum()) if kind == "routes" else 0
        if seen.hop in (Hop.FORWARD, Hop.RECOMPUTE) and kind == "routes":
            # Where the rollout has no route the model uses its own choice.
            is_compared &= ~is_missing
        # A place that the rollout does not have, such as a position behind the end, is a difference too.
        is_bad = is_compared & (~is_there | (got != expected))
        found.append(
            Comparison(
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


def _is_missing(samples: Mapping[str, Sample], seen: Observation) -> np.ndarray:
    """`[S, L]` bool: tokens whose route the rollout does not have."""
    missing = np.zeros(seen.digests.shape, dtype=bool)
    for index, key in enumerate(seen.keys):
        if key not in samples:
            continue
        sample = samples[key]
        slots = np.flatnonzero((seen.key_index == index) & (seen.positions < len(sample.digests)))
        lost = sample.is_missing
        for column, source in enumerate(sample.columns(seen.layers)):
            if source >= 0:
                missing[slots, column] = lost[seen.positions[slots], source]
    return missing
