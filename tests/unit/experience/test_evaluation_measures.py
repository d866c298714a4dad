"""Measures of samples of prompts: estimates against lists of all subsets, intervals against tables, votes."""

from __future__ import annotations

import json
import random
from itertools import combinations, product
from math import factorial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.config.run import EvaluationConfig
from nemo_rl.experience.evaluation.evaluator import SetResult, ValidationResult, evaluation_lines
from nemo_rl.experience.evaluation.measures import (
    PromptSamples,
    jackknife_error,
    majority_at_k,
    majority_of_samples,
    mean_with_interval,
    measure_set,
    pass_at_k,
    pass_of_samples,
    stated_answer,
    t_quantile,
    wilson_interval,
)


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(samples: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(samples)))
    subsets = [any(subset) for subset in combinations(samples, k)]
    found = pass_at_k(num_samples=len(samples), num_right=sum(samples), k=k)
    assert found == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)


def test_pass_at_k_is_unbiased_and_its_plain_estimate_is_not() -> None:
    chances = [pytest.approx(1 - 0.7**4, abs=1e-12), pass_at_k(num_samples=10, num_right=3, k=4)]
    mean = sum(binomial(10, c, 0.3) * pass_at_k(num_samples=10, num_right=c, k=4) for c in range(11))
    assert mean == chances[0]
    assert chances[1] == pytest.approx(0.8333333, abs=1e-7)


def binomial(n: int, c: int, p: float) -> float:
    return len(list(combinations(range(n), c))) * p**c * (1 - p) ** (n - c)


def wins(subset: tuple[str | None, ...]) -> float:
    """1 / (answers with most votes) where A is among them."""
    votes = {answer: subset.count(answer) for answer in subset if answer is not None}
    most = max(votes.values(), default=0)
    best = [answer for answer, count in votes.items() if count == most]
    return 1 / len(best) if "A" in best else 0.0


@given(st.lists(st.sampled_from(["A", "B", "C", "D", None]), min_size=1, max_size=9), st.data())
def test_majority_at_k_is_the_mean_over_subsets_with_ties_shared(
    samples: list[str | None], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(samples)))
    subsets = [wins(subset) for subset in combinations(samples, k)]
    votes = {answer: samples.count(answer) for answer in samples if answer is not None}
    found = majority_at_k(votes, right="A", num_silent=samples.count(None), k=k)
    assert found == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)


def test_many_samples_are_counted_at_once() -> None:
    votes = {"A": 400, "B": 350} | {f"w{number}": 1 for number in range(250)}
    assert majority_at_k(votes, right="A", k=1) == 0.4
    assert 0.4 < majority_at_k(votes, right="A", k=16) < 0.7


def test_k_is_at_least_one_and_at_most_the_number_of_samples() -> None:
    for k in (0, 4):
        with pytest.raises(ValueError, match="expected k from 1 to the 3 samples"):
            pass_at_k(num_samples=3, num_right=1, k=k)
        with pytest.raises(ValueError, match="expected k from 1 to the 3 samples"):
            majority_at_k({"A": 3}, right="A", k=k)
    with pytest.raises(ValueError, match="expected 0 to 3 right samples, got 4"):
        pass_at_k(num_samples=3, num_right=4, k=1)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (10, 2.22814), (120, 1.97993), (5000, 1.95996)]
)
def test_quantiles_of_t_are_those_of_tables(freedom: int, quantile: float) -> None:
    assert t_quantile(freedom, confidence=0.95) == pytest.approx(quantile, abs=6e-6)
    assert t_quantile(freedom, confidence=0.5) < t_quantile(freedom, confidence=0.99)


def test_an_interval_is_that_of_t_within_the_bounds_of_a_share() -> None:
    found = mean_with_interval([0.2, 0.6, 1.0, 0.4], confidence=0.95, bounds=(0.0, 1.0))
    half = 3.18245 * np.std([0.2, 0.6, 1.0, 0.4], ddof=1) / 2
    assert (found.value, found.low, found.high) == (pytest.approx(0.55), pytest.approx(0.55 - half, abs=1e-5), 1.0)
    free = mean_with_interval([0.2, 0.6, 1.0, 0.4], confidence=0.95, bounds=None)
    assert free.high == pytest.approx(0.55 + half, abs=1e-5)


