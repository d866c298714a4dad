"""Rewards that say more than one number, ask for more than three arguments, or take whole batches."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from nemo_rl.config.env import EnvConfig
from nemo_rl.data.datasets import Prompt
from nemo_rl.environments.interfaces import NO_REWARD, ChecksAnswers, Environment, EnvReport, Response
from nemo_rl.environments.process_environment import reward_identity
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


def test_a_component_that_is_none_is_left_out_and_a_row_of_none_is_unscored() -> None:
    weights = {"a": 2.0, "b": 1.0}
    answers = [{"a": 1.0, "b": None}, {"a": 1.0, "b": 3.0}, {"a": None, "b": None}, None]
    with environment(**custom("parts_or_none", reward_weights=weights, on_none="leave_out")) as env:
        report = score(env, ["x"] * 4, answers)
    assert report.rewards == (2.0, 5.0, 0.0, 0.0)
    assert report.unscored == ("", "", NO_REWARD, NO_REWARD)
    assert [math.isnan(part) for part in report.components["b"]] == [True, False, True, True]
    assert report.components["a"][:2] == (1.0, 1.0)
    with environment(**custom("parts_or_none", on_none="leave_out", score_threshold=0.5)) as env:
        assert score(env, ["x"] * 2, [None, {"a": 1.0}]).rewards == (0.0, 1.0)
        assert score(env, ["x"], [None]).components == {}


@pytest.mark.parametrize(
    ("answer", "message"),
    [(None, "returned None, expected a finite number"), ({"a": None}, "expected a finite number, got None")],
)
def test_without_the_key_none_is_no_reward(answer: object, message: str) -> None:
    with environment(**custom("parts_or_none")) as env, pytest.raises(RewardError, match=message):
        score(env, ["x"], [answer])


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
        pytest.raises(
            RewardError, match=r"take row, .*, truncated and columns of the row by name, got \(prompt.*judge"
        ),
        environment(**custom("with_the_unnamed")),
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


def test_a_batch_reward_gets_lists_and_of_a_late_batch_only_the_late_response_pays() -> None:
    with environment(**custom("batch", reward_batch_size=4, timeout_s=2)) as env:
        texts = ["", "a", "aa", "aaa", "aaaa", "hang"]
        report = score(env, texts, [None] * 6)
    assert report.rewards == (4.0, 4.01, 4.02, 4.03, 1.04, 0.0)
    assert report.num_timeouts == 1
    assert [line for line in report.printed if "a batch of 2 responses took longer than env.timeout_s 2 s" in line]
    with (
        environment(**custom("short_batch", reward_batch_size=4)) as env,
        pytest.raises(RewardError, match="returned 1 scores, expected 3, one per response"),
    ):
        score(env, ["a"] * 3, [None] * 3)


def test_a_file_may_hold_the_reward_and_import_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "helper_of_this_reward.py").write_text("VALUE = 0.25\n")
    package = tmp_path / "package_of_this_reward"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "part.py").write_text("VALUE = 0.75\n")
    for file, line in (
        (tmp_path / "json.py", "from helper_of_this_reward import VALUE"),
        (package / "mine.py", "from .part import VALUE"),
    ):
        file.write_text(f"{line}\n\ndef f(prompt, response, answer):\n    return VALUE\n")
        with environment(name="custom", reward_function=f"{file}:f") as env:
            assert score(env, ["a"], [None]).rewards == ((0.75,) if file.name == "mine.py" else (0.25,))


def test_a_reward_that_is_nowhere_names_the_places_searched() -> None:
    for name, message in (
        ("my_rewards.py:f", "my_rewards.py"),
        ("my_rewards:f", f"beside the recipe that names it, nor in the working directory {re.escape(os.getcwd())}"),
    ):
        with pytest.raises(RewardError, match=message), environment(name="custom", reward_function=name):
            pass


def test_the_identity_of_a_reward_is_that_of_its_source(tmp_path: Path) -> None:
    def identity(name: str = "custom", function: str | None = f"{tmp_path / 'mine.py'}:f") -> str:
        cfg = EnvConfig(name=name, reward_function=function)
        with environment(name=name, reward_function=function) as env:
            return reward_identity(cfg, env)

    (tmp_path / "beside.py").write_text("X = 1\n")
    code = "import beside\ndef f(prompt, response, answer):\n    return 1\n"
    (tmp_path / "mine.py").write_text(code)
    first = identity()
    assert identity() == first
    (tmp_path / "beside.py").write_text("X = 2\n")
    other = identity()
    (tmp_path / "mine.py").write_text(code.replace("1\n", "2\n"))
    assert len({first, other, identity()}) == 3
    assert identity("sort", None) == "sort"


def test_a_custom_reward_may_say_which_answers_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def f(prompt, response, answer):\n    return 1\n\n"
        "def check(answer):\n    if answer == 'raise':\n        raise KeyError('x')\n"
        "    if answer == 'hang':\n        import time\n        time.sleep(60)\n"
        "    return None if answer else 'is empty'\n\nf.check_answer = check\n"
    )
    answers = ["a", "", "hang", None, *["b"] * 40]
    prompts = [Prompt(index=n, text="p", answer=each, ids=(1,), place=f"prompt {n}") for n, each in enumerate(answers)]
    with environment(name="custom", reward_function=f"{tmp_path / 'mine.py'}:f", timeout_s=0.5) as env:
        assert isinstance(env, ChecksAnswers)
        found = env.answer_problems(prompts)
        assert [number for number, problem in enumerate(found) if problem] == [1, 2, 3]
        assert found[1] == "is empty" and found[2] == "takes longer than env.timeout_s 0.5 s"
        raising = [Prompt(index=0, text="p", answer="raise", ids=(1,))]
        assert "raised KeyError" in str(env.answer_problems(raising)[0])
