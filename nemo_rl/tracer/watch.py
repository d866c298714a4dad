"""`Watch`: what is looked at, as a text that is parsed and never evaluated: `SITES | REDUCERS | WHEN`.

    layer.out, attn.* & layer in 0..3 | stats                   in every phase of every traced step
    layer.out | tiles(8, rms); histogram | train; every 10      in training passes, of every tenth step
    mlp.out | stats | train; recomputed                         recomputed passes too, shown apart

Sites are a `Selector`. Between the bars `;` separates. A `Plan` is all that is watched; its digest says whether two
processes look at the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from nemo_rl.errors import UserError
from nemo_rl.records.selector import Selector
from nemo_rl.records.sites import Direction, SiteKind
from nemo_rl.tracer.reducer import PerToken, Reducer, parse_reducer

__all__ = ["PHASES", "Plan", "Watch"]

PHASES = ("prev_logprobs", "reference_logprobs", "train", "forward", "generation")
"""Passes: of the policy workers, of `nemo-rl probe run`, and decoding of the embedded engine, which is only looked at
where a watch names it."""
ON_REQUEST = frozenset({"generation"})
EVERY = re.compile(r"every\s+(\d+)")
RECOMPUTED = "recomputed"
MAX_WATCHES = 64


@dataclass(frozen=True, slots=True)
class Watch:
    """Some sites, and what is kept of them.

    Example:
        >>> watch = Watch.parse("layer.out & layer in 0..1 | stats; norm | train; every 5")
        >>> [str(reducer) for reducer in watch.reducers], watch.every
        (['stats', 'norm'], 5)
    """

    text: str
    sites: Selector
    reducers: tuple[Reducer, ...]
    phases: frozenset[str]
    every: int = 1
    """Of so many steps one is looked at: those whose number divides by it."""
    with_recomputed: bool = False
    """Also what a backward pass computes once more, apart from the first time."""

    @classmethod
    def parse(cls, text: str) -> Watch:
        """Raises:
        UserError: no such site, reducer or phase.
        """
        sites, bar, rest = text.partition("|")
        how, _, when = rest.partition("|")
        if not bar or not how.strip() or "|" in when:
            raise UserError(
                f"watch: expected 'SITES | REDUCERS' or 'SITES | REDUCERS | WHEN', such as 'layer.out | stats', "
                f"got {text[:200]!r}"
            )
        phases, every, with_recomputed = _when(when)
        reducers = tuple(parse_reducer(part) for part in how.split(";") if part.strip())
        return cls(" ".join(text.split()), Selector.parse(sites), reducers, phases, every, with_recomputed)

    def takes(self, kind: SiteKind, layer: int | None, direction: Direction, *, phase: str, step: int) -> bool:
        """Whether this site is looked at."""
        return self.is_due(phase, step) and self.sites.takes(kind, layer, direction)

    def is_due(self, phase: str, step: int) -> bool:
        """Whether anything is looked at in this phase of this step."""
        return phase in self.phases and step % self.every == 0


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is watched."""

    watches: tuple[Watch, ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Plan:
        """Raises:
        UserError: names the watch that cannot be read.
        """
        texts = list(texts)
        if len(texts) > MAX_WATCHES:
            raise UserError(f"expected at most {MAX_WATCHES} watches, got {len(texts)}")
        return cls(tuple(Watch.parse(text) for text in texts))

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(watch.text for watch in self.watches)

    @property
    def digest(self) -> str:
        """Equal for equal plans."""
        return blake2b("\n".join(self.texts).encode(), digest_size=8).hexdigest()

    @property
    def has_tokens(self) -> bool:
        """Whether tokens are shown one by one."""
        return any(isinstance(reducer, PerToken) for watch in self.watches for reducer in watch.reducers)

    def reducers_of(
        self,
        kind: SiteKind,
        layer: int | None,
        direction: Direction,
        *,
        phase: str,
        step: int,
        recomputed: bool = False,
    ) -> tuple[Reducer, ...]:
        """What is kept of this site, each once."""
        found = (
            reducer
            for watch in self.watches
            if watch.takes(kind, layer, direction, phase=phase, step=step) and (watch.with_recomputed or not recomputed)
            for reducer in watch.reducers
        )
        return tuple(dict.fromkeys(found))


def _when(text: str) -> tuple[frozenset[str], int, bool]:
    phases, every, with_recomputed = set(), 1, False
    for term in (part.strip() for part in text.split(";")):
        if not term:
            continue
        if term in PHASES:
            phases.add(term)
        elif (match := EVERY.fullmatch(term)) and int(match[1]) > 0:
            every = int(match[1])
        elif term == RECOMPUTED:
            with_recomputed = True
        else:
            raise UserError(
                f"watch: expected a phase ({', '.join(PHASES)}), 'every N' or '{RECOMPUTED}', got {term[:200]!r}"
            )
    return frozenset(phases) or frozenset(PHASES) - ON_REQUEST, every, with_recomputed