def test_shares_that_agree_still_have_an_interval() -> None:
    assert wilson_interval(3, 10, confidence=0.95) == (
        pytest.approx(0.1077913, abs=1e-6),
        pytest.approx(0.6032219, abs=1e-6),
    )
    assert wilson_interval(0, 10, confidence=0.95) == (0.0, pytest.approx(0.2775328, abs=1e-6))
    right = mean_with_interval([1.0] * 10, confidence=0.95, bounds=(0.0, 1.0))
    assert (right.value, right.high) == (1.0, 1.0) and 0.7 < right.low < 0.75
    halves = mean_with_interval([0.5] * 10, confidence=0.95, bounds=(0.0, 1.0))
    assert halves.low < 0.3 < 0.7 < halves.high
    alone = mean_with_interval([0.5], confidence=0.95, bounds=(0.0, 1.0))
    assert (alone.low, alone.high) == (0.0, 1.0)
    with pytest.raises(ValueError, match="at least one prompt"):
        mean_with_interval([], confidence=0.95, bounds=None)


def test_an_interval_holds_the_true_mean_as_often_as_it_says() -> None:
    draws, held = random.Random(0), 0
    for _ in range(400):
        prompts = [sum(draws.random() < draws.choice((0.1, 0.6)) for _ in range(8)) / 8 for _ in range(40)]
        found = mean_with_interval(prompts, confidence=0.9, bounds=(0.0, 1.0))
        held += found.low <= 0.35 <= found.high
    assert 0.86 < held / 400 < 0.94


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("so it is \\boxed{\\frac{1}{2}} indeed", "\\frac{1}{2}"),
        ("\\boxed{1} no, \\boxed{2}", "2"),
        ("<think>\\boxed{3}</think> 7\n 8 ", "7 8"),
        ("\\boxed{never closed", "\\boxed{never closed"),
        (" \n", None),
        ("<think>4", "<think>4"),
    ],
)
def test_the_answer_is_what_is_boxed_last_or_what_follows_the_thoughts(response: str, answer: str | None) -> None:
    assert stated_answer(response) == answer


def samples(rewards: list[float], answers: list[str | None], category: str | None = None) -> PromptSamples:
    return PromptSamples(rewards=tuple(rewards), answers=tuple(answers), category=category, greedy_reward=max(rewards))


def test_right_responses_vote_as_one_however_they_are_written() -> None:
    config = EvaluationConfig(num_samples=4, pass_at=(1, 4), majority_at=(4,))
    prompt = samples([1.0, 1.0, 0.0, 0.0], ["1/2", "0.5", "3", "4"])
    found = measure_set([prompt, prompt], config, is_accuracy=True).measures
    assert {name: each.value for name, each in found.items()} == {
        "reward": 0.5,
        "pass@1": 0.5,
        "pass@4": 1.0,
        "majority@4": 1.0,
        "greedy_reward": 1.0,
    }
    strict = config.model_copy(update={"pass_reward": 1.5})
    assert measure_set([prompt], strict, is_accuracy=True).measures["pass@4"].value == 0.0


