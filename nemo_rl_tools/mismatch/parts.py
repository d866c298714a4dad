"""`split`: the KL of a step in parts, one change of the setting after another, from the trainer's to the engine's.

    split
      |- find_trainer     the setting that gives the trainer's own log-probabilities; its rest is batching
      |- _best            greedy: of all changes the one that removes most, what the run states before what it does not
      `- what is left     is the engine's: weights or computation

The order decides how much of a common part each cause gets, so the largest comes first: a cause that is alone is named
alone. Invariant: a part is the KL before a change less that after it, so that parts add up to the total; the part of
batching may be negative, for that change is always the first.

With d = log p_trainer - log p_rollout of a token that the rollout has sampled, `k3` estimates KL(rollout || trainer).
Shapes: M tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from nemo_rl.models.head.logprobs import Sampling, k3
from nemo_rl_tools.mismatch.scorer import Scorer
from nemo_rl_tools.mismatch.setting import (
    Cause,
    ScoreSetting,
    SettingChange,
    Stated,
    refined,
    sampling_changes,
    stated_changes,
    supposed_changes,
)

__all__ = ["MismatchPart", "TokenDivergence", "divergence", "named_first", "split"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenDivergence:
    """The divergence between two sides, over the tokens of all rows."""

    kl: float
    """Mean of k3, nats per token."""
    std_error: float
    """Standard error of the mean; rows are independent of one another, tokens of a row are not."""
    mean_abs: float
    """Mean of |d|."""
    largest: float
    """Largest |d|."""
    num_tokens: int


def divergence(trainer_M: torch.Tensor, rollout_M: torch.Tensor, row_M: torch.Tensor) -> TokenDivergence:
    """Over the tokens that both sides have; NaN is none.

    Args:
        row_M: number of the row of each token.
    """
    log_ratio_M = trainer_M.double() - rollout_M.double()
    is_there_M = ~log_ratio_M.isnan()
    d, row = log_ratio_M[is_there_M], row_M[is_there_M]
    if not len(d):
        return TokenDivergence(kl=0.0, std_error=0.0, mean_abs=0.0, largest=0.0, num_tokens=0)
    each = k3(d)
    mean = float(each.mean())
    # The mean is a ratio of two sums over rows: its error is that of the rows' sums about it.
    of_rows = torch.zeros(int(row.max()) + 1, dtype=torch.float64).index_add_(0, row, each - mean)
    return TokenDivergence(
        kl=mean,
        std_error=float(of_rows.square().sum().sqrt()) / len(d),
        mean_abs=float(d.abs().mean()),
        largest=float(d.abs().max()),
        num_tokens=len(d),
    )


FLOOR = 1e-9
"""Nats per token: differences of 4e-5, tenfold what float32 leaves between two ways to batch."""
NOISE_FACTOR = 10.0
NOISE_ROWS = 32
SMALL_SHARE = 0.02
"""Share of the total that a difference stated by the run must explain to be named."""
FITTED_SHARE = 0.7
"""Share of the rest that a fitted number must explain to be believed. A flat guess is nearer to any."""
FIXED_SHARE = 0.3
"""Share of the rest for suppositions without a number to fit: a wrong one makes both sides differ more."""
SETS_SHARE = 0.5
"""Share of the rest from which on sets that were not recorded are named for what moved them, too."""
DONE_SHARE = 0.1
"""Share of the rest: a change that leaves no more is taken before others are tried."""
WORTH_SHARE = 0.2
"""Share of the rest: another rope base that removes less on a coarse grid is not refined, for each is a pass."""
FITTED_SAMPLINGS: tuple[Cause, ...] = ("temperature", "top_p", "top_k")
FITTED: tuple[Cause, ...] = (*FITTED_SAMPLINGS, "rope")
PRECISE_SHARE = 1e-3
"""Share of the rest: a fit that leaves no more is exact enough."""
MAX_CHANGES = 6
EXACT = "float32"
UNEXPLAINED = "no change explains it"


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchPart:
    """The KL that one change has removed."""

    cause: Cause
    what: str
    kl: float
    share: float
    is_stated: bool
    """Config and tags say so; False: it was found by trying."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchSplit:
    """The KL of one step."""

    total: TokenDivergence
    floor: float
    """The KL below which a difference is noise."""
    trainer: ScoreSetting
    parts: tuple[MismatchPart, ...]
    """Parts in the order of the changes; the last one is the rest."""
    rest_M: torch.Tensor
    """Log-probabilities after all changes."""


