"""Rewards that say more than one number, ask for more than three arguments, or take whole batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest

from nemo_rl.data.datasets import Prompt
from nemo_rl.environments.interfaces import Environment, EnvReport, Response
from nemo_rl.errors import RewardError
from tests.unit.environments.test_process_environment import answered, custom, environment


def score(env: Environment, texts: Sequence[str], answers: Sequence[object]) -> EnvReport:
    prompts = [Prompt(index=0, text="p", answer=answer, ids=(1,)) for answer in answers]
    return env.score(prompts, answered(texts))


def test_components_are_weighted_and_kept_apart() -> None:
    with environment(**custom("parts", reward_weights={"correct": 1.0, "format": 0.5})) as env:
        report = score(env, ["ab", "abcd"], [["correct", "format"]] * 2)
    assert report.components == {"correct": (0.2, 0.4), "format": (1.2, 1.4)}
    assert report.rewards == pytest.approx((0.2 + 0.6, 0.4 + 0.7))


def test_components_without_weights_are_added_up_and_a_threshold_makes_them_right_or_wrong() -> None:
    with environment(**custom("parts")) as env:
        assert score(env, ["ab"], [["a", "b"]]).rewards == pytest.approx((1.4,))
    with environment(**custom("parts", score_threshold=1.0)) as env:
        assert score(env, ["ab", "ab"], [["a", "b"]] * 2).rewards == (1.0, 1.0)
    with environment(**custom("parts", score_threshold=0.5)) as env:
        assert score(env, ["abcd", "abcde"], [["a"]] * 2).rewards == (0.0, 1.0), "a reward at the threshold is right"


def test_a_response_that_was_not_scored_has_no_components() -> None:
    with environment(**custom("parts", timeout_s=0.5)) as env:
        report = score(env, ["ab", "hang"], [["a"], ["a"]])
        assert report.rewards == (0.2, 0.0) and report.num_timeouts == 1
        assert report.components["a"][0] == 0.2 and math.isnan(report.components["a"][1])
        assert score(env, ["hang"], [["a"]]).components == {}


@pytest.mark.parametrize(
    ("weights", "answers", "cause"),
    [
        ({}, [["a"], ["b"]], "returned the components b, expected a: other responses have others"),
        ({"a": 1.0}, [["a", "b"]], "returned the components a, b, expected a: env.reward_weights names others"),
        ({"a": 1.0, "b": 1.0}, [["a"]], "returned the components a, expected a, b"),
        ({}, [[]], "returned the components of nothing, expected at least one"),
        ({}, [["has space"]], "returned the component 'has space', expected a name of letters"),
    ],
)
def test_components_that_do_not_fit_are_refused(
    weights: Mapping[str, float], answers: Sequence[object], cause: str
) -> None:
    with environment(**custom("parts", reward_weights=weights)) as env, pytest.raises(RewardError, match=cause):
        score(env, ["x"] * len(answers), answers)


def test_weights_need_components() -> None:
    with (
        environment(**custom("misbehave", reward_weights={"a": 1.0})) as env,
        pytest.raises(RewardError, match=r"returned 0.25, expected the components a"),
    ):
        score(env, ["fine"], [None])


def test_a_reward_gets_the_further_arguments_that_it_names() -> None:
    prompt = Prompt(index=0, text="p", answer=None, ids=(1, 2, 3), metadata={"difficulty": 4})
    response = Response(text="r", num_tokens=5, truncated=True)
    with environment(**custom("with_context")) as env:
        assert env.score([prompt], [response]).rewards == (451.0,)
    with environment(**custom("with_everything")) as env:
        assert env.score([prompt], [response]).rewards == (3.0,)
    with (
        pytest.raises(RewardError, match=r"may also take row, prompt_tokens, response_tokens, truncated, got \(prompt"),
        environment(**custom("with_the_unknown")),
    ):
        pass


def test_only_a_reward_that_asks_for_the_row_needs_it_to_be_json() -> None:
    prompt = Prompt(index=0, text="p", answer=None, ids=(1,), metadata={"picture": object()})
    with environment(**custom("length")) as env:
        assert env.score([prompt], answered(["abc"])).rewards == (3.0,)
    with (
        environment(**custom("with_context")) as env,
        pytest.raises(RewardError, match="cannot be given answer, row, which holds no JSON values"),
    ):
        env.score([prompt], answered(["abc"]))


def test_a_batch_reward_gets_lists_and_its_limit_holds_for_a_batch() -> None:
    with environment(**custom("batch", reward_batch_size=4, timeout_s=0.5)) as env:
        texts = ["", "a", "aa", "aaa", "aaaa", "hang"]
        report = score(env, texts, [None] * 6)
    assert report.rewards == (4.0, 4.01, 4.02, 4.03, 0.0, 0.0)
    assert report.num_timeouts == 2
    with (
        environment(**custom("short_batch", reward_batch_size=4)) as env,
        pytest.raises(RewardError, match="returned 1 scores, expected 3, one per response"),
    ):
        score(env, ["a"] * 3, [None] * 3)


def test_a_file_name_in_place_of_a_module_is_explained() -> None:
    with (
        pytest.raises(RewardError, match=r"got the file my_rewards.py; write my_rewards:f"),
        environment(name="custom", reward_function="my_rewards.py:f"),
    ):
        pass
