"""`SiteWatch`: what is looked at, as a text that is parsed and never evaluated: `SITES | REDUCERS | WHEN`.

    layer.out, attn.* & layer in 0..3 | stats                   in every phase of every traced step
    layer.out | tiles(8, rms); histogram | train; every 10      in training passes, of every tenth step
    mlp.out | stats | train; recomputed                         recomputed passes too, shown apart
    layer.out | stats | generation                              while the generation engine decodes, alone

Sites are a `Selector`. Between the bars `;` separates. A `WatchPlan` is all that is watched; its digest says whether
two processes look at the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from nemo_rl.errors import UserError
from nemo_rl.records.sites import Direction, Selector, SiteKind
from nemo_rl.tracer.reducer import Counts, PerToken, Reducer, parse_reducer

__all__ = [
    "BY_FLAG",
    "CLASSICAL",
    "GENERATION",
    "PHASES",
    "Classical",
    "SiteWatch",
    "WatchPlan",
    "applies",
]

GENERATION = "generation"
PHASES = ("prev_logprobs", "reference_logprobs", "train", GENERATION)
"""Passes of the policy workers, and decoding of the embedded engine, which is only looked at where a watch names it."""
ON_REQUEST = frozenset({GENERATION})
EVERY = re.compile(r"every\s+(\d+)")
RECOMPUTED = "recomputed"
MAX_WATCHES = 64
OF_PARAMETERS = frozenset({SiteKind.GRAD, SiteKind.PARAM})
WITHOUT_TOKENS = OF_PARAMETERS | {SiteKind.LOSS}
OF_WHOLE_NUMBERS = frozenset({SiteKind.TOKENS, SiteKind.ROUTER_IDS})


def applies(reducer: Reducer, kind: SiteKind) -> bool:
    """Return whether a reducer can be used at a site; of several sites chosen at once, it is left out at the others."""
    if isinstance(reducer, PerToken):
        return kind not in WITHOUT_TOKENS
    return kind in OF_WHOLE_NUMBERS or not isinstance(reducer, Counts)


@dataclass(frozen=True, slots=True)
class SiteWatch:
    """Some sites, and what is kept of them.

    Example:
        >>> watch = SiteWatch.parse("layer.out & layer in 0..1 | stats; norm | train; every 5")
        >>> [str(reducer) for reducer in watch.reducers], watch.every
        (['stats', 'norm'], 5)
    """

    text: str
    sites: Selector
    reducers: tuple[Reducer, ...]
    phases: frozenset[str]
    every: int = 1
    """Distance of the steps that are looked at: those whose number divides by it."""
    with_recomputed: bool = False
    """True where tensors that a backward pass computes once more are shown too, apart from the first time."""

    @classmethod
    def parse(cls, text: str) -> SiteWatch:
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
        selector = Selector.parse(sites)
        for reducer in reducers:
            if not any(applies(reducer, kind) for kind in selector.kinds()):
                what = "tokens, which only sites of tokens have" if isinstance(reducer, PerToken) else "whole numbers"
                raise UserError(f"watch {text[:200]!r}: {reducer.name} is of {what}; choose other sites or reducers")
        return cls(" ".join(text.split()), selector, reducers, phases, every, with_recomputed)

    def takes(self, kind: SiteKind, layer: int | None, direction: Direction, *, phase: str, step: int) -> bool:
        """Return whether this site is looked at."""
        return self.is_due(phase, step) and self.sites.takes(kind, layer, direction)

    def is_due(self, phase: str, step: int) -> bool:
        """Return whether a site is looked at in this phase of this step."""
        return phase in self.phases and step % self.every == 0


@dataclass(frozen=True, slots=True)
class WatchPlan:
    """The watches of a job."""

    watches: tuple[SiteWatch, ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str]) -> WatchPlan:
        """Raises:
        UserError: names the watch that cannot be read.
        """
        texts = list(texts)
        if len(texts) > MAX_WATCHES:
            raise UserError(f"expected at most {MAX_WATCHES} watches, got {len(texts)}")
        return cls(tuple(SiteWatch.parse(text) for text in texts))

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(watch.text for watch in self.watches)

    @property
    def digest(self) -> str:
        return blake2b("\n".join(self.texts).encode(), digest_size=8).hexdigest()

    def is_due(self, phase: str, step: int) -> bool:
        """Return whether a site is looked at in this phase of this step."""
        return any(watch.is_due(phase, step) for watch in self.watches)

    def looks_at(self, kind: SiteKind, layer: int | None, direction: Direction, *, phase: str, step: int) -> bool:
        """Return whether something is kept of this site or, for parameters, of any parameter."""
        return any(
            watch.is_due(phase, step)
            and (kind in watch.sites.kinds() if kind in OF_PARAMETERS else watch.sites.takes(kind, layer, direction))
            for watch in self.watches
        )

    def reducers_of_parameter(self, kind: SiteKind, name: str, *, phase: str, step: int) -> tuple[Reducer, ...]:
        watches = (watch for watch in self.watches if watch.is_due(phase, step))
        return _reducers(kind, (watch for watch in watches if watch.sites.takes_parameter(name, kind)))

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
        """Return the reducers of this site, each once."""
        watches = (watch for watch in self.watches if (watch.with_recomputed or not recomputed))
        found = (watch for watch in watches if watch.takes(kind, layer, direction, phase=phase, step=step))
        return _reducers(kind, found)


def _reducers(kind: SiteKind, watches: Iterable[SiteWatch]) -> tuple[Reducer, ...]:
    return tuple(dict.fromkeys(each for watch in watches for each in watch.reducers if applies(each, kind)))


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Classical:
    """One classical switch, a name for sites that older tensor tracers use."""

    switch: str
    """Its name in a recipe."""
    flag: str
    """Its public name, in messages of the compatibility endpoint."""
    update_type: int
    sites: str
    """Sites as a `SiteWatch` takes them."""


CLASSICAL = (
    Classical(switch="qkv_mat_mul", flag="QKV_mat_mul", update_type=1, sites="attn.q, attn.k, attn.v"),
    Classical(switch="context_layer_mat_mul", flag="ContextLayer_mat_mul", update_type=3, sites="attn.context"),
    Classical(switch="mlp1_mat_mul", flag="MLP1_mat_mul", update_type=4, sites="mlp.gate, mlp.up"),
    Classical(switch="mlp2_mat_mul", flag="MLP2_mat_mul", update_type=5, sites="mlp.out"),
    Classical(switch="attention_output_mat_mul", flag="AttentionOutput_mat_mul", update_type=6, sites="attn.out"),
    Classical(switch="hidden_states", flag="HiddenStates", update_type=7, sites="layer.out"),
)

BY_FLAG: Mapping[str, Classical] = {each.flag: each for each in CLASSICAL}
