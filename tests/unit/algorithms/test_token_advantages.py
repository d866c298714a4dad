"""Advantages per token: references in plain Python from the formulas, layouts, edges, and which losses take them."""

from __future__ import annotations

import math
import pickle
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch

from nemo_rl.algorithms.estimators import (
    OptimalTokenBaseline,
    TokenReinforcePlusPlus,
    whiten_over_tokens,
)
from nemo_rl.algorithms.grpo import score_rows
from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.algorithms.stages.columns import stage_columns
from nemo_rl.algorithms.token_work import (
    KlInReward,
    Moments,
    TokenEstimator,
    TokenRows,
    TokenWork,
    advantages_in_process,
    plan_groups,
    token_estimator,
)
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.config.loss import LOSS_PROPERTIES
from nemo_rl.config.schema import MasterConfig
from nemo_rl.errors import ConfigError, NonFiniteError
from nemo_rl.experience.payload import SampleStats

KL = KlInReward(weight=0.1, clamp=20.0)
REWARDS = [1.0, 0.0, 0.0, 0.5, 0.25, 0.25, 1.0, 1.0, 0.0]
GROUPS = [0, 0, 0, 1, 1, 1, 2, 2, 3]
"""The last group has a single row."""
LENGTHS = [9, 4, 6, 3, 12, 5, 7, 2, 8]
PROMPT = 2
"""Tokens; the row of two tokens has no response."""


class Returns(TokenEstimator):
    """Returns as they are."""

    reads = ("prev_logprobs",)

    def __call__(self, rows: TokenRows) -> torch.Tensor:
        assert set(rows.columns) == {"prev_logprobs"}
        return rows.returns


class Wrong(TokenEstimator):
    """What the test puts here."""

    gives: object = None

    def __call__(self, rows: TokenRows) -> torch.Tensor:
        return self.gives  # type: ignore[return-value]


def columns_of(*, padding: int = 0) -> dict[str, torch.Tensor]:
    """Rubbish outside the responses, NaN in the padding; the squares are those of some distribution."""
    draw, width = torch.Generator().manual_seed(5), max(LENGTHS)
    position = torch.arange(width + padding)
    is_token = position < torch.tensor(LENGTHS)[:, None]
    found = {"token_mask": is_token & (position >= PROMPT)}
    for name in ("prev_logprobs", "reference_policy_logprobs"):
        values = torch.full((len(LENGTHS), width + padding), math.nan)
        values[:, :width] = -2 * torch.rand(len(LENGTHS), width, generator=draw)
        found[name] = torch.where(is_token, values, math.nan)
    # What is left of the probability is shared by three tokens.
    chosen = found["prev_logprobs"].exp()
    found["squared_probs"] = chosen.square() + (1 - chosen).square() / 3
    return found


def work_of(estimator: TokenEstimator, *, kl: KlInReward | None = KL, **grpo: object) -> TokenWork:
    rows = SampleStats(
        rewards=np.asarray(REWARDS, dtype=np.float32),
        truncated=np.zeros(len(REWARDS), dtype=bool),
        response_lengths=np.asarray(LENGTHS, dtype=np.int32) - PROMPT,
    )
    config = GRPOConfig.model_validate({"drop_zero_advantage_groups": False, **grpo})
    scored = score_rows(rows, [f"u{group}" for group in GROUPS], config, per_token=True)
    assert not scored.advantages.any()
    return TokenWork.of(scored, rows, config, estimator=estimator, kl=kl, rows=range(len(REWARDS)))


def advantages(work: TokenWork, columns: dict, *, dp_world: int = 1) -> list[list[float]]:
    """Of each row its response tokens."""
    found = advantages_in_process(work, columns, LENGTHS, dp_world=dp_world)
    outside = found.masked_select(~columns["token_mask"])
    assert found.dtype == torch.float32 and not outside.any()
    return [row[mask].tolist() for row, mask in zip(found, columns["token_mask"], strict=True)]


def returns(columns: dict, kl: KlInReward | None = KL) -> list[list[float]]:
    """R less the penalties of the tokens from each on."""
    result = []
    for row, reward in enumerate(REWARDS):
        tokens = [at for at, kept in enumerate(columns["token_mask"][row].tolist()) if kept]
        prev, reference = (columns[name][row].tolist() for name in ("prev_logprobs", "reference_policy_logprobs"))
        costs = [kl.weight * (prev[at] - reference[at]) if kl is not None else 0.0 for at in tokens]
        result.append([reward - math.fsum(costs[start:]) for start in range(len(costs))])
    return result