def test_categories_get_measures_of_their_own_and_lines_of_the_table() -> None:
    prompts = [samples([1.0], ["1"], "easy"), samples([0.0], ["2"], "hard"), samples([1.0], ["3"], "hard")]
    measures = measure_set(prompts, EvaluationConfig(), is_accuracy=True)
    assert {name: (part.num_prompts, part.measures["reward"].value) for name, part in measures.categories.items()} == {
        "easy": (1, 1.0),
        "hard": (2, 0.5),
    }
    result = SetResult(
        measures=measures, is_accuracy=True, num_samples=1, mean_response_tokens=4.0, truncated_share=0.25
    )
    metrics = ValidationResult(sets={"validation": result, "more": result}).metrics()
    assert metrics["val/accuracy"] == metrics["val/reward"] == metrics["val/more/pass@1"] == pytest.approx(2 / 3)
    assert metrics["val/category/hard/reward"] == metrics["val/more/category/hard/pass@1"] == 0.5
    assert metrics["val/pass@1_low"] < 2 / 3 < metrics["val/pass@1_high"]
    lines = evaluation_lines({"validation": result}, confidence=0.9)
    assert [line.split()[:2] for line in lines[:4]] == [
        ["set", "prompts"], ["validation", "3"], ["easy", "1"], ["hard", "2"],
    ]  # fmt: skip
    assert "0.667 [" in lines[1] and "90% confidence" in lines[-1]
    record = result.as_record()["categories"]
    assert isinstance(record, dict) and record["hard"]["reward"]["value"] == 0.5


def test_confidence_widens_intervals_and_greedy_responses_are_measured_where_there_are_some() -> None:
    prompts = [samples([reward], ["1"]) for reward in (0.0, 1.0, 1.0, 0.5)]
    narrow, wide = (
        measure_set(prompts, EvaluationConfig(confidence=confidence), is_accuracy=True).measures
        for confidence in (0.5, 0.99)
    )
    for name in ("reward", "pass@1", "greedy_reward"):
        assert wide[name].low < narrow[name].low < narrow[name].high < wide[name].high or wide[name].low == 0.0
        assert wide[name].high - wide[name].low > narrow[name].high - narrow[name].low
    sampled = [PromptSamples(rewards=(1.0,), answers=("1",), category=None, greedy_reward=None)]
    assert "greedy_reward" not in measure_set(sampled, EvaluationConfig(), is_accuracy=True).measures


def test_a_component_that_was_scored_nowhere_is_no_number_in_json() -> None:
    measures = measure_set([samples([1.0], ["1"])], EvaluationConfig(), is_accuracy=True)
    result = SetResult(
        measures=measures,
        is_accuracy=True,
        num_samples=1,
        mean_response_tokens=4.0,
        truncated_share=0.0,
        components={"style": float("nan"), "right": 0.5},
    )
    assert result.as_record()["components"] == {"style": None, "right": 0.5}
    assert "NaN" not in json.dumps(result.as_record())


def test_rewards_without_bounds_have_no_ends_where_nothing_is_known() -> None:
    measures = measure_set([samples([3.0], ["1"])], EvaluationConfig(), is_accuracy=False)
    graded = SetResult(
        measures=measures, is_accuracy=False, num_samples=1, mean_response_tokens=4.0, truncated_share=0.25
    )
    metrics = graded.metrics("val")
    assert graded.as_record()["reward"] == {"value": 3.0, "low": None, "high": None, "interval": "none"}
    assert metrics["val/reward"] == 3.0 and "val/accuracy" not in metrics and "val/reward_low" not in metrics


# ---- one prompt


def measures_of_one(rewards: list[float], answers: list[str | None], *, is_accuracy: bool = True) -> dict[str, object]:
    n = len(rewards)
    config = EvaluationConfig(num_samples=n, pass_at=tuple({1, n}), majority_at=tuple({1, min(n, 3), n}))
    found = measure_set([samples(rewards, answers)], config, is_accuracy=is_accuracy).measures
    return {name: each.as_record() for name, each in found.items()}