def split(scorer: Scorer, stated: Stated, trainer_M: torch.Tensor, *, precision: str) -> MismatchSplit:
    """
    Args:
        trainer_M: log-probabilities of the trainer's own pass.
        precision: of the trainer.
    """
    tokens = scorer.tokens
    total = divergence(trainer_M, tokens.rollout_M, tokens.row_M)
    as_run = replace(stated.setting, lag=None, precision=precision)
    floor = noise_floor(scorer, as_run, stated)
    search = _Search(scorer, stated, total.kl, floor)
    at = find_trainer(scorer, stated, as_run, trainer_M, enough=max(floor, SMALL_SHARE * total.kl))
    parts = [search.part("batching", "the trainer's pass -> rows of one length, unpadded, one process", at, total.kl)]
    trainer, left = at, search.kl(at)
    while left > max(floor, search.rounding(at)) and len(parts) <= MAX_CHANGES:
        change = search.best(at, left)
        if change is None:
            break
        parts.append(search.part(change.cause, change.text, change.setting, left, is_stated=change.is_stated))
        at, left = change.setting, search.kl(change.setting)
    parts.append(search.rest(at, left))
    return MismatchSplit(
        total=total,
        floor=floor,
        trainer=trainer,
        parts=tuple(parts),
        rest_M=scorer.logprobs(at)[0],
    )


def noise_floor(scorer: Scorer, as_run: ScoreSetting, stated: Stated) -> float:
    """Return the KL of one model against itself: rows one by one against rows of one length together.

    Where both sides compute in the same low precision, also what that gives against float32.
    """
    row_M = scorer.tokens.row_M
    together = scorer.logprobs(as_run)[0]
    alone = divergence(scorer.one_by_one(as_run, num_rows=NOISE_ROWS), together, row_M).kl
    floor = max(FLOOR, NOISE_FACTOR * alone)
    if as_run.precision == stated.setting.precision != EXACT:
        exact = scorer.logprobs(replace(as_run, precision=EXACT))[0]
        floor = max(floor, divergence(exact, together, row_M).kl)
    return floor


def find_trainer(
    scorer: Scorer, stated: Stated, as_run: ScoreSetting, trainer_M: torch.Tensor, *, enough: float
) -> ScoreSetting:
    """Find the setting under which the trainer has scored: as the config says, unless its own numbers say otherwise.

    Args:
        enough: KL to the trainer's numbers at which the config is believed.
    """

    def apart(settings: Sequence[ScoreSetting]) -> list[float]:
        scored = scorer.logprobs(*settings)
        return [divergence(one, trainer_M, scorer.tokens.row_M).kl for one in scored]

    at, lowest = as_run, apart([as_run])[0]
    if lowest <= enough:
        return at
    if stated.can_replay:
        other = replace(at, routes="own" if at.routes == "replayed" else "replayed")
        kl = apart([other])[0]
        if kl < DONE_SHARE * lowest:
            at, lowest = other, kl
    if lowest <= enough:
        return at
    plain = [Sampling(), Sampling(temperature=at.sampling.temperature), replace(at.sampling, temperature=1.0)]
    found = _nearest([replace(at, sampling=sampling) for sampling in plain], apart)
    if found[1] < DONE_SHARE * lowest:
        return found[0]
    changes = sampling_changes(at)
    fitted = []
    for cause in FITTED_SAMPLINGS:
        alike = {change.setting: change for change in changes if change.cause == cause}
        best, _ = _nearest(list(alike), apart)
        exact = enough * PRECISE_SHARE
        fitted.append(refined(alike[best], at, lambda tried: apart([one.setting for one in tried]), enough=exact))
    found = _nearest([change.setting for change in fitted], apart)
    return found[0] if found[1] < DONE_SHARE * lowest else at


def _nearest(
    settings: Sequence[ScoreSetting], apart: Callable[[Sequence[ScoreSetting]], Sequence[float]]
) -> tuple[ScoreSetting, float]:
    return min(zip(settings, apart(settings), strict=True), key=lambda pair: pair[1])


def named_first(parts: Sequence[MismatchPart]) -> MismatchPart:
    """Return the cause with the largest part; what it has in several steps counts together."""
    causes = {part.cause: [other for other in parts if other.cause == part.cause] for part in parts}
    largest = max(causes.values(), key=lambda of_cause: sum(part.kl for part in of_cause))
    what = max(largest, key=lambda part: part.kl)
    return replace(what, kl=sum(part.kl for part in largest), share=sum(part.share for part in largest))