def config_of(**sections: object) -> MasterConfig:
    return MasterConfig.model_validate({"policy": {"model_name": "m"}, **sections})


IN_REWARD = {
    "loss_fn": {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.1},
    "grpo": {"adv_estimator": {"name": "reinforce_plus_plus"}, "drop_zero_advantage_groups": False},
}


def test_the_return_of_a_token_is_the_reward_less_the_penalties_from_there_on() -> None:
    columns = columns_of()
    found, expected = advantages(work_of(Returns(config=GRPOConfig())), columns), returns(columns)
    for row, values in enumerate(expected):
        assert found[row] == pytest.approx(values, rel=1e-6)
    assert found[7] == []


def test_reinforce_plus_plus_of_the_worked_example() -> None:
    rows = TokenRows(
        groups=torch.tensor([0]),
        rewards=torch.tensor([1.0], dtype=torch.float64),
        scored=torch.tensor([1.0], dtype=torch.float64),
        mask=torch.ones(1, 3, dtype=torch.bool),
        penalties=0.1 * torch.tensor([[0.2, -0.1, 0.3]], dtype=torch.float64),
        columns={},
    )
    assert TokenReinforcePlusPlus(config=GRPOConfig())(rows)[0].tolist() == pytest.approx([0.96, 0.98, 0.97])


def test_reinforce_plus_plus_whitens_over_all_tokens_of_the_step() -> None:
    columns = columns_of()
    every = [value for row in returns(columns) for value in row]
    mean, spread = statistics.fmean(every), math.sqrt(statistics.variance(every) + 1e-8)
    found = advantages(work_of(TokenReinforcePlusPlus(config=GRPOConfig())), columns)
    for row, values in enumerate(returns(columns)):
        assert found[row] == pytest.approx([(value - mean) / spread for value in values], rel=1e-5, abs=1e-6)


def baseline_of(columns: dict[str, torch.Tensor], values: list[list[float]]) -> list[list[float]]:
    """A_t = G_t - B_t, row by row and token by token."""
    weights, result = [], []
    for row in range(len(LENGTHS)):
        total, mine = 0.0, []
        for at in range(PROMPT, LENGTHS[row]):
            chosen = math.exp(float(columns["prev_logprobs"][row, at]))
            total += 1 - 2 * chosen + float(columns["squared_probs"][row, at])
            mine.append(total)
        weights.append(mine)
    for row, own in enumerate(values):
        found = []
        for at, value in enumerate(own):
            there = [other for other, group in enumerate(GROUPS) if group == GROUPS[row] and at < len(values[other])]
            part = sum(values[other][at] * weights[other][at] for other in there)
            baseline = part / (sum(weights[other][at] for other in there) + 1e-8) if len(there) > 1 else 0.0
            found.append(value - baseline)
        result.append(found)
    return result


