"""Advantage estimators; `grpo.adv_estimator.name` names one, `nemo_rl.config.parts` says where it is.

    GroupAdvantages        within groups: GRPO (arXiv 2402.03300)
    DrGRPO, LeaveOneOut    the same without division (2503.20783), with the siblings as baseline (RLOO, 2402.14740)
    MaxRL                  by the mean reward of the group
    GDPO                   every component of the reward normalised in its groups (2601.05242)
    ReinforcePlusPlus      over all rows of the step (2501.03262); also with a baseline, and in a form per token
    OptimalTokenBaseline   a baseline per token, on the workers

Row estimators are called by the driver on small per-row vectors, token estimators by the workers. Shapes: N rows,
P groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nemo_rl.algorithms.advantage_estimator import GroupStats, UsesRows, counted_part, group_statistics
from nemo_rl.algorithms.token_work import VARIANCE_EPSILON, TokenEstimator, TokenRows
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.errors import ConfigError
from nemo_rl.experience.payload import SampleStats

__all__ = [
    "GDPO",
    "DiscountedReturn",
    "DrGRPO",
    "GroupAdvantages",
    "LeaveOneOut",
    "MaxRL",
    "OptimalTokenBaseline",
    "OutcomePlusTurn",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "TokenReinforcePlusPlus",
    "estimate_advantages",
    "whiten_over_tokens",
]


STD_EPSILON = 1e-4
"""Added to the standard deviation of a group, as TRL does; others take 1e-6."""
SIBLING_STD_EPSILON = 1e-6
"""Added to the standard deviation of a row's siblings, as NeMo-RL does."""


@dataclass(frozen=True, kw_only=True)
class GroupAdvantages:
    """`grpo`: by the keys `normalize_rewards`, `use_leave_one_out_baseline` and `use_leave_one_out_std`."""

    config: GRPOConfig

    def __call__(self, rewards: torch.Tensor, stats: GroupStats) -> torch.Tensor:
        return estimate_advantages(
            rewards,
            stats,
            leave_one_out=self.config.use_leave_one_out_baseline,
            normalize=self.config.normalize_rewards,
            leave_one_out_std=self.config.use_leave_one_out_std,
        )


@dataclass(frozen=True, kw_only=True)
class DrGRPO:
    """`dr_grpo`: A_i = R_i - mean, without division: no group counts more because its rewards are alike."""

    config: GRPOConfig

    def __call__(self, rewards: torch.Tensor, stats: GroupStats) -> torch.Tensor:
        return estimate_advantages(rewards, stats, leave_one_out=False, normalize=False)


@dataclass(frozen=True, kw_only=True)
class LeaveOneOut:
    """`rloo`: A_i = R_i - mean of its siblings, without division, so that its baseline does not depend on the row."""

    config: GRPOConfig

    def __call__(self, rewards: torch.Tensor, stats: GroupStats) -> torch.Tensor:
        return estimate_advantages(rewards, stats, leave_one_out=True, normalize=False)


def estimate_advantages(
    rewards: torch.Tensor,
    stats: GroupStats,
    *,
    leave_one_out: bool,
    normalize: bool,
    leave_one_out_std: bool = False,
) -> torch.Tensor:
    """`[N]` float32 advantages, exactly 0 in zero-variance groups.

    A_i = R_i - b_i, with b_i the mean of the other rows of the group (leave-one-out, arXiv 2402.14740) or of all its
    rows; divided by (std + 1e-4) when `normalize` is set. A group of one row has no siblings and gets 0.

    With `leave_one_out_std` the divisor is (std of the other rows + 1e-6), and a row whose siblings are all equal is
    not divided.
    """
    group_N = stats.row_group
    advantages_N = rewards.double() - stats.mean[group_N]
    if leave_one_out:
        # R_i - (sum - R_i) / (G - 1) equals G / (G - 1) * (R_i - mean).
        advantages_N = advantages_N * (stats.count / (stats.count - 1).clamp(min=1))[group_N]
    if normalize:
        advantages_N = advantages_N / (
            _sibling_divisor(rewards, stats) if leave_one_out_std else stats.row_std + STD_EPSILON
        )
    advantages_N = torch.where(stats.row_is_zero_variance, 0.0, advantages_N)
    return advantages_N.float()


