"""The stream of prompts of several sources: each source has its share of every prefix, to less than one prompt.

Called by the trainer in place of `PromptSampler`, with the same meaning of ordinals. Invariant: which prompt has which
ordinal depends on the seed, and on the names, sizes and shares of the sources alone; with dynamic sampling also on what
was missing of each in earlier rounds, and then the shares are those of the groups that are trained.

The order of sources is the one of Tijdeman, The chairman assignment problem (Discrete Mathematics 32, 1980): of the
sources that are at least 1 / (2n - 2) behind their share the one takes the turn that would be late first, and no source
is ever more than 1 - 1 / (2n - 2) away from it. Shares may change on the way.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from nemo_rl.data.sampler import PromptStream, SampledPrompt, refuse_curriculum
from nemo_rl.errors import CheckpointError, DatasetError

__all__ = ["MixedSource", "Phase", "PromptMixture"]

ROUNDING = 1e-9
"""Error of a sum of shares, in prompts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedSource:
    """One source of a mixture."""

    name: str
    first: int
    """Number of its first prompt in the training set; the others follow."""
    num_prompts: int
    max_num_epochs: int | None = None
    """Passes over its prompts, after which the run ends; None never ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Shares from one ordinal of the stream on."""

    first: int
    shares: tuple[float, ...]
    """By source; their sum is 1."""


