"""Advantage estimators and reward shaping: references in plain Python from the papers' formulas, edges, keys."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from nemo_rl.algorithms.grpo import overlong_penalty, score_rows
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.config.parts import ADVANTAGE_ESTIMATORS, TOKEN_ESTIMATORS
from nemo_rl.errors import ConfigError
from nemo_rl.experience.payload import SampleStats

OF_ROWS = [name for name, path in ADVANTAGE_ESTIMATORS.builtin.items() if TOKEN_ESTIMATORS.builtin.get(name) != path]
"""Those that give one advantage per row."""
REWARDS = [1.0, 0.0, 0.0, 0.0, 0.25, 0.5, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0]
UIDS = [*"aaaabbbbcccc"]
LENGTHS = [3, 9, 4, 5, 8, 2, 7, 6, 5, 5, 1, 4]
PARTS = {"correct": REWARDS, "format": [1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0]}


def rows_of(
    rewards: Sequence[float] = REWARDS,
    *,
    lengths: Sequence[int] = LENGTHS,
    parts: Mapping[str, Sequence[float]] = PARTS,
    truncated: Sequence[bool] | None = None,
) -> SampleStats:
    return SampleStats(
        rewards=np.asarray(rewards, dtype=np.float32),
        truncated=np.asarray(truncated or [False] * len(rewards)),
        response_lengths=np.asarray(lengths, dtype=np.int32),
        components={name: np.asarray(part, dtype=np.float32) for name, part in parts.items()},
    )


def config_of(name: str = "grpo", **keys: object) -> GRPOConfig:
    estimator = {"name": name, **keys.pop("adv_estimator", {})}  # type: ignore[dict-item]
    return GRPOConfig.model_validate({"adv_estimator": estimator, "drop_zero_advantage_groups": False, **keys})


def advantages(name: str, rows: SampleStats | None = None, uids: Sequence[str] = UIDS, **keys: object) -> list[float]:
    return score_rows(rows or rows_of(), uids, config_of(name, **keys)).advantages.tolist()


def groups(values: Sequence[float], uids: Sequence[str] = UIDS) -> list[list[float]]:
    """The group of each row."""
    return [[v for v, u in zip(values, uids, strict=True) if u == uid] for uid in uids]


def whiten(values: Sequence[float], lengths: Sequence[int] = LENGTHS) -> list[float]:
    """Token by token."""
    tokens = [value for value, length in zip(values, lengths, strict=True) for _ in range(length)]
    mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
    return [(value - mean) / math.sqrt(variance + 1e-8) for value in values]


def grpo(values: Sequence[float]) -> list[float]:
    """With a leave-one-out baseline."""
    result = []
    for value, group in zip(values, groups(values), strict=True):
        others = (sum(group) - value) / (len(group) - 1)
        result.append(0.0 if max(group) == min(group) else (value - others) / (statistics.stdev(group) + 1e-4))
    return result


def gdpo(weights: Mapping[str, float]) -> list[float]:
    sums = [0.0] * len(REWARDS)
    for name, weight in weights.items():
        sums = [total + weight * part for total, part in zip(sums, grpo(PARTS[name]), strict=True)]
    return [(total - statistics.fmean(sums)) / statistics.stdev(sums) for total in sums]


REFERENCES = {
    "grpo": grpo(REWARDS),
    "dr_grpo": [r - statistics.fmean(g) for r, g in zip(REWARDS, groups(REWARDS), strict=True)],
    "rloo": [r - (sum(g) - r) / (len(g) - 1) for r, g in zip(REWARDS, groups(REWARDS), strict=True)],
    "reinforce_plus_plus": whiten(REWARDS),
    "reinforce_plus_plus_baseline": whiten(
        [r - statistics.fmean(g) for r, g in zip(REWARDS, groups(REWARDS), strict=True)]
    ),
    "gdpo": gdpo({"correct": 1.0, "format": 1.0}),
    "maxrl": [
        (r - statistics.fmean(g)) / statistics.fmean(g) if sum(g) else 0.0
        for r, g in zip(REWARDS, groups(REWARDS), strict=True)
    ],
}


@pytest.mark.parametrize("name", sorted(OF_ROWS))
def test_every_estimator_equals_its_formula_in_any_order_of_the_rows(name: str) -> None:
    assert advantages(name) == pytest.approx(REFERENCES[name], rel=1e-5, abs=1e-6)
    order = [5, 0, 11, 7, 2, 9, 1, 3, 10, 4, 8, 6]
    mixed = advantages(name, rows_of().select(order), [UIDS[row] for row in order])
    assert mixed == pytest.approx([REFERENCES[name][row] for row in order], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", sorted(OF_ROWS))
@pytest.mark.parametrize("reward", [0.0, 0.1, -1.0])
def test_equal_rewards_and_a_single_row_give_zero(name: str, reward: float) -> None:
    for count in (1, 6):
        parts = {"a": [reward] * count, "b": [reward] * count}
        rows = rows_of([reward] * count, lengths=[1] * count, parts=parts)
        assert advantages(name, rows, ["u"] * count) == [0.0] * count


def test_known_numbers() -> None:
    rows = rows_of([1.0, 0.0, 0.0, 0.0], lengths=[1] * 4, parts={})
    assert advantages("maxrl", rows, ["u"] * 4) == [3.0, -1.0, -1.0, -1.0]
    assert advantages("dr_grpo", rows, ["u"] * 4) == [0.75, -0.25, -0.25, -0.25]
    assert advantages("rloo", rows, ["u"] * 4) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    parts = {"c": [1.0, 0.0, 1.0, 0.0], "f": [1.0, 1.0, 0.0, 0.0]}
    two = rows_of([2.0, 1.0, 1.0, 0.0], lengths=[1] * 4, parts=parts)
    assert advantages("gdpo", two, ["u"] * 4, use_leave_one_out_baseline=False) == pytest.approx(
        [1.2247449, 0.0, 0.0, -1.2247449], abs=1e-6
    )


def test_whitening_counts_every_token() -> None:
    rows = rows_of([1.0, 0.0], lengths=[1, 3], parts={})
    assert advantages("reinforce_plus_plus", rows, ["u", "v"]) == pytest.approx([1.5, -0.5], abs=1e-6)


def test_components_are_normalised_before_they_are_added() -> None:
    weighted = advantages("gdpo", adv_estimator={"component_weights": {"format": -0.5}})
    assert weighted == pytest.approx(gdpo({"correct": 1.0, "format": -0.5}), rel=1e-5, abs=1e-6)
    plain = advantages("gdpo", normalize_rewards=False)
    assert plain != pytest.approx(REFERENCES["gdpo"], rel=1e-3)
    unscored = rows_of(parts={**PARTS, "format": [math.nan, *PARTS["format"][1:]]})
    zero = rows_of(parts={**PARTS, "format": [0.0, *PARTS["format"][1:]]})
    assert advantages("gdpo", unscored) == advantages("gdpo", zero)


def test_components_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"component_weights.style: the reward has only \['correct', 'format'\]"):
        advantages("gdpo", adv_estimator={"component_weights": {"style": 1.0}})
    with pytest.raises(ConfigError, match="at least two components, got \\['correct'\\]"):
        advantages("gdpo", rows_of(parts={"correct": REWARDS}))


@pytest.mark.parametrize("name", sorted(OF_ROWS))
def test_advantages_of_every_estimator_are_clipped(name: str) -> None:
    free = advantages(name)
    clipped = advantages(name, advantage_clip_low=-0.2, advantage_clip_high=0.3)
    assert clipped == pytest.approx([min(max(value, -0.2), 0.3) for value in free])
    assert min(free) < -0.2 and max(free) > 0.3


def test_duplicate_prompts_stay_groups_of_their_own() -> None:
    rows = rows_of([1.0, 1.0, 0.0, 0.0], lengths=[1] * 4, parts={})
    assert score_rows(rows, ["u", "u", "v", "v"], GRPOConfig()).sample_mask.tolist() == [0.0] * 4


def test_the_overlong_penalty_grows_in_the_buffer_and_no_further() -> None:
    lengths = torch.tensor([1, 16384, 18432, 20480, 24576])
    penalty = overlong_penalty(lengths, longest=20480, buffer=4096, most=1.0)
    assert penalty.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert overlong_penalty(lengths, longest=20480, buffer=4096, most=0.5).tolist()[2] == -0.25


def shaped(rows: SampleStats, **keys: object) -> list[float]:
    """Rewards after shaping, told by the estimator without baseline of groups of two opposite rows."""
    names = [f"u{row // 2}" for row in range(len(rows))]
    found = score_rows(rows, names, config_of("dr_grpo", **keys)).advantages.tolist()
    return [found[row] - found[row + 1] for row in range(0, len(rows), 2)]


def test_every_key_of_shaping_and_scaling_changes_what_it_names() -> None:
    rows = rows_of([1.0, 0.0, 1.0, 0.0], lengths=[10, 1, 6, 1], parts={}, truncated=[True, False, False, False])
    buffer = {"enabled": True, "overlong_buffer_length": 4, "max_response_length": 10}
    assert shaped(rows) == [1.0, 1.0]
    assert shaped(rows, reward_shaping=buffer) == [0.0, 1.0]
    assert shaped(rows, reward_shaping={**buffer, "overlong_buffer_penalty": 0.5}) == [0.5, 1.0]
    assert shaped(rows, reward_shaping={**buffer, "overlong_buffer_length": 8}) == [0.0, 0.5]
    assert shaped(rows, reward_shaping={**buffer, "max_response_length": 12}) == [0.5, 1.0]
    assert shaped(rows, reward_shaping={"enabled": True, "stop_properly_penalty_coef": 0.25}) == [0.25, 1.0]
    assert shaped(rows, reward_scaling={"enabled": True, "target_max": 3.0}) == [3.0, 3.0]
    assert shaped(rows, reward_scaling={"enabled": True, "source_max": 0.5}) == [1.0, 1.0]
    assert shaped(rows, reward_scaling={"enabled": True, "source_max": 2.0}) == [0.5, 0.5]
    assert shaped(rows, reward_scaling={"enabled": True, "source_min": -1.0}) == [0.5, 0.5]
    assert shaped(rows, reward_scaling={"enabled": True, "target_min": -1.0}) == [2.0, 2.0]
    both = {"reward_scaling": {"enabled": True, "target_max": 3.0}, "reward_shaping": buffer}
    assert shaped(rows, **both) == [2.0, 3.0], "the penalty is in units of scaled rewards"


def test_shaped_rewards_make_the_advantages_and_scored_ones_choose_the_groups() -> None:
    rows = rows_of([1.0, 1.0, 1.0, 0.0], lengths=[10, 1, 1, 1], parts={})
    keys = {"reward_shaping": {"enabled": True, "overlong_buffer_length": 4, "max_response_length": 10}}
    config = config_of("dr_grpo", drop_zero_advantage_groups=True, **keys)
    scored = score_rows(rows, ["u", "u", "v", "v"], config)
    assert scored.sample_mask.tolist() == [0.0, 0.0, 1.0, 1.0], "equal as they were scored: nothing to learn"
    assert scored.advantages.tolist() == [-0.5, 0.5, 0.5, -0.5]
    assert scored.stats.mean.tolist() == [1.0, 0.5], "statistics are those of what was scored"


def test_a_component_that_is_none_has_no_part_in_its_group_and_adds_nothing() -> None:
    nan, plain = math.nan, {"normalize_rewards": False, "use_leave_one_out_baseline": False}
    parts = {"correct": [1.0, 0.0, 1.0, 0.0], "format": [nan, 1.0, 0.0, nan]}
    rows = rows_of([0.0] * 4, lengths=[1] * 4, parts=parts)
    found = advantages("gdpo", replace(rows, leaves_none=True), ["u"] * 4, **plain)
    sums = [0.5, -0.5 + 0.5, 0.5 - 0.5, -0.5]
    assert found == pytest.approx([each / statistics.stdev(sums) for each in sums])
    assert found != pytest.approx(advantages("gdpo", rows, ["u"] * 4, **plain)), "else it counts 0"
    late = replace(rows_of([0.0] * 4, lengths=[1] * 4, parts={"a": [nan, 1.0, 1.0, 1.0], "b": [nan, 2.0, 2.0, 2.0]}))
    assert advantages("gdpo", replace(late, leaves_none=True), ["u"] * 4) == advantages("gdpo", late, ["u"] * 4)


def test_a_group_whose_given_components_are_equal_teaches_nothing() -> None:
    nan, config = math.nan, GRPOConfig.model_validate({"adv_estimator": {"name": "gdpo"}})
    parts = {"correct": [1.0] * 4 + [1.0, 1.0], "format": [nan, 1.0, 1.0, nan, nan, 1.0]}
    rows = rows_of([1.0] * 6, lengths=[1] * 6, parts=parts)
    uids = ["u"] * 4 + ["v"] * 2
    config = config.model_copy(update={"drop_zero_advantage_groups": True})
    assert score_rows(rows, uids, config).is_trained_group.tolist() == [True] * 6
    left = replace(rows, leaves_none=True)
    assert score_rows(left, uids, config).is_trained_group.tolist() == [False] * 6
    differs = replace(left, components={**left.components, "correct": np.asarray([1, 0, 1, 1, 1, 1], dtype=np.float32)})
    assert score_rows(differs, uids, config).is_trained_group.tolist() == [True] * 4 + [False] * 2