def _sibling_divisor(rewards: torch.Tensor, stats: GroupStats) -> torch.Tensor:
    """`[N]` float64: unbiased deviation of the other rows of the group, plus epsilon; 1 where they are equal."""
    group_N, rewards_N = stats.row_group, rewards.double()
    count_N = stats.count[group_N]
    # Of G rows with deviations d from their mean, the others' squares sum to sum(d^2) - d_i^2 G / (G - 1).
    squares_N = stats.std[group_N].square() * (count_N - 1)
    deviation_N = rewards_N - stats.mean[group_N]
    squares_N = squares_N - deviation_N.square() * count_N / (count_N - 1).clamp(min=1)
    std_N = (squares_N.clamp(min=0) / (count_N - 2).clamp(min=1)).sqrt()
    return torch.where(_has_equal_siblings(rewards_N, stats), 1.0, std_N + SIBLING_STD_EPSILON)


def _has_equal_siblings(rewards_N: torch.Tensor, stats: GroupStats) -> torch.Tensor:
    """`[N]` bool, by exact equality."""
    group_N, zeros_P = stats.row_group, torch.zeros(len(stats.count), dtype=torch.float64)
    found_N = stats.row_is_zero_variance
    for which in ("amax", "amin"):
        extreme_N = zeros_P.scatter_reduce(0, group_N, rewards_N, which, include_self=False)[group_N]
        is_extreme_N = rewards_N == extreme_N
        num_extreme_P = zeros_P.index_add(0, group_N, is_extreme_N.double())
        found_N = found_N | (~is_extreme_N & (num_extreme_P == stats.count - 1)[group_N])
    return found_N


@dataclass(frozen=True, kw_only=True)
class MaxRL:
    """`maxrl`: A_i = (R_i - mean) / mean, 0 in groups whose mean is not above 0: rare successes count most.

    For rewards that are not negative.

    Example:
        Rewards 1, 0, 0, 0 give 3, -1, -1, -1.
    """

    config: GRPOConfig

    def __call__(self, rewards: torch.Tensor, stats: GroupStats) -> torch.Tensor:
        mean_N = stats.mean[stats.row_group]
        advantages_N = (rewards.double() - mean_N) / torch.where(mean_N > 0, mean_N, 1.0)
        return torch.where((mean_N > 0) & ~stats.row_is_zero_variance, advantages_N, 0.0).float()


@dataclass(frozen=True, kw_only=True)
class GDPO(UsesRows):
    """`gdpo`: S_i = sum over components k of w_k A_ik, A_ik as `grpo` makes it of R_ik; A = (S - mean) / std over rows.

    So two components that would cancel in a sum of rewards keep their signals. Weights are
    `grpo.adv_estimator.component_weights`, 1 where none is named. A row that was not scored counts 0 in all;
    a component that is None has no part in A_ik of its group, and adds nothing to S_i (`env.on_none`).
    The standard deviation is unbiased; equal sums give 0.
    """

    config: GRPOConfig

    def __call__(self, rewards: torch.Tensor, stats: GroupStats, *, rows: SampleStats) -> torch.Tensor:
        """
        Raises:
            ConfigError: the reward has fewer than two components, or a weight is for none of them.
        """
        weights = self._weights(rows)
        sums_N = torch.zeros(len(rewards), dtype=torch.float64)
        for name, weight in weights.items():
            part_N, counts_N = counted_part(rows, name)
            sums_N[counts_N] += weight * self._advantages(part_N[counts_N], stats, counts_N).double()
        if bool((sums_N == sums_N[:1]).all()):
            return torch.zeros(len(rewards))
        return ((sums_N - sums_N.mean()) / sums_N.std()).float()

    def _advantages(self, part: torch.Tensor, stats: GroupStats, counts_N: torch.Tensor) -> torch.Tensor:
        return estimate_advantages(
            part,
            stats.of_some(part, counts_N),
            leave_one_out=self.config.use_leave_one_out_baseline,
            normalize=self.config.normalize_rewards,
            leave_one_out_std=self.config.use_leave_one_out_std,
        )

    def _weights(self, rows: SampleStats) -> dict[str, float]:
        given, names = self.config.adv_estimator.component_weights, sorted(rows.components)
        unknown = sorted(set(given) - set(names))
        if unknown:
            raise ConfigError(f"grpo.adv_estimator.component_weights.{unknown[0]}: the reward has only {names}")
        if len(names) < 2:
            raise ConfigError(
                f"grpo.adv_estimator.name: 'gdpo' needs a reward with at least two components, got {names}; let "
                "env.reward_function return them by name, or set grpo.adv_estimator.name=grpo"
            )
        return {name: given.get(name, 1.0) for name in names}


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(UsesRows):
    """`reinforce_plus_plus`: A_i = whiten(R_i) over all response tokens of the step; groups play no part."""

    config: GRPOConfig

    def __call__(self, rewards: torch.Tensor, stats: GroupStats, *, rows: SampleStats) -> torch.Tensor:
        return whiten_over_tokens(rewards.double(), _lengths(rows)).float()