class PromptMixture(PromptStream):
    """Draws prompts of several sources.

    Args:
        sources: in the order in which the training set holds their prompts.
        phases: in the order of their ordinals, the first one from 0 on.
        seed: the order of a source in its epoch e depends on this, its name and e alone.
        shuffle: False keeps each source's order in every epoch.
        by_tokens: shares are of the tokens that are trained (`trained`), and not of prompts.

    Example:
        >>> sources = [MixedSource(name="a", first=0, num_prompts=2), MixedSource(name="b", first=2, num_prompts=1)]
        >>> mixture = PromptMixture(sources, [Phase(first=0, shares=(0.75, 0.25))], seed=0, shuffle=False)
        >>> [draw.source for draw in mixture.next(4)]
        ['a', 'a', 'b', 'a']
    """

    def __init__(
        self,
        sources: Sequence[MixedSource],
        phases: Sequence[Phase],
        *,
        seed: int,
        shuffle: bool = True,
        by_tokens: bool = False,
    ) -> None:
        empty = [source.name for source in sources if not source.num_prompts]
        if empty or not sources:
            raise DatasetError(f"training prompts: no prompt in {', '.join(empty) or 'any source'}; check data.train")
        self._sources, self._phases = tuple(sources), tuple(phases)
        self._seed, self._shuffle, self._by_tokens = seed, shuffle, by_tokens
        self._tokens, self._trained = [0] * len(self._sources), [0] * len(self._sources)
        """Tokens and prompts of each source that were trained."""
        self._position, self._batch_size = 0, 1
        self._turns = _Turns(self._phases)
        self._rounds: list[tuple[int, ...]] = []
        """Prompts of each source of the rounds that `next_for` has drawn; none where turns say who is drawn."""
        self._of_rounds: list[int] = []
        """Source of each ordinal of these rounds."""
        self._places: list[int] = []
        """Of each ordinal, how many its source had before."""
        self._drawn = [0] * len(self._sources)
        """Prompts of each source in `_places`."""
        self._orders: dict[int, tuple[int, list[int]]] = {}
        """Number of a source -> its last epoch that was asked for, and the order of that one."""

    @property
    def is_exhausted(self) -> bool:
        """Return True when a source that ends has fewer prompts left than the last draw would take."""
        return not self.has(self._batch_size)

    def has(self, count: int) -> bool:
        """Return whether `next` would give so many."""
        return not self._short_of(count)

    def next(self, count: int) -> list[SampledPrompt]:
        """Return the next `count` prompts.

        Raises:
            DatasetError: a source that ends has too few left.
        """
        short = self._short_of(count)
        if short:
            raise DatasetError(
                f"training prompts: {' and '.join(short)} ends before {count} more prompts are drawn; raise "
                "max_num_epochs of that source, or lower grpo.max_num_steps"
            )
        self._batch_size = count
        if self._by_tokens and len(self._of_rounds) == self._position:
            self._add_round(self._counts_by_tokens(self._position, count))
        drawn = [self.draw(ordinal) for ordinal in range(self._position, self._position + count)]
        self._position += count
        return drawn

    @property
    def ordinal(self) -> int:
        return self._position

    def position_of(self, ordinal: int) -> dict[str, int]:
        """Return the entries of `state_dict` with which the next draw has this ordinal."""
        return {"position": ordinal}

    def draw(self, ordinal: int) -> SampledPrompt:
        """Return the draw at any place of the stream."""
        self._place(ordinal + 1)
        number = self._sources_drawn[ordinal]
        source = self._sources[number]
        epoch, index = divmod(self._places[ordinal], source.num_prompts)
        return SampledPrompt(ordinal, source.first + self._order(number, epoch)[index], source=source.name)

    def wanted(self, first: int, count: int) -> dict[str, int]:
        if self._by_tokens:
            found = dict(enumerate(self._counts_by_tokens(first, count)))
        else:
            self._turns.make(first + count)
            found = Counter(self._turns.sources[first : first + count])
        return {source.name: found[number] for number, source in enumerate(self._sources)}

    def trained(self, tokens: Mapping[str, int], prompts: Mapping[str, int]) -> None:
        for number, source in enumerate(self._sources):
            self._tokens[number] += tokens.get(source.name, 0)
            self._trained[number] += prompts.get(source.name, 0)

    def _counts_by_tokens(self, first: int, count: int) -> list[int]:
        """Return the prompts of each source that bring the trained tokens nearest to their shares, as long as prompts
        are on average."""
        shares = _shares_at(self._phases, first)
        mean = sum(self._tokens) / max(1, sum(self._trained)) or 1.0
        sizes = [
            tokens / prompts if tokens else mean for tokens, prompts in zip(self._tokens, self._trained, strict=True)
        ]
        expected, counts = [float(tokens) for tokens in self._tokens], [0] * len(shares)
        for _ in range(count):
            total = sum(expected)
            behind = [share * total - own for share, own in zip(shares, expected, strict=True)]
            number = max((each for each in range(len(shares)) if shares[each]), key=behind.__getitem__)
            counts[number] += 1
            expected[number] += sizes[number]
        return counts

    def next_for(self, missing: Mapping[str, int], count: int) -> list[SampledPrompt]:
        """Return the next `count` prompts, of each source in proportion to what is missing of it."""
        lacking = [missing.get(source.name, 0) for source in self._sources]
        ends = [count * each / sum(lacking) for each in accumulate(lacking)]
        whole = [0, *(math.floor(end + 0.5) for end in ends)]
        assert len(self._of_rounds) == self._position, "a stream is of rounds from its start on"
        self._add_round([end - begin for begin, end in pairwise(whole)])
        return self.next(count)

    def _add_round(self, counts: Sequence[int]) -> None:
        self._rounds.append(tuple(counts))
        self._of_rounds += [number for number, count in enumerate(counts) for _ in range(count)]

    @property
    def _sources_drawn(self) -> Sequence[int]:
        return self._of_rounds if self._rounds else self._turns.sources

    def _place(self, end: int) -> None:
        """Give ordinals below `end` their places."""
        if not self._rounds:
            self._turns.make(end)
        for number in self._sources_drawn[len(self._places) : end]:
            self._places.append(self._drawn[number])
            self._drawn[number] += 1

    def state_dict(self) -> dict[str, object]:
        """Return the position of the next draw, and the meaning of that position."""
        names = [source.name for source in self._sources]
        return {
            "position": self._position,
            "batch_size": self._batch_size,
            "sources": {source.name: source.num_prompts for source in self._sources},
            "phases": [[each.first, dict(zip(names, each.shares, strict=True))] for each in self._phases],
            "seed": self._seed,
            "shuffle": self._shuffle,
            "rounds": [list(counts) for counts in self._rounds],
            "by_tokens": self._by_tokens,
            "trained": [list(self._tokens), list(self._trained)],
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            CheckpointError: the state belongs to other sources, seed or order, or to other shares before its position.
        """
        refuse_curriculum(state)
        mine = self.state_dict()
        position, batch_size, phases = state.get("position"), state.get("batch_size"), state.get("phases")
        if not (isinstance(position, int) and isinstance(batch_size, int) and isinstance(phases, list)):
            raise CheckpointError(
                "data position: the checkpoint is of a run with one source of prompts, and data.train has "
                f"{', '.join(source.name for source in self._sources)}; start afresh with checkpointing.resume=false"
            )
        rounds = state.get("rounds", [])
        trained = state.get("trained")
        if not isinstance(rounds, list) or not isinstance(trained, list):
            raise CheckpointError(
                f"data position: expected lists of rounds and of what was trained, got {dict(state)!r}"
            )
        found = {**state, "phases": _begun(phases, position)}
        mine = {**mine, "phases": _begun(mine["phases"], position)}
        for name, key in (
            ("sources", "data.train"),
            ("seed", "grpo.seed"),
            ("shuffle", "data.shuffle"),
            ("by_tokens", "data.mixture.unit"),
        ):
            if found.get(name) != mine[name]:
                raise CheckpointError(
                    f"data position: {name}: the checkpoint has {found.get(name)!r}, this run {mine[name]!r}; resume "
                    f"with the same {key}, or start afresh with checkpointing.resume=false"
                )
        if found["phases"] != mine["phases"]:
            raise CheckpointError(
                f"data position: shares of the sources up to prompt {position}: the checkpoint has "
                f"{found['phases']!r}, this run {mine['phases']!r}; keep the weights that it had, and change them from "
                "a later step on with data.train.NAME.schedule"
            )
        self._tokens, self._trained = (list(each) for each in trained)
        self._rounds, self._of_rounds = [], []
        for counts in rounds:
            self._add_round(counts)
        self._position, self._batch_size = position, batch_size

    def _short_of(self, count: int) -> list[str]:
        """Return the sources that end before so many more prompts."""
        if all(source.max_num_epochs is None for source in self._sources):
            return []
        self._turns.make(self._position + count)
        taken = Counter(self._turns.sources[: self._position + count])
        return [
            f"data.train.{source.name}"
            for number, source in enumerate(self._sources)
            if source.max_num_epochs is not None and taken[number] > source.max_num_epochs * source.num_prompts
        ]

    def _order(self, number: int, epoch: int) -> list[int]:
        known = self._orders.get(number)
        if known is None or known[0] != epoch:
            source = self._sources[number]
            order = list(range(source.num_prompts))
            if self._shuffle:
                random.Random(f"{self._seed}:{source.name}:{epoch}").shuffle(order)
            self._orders[number] = known = (epoch, order)
        return known[1]


def _shares_at(phases: Sequence[Phase], ordinal: int) -> tuple[float, ...]:
    return phases[bisect_right(phases, ordinal, key=lambda each: each.first) - 1].shares


def _begun(phases: object, position: int) -> list[object]:
    """Return the phases that have begun before a position; a stored one may be malformed."""
    assert isinstance(phases, list)
    found = [list(each) if isinstance(each, list | tuple) else [0, each] for each in phases]
    return [each for number, each in enumerate(found) if not number or each[0] < position]


class _Turns:
    """Which source has which turn; made as far as it is asked for."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        self._phases = phases
        self._num_sources = len(phases[0].shares)
        self.sources: list[int] = []
        """Source of each turn."""
        self._counts = [0] * self._num_sources
        self._targets = [0.0] * self._num_sources
        """Turns that each source should have had."""

    def make(self, end: int) -> None:
        """Make so many turns."""
        while len(self.sources) < end:
            number = self._next(len(self.sources))
            self.sources.append(number)
            self._counts[number] += 1

    def _next(self, ordinal: int) -> int:
        """Choose the source of the next ordinal."""
        phase = bisect_right(self._phases, ordinal, key=lambda each: each.first) - 1
        for number, share in enumerate(self._phases[phase].shares):
            self._targets[number] += share
        if self._num_sources == 1:
            return 0
        least = 1.0 / (2 * self._num_sources - 2)
        behind = [target - count for target, count in zip(self._targets, self._counts, strict=True)]
        ready = [number for number, each in enumerate(behind) if each >= least - ROUNDING]
        return min(ready, key=lambda number: self._deadline(number, 1.0 - least - behind[number], ordinal, phase))

    def _deadline(self, number: int, missing: float, ordinal: int, phase: int) -> float:
        """Return the ordinal, as a real number, up to which a source has come `missing` further behind."""
        for place in range(phase, len(self._phases)):
            share = self._phases[place].shares[number]
            last = place + 1 == len(self._phases)
            room = float("inf") if last else float(self._phases[place + 1].first - 1 - ordinal)
            needed = missing / share if share > 0 else float("inf")
            if last or needed <= room:
                return ordinal + needed
            missing, ordinal = missing - share * room, ordinal + int(room)
        raise AssertionError("the last phase has no end")