def test_one_prompt_has_intervals_over_its_samples_and_says_which() -> None:
    found = measures_of_one([1.0] * 3 + [0.0] * 7, ["1"] * 3 + ["2", "3", "4", "5", "6", None, None])
    low, high = wilson_interval(3, 10, confidence=0.95)
    wilson = {"value": 0.3, "low": pytest.approx(low), "high": pytest.approx(high), "interval": "wilson over samples"}
    assert found["reward"] == found["pass@1"] == found["majority@1"] == wilson
    assert found["pass@10"]["low"] == pytest.approx(1 - (1 - low) ** 10) and found["pass@10"]["high"] == 1.0
    assert found["majority@3"]["interval"] == "jackknife over samples"
    assert 0 <= found["majority@3"]["low"] < found["majority@3"]["value"] < found["majority@3"]["high"] < 1
    assert found["majority@10"] == {"value": 1.0, "low": pytest.approx(0.0, abs=0.02), "high": 1.0, **WILSON}
    graded = measures_of_one([0.2, 0.6, 1.0, 0.4], [None] * 4, is_accuracy=False)["reward"]
    half = 3.18245 * np.std([0.2, 0.6, 1.0, 0.4], ddof=1) / 2
    assert graded == {
        "value": pytest.approx(0.55),
        "low": pytest.approx(0.55 - half, abs=1e-5),
        "high": pytest.approx(0.55 + half, abs=1e-5),
        "interval": "student_t over samples",
    }
    # One sample, or several prompts: over prompts.
    assert measures_of_one([1.0], ["1"])["reward"]["interval"] == "wilson over prompts"
    two = measure_set([samples([1.0, 0.0], ["1", "2"])] * 2, EvaluationConfig(num_samples=2), is_accuracy=True)
    assert two.measures["reward"].interval == "wilson over prompts"


WILSON = {"interval": "wilson over samples"}


@pytest.mark.parametrize("right", [0, 8])
def test_samples_that_agree_leave_room_for_those_that_would_not(right: int) -> None:
    found = measures_of_one([1.0] * right + [0.0] * (8 - right), ["7"] * 8)
    for name in ("pass@1", "pass@8", "majority@3", "majority@8"):
        each = found[name]
        assert each["value"] == (right == 8) and each["low"] <= each["value"] <= each["high"]
        assert 0.1 < each["high"] - each["low"] < 1 or name == "pass@8"


def test_the_error_of_the_jackknife_is_that_of_its_formula() -> None:
    given = ["A", "A", "A", "B", "B", "C", None, "D"]
    without = [given[:i] + given[i + 1 :] for i in range(len(given))]
    estimates = [np.mean([wins(subset) for subset in combinations(left, 3)]) for left in without]
    expected = np.sqrt(7 / 8 * np.square(np.subtract(estimates, np.mean(estimates))).sum())
    votes = {"A": 3, "B": 2, "C": 1, "D": 1}
    assert jackknife_error(votes, right="A", num_silent=1, k=3) == pytest.approx(expected, rel=1e-12)


def test_intervals_over_samples_hold_the_truth_about_as_often_as_they_say() -> None:
    """Exact coverage at n = 12: over c for pass@4, over the counts of three answers for majority@3."""
    n, chances = 12, [0.05 * i for i in range(1, 20)]
    of_c = [pass_of_samples(num_samples=n, num_right=c, k=4, confidence=0.95) for c in range(n + 1)]
    coverage = [
        sum(binomial(n, c, p) for c, each in enumerate(of_c) if each.low <= 1 - (1 - p) ** 4 <= each.high)
        for p in chances
    ]
    assert np.mean(coverage) > 0.94 and min(coverage) > 0.88, coverage
    counts = [(a, b, n - a - b) for a in range(n + 1) for b in range(n + 1 - a)]
    found = [
        majority_of_samples({"A": a, "B": b, "C": c}, right="A", num_silent=0, k=3, confidence=0.95)
        for a, b, c in counts
    ]
    held = []
    for p, q in ((0.1, 0.2), (0.3, 0.3), (0.5, 0.25), (0.6, 0.3), (0.9, 0.05)):
        share = {"A": p, "B": q, "C": 1 - p - q}
        truth = sum(wins(drawn) * np.prod([share[x] for x in drawn]) for drawn in product("ABC", repeat=3))
        chance = [factorial(n) / np.prod([factorial(x) for x in each]) * p**each[0] * q**each[1] * share["C"] ** each[2]
                  for each in counts]  # fmt: skip
        held.append(sum(w for w, each in zip(chance, found, strict=True) if each.low <= truth <= each.high))
    assert np.mean(held) > 0.9 and min(held) > 0.8, held