def with_replies(columns: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same sampled tokens with replies of other lengths between them: row i has 1 + i % 3 tokens more behind its
    second sampled token."""
    found = {name: torch.full((len(LENGTHS), column.shape[1] + 3), math.nan) for name, column in columns.items()}
    found["token_mask"] = torch.zeros(found["token_mask"].shape, dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        cut = min(PROMPT + 2, length)
        for name, column in columns.items():
            start = cut + 1 + row % 3
            found[name][row, :cut] = column[row, :cut]
            found[name][row, start : start + length - cut] = column[row, cut:length]
    return found


@pytest.mark.parametrize("kl", [None, KL])
@pytest.mark.parametrize("estimator", [Returns, TokenReinforcePlusPlus, OptimalTokenBaseline])
def test_replies_between_sampled_tokens_change_no_advantage(estimator: type, kl: KlInReward | None) -> None:
    columns = columns_of()
    plain = advantages(work_of(estimator(config=GRPOConfig()), kl=kl), columns)
    holes = advantages(work_of(estimator(config=GRPOConfig()), kl=kl), with_replies(columns))
    assert [len(row) for row in holes] == [len(row) for row in plain]
    for row, values in enumerate(plain):
        assert holes[row] == pytest.approx(values, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("kl", [None, KL])
def test_the_token_baseline_is_the_weighted_mean_of_the_returns_of_the_group(kl: KlInReward | None) -> None:
    columns = columns_of()
    found = advantages(work_of(OptimalTokenBaseline(config=GRPOConfig()), kl=kl), columns)
    expected = baseline_of(columns, returns(columns, kl))
    for row, values in enumerate(expected):
        assert found[row] == pytest.approx(values, rel=1e-5, abs=1e-6)
    assert found[8] == pytest.approx(returns(columns, kl)[8], rel=1e-6), "a row alone has no baseline"
    # The longest row of its group beyond the second longest.
    assert found[4][3:] == pytest.approx(returns(columns, kl)[4][3:], rel=1e-6)
    assert found[4][:3] != pytest.approx(returns(columns, kl)[4][:3], rel=1e-3)


def test_the_token_baseline_of_the_worked_example() -> None:
    probs = torch.tensor([[0.5, 0.8], [0.2, 0.5]], dtype=torch.float64)
    rows = TokenRows(
        groups=torch.tensor([0, 0]),
        rewards=torch.tensor([1.0, 0.0], dtype=torch.float64),
        scored=torch.tensor([1.0, 0.0], dtype=torch.float64),
        mask=torch.ones(2, 2, dtype=torch.bool),
        penalties=torch.zeros(2, 2, dtype=torch.float64),
        columns={"prev_logprobs": probs.log(), "squared_probs": probs.square() + (1 - probs).square()},
    )
    found = OptimalTokenBaseline(config=GRPOConfig())(rows)
    baseline = torch.tensor([0.2808989, 0.2457627], dtype=torch.float64)
    torch.testing.assert_close(found, torch.stack([1 - baseline, -baseline]), rtol=0, atol=1e-6)


def test_tokens_that_are_certain_and_impossible_ones_have_finite_advantages() -> None:
    columns = columns_of()
    columns["prev_logprobs"][:, :] = 0.0
    # As float32 rounds it: 1 - 2 pi + sum of squares would be below 0.
    columns["squared_probs"][:, :] = 0.9999999
    certain = advantages(work_of(OptimalTokenBaseline(config=GRPOConfig()), kl=None), columns)
    assert certain == [[reward] * (length - PROMPT) for reward, length in zip(REWARDS, LENGTHS, strict=True)]
    columns["prev_logprobs"][0, 3], columns["squared_probs"][0, 3] = -math.inf, 0.25
    found = advantages(work_of(OptimalTokenBaseline(config=GRPOConfig()), kl=None), columns)
    assert all(math.isfinite(value) for row in found for value in row)
    # The only row with a weight is the baseline of all.
    assert found[0][1:4] == pytest.approx([0.0] * 3, abs=1e-6) and found[1][1] == pytest.approx(-1.0, abs=1e-6)


def test_without_a_kl_tokens_get_what_their_rows_get_from_the_driver() -> None:
    columns, lengths = columns_of(), torch.tensor(LENGTHS).double() - PROMPT
    by_row = whiten_over_tokens(torch.tensor(REWARDS, dtype=torch.float64), lengths).tolist()
    found = advantages(work_of(TokenReinforcePlusPlus(config=GRPOConfig()), kl=None), columns)
    for row, values in enumerate(found):
        assert values == pytest.approx([by_row[row]] * (LENGTHS[row] - PROMPT), rel=1e-6)


def estimators() -> list[TokenEstimator]:
    return [kind(config=GRPOConfig()) for kind in (Returns, TokenReinforcePlusPlus, OptimalTokenBaseline)]


@pytest.mark.parametrize("estimator", estimators(), ids=lambda estimator: type(estimator).__name__)
def test_ranks_order_and_padding_change_nothing(estimator: TokenEstimator) -> None:
    columns = columns_of()
    work = pickle.loads(pickle.dumps(work_of(estimator)))
    whole = advantages(work, columns)
    assert advantages(work, columns_of(padding=7)) == whole, "to the last bit"
    for dp_world in (2, 3, 6):
        for mine, expected in zip(advantages(work, columns, dp_world=dp_world), whole, strict=True):
            assert mine == pytest.approx(expected, rel=1e-6, abs=1e-7)
    order = [3, 8, 0, 6, 4, 1, 7, 5, 2]
    shuffled = {name: column[order] for name, column in columns.items()}
    found = advantages_in_process(work.of_rows(order), shuffled, [LENGTHS[row] for row in order], dp_world=2)
    for place, row in enumerate(order):
        assert found[place][shuffled["token_mask"][place]].tolist() == pytest.approx(whole[row], rel=1e-6, abs=1e-7)


def test_groups_are_never_split_and_ranks_get_about_the_same_tokens() -> None:
    groups, lengths = [0, 1, 0, 2, 1, 3, 2, 4], [10, 20, 10, 5, 21, 30, 5, 9]
    plan = plan_groups(groups, lengths, dp_world=2)
    rows = [plan.rows_of_rank(rank) for rank in range(2)]
    assert sorted(rows[0] + rows[1]) == list(range(8))
    assert not {groups[row] for row in rows[0]} & {groups[row] for row in rows[1]}
    loads = [sum(lengths[row] for row in mine) for mine in rows]
    assert abs(loads[0] - loads[1]) <= 10 and plan.steps == (1,) and plan.pad_to == 30
    idle = plan_groups([0, 0], [3, 3], dp_world=3)
    assert [len(idle.rows_of_rank(rank)) for rank in range(3)] == [2, 0, 0]


def test_moments_of_parts_are_those_of_the_whole() -> None:
    values = torch.tensor([0.5, -1.0, 3.0, 3.0, 1e3, 2.5, 7.0], dtype=torch.float64)
    parts = [Moments.of(values[:3]), Moments.of(values[3:3]), Moments.of(values[3:])]
    merged = Moments()
    for part in parts:
        merged = merged.merge(Moments.from_tensor(part.to_tensor()))
    assert (merged.count, merged.low, merged.high) == (7.0, -1.0, 1e3)
    assert merged.mean == pytest.approx(float(values.mean())) and merged.squares / 6 == pytest.approx(
        float(values.var())
    )
    whitening = merged.whitening()
    whitened = (values - whitening.shift) * whitening.scale
    assert float(whitened.mean()) == pytest.approx(0, abs=1e-12) and float(whitened.std()) == pytest.approx(1)


@pytest.mark.parametrize("values", [[], [0.7], [0.1, 0.1, 0.1]])
def test_equal_values_a_single_one_and_none_are_whitened_to_zero(values: list[float]) -> None:
    whitening = Moments.of(torch.tensor(values, dtype=torch.float64)).merge(Moments()).whitening()
    assert [(value - whitening.shift) * whitening.scale for value in values] == [0.0] * len(values)


def test_rows_of_groups_that_are_not_trained_are_neither_seen_nor_counted() -> None:
    columns = columns_of()
    work = work_of(TokenReinforcePlusPlus(config=GRPOConfig()), drop_zero_advantage_groups=True)
    is_trained = [True] * 6 + [False] * 3
    assert work.is_trained_group.tolist() == is_trained
    found = advantages(work, columns)
    assert found[6:] == [[0.0] * 5, [], [0.0] * 6]
    kept = [value for row in returns(columns)[:6] for value in row]
    mean, spread = statistics.fmean(kept), math.sqrt(statistics.variance(kept) + 1e-8)
    assert found[0] == pytest.approx([(value - mean) / spread for value in returns(columns)[0]], rel=1e-5)


def test_advantages_are_clipped_and_the_driver_gets_the_mean_of_each_row() -> None:
    columns = columns_of()
    work = work_of(Returns(config=GRPOConfig()), advantage_clip_low=0.1, advantage_clip_high=0.9)
    output = work(columns)
    for row, mask in enumerate(columns["token_mask"]):
        expected = [min(max(value, 0.1), 0.9) for value in returns(columns)[row]]
        assert output.columns["token_advantages"][row][mask].tolist() == pytest.approx(expected, rel=1e-6)
        mean = statistics.fmean(expected) if expected else 0.0
        assert float(output.numbers["advantage"][row]) == pytest.approx(mean, rel=1e-6)
    assert not replace(work, only_moments=True)(columns).columns, "nothing is written before the moments are known"


def test_an_infinite_log_probability_costs_as_much_as_the_clamp() -> None:
    columns = columns_of()
    columns["reference_policy_logprobs"][0, 4] = -math.inf
    bounded = KlInReward(weight=0.1, clamp=3.0)
    found = advantages(work_of(Returns(config=GRPOConfig()), kl=bounded), columns)
    assert all(map(math.isfinite, found[0])) and found[0][2] == pytest.approx(found[0][3] - 0.3, abs=1e-6)
    whitened = advantages(work_of(TokenReinforcePlusPlus(config=GRPOConfig()), kl=bounded), columns)
    assert all(math.isfinite(value) for row in whitened for value in row)


@pytest.mark.parametrize(
    ("gives", "error", "text"),
    [
        (torch.zeros(9), ConfigError, r"Wrong: expected an advantage for each token, a tensor \[9, 12\], got \[9\]"),
        (1.0, ConfigError, r"got float"),
        (torch.full((9, 12), math.nan), NonFiniteError, "Wrong gave NaN or inf"),
    ],
)
def test_what_is_no_advantage_is_refused(gives: object, error: type[Exception], text: str) -> None:
    wrong = Wrong(config=GRPOConfig())
    wrong.gives = gives
    with pytest.raises(error, match=text):
        work_of(wrong)(columns_of())


@pytest.mark.parametrize("name", LOSS_PROPERTIES)
def test_a_loss_with_one_advantage_per_row_takes_none_of_tokens(name: str) -> None:
    own = {"adv_estimator": {"name": f"{__name__}:Returns"}}
    loss = {"name": name, **({"dro": {"beta": 0.1}} if name == "dro" else {})}
    config = config_of(loss_fn=loss, grpo=own)
    if name in ("gspo", "luspo", "gmpo", "vespo"):
        with pytest.raises(ConfigError, match=f"loss_fn.name: '{name}' has one advantage per row.*gspo_token"):
            token_estimator(config.grpo, config.loss_fn)
    else:
        assert isinstance(token_estimator(config.grpo, config.loss_fn), Returns)


def estimator_of(**sections: object) -> TokenEstimator | None:
    config = config_of(**sections)
    return token_estimator(config.grpo, config.loss_fn)


def test_reinforce_plus_plus_is_of_tokens_with_a_kl_in_the_reward_and_of_rows_without() -> None:
    assert isinstance(estimator_of(**IN_REWARD), TokenReinforcePlusPlus)
    assert estimator_of(grpo=IN_REWARD["grpo"]) is None
    assert estimator_of(loss_fn=IN_REWARD["loss_fn"]) is None, "grpo is of rows"


def test_sums_of_squares_are_written_only_where_they_are_read() -> None:
    with_squares = config_of(grpo={"adv_estimator": {"name": "optimal_token_baseline"}})
    assert isinstance(token_estimator(with_squares.grpo, with_squares.loss_fn), OptimalTokenBaseline)
    for config, expected in ((with_squares, True), (config_of(**IN_REWARD), False), (config_of(), False)):
        stages = {stage.name: stage for stage in stage_columns(config, PolicyLoss(config=config.loss_fn))}
        assert ("squared_probs" in stages["prev_logprobs"].writes) == expected
        assert "squared_probs" not in stages["train"].reads
    stages = {stage.name: stage for stage in stage_columns(with_squares, PolicyLoss(config=with_squares.loss_fn))}
    assert stages["token_advantages"].reads == ("prev_logprobs", "squared_probs", "token_mask")
    assert "measure_rows" not in stages and stages["advantages"].writes == ("sample_mask",)


def test_columns_of_tokens_take_the_place_of_those_of_rows() -> None:
    with_kl, without = config_of(**IN_REWARD), config_of(grpo=IN_REWARD["grpo"])
    [found, rows] = [
        {stage.name: stage for stage in stage_columns(config, PolicyLoss(config=config.loss_fn))}
        for config in (with_kl, without)
    ]
    order = [
        "rollout",
        "score",
        "prev_logprobs",
        "reference_logprobs",
        "measure_rows",
        "token_advantages",
        "advantages",
    ]
    assert list(found) == [*order, "train", "log"]
    assert found["token_advantages"].writes == ("token_advantages",)
    assert found["token_advantages"].reads == ("prev_logprobs", "reference_policy_logprobs", "token_mask")
    assert found["advantages"].writes == ("sample_mask",)
    reads = set(found["train"].reads)
    assert "token_advantages" in reads and not {"advantages", "reference_policy_logprobs"} & reads
    assert "advantages" in rows["train"].reads and rows["advantages"].writes == ("advantages", "sample_mask")


def test_an_estimator_that_reads_what_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for reads, text in (
        (("nonsense",), "reads nonsense; expected some of"),
        (("prev_logprobs",), "written by no stage"),
    ):
        monkeypatch.setattr(Wrong, "reads", reads)
        config = config_of(
            grpo={"adv_estimator": {"name": f"{__name__}:Wrong"}, "use_generation_logprobs_as_prev": True},
            loss_fn={"reference_policy_kl_penalty": 0},
        )
        with pytest.raises(ConfigError, match=text):
            stage_columns(config, PolicyLoss(config=config.loss_fn, prev_field="generation_logprobs"))
