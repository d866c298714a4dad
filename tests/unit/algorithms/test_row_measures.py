"""What workers measure of rows: references in plain Python, edges, and that nothing but a row's tokens matters."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch

from nemo_rl.algorithms.grpo import ScoredRows, score_rows, select_train_rows
from nemo_rl.algorithms.token_work import (
    KL,
    LOGPROB_ERROR,
    KlInReward,
    MeasuredStatistics,
    TokenStatistics,
    less_penalties,
    logprob_errors,
    row_sums,
)
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.experience.payload import SampleStats

ERRORS = TokenStatistics(error_threshold=2.0)
IN_REWARD = TokenStatistics(kl=KlInReward(weight=0.1, clamp=0.5))


def batch_of(rows: int = 5, width: int = 9, *, seed: int = 0, padding: int = 0) -> dict[str, torch.Tensor]:
    """Rows of unequal lengths, the last without a response; rubbish in the padding."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([width, *(3 + row % 5 for row in range(rows - 2)), 2])
    columns = torch.arange(width + padding)
    mask = (columns >= 2) & (columns < lengths[:, None])

    def column() -> torch.Tensor:
        values = torch.full((rows, width + padding), float("nan"))
        values[:, :width] = -torch.rand(rows, width, generator=draw)
        return torch.where(columns < lengths[:, None], values, float("nan"))

    return {
        "token_mask": mask,
        "prev_logprobs": column(),
        "generation_logprobs": column(),
        "reference_policy_logprobs": column(),
    }


def tokens(batch: dict[str, torch.Tensor], row: int) -> list[int]:
    return [at for at, kept in enumerate(batch["token_mask"][row].tolist()) if kept]


def test_an_error_is_the_mean_of_the_tokens_ratios_the_larger_way_round() -> None:
    batch = batch_of()
    for row, found in enumerate(ERRORS(batch).numbers[LOGPROB_ERROR].tolist()):
        prev, sampled = batch["prev_logprobs"][row].tolist(), batch["generation_logprobs"][row].tolist()
        ratios = [math.exp(abs(prev[at] - sampled[at])) for at in tokens(batch, row)]
        assert found == pytest.approx(sum(ratios) / len(ratios) if ratios else 1.0, rel=1e-12)
        assert found > 1.0 or not ratios


def test_the_kl_of_a_row_is_the_sum_of_its_tokens_clamped_log_ratios() -> None:
    batch, is_clamped = batch_of(), False
    for row, found in enumerate(IN_REWARD(batch).numbers[KL].tolist()):
        prev, reference = batch["prev_logprobs"][row].tolist(), batch["reference_policy_logprobs"][row].tolist()
        ratios = [prev[at] - reference[at] for at in tokens(batch, row)]
        is_clamped = is_clamped or max(map(abs, ratios), default=0.0) > 0.5
        assert found == pytest.approx(math.fsum(min(max(ratio, -0.5), 0.5) for ratio in ratios), rel=1e-12, abs=1e-12)
    assert is_clamped


def test_tokens_of_replies_count_in_no_measure() -> None:
    batch = batch_of()
    batch["token_mask"][:, 4:6] = False
    every = TokenStatistics(error_threshold=2.0, kl=IN_REWARD.kl)
    numbers = every(batch).numbers
    for row in range(len(batch["token_mask"])):
        at = batch["token_mask"][row]
        compact = {name: column[row][at][None] for name, column in batch.items()}
        for name, found in every(compact).numbers.items():
            assert numbers[name][row].item() == pytest.approx(found.item(), rel=1e-12)


def test_an_infinite_log_ratio_is_clamped_and_equal_infinities_are_none() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    inf = math.inf
    columns = {"prev_logprobs": torch.tensor([[-1.0, -inf, -inf]])}
    columns["reference_policy_logprobs"] = torch.tensor([[-inf, -1.0, -inf]])
    assert KlInReward(weight=1.0, clamp=20.0).k1(columns, mask).tolist() == [[20.0, -20.0, 0.0]]


def test_weight_and_clamp_are_those_of_the_recipe() -> None:
    loss = LossConfig(use_kl_in_reward=True, reference_policy_kl_penalty=0.3, kl_input_clamp_value=4.0)
    assert KlInReward.of(loss) == KlInReward(weight=0.3, clamp=4.0)
    assert KlInReward.of(LossConfig(reference_policy_kl_penalty=0.3)) is None


def test_only_what_a_recipe_needs_is_read() -> None:
    assert ERRORS.input_fields == ("token_mask", "prev_logprobs", "generation_logprobs")
    assert IN_REWARD.input_fields == ("token_mask", "prev_logprobs", "reference_policy_logprobs")
    both = TokenStatistics(error_threshold=2.0, kl=IN_REWARD.kl)
    assert both.input_fields == (*ERRORS.input_fields, "reference_policy_logprobs")
    assert set(both(batch_of()).numbers) == {LOGPROB_ERROR, KL}


def test_a_number_depends_on_its_rows_tokens_alone_to_the_last_bit() -> None:
    narrow, wide = batch_of(rows=40, width=60), batch_of(rows=40, width=60, padding=37)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    for work, name in ((ERRORS, LOGPROB_ERROR), (IN_REWARD, KL)):
        whole = work(narrow).numbers[name]
        assert whole.dtype == torch.float64 and torch.equal(work(wide).numbers[name], whole)
        shuffled = {column: values[order] for column, values in wide.items()}
        assert torch.equal(work(shuffled).numbers[name], whole[order])
        alone = [work({c: v[[row]] for c, v in narrow.items()}).numbers[name] for row in range(40)]
        assert torch.equal(torch.cat(alone), whole)