class TokenReinforcePlusPlus(TokenEstimator):
    """`reinforce_plus_plus` with `loss_fn.use_kl_in_reward`: A_t = whiten(R - beta sum of k1 from t on).

    Example:
        beta 0.1, k1 of three tokens 0.2, -0.1, 0.3 and R 1 give the returns 0.96, 0.98, 0.97.
    """

    whitens = True

    def __call__(self, rows: TokenRows) -> torch.Tensor:
        return rows.returns


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusBaseline(UsesRows):
    """`reinforce_plus_plus_baseline`: the same of R_i - mean of the group."""

    config: GRPOConfig

    def __call__(self, rewards: torch.Tensor, stats: GroupStats, *, rows: SampleStats) -> torch.Tensor:
        centred_N = torch.where(stats.row_is_zero_variance, 0.0, rewards.double() - stats.mean[stats.row_group])
        return whiten_over_tokens(centred_N, _lengths(rows)).float()


def whiten_over_tokens(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """`[N]` float64: (v - mean) / sqrt(variance + 1e-8), each row counted once for each of its tokens.

    The variance is unbiased. Equal values, and a step of one token, give 0.

    Args:
        values: `[N]` float64.
        lengths: `[N]` float64, tokens.

    Example:
        Values 1 and 0 with 1 and 3 tokens give 1.5 and -0.5.
    """
    if bool((values == values[:1]).all()):
        return torch.zeros_like(values)
    num_tokens = lengths.sum()
    centred_N = values - (values * lengths).sum() / num_tokens
    variance = (centred_N.square() * lengths).sum() / (num_tokens - 1).clamp(min=1)
    return centred_N / (variance + VARIANCE_EPSILON).sqrt()


def _lengths(rows: SampleStats) -> torch.Tensor:
    return torch.from_numpy(rows.response_lengths).double()


EPSILON = 1e-8
"""Added to the sum of the weights."""
PREV, SQUARES = "prev_logprobs", "squared_probs"


class OptimalTokenBaseline(TokenEstimator):
    """`optimal_token_baseline`: A_t = G_t - B_t, with G_t the return and B_t its weighted mean over the group.

    The weight of a row at t is W_t, the sum up to t of e = 1 - 2 pi + sum over the vocabulary of pi_v^2: the squared
    norm of the gradient of the logits. B_t = sum of G W / (sum of W + 1e-8) over the rows of the group; where fewer
    than two rows reach t it is 0, so for a row without siblings, and for the end of the longest one. t counts the
    sampled tokens of a row: replies of a conversation count nothing.

    Example:
        Two rows of two tokens, vocabulary 2, R = 1 and 0, pi = 0.5, 0.8 and 0.2, 0.5: W = 0.5, 0.58 and 1.28, 1.78;
        B = 0.2808989, 0.2457627.
    """

    reads = (PREV, SQUARES)

    def __call__(self, rows: TokenRows) -> torch.Tensor:
        # Tokens of replies lie between those of turns: rows are compared at the t-th token that each has sampled.
        order_NT = (~rows.mask).to(torch.int8).argsort(dim=1, stable=True)
        returns_NT, mask_NT = rows.returns.gather(1, order_NT), rows.mask.gather(1, order_NT)
        # Rounding must not make a sum of squares negative.
        energy_NT = (1 - 2 * rows.columns[PREV].exp() + rows.columns[SQUARES]).clamp(min=0).gather(1, order_NT)
        weight_NT = torch.where(mask_NT, energy_NT, 0.0).cumsum(1) * mask_NT
        baseline_NT = _of_group(returns_NT * weight_NT, rows.groups) / (_of_group(weight_NT, rows.groups) + EPSILON)
        baseline_NT = torch.where(_of_group(mask_NT.double(), rows.groups) >= 2, baseline_NT, 0.0)
        found_NT = torch.where(mask_NT, returns_NT - baseline_NT, 0.0)
        return torch.zeros_like(found_NT).scatter(1, order_NT, found_NT)


def _of_group(values_NT: torch.Tensor, groups_N: torch.Tensor) -> torch.Tensor:
    """`[N, T]`: of each row the sum over its group."""
    sums_PT = values_NT.new_zeros(int(groups_N.max()) + 1, values_NT.shape[1])
    return sums_PT.index_add(0, groups_N, values_NT)[groups_N]


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
