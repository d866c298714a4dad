"""Advantages per turn against slow loops in float64."""

from __future__ import annotations

import math
import random
import statistics

import pytest
import torch

from nemo_rl.algorithms.estimators import DiscountedReturn, OutcomePlusTurn
from nemo_rl.algorithms.token_work import TokenRows
from nemo_rl.config.grpo import GRPOConfig

EPSILON = 1e-4
Turn = tuple[int, int, int, float]
"""Start, length, number in the conversation, reward."""


def rows_of(turns: list[list[Turn]], groups: list[int], conversations: list[int], outcome: list[float]) -> TokenRows:
    width, most = 24, max(map(len, turns))
    mask = torch.zeros(len(turns), width, dtype=torch.bool)
    spans, rewards = torch.zeros(len(turns), most, 3, dtype=torch.int32), torch.zeros(len(turns), most)
    for row, of_row in enumerate(turns):
        for place, (start, length, number, reward) in enumerate(of_row):
            mask[row, start : start + length] = True
            spans[row, place], rewards[row, place] = torch.tensor([start, length, number]), reward
    return TokenRows(
        groups=torch.tensor(groups),
        rewards=torch.zeros(len(turns), dtype=torch.float64),
        scored=torch.zeros(len(turns), dtype=torch.float64),
        mask=mask,
        penalties=torch.zeros(mask.shape, dtype=torch.float64),
        columns={"turns": spans, "turn_rewards": rewards.double()},
        outcome=torch.tensor(outcome, dtype=torch.float64),
        conversations=torch.tensor(conversations),
    )


def config_of(name: str, **keys: object) -> GRPOConfig:
    return GRPOConfig.model_validate({"adv_estimator": {"name": name, **keys}})


def random_rows(seed: int) -> tuple[list[list[Turn]], list[int], list[int], list[float]]:
    """Two groups of three conversations of one to four turns; the last turns of some are in a second row."""
    rng = random.Random(seed)
    turns, groups, conversations, outcome = [], [], [], []
    for conversation in range(6):
        advantage, count = rng.uniform(-1, 1), rng.randint(1, 4)
        whole, place = list[Turn](), 2
        for number in range(count):
            length = rng.randint(1, 3)
            whole.append((place, length, number, rng.choice([0.0, 0.5, 1.0])))
            place += length + rng.randint(1, 2)
        cut = rng.choice([count, max(1, count - 1)])
        for part in (whole[:cut], [(2, length, number, reward) for _, length, number, reward in whole[cut:]]):
            if part:
                turns.append(part)
                groups.append(conversation // 3)
                conversations.append(conversation)
                outcome.append(advantage)
    return turns, groups, conversations, outcome


def normalised(value: float, others: list[float], *, divides: bool) -> float:
    if len(set(others)) == 1:
        return 0.0
    centred = value - statistics.fmean(others)
    return centred / (statistics.stdev(others) + EPSILON) if divides else centred


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("divides", [True, False])
def test_the_advantage_of_a_turn_is_added_to_that_of_its_row(seed: int, divides: bool):
    turns, groups, conversations, outcome = random_rows(seed)
    config = config_of("outcome_plus_turn", turn_weight=0.25).model_copy(update={"normalize_rewards": divides})
    found = OutcomePlusTurn(config=config)(rows_of(turns, groups, conversations, outcome))
    for row, of_row in enumerate(turns):
        for start, length, number, reward in of_row:
            cell = [
                each[3]
                for other, part in enumerate(turns)
                if groups[other] == groups[row]
                for each in part
                if each[2] == number
            ]
            expected = outcome[row] + 0.25 * normalised(reward, cell, divides=divides)
            assert torch.allclose(found[row, start : start + length], torch.tensor(expected).double(), atol=1e-6)


@pytest.mark.parametrize("seed", range(10))
def test_a_discounted_return_is_normalised_over_all_turns_of_the_group(seed: int):
    turns, groups, conversations, outcome = random_rows(seed)
    found = DiscountedReturn(config=config_of("discounted_return", turn_discount=0.5))(
        rows_of(turns, groups, conversations, outcome)
    )

    def return_of(conversation: int, number: int) -> float:
        later = [
            (each[2], each[3])
            for row, part in enumerate(turns)
            if conversations[row] == conversation
            for each in part
            if each[2] >= number
        ]
        return math.fsum(0.5 ** (other - number) * reward for other, reward in later)

    for row, of_row in enumerate(turns):
        whole = [
            return_of(conversations[other], each[2])
            for other, part in enumerate(turns)
            if groups[other] == groups[row]
            for each in part
        ]
        for start, length, number, _ in of_row:
            expected = normalised(return_of(conversations[row], number), whole, divides=True)
            assert torch.allclose(found[row, start : start + length], torch.tensor(expected).double(), atol=1e-9)
    assert bool((found[~rows_of(turns, groups, conversations, outcome).mask] == 0).all())
