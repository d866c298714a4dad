"""Chooses among the prompts of a stream by how often they were solved so far.

Called by the trainer between a stream of candidates and the source of batches. A candidate is a draw of the stream
without a curriculum; each rule gives it a chance, and a coin that depends on the seed and its place in that stream
alone decides whether it is drawn. Invariant: which prompt has which ordinal is a function of the candidates and of the
groups that were noted before it was drawn; what was drawn is kept, so an ordinal means the same prompt ever after.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from nemo_rl.config.data import CurriculumConfig, GateConfig, VarianceConfig, WindowConfig
from nemo_rl.config.parts import CURRICULUM_RULES
from nemo_rl.data.sampler import CANDIDATES, PromptStream, SampledPrompt
from nemo_rl.errors import CheckpointError, ConfigError, DatasetError
from nemo_rl.utils.metrics import Max, Mean, Reduction

__all__ = ["CurriculumRule", "CurriculumStream", "PassRateWindow", "RewardVariance", "SeenPrompt", "SourceGates"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenPrompt:
    """A prompt, and the groups that were sampled of it."""

    number: int
    """In the training set."""
    source: str = ""
    """Name of its source; empty where there is one alone."""
    num_groups: int = 0
    rate: float = 0.0
    """Share of its rows that passed, from 0 to 1: the mean of its groups, of which later ones count more."""

    def expected_rate(self, source_rates: Mapping[str, float]) -> float | None:
        """Return its rate; before its first group that of its source, or None where that is not known or says nothing,
        since there is no other source."""
        return self.rate if self.num_groups else source_rates.get(self.source) if self.source else None


class CurriculumRule(ABC):
    """Says how likely a candidate is drawn.

    `data.curriculum.rule` names one of your own, a class or a function that makes one; it is called with
    `data.curriculum.options` as keywords. What it returns may depend on its arguments alone, else a resumed run draws
    other prompts.
    """

    @abstractmethod
    def chance(self, prompt: SeenPrompt, source_rates: Mapping[str, float]) -> float:
        """Return the chance, from 0 to 1, that the candidate is drawn.

        Args:
            source_rates: name -> mean pass rate of the last `data.curriculum.recent_groups` groups, of each source
                that has had so many.
        """


class PassRateWindow(CurriculumRule):
    """Draws prompts that are neither too easy nor too hard."""

    def __init__(self, config: WindowConfig) -> None:
        self._config = config

    def chance(self, prompt: SeenPrompt, source_rates: Mapping[str, float]) -> float:
        rate = prompt.expected_rate(source_rates)
        if rate is None:
            return 1.0
        return {"hard": self._config.hard, "easy": self._config.easy}.get(pool_of(rate, self._config), 1.0)


class RewardVariance(CurriculumRule):
    """Draws prompts in proportion to `4 p (1 - p)`, the variance of passing at rate p over its largest value."""

    def __init__(self, config: VarianceConfig) -> None:
        self._least = config.least

    def chance(self, prompt: SeenPrompt, source_rates: Mapping[str, float]) -> float:
        rate = prompt.expected_rate(source_rates)
        return 1.0 if rate is None else max(self._least, 4 * rate * (1 - rate))


class SourceGates(CurriculumRule):
    """Draws a source only once another one has been solved often enough; a gate that has opened stays open."""

    def __init__(self, gates: Mapping[str, GateConfig]) -> None:
        self._gates = gates
        self.open: set[str] = set()
        """Sources whose gate has opened."""

    def note(self, source_rates: Mapping[str, float]) -> None:
        """Open the gates whose time has come; rates are as in `chance`."""
        self.open |= {name for name, gate in self._gates.items() if source_rates.get(gate.after, -1.0) >= gate.rate}

    def chance(self, prompt: SeenPrompt, source_rates: Mapping[str, float]) -> float:
        return float(prompt.source not in self._gates or prompt.source in self.open)


def pool_of(rate: float, window: WindowConfig) -> str:
    """Return `hard`, `easy` or, between these two, `within`."""
    return "hard" if rate < window.least else "easy" if rate > window.most else "within"


class CurriculumStream(PromptStream):
    """Draws the candidates that the rules let through.

    Args:
        candidates: has no end.
        sources: name and number of prompts of each source, in the order in which the training set holds them.
        seed: of the coins.
    """

    notes_groups = True

    def __init__(
        self, candidates: PromptStream, config: CurriculumConfig, sources: Mapping[str, int], *, seed: int
    ) -> None:
        self._candidates, self._config, self._seed = candidates, config, seed
        self._ends = list(zip(sources, accumulate(sources.values()), strict=True))
        self._gates = SourceGates(config.gates)
        self._rules = _rules(config, self._gates)
        self._window = config.window or WindowConfig()
        self._first = 0
        """Ordinal of the first draw of `_drawn`; those before are of a run without a curriculum."""
        self._drawn: list[int] = []
        """Prompts, by ordinal."""
        self._position = 0
        self._seen: dict[int, SeenPrompt] = {}
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=config.recent_groups) for name in sources}
        """Pass rates of the last groups of each source."""
        self._again: list[int] = []
        """Prompts that are drawn once more, in the order in which they were noted as hard."""
        self._num_looked, self._num_again, self._num_forced = 0, 0, 0
        """Since the last step: candidates that were looked at, draws of `_again`, draws that no rule let through."""
        self._told_at = 0
        """Ordinal of the first draw of these counts."""

    @property
    def is_exhausted(self) -> bool:
        return False

    def has(self, count: int) -> bool:
        """Return True: the candidates have no end."""
        return True

    @property
    def ordinal(self) -> int:
        return self._position

    def next(self, count: int) -> list[SampledPrompt]:
        """Return the next `count` prompts: those that were drawn before a resume, then others."""
        end = self._position + count
        while self._first + len(self._drawn) < end:
            self._drawn.append(self._choose(self._first + len(self._drawn)))
        drawn = [self.draw(ordinal) for ordinal in range(self._position, end)]
        self._position = end
        return drawn

    def draw(self, ordinal: int) -> SampledPrompt:
        """Return the draw at a place of the stream that was drawn before.

        Raises:
            DatasetError: it was not.
        """
        if ordinal < self._first:
            return self._candidates.draw(ordinal)
        if ordinal >= self._first + len(self._drawn):
            raise DatasetError(f"data.curriculum: prompt {ordinal} of the stream is not chosen yet")
        prompt = self._drawn[ordinal - self._first]
        return SampledPrompt(ordinal, prompt, source=self._source_of(prompt))

    def position_of(self, ordinal: int) -> dict[str, int]:
        """Return the entries of `state_dict` with which the next draw has this ordinal."""
        return {"position": ordinal}

    def note(self, draw: SampledPrompt, rewards: Sequence[float]) -> None:
        """Note the rewards of a group; of none where it was not scored."""
        if not len(rewards):
            return
        rate = sum(reward >= self._config.passed_at for reward in rewards) / len(rewards)
        before = self._seen.get(draw.prompt)
        smoothed = rate if before is None else rate + self._config.smoothing * (before.rate - rate)
        num_groups = 1 if before is None else before.num_groups + 1
        seen = SeenPrompt(number=draw.prompt, source=draw.source, num_groups=num_groups, rate=smoothed)
        self._seen[draw.prompt] = seen
        self._recent[draw.source].append(rate)
        self._gates.note(self._source_rates())
        again = self._config.again
        if again is not None and smoothed < again.below and draw.prompt not in self._again:
            self._again.append(draw.prompt)

    def metrics(self) -> dict[str, Reduction]:
        """Return shares of the prompts by pool, and what was drawn since the last call."""
        pools = Counter(pool_of(seen.rate, self._window) for seen in self._seen.values())
        pools["unseen"] = self._num_prompts - len(self._seen)
        found: dict[str, Reduction] = {
            f"curriculum/pool/{name}": Mean(float(pools[name]), float(self._num_prompts))
            for name in ("unseen", "hard", "within", "easy")
        }
        num_drawn = self._first + len(self._drawn) - self._told_at
        if num_drawn:
            found["curriculum/admitted_share"] = Mean(float(num_drawn - self._num_again), float(self._num_looked))
            found["curriculum/again_share"] = Mean(float(self._num_again), float(num_drawn))
            found["curriculum/forced_share"] = Mean(float(self._num_forced), float(num_drawn))
        for name, rates in self._recent.items():
            if rates:
                found[f"curriculum/pass_rate{name and f'/{name}'}"] = Mean(sum(rates), float(len(rates)))
        for name in self._config.gates:
            found[f"curriculum/open/{name}"] = Max(float(name in self._gates.open))
        self._num_looked = self._num_again = self._num_forced = 0
        self._told_at = self._first + len(self._drawn)
        return found

    def state_dict(self) -> dict[str, object]:
        """Return what was drawn and seen, and the position of the next draw."""
        return {
            "position": self._position,
            CANDIDATES: self._candidates.state_dict(),
            "first": self._first,
            "drawn": list(self._drawn),
            "seen": [[seen.number, seen.num_groups, seen.rate] for seen in self._seen.values()],
            "recent": {name: list(rates) for name, rates in self._recent.items()},
            "again": list(self._again),
            "open": sorted(self._gates.open),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue where `state_dict` was taken, or begin a curriculum where a run without one has come to."""
        if CANDIDATES not in state:
            self._candidates.load_state_dict(state)
            self._first = self._position = self._told_at = self._candidates.ordinal
            return
        try:
            self._load(state)
        except (KeyError, TypeError, ValueError) as problem:
            raise CheckpointError(f"data position: expected the state of a curriculum, got {problem!r}") from problem

    def _load(self, state: Mapping[str, object]) -> None:
        candidates, recent = _mapping(state[CANDIDATES]), _mapping(state["recent"])
        self._candidates.load_state_dict(candidates)
        self._position, self._first = int(str(state["position"])), int(str(state["first"]))
        self._drawn, self._again = _numbers(state["drawn"]), _numbers(state["again"])
        rows = state["seen"]
        if not isinstance(rows, list):
            raise TypeError(rows)
        self._seen = {
            number: SeenPrompt(number=number, source=self._source_of(number), num_groups=num_groups, rate=rate)
            for number, num_groups, rate in rows
        }
        for name, rates in self._recent.items():
            rates.clear()
            rates.extend(map(float, recent[name]))  # type: ignore[call-overload]
        self._gates.open.update(map(str, state["open"]))  # type: ignore[call-overload]
        self._told_at = self._first + len(self._drawn)

    def _choose(self, ordinal: int) -> int:
        """Return the prompt that is drawn next."""
        again = self._config.again
        if (
            again is not None
            and self._again
            and math.floor((ordinal + 1) * again.share) > math.floor(ordinal * again.share)
        ):
            self._num_again += 1
            return self._again.pop(0)
        rates, best, best_chance = self._source_rates(), -1, -1.0
        # A pass over the candidates in which none is drawn would be followed by another one like it.
        for _ in range(self._num_prompts):
            [candidate] = self._candidates.next(1)
            self._num_looked += 1
            chance = self._chance(candidate, rates)
            if chance >= 1.0 or random.Random(f"{self._seed}:curriculum:{candidate.ordinal}").random() < chance:
                return candidate.prompt
            if chance > best_chance:
                best, best_chance = candidate.prompt, chance
        self._num_forced += 1
        return best

    def _chance(self, candidate: SampledPrompt, rates: Mapping[str, float]) -> float:
        seen = self._seen.get(candidate.prompt) or SeenPrompt(number=candidate.prompt, source=candidate.source)
        chance = math.prod(rule.chance(seen, rates) for rule in self._rules)
        if not 0.0 <= chance <= 1.0:
            raise ConfigError(f"data.curriculum.rule: expected a chance from 0 to 1, got {chance!r} for {seen}")
        return chance

    def _source_rates(self) -> dict[str, float]:
        return {name: sum(rates) / len(rates) for name, rates in self._recent.items() if len(rates) == rates.maxlen}

    @property
    def _num_prompts(self) -> int:
        return self._ends[-1][1]

    def _source_of(self, prompt: int) -> str:
        return next(name for name, end in self._ends if prompt < end)


def _rules(config: CurriculumConfig, gates: SourceGates) -> list[CurriculumRule]:
    rules: list[CurriculumRule] = [gates] if config.gates else []
    if config.window is not None:
        rules.append(PassRateWindow(config.window))
    if config.variance is not None:
        rules.append(RewardVariance(config.variance))
    if config.rule is not None:
        rules.append(_own_rule(config, config.rule))
    return rules


def _own_rule(config: CurriculumConfig, name: str) -> CurriculumRule:
    key = "data.curriculum.rule"
    made = CURRICULUM_RULES.load(name, key=key)
    try:
        rule = made(**config.options)
    except Exception as error:
        # Code of the user's may fail in any way.
        given = dict(config.options)
        raise ConfigError(
            f"{key}: {name} with data.curriculum.options {given!r} raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(rule, CurriculumRule):
        raise ConfigError(f"{key}: expected {name} to make a CurriculumRule, got {type(rule).__name__}")
    return rule


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise TypeError(value)
    return value


def _numbers(value: object) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
        raise TypeError(value)
    return value