class _Search:
    def __init__(self, scorer: Scorer, stated: Stated, total: float, floor: float) -> None:
        self._scorer, self._stated, self._total, self._floor = scorer, stated, total, floor
        self._tried: set[Cause] = set()
        """Supposed and taken: none is taken twice, so the search ends."""

    def kl(self, setting: ScoreSetting) -> float:
        return self._kls([setting])[0]

    def part(
        self, cause: Cause, what: str, after: ScoreSetting, before: float, *, is_stated: bool = True
    ) -> MismatchPart:
        """Return the part of a change to the setting `after`."""
        removed = before - self.kl(after)
        return MismatchPart(cause=cause, what=what, kl=removed, share=self._share(removed), is_stated=is_stated)

    def rest(self, at: ScoreSetting, left: float) -> MismatchPart:
        is_rounding = left <= self.rounding(at)
        return MismatchPart(
            cause="precision" if is_rounding else "engine",
            what=f"the rest is of the size of {at.precision}'s own rounding" if is_rounding else UNEXPLAINED,
            kl=left,
            share=self._share(left),
            is_stated=False,
        )

    def rounding(self, at: ScoreSetting) -> float:
        """Return the KL of a low precision against float32: decoding rounds elsewhere than a pass over whole rows."""
        if at.precision == EXACT:
            return 0.0
        low, exact = self._scorer.logprobs(at, replace(at, precision=EXACT))
        return divergence(exact, low, self._scorer.tokens.row_M).kl

    def best(self, at: ScoreSetting, left: float) -> SettingChange | None:
        """Return the change that removes most; None where none removes enough."""
        stated = self._stated
        changes = stated_changes(at, stated, is_lagging=self._scorer.is_lagging)
        sets = self._least([change for change in changes if change.cause == "sets"])
        if sets is not None and left - sets[1] >= max(SETS_SHARE * left, self._floor):
            return sets[0]
        said = self._least(changes)
        if said is not None and said[1] <= DONE_SHARE * left:
            return said[0]
        supposed = supposed_changes(
            at, stated, has_weights=self._scorer.has_weights, has_rope=self._scorer.has_rope(at)
        )
        supposed = [change for change in supposed if change.cause not in self._tried]
        tried = [self._least([change for change in supposed if change.cause not in FITTED])]
        if tried[0] is None or tried[0][1] > DONE_SHARE * left:
            tried += self._fits(at, left, [change for change in supposed if change.cause in FITTED])
        believed = [
            (change, after)
            for change, after in filter(None, tried)
            if left - after >= (FITTED_SHARE if change.cause in FITTED else FIXED_SHARE) * left
        ]
        return self._chosen(said, min(believed, key=lambda pair: pair[1], default=None), left)

    def _chosen(
        self, said: tuple[SettingChange, float] | None, supposed: tuple[SettingChange, float] | None, left: float
    ) -> SettingChange | None:
        if said is not None and left - said[1] < max(SMALL_SHARE * self._total, self._floor):
            said = None
        # A supposition must explain clearly more than what the run says itself.
        if said is not None and (supposed is None or left - supposed[1] <= 2 * (left - said[1])):
            return said[0]
        if supposed is None:
            return None
        self._tried.add(supposed[0].cause)
        return supposed[0]

    def _fits(
        self, at: ScoreSetting, left: float, changes: Sequence[SettingChange]
    ) -> list[tuple[SettingChange, float] | None]:
        # Samplings share their forward passes, so they are scored in one call.
        self._kls([change.setting for change in changes if change.setting.passes == at.passes])
        found = []
        for cause in FITTED:
            found.append(self._fit(at, left, [change for change in changes if change.cause == cause]))
            if found[-1] is not None and found[-1][1] <= DONE_SHARE * left:
                break
        return found

    def _fit(
        self, at: ScoreSetting, left: float, changes: Sequence[SettingChange]
    ) -> tuple[SettingChange, float] | None:
        found = self._least(changes)
        if found is None or (found[0].cause == "rope" and found[1] > (1 - WORTH_SHARE) * left):
            return found
        enough = max(self._floor, PRECISE_SHARE * left)
        best = refined(found[0], at, lambda tried: self._kls([one.setting for one in tried]), enough=enough)
        return best, self.kl(best.setting)

    def _least(self, changes: Sequence[SettingChange]) -> tuple[SettingChange, float] | None:
        kls = self._kls([change.setting for change in changes])
        return min(zip(changes, kls, strict=True), key=lambda pair: pair[1], default=None)

    def _kls(self, settings: Sequence[ScoreSetting]) -> list[float]:
        tokens = self._scorer.tokens
        scored = self._scorer.logprobs(*settings)
        return [divergence(one, tokens.rollout_M, tokens.row_M).kl for one in scored]

    def _share(self, kl: float) -> float:
        return kl / self._total if self._total else 0.0
