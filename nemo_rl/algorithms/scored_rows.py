"""`ScoredRows`: advantages and weights of all rows of a step, and why a row has none.

Made by `score_rows`, changed by the stage that measures tokens. Invariant: numbers of the same rows in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from nemo_rl.algorithms.advantage_estimator import GroupStats

__all__ = ["CUT", "EQUAL", "LEFT_OUT", "TOO_FAR", "VOID", "ScoredRows"]

LEFT_OUT = "conversation was not scored (experience.conversation.endings)"
VOID = "turn without text and without a call (experience.conversation.drop_void_turns)"
EQUAL = "equal rewards in its group"
CUT = "truncated response (grpo.overlong_filtering)"
TOO_FAR = "log-probability error is above grpo.seq_logprob_error_threshold"
"""The reasons why a row has no weight in the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredRows:
    """Advantages and weights of all rows of a step."""

    stats: GroupStats
    advantages: torch.Tensor
    """`[N]` float32."""
    sample_mask: torch.Tensor
    """`[N]` float32, the weight of each row in the loss; 0 leaves it out."""
    is_trained_group: torch.Tensor
    """`[N]` bool: the row's group is not left out for its equal rewards."""
    had_weight: torch.Tensor
    """`[N]` bool: the row had a weight before its log-probabilities were looked at."""
    is_void: torch.Tensor | None = None
    """`[N]` bool: a void turn takes the row's weight; None as below."""
    is_scored: torch.Tensor | None = None
    """`[N]` bool: the row's conversation counts; None where rows are no conversations."""
    conversations: torch.Tensor | None = None
    """`[N]` int64: number of the row's conversation in the step; None as above."""

    def why_no_weight(self, row: int) -> str | None:
        """Return why a row has no part in the loss; None for one that has."""
        if self.sample_mask[row] > 0:
            return None
        if self.is_scored is not None and not self.is_scored[row]:
            return LEFT_OUT
        if not self.is_trained_group[row]:
            return EQUAL
        if self.is_void is not None and self.is_void[row]:
            return VOID
        return TOO_FAR if self.had_weight[row] else CUT

    def why_no_update(self) -> str:
        """Return why a step without a weighted row has no update."""
        reasons = dict.fromkeys(why for row in range(len(self.sample_mask)) if (why := self.why_no_weight(row)))
        return (
            "every group has equal rewards" if set(reasons) == {EQUAL} else f"no row has a weight: {', '.join(reasons)}"
        )

    def select(self, rows: Sequence[int]) -> ScoredRows:
        """The same numbers of `rows`, in that order."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        return ScoredRows(
            stats=self.stats.select(rows),
            advantages=self.advantages[index],
            sample_mask=self.sample_mask[index],
            is_trained_group=self.is_trained_group[index],
            had_weight=self.had_weight[index],
            is_void=None if self.is_void is None else self.is_void[index],
            is_scored=None if self.is_scored is None else self.is_scored[index],
            conversations=None if self.conversations is None else self.conversations[index],
        )

    def concat(self, *others: ScoredRows) -> ScoredRows:
        """Rows of this one, then those of the others, which have other groups; none are conversations."""
        parts = (self, *others)
        return ScoredRows(
            stats=self.stats.concat(*(other.stats for other in others)),
            advantages=torch.cat([part.advantages for part in parts]),
            sample_mask=torch.cat([part.sample_mask for part in parts]),
            is_trained_group=torch.cat([part.is_trained_group for part in parts]),
            had_weight=torch.cat([part.had_weight for part in parts]),
        )

    def with_advantages(self, rows: Sequence[int], advantages: torch.Tensor) -> ScoredRows:
        index = torch.as_tensor(rows, dtype=torch.int64)
        return replace(self, advantages=self.advantages.index_copy(0, index, advantages.float()))

    def with_weights(self, rows: Sequence[int], weights: torch.Tensor) -> ScoredRows:
        index = torch.as_tensor(rows, dtype=torch.int64)
        return replace(self, sample_mask=self.sample_mask.index_copy(0, index, weights))
