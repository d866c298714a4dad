"""Estimators of advantages per turn of a conversation; `grpo.adv_estimator.name` names one.

    OutcomePlusTurn      A = A_row + lambda A_turn                     (MT-GRPO, arXiv 2505.11821)
    DiscountedReturn     the discounted return of a turn, normalised over all turns of the group (Kevin, 2507.11948)

Called by the workers that have the rows of whole groups. The columns `turns` and `turn_rewards` say where
the turns of a row are, their numbers in the conversation, and their rewards. Shapes: N rows, K most turns of a row, T
tokens, U turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nemo_rl.algorithms.advantage_estimator import group_statistics
from nemo_rl.algorithms.estimators import STD_EPSILON, estimate_advantages
from nemo_rl.algorithms.token_work import TokenEstimator, TokenRows

__all__ = ["DiscountedReturn", "OutcomePlusTurn"]

TURNS, REWARDS = "turns", "turn_rewards"


class OutcomePlusTurn(TokenEstimator):
    """`outcome_plus_turn`: A_t = A_i + lambda (r_ik - mean_k) / (std_k + 1e-4), with k the turn of the token.

    A_i is the advantage of the row by `grpo` and its keys; mean and standard deviation are those of the rewards of the
    turns with the same number in the group, without division where `normalize_rewards` is false. A turn that no other
    row of the group has gets A_i alone.
    """

    reads = (TURNS, REWARDS)

    def __call__(self, rows: TokenRows) -> torch.Tensor:
        turns = _Turns.of(rows)
        rewards_U = turns.reward_U.float()
        cells = list(zip(turns.group_U.tolist(), turns.number_U.tolist(), strict=True))
        stats = group_statistics(rewards_U, cells)
        by_turn_U = estimate_advantages(
            rewards_U, stats, leave_one_out=False, normalize=self.config.normalize_rewards
        ).double()
        weight = self.config.adv_estimator.turn_weight
        return rows.outcome[:, None] + weight * turns.at_tokens(by_turn_U)


class DiscountedReturn(TokenEstimator):
    """`discounted_return`: A_t = (G_ik - mean) / (std + 1e-4), with G_ik = r_ik + gamma G_i(k+1).

    Mean and standard deviation are over all turns of all rows of the group; `normalize_rewards: false` leaves the
    division out.
    """

    reads = (TURNS, REWARDS)

    def __call__(self, rows: TokenRows) -> torch.Tensor:
        turns = _Turns.of(rows)
        returns_U = turns.returns(self.config.adv_estimator.turn_discount)
        stats = group_statistics(returns_U, turns.group_U.tolist())
        centred_U = torch.where(stats.row_is_zero_variance, 0.0, returns_U - stats.mean[stats.row_group])
        if self.config.normalize_rewards:
            centred_U = centred_U / (stats.row_std + STD_EPSILON)
        return turns.at_tokens(centred_U)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Turns:
    """The turns of the rows, each once."""

    group_U: torch.Tensor
    conversation_U: torch.Tensor
    number_U: torch.Tensor
    """`[U]` int64, number of the turn in its conversation."""
    reward_U: torch.Tensor
    """`[U]` float64."""
    turn_NT: torch.Tensor
    """`[N, T]` int64, the turn of a token; U where none was sampled."""

    @classmethod
    def of(cls, rows: TokenRows) -> _Turns:
        spans_NK = rows.columns[TURNS].long()
        # Rows with fewer turns are padded with spans of no token.
        row_U, place_U = (spans_NK[:, :, 1] > 0).nonzero(as_tuple=True)
        start_U, length_U, number_U = spans_NK[row_U, place_U].unbind(-1)
        turn_NT = torch.full(rows.mask.shape, len(row_U), dtype=torch.int64)
        for turn, (row, start, length) in enumerate(
            zip(row_U.tolist(), start_U.tolist(), length_U.tolist(), strict=True)
        ):
            turn_NT[row, start : start + length] = turn
        return cls(
            group_U=rows.groups[row_U],
            conversation_U=rows.conversations[row_U],
            number_U=number_U,
            reward_U=rows.columns[REWARDS][row_U, place_U].double(),
            turn_NT=turn_NT,
        )

    def returns(self, discount: float) -> torch.Tensor:
        """Return `[U]` float64 discounted returns, from each turn to the last one of its conversation."""
        found, later = torch.zeros_like(self.reward_U), dict[int, float]()
        for turn in sorted(range(len(found)), key=lambda turn: -int(self.number_U[turn])):
            conversation = int(self.conversation_U[turn])
            later[conversation] = float(self.reward_U[turn]) + discount * later.get(conversation, 0.0)
            found[turn] = later[conversation]
        return found

    def at_tokens(self, values_U: torch.Tensor) -> torch.Tensor:
        """Return `[N, T]` the value of each token's turn, 0 where none was sampled."""
        return torch.cat([values_U, values_U.new_zeros(1)])[self.turn_NT]