@pytest.mark.parametrize(
    ("prev", "sampled", "expected"),
    [
        (-1.0, math.nan, 1.0),
        (-math.inf, -math.inf, 1.0),
        (-1.0, -math.inf, math.exp(20)),
        (-math.inf, -1.0, math.exp(20)),
        (-500.0, -1.0, math.exp(20)),
    ],
)
def test_what_is_not_known_is_equal_and_what_is_infinite_is_bounded(prev, sampled, expected):
    mask = torch.tensor([[False, True]])
    found = logprob_errors(torch.tensor([[0.0, prev]]), torch.tensor([[0.0, sampled]]), mask)
    assert found.tolist() == pytest.approx([expected])


def test_rows_above_the_threshold_lose_their_weight_and_others_are_not_counted() -> None:
    errors, weights = torch.tensor([1.0, 2.0, 2.5, 9.0]), torch.tensor([1.0, 0.5, 1.0, 0.0])
    measured = MeasuredStatistics.of(weights, {LOGPROB_ERROR: errors}, threshold=2.0)
    assert measured.is_masked.tolist() == [False, False, True, False]
    assert measured.metrics() == {
        "seq_logprob_error_max": 2.5,
        "seq_logprob_error_mean": pytest.approx(5.5 / 3),
        "seq_logprob_error_masked_rows": 1.0,
        "seq_logprob_error_masked_share": pytest.approx(1 / 3),
    }
    nothing = MeasuredStatistics.of(weights, {}, threshold=None)
    assert not nothing.is_masked.any() and nothing.metrics() == {}
    of_kl = MeasuredStatistics.of(weights, {KL: torch.tensor([1.0, 2.0, 3.0, 99.0])}, threshold=None)
    assert of_kl.metrics() == {"kl_in_reward": 2.0}


def test_sums_leave_out_what_is_not_in_the_mask() -> None:
    values = torch.tensor([[math.nan, 1.0, 2.0], [4.0, math.inf, 0.5]])
    mask = torch.tensor([[False, True, True], [True, False, True]])
    assert row_sums(values, mask).tolist() == [3.0, 4.5]
    assert row_sums(values, torch.zeros_like(mask)).tolist() == [0.0, 0.0]


def groups_of(rewards: list[float], **keys: object) -> tuple[SampleStats, ScoredRows, GRPOConfig]:
    """Groups of three."""
    config = GRPOConfig.model_validate(keys)
    rows = SampleStats(
        rewards=np.asarray(rewards, dtype=np.float32),
        truncated=np.asarray([row == 4 for row in range(len(rewards))]),
        response_lengths=np.arange(1, len(rewards) + 1, dtype=np.int32),
    )
    return rows, score_rows(rows, [f"u{row // 3}" for row in range(len(rewards))], config), config


REWARDS = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
PENALTIES = torch.tensor([0.3, -0.1, 0.2, 0.5, 0.05, 0.1, 0.7, 0.2, 0.1], dtype=torch.float64)


def test_advantages_are_those_of_rewards_less_penalties_and_groups_are_chosen_before() -> None:
    rows, scored, config = groups_of(REWARDS)
    found = less_penalties(scored, rows, config, rows=range(9), penalties=PENALTIES)
    for first in (0, 3):
        shaped = [REWARDS[row] - float(PENALTIES[row]) for row in range(first, first + 3)]
        for row in range(3):
            others = (sum(shaped) - shaped[row]) / 2
            expected = (shaped[row] - others) / (statistics.stdev(shaped) + 1e-4)
            assert float(found.advantages[first + row]) == pytest.approx(expected, rel=1e-5)
    # A group of equal rewards stays out, whatever its penalties are and whether workers have seen some of its rows.
    assert found.sample_mask.tolist() == scored.sample_mask.tolist() == [1.0] * 6 + [0.0] * 3
    assert found.advantages[6:].tolist() == [0.0] * 3
    for fillers in ([], [7]):
        seen = [0, 1, 2, 3, 4, 5, *fillers]
        again = less_penalties(scored, rows, config, rows=seen, penalties=PENALTIES[seen])
        assert torch.equal(again.advantages, found.advantages)


def test_groups_of_equal_rewards_get_advantages_by_their_penalties_where_they_are_trained() -> None:
    rows, scored, config = groups_of(REWARDS, drop_zero_advantage_groups=False, normalize_rewards=False)
    found = less_penalties(scored, rows, config, rows=range(9), penalties=PENALTIES)
    assert found.advantages[6:].tolist() == pytest.approx([-0.55, 0.2, 0.35])


def test_a_group_must_be_there_whole() -> None:
    rows, scored, config = groups_of(REWARDS)
    with pytest.raises(AssertionError, match="without the penalties of all its rows"):
        less_penalties(scored, rows, config, rows=range(5), penalties=PENALTIES[:5])


def test_rows_without_weight_go_to_the_workers_with_their_groups_where_these_are_needed_whole() -> None:
    _, scored, _ = groups_of(REWARDS, overlong_filtering=True)
    assert scored.sample_mask.tolist() == [1, 1, 1, 1, 0, 1, 0, 0, 0]
    policy = PolicyConfig.model_validate(
        {"model_name": "m", "train_global_batch_size": 9, "dynamic_batching": {"enabled": True}}
    )
    for whole_groups, expected in ((False, (0, 1, 2, 3, 5)), (True, (0, 1, 2, 3, 4, 5))):
        chosen = select_train_rows(scored, [5] * 9, policy, layout=ParallelLayout(), whole_groups=whole_groups)
        assert chosen.rows == expected
    none = scored.with_weights(range(9), torch.zeros(9))
    assert select_train_rows(none, [5] * 9, policy, layout=ParallelLayout(), whole_groups=True).rows == ()
