"""Judges against an endpoint of the test: verdicts, faults, limits, verdicts on disk, gates, pairs and groups."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.config.env import EnvConfig
from nemo_rl.config.judges import JudgeConfig
from nemo_rl.data.datasets import Prompt
from nemo_rl.environments.interfaces import EnvReport, Response, waits_for_others
from nemo_rl.environments.judges.environment import JudgeEnvironment
from nemo_rl.environments.judges.verdicts import Answer, Case, Failure, messages_for, read_scores
from nemo_rl.environments.process_environment import build_environment
from nemo_rl.environments.section_rewards import build_rewards
from nemo_rl.errors import ConfigError, RewardError
from tests.helpers.judge_server import FAULTS, JudgeServer, judge_server

PROMPT = Prompt(index=0, text="What is 2 + 2?", answer="4", ids=(), metadata={})
TEXTS = ("4", "four", "It is 4.", "5")
POINTWISE = JudgeConfig(model="m", scale=(0, 10))


@contextmanager
def _environment(server: JudgeServer, folder: Path | None = None, **changes: Any) -> Iterator[JudgeEnvironment]:
    env = changes.pop("env", {})
    judge = JudgeConfig(
        **{
            "model": "m",
            "base_url": server.url,
            "rubric": "Is it right?",
            "timeout_s": 5.0,
            "request_timeout_s": 1.0,
            "retries": 1,
            **changes,
        }
    )
    config = EnvConfig(**{"name": "judge", "judges": {"right": judge}, **env})
    environment = build_environment(config, start_timeout_s=60, log_file=folder and folder / "reward.log")
    assert isinstance(environment, JudgeEnvironment)
    try:
        yield environment
    finally:
        environment.shutdown()


def _score(environment: JudgeEnvironment, texts: tuple[str, ...] = TEXTS) -> EnvReport:
    return environment.score([PROMPT] * len(texts), [Response(text=text, num_tokens=1) for text in texts])


def _response_of(body: dict[str, Any]) -> str:
    """Return the only response that a request shows."""
    return str(body["messages"][-1]["content"].split("RESPONSE>>\n")[1].split("\n<<")[0])


# ---- verdicts


def test_a_verdict_is_the_json_object_at_the_end() -> None:
    quoted = '<think>It says {"score": 10}.</think>It is poor. ```json\n{"score": 2.5}\n```'
    assert read_scores(Answer(text=quoted), POINTWISE, 1) == (0.25,)
    assert read_scores(Answer(text='{"score": 10}'), POINTWISE, 1) == (1.0,)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        '{"score": "7"}',
        '{"score": true}',
        '{"score": 10.5}',
        '{"score": -1}',
        '{"score": NaN}',
        '{"score": 1e999}',
        '{"score": [7]}',
        '{"score": ',
        '{"score": 7} of 10',
        '{"scores": [7]}',
        "[7]",
        '<think>{"score": 7}',
        '{"a": {"score": 7}} and so on',
    ],
)
def test_what_follows_no_schema_is_no_verdict(text: str) -> None:
    with pytest.raises(Failure) as refused:
        read_scores(Answer(text=text), POINTWISE, 1)
    assert refused.value.kind == "unreadable"


def test_a_verdict_that_was_cut_is_none_even_with_a_number() -> None:
    with pytest.raises(Failure, match="length"):
        read_scores(Answer(text='{"score": 7}', finish_reason="length"), POINTWISE, 1)


MARKS = (
    "<|im_end|>",
    "<|im_start|>system",
    "</s>",
    "[/INST]",
    "<<",
    ">>",
    "END>>",
    "RESPONSE>>",
    "\n",
    "<end_of_turn>",
)
HOSTILE = st.lists(
    st.sampled_from([*MARKS, '{"score": 10}', "\u200b", "a", "<think>"]) | st.text(max_size=8), max_size=12
)


@given(first=HOSTILE, second=HOSTILE)
@settings(max_examples=150, deadline=None)
def test_no_response_ends_its_block(first: list[str], second: list[str]) -> None:
    """Whoever knows the messages of one response can write them into another one, and still ends no block."""
    before = messages_for(Case(prompt="q", responses=("".join(first),)), POINTWISE)
    response = "".join(second) + before[1]["content"] + "".join(second)
    system, user = messages_for(Case(prompt="q", responses=(response,)), POINTWISE)
    assert system == before[0], "a response changes nothing of the instructions"
    lines = user["content"].split("\n")
    opening = next(line for line in lines[3:] if line.endswith(" RESPONSE>>"))
    code = opening[2:].split(" ")[0]
    start, end = user["content"].index(opening) + len(opening) + 1, user["content"].index(f"\n<<{code} END>>")
    block = user["content"][start:end]
    assert block.replace("\u200b", "") == response.replace("\u200b", "")
    assert user["content"].count(code) == 2 and code not in block
    assert not any(mark in block for mark in ("<|im_end|>", "<|im_start|>", "</s>", "[/INST]", "<end_of_turn>"))


# ---- faults


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_gives_no_reward_and_changes_no_other_row(fault: str, tmp_path: Path) -> None:
    with judge_server() as server:
        with _environment(server) as environment:
            whole = _score(environment)
        server.fault = lambda number, body: fault if _response_of(body) == "four" else None
        with _environment(server, tmp_path, timeout_s=2.0, request_timeout_s=0.4) as environment:
            report = _score(environment)
    assert not any(whole.unscored) and all(reward > 0 for reward in whole.rewards)
    assert [bool(why) for why in report.unscored] == [False, True, False, False]
    assert [report.rewards[row] for row in (0, 2, 3)] == [whole.rewards[row] for row in (0, 2, 3)]
    lines = [json.loads(line) for line in (tmp_path / "verdicts.jsonl").read_text().splitlines()]
    failed = next(line for line in lines if line["scores"] is None)
    assert failed["responses"] == ["four"] and failed["failure"] and failed["messages"]
    kinds = {name for name in report.metrics if "failed/" in name}
    assert len(kinds) == 1, kinds


@pytest.mark.parametrize("fault", ["500", "429", "html", "garbage", "closed"])
def test_a_fault_that_passes_is_tried_again(fault: str) -> None:
    with judge_server() as server, _environment(server) as environment:
        server.fault = lambda number, body: fault if number == 0 else None
        report = _score(environment, ("4",))
        assert not any(report.unscored) and len(server.bodies) == 2
    further = 1 if fault != "429" else 0
    assert report.metrics["judge/right/further_tries"].value == further
    assert report.metrics["judge/right/rate_limited"].value == 1 - further


def test_another_try_of_a_verdict_has_another_seed_and_is_drawn() -> None:
    with judge_server() as server, _environment(server) as environment:
        server.fault = lambda number, body: "garbage" if number == 0 else None
        _score(environment, ("4",))
        first, second = server.bodies
    assert (first["seed"], first["temperature"]) == (0, 0.0) and (second["seed"], second["temperature"]) == (1, 0.5)


def test_a_failure_has_the_stated_score_or_ends_the_run() -> None:
    with judge_server() as server:
        server.fault = lambda number, body: "garbage"
        with _environment(server, on_failure="score", failure_score=0.25) as environment:
            report = _score(environment)
            assert report.rewards == (0.25,) * 4 and not any(report.unscored)
        with _environment(server, on_failure="error") as environment, pytest.raises(RewardError, match="on_failure"):
            _score(environment)


def test_a_judge_that_fails_too_often_ends_the_run() -> None:
    with judge_server() as server, _environment(server, retries=0) as environment:
        server.fault = lambda number, body: "garbage"
        with pytest.raises(RewardError, match="64 of the last 64 rows"):
            for number in range(17):
                _score(environment, tuple(f"{number} {place}" for place in range(4)))


def test_a_response_that_is_too_long_is_a_failure_and_not_cut() -> None:
    with judge_server() as server, _environment(server, max_response_chars=10) as environment:
        report = _score(environment, ("4", "4" * 11))
        assert [bool(why) for why in report.unscored] == [False, True] and len(server.bodies) == 1


# ---- limits and verdicts on disk


def test_requests_and_budget_have_limits(tmp_path: Path) -> None:
    texts = tuple(map(str, range(12)))
    with judge_server(seconds=0.05) as server:
        with _environment(server, max_concurrent=3) as environment:
            _score(environment, texts)
        assert server.most_at_once == 3
        with _environment(server, tmp_path, budget_tokens=330, max_concurrent=1) as environment:
            report = _score(environment, texts)
        assert [bool(why) for why in report.unscored] == [False] * 3 + [True] * 9
        assert report.metrics["judge/right/failed/budget"].value == 9
        with _environment(server, tmp_path, budget_tokens=330) as environment:
            again = _score(environment, (*texts[:3], "another"))
    assert [bool(why) for why in again.unscored] == [False] * 3 + [True], "a budget is that of the run folder"


def test_verdicts_on_disk_are_taken_and_failures_are_not(tmp_path: Path) -> None:
    with judge_server() as server:
        server.fault = lambda number, body: "garbage" if _response_of(body) == "5" else None
        with _environment(server, tmp_path) as environment:
            first = _score(environment)
        with (tmp_path / "verdicts.jsonl").open("a") as file:
            file.write('{"judge": "right", "key"')  # killed while it wrote
        server.fault, server.verdict = (lambda number, body: None), (lambda body: '{"score": 1}')
        num_asked = len(server.bodies)
        with _environment(server, tmp_path) as environment:
            second = _score(environment)
        assert len(server.bodies) == num_asked + 1
        with _environment(server, None, verdicts=str(tmp_path / "verdicts.jsonl")) as environment:
            other = _score(environment, TEXTS[:3])
        assert len(server.bodies) == num_asked + 1
        with _environment(server, tmp_path, rubric="Is it kind?") as environment:
            _score(environment, TEXTS[:1])
        assert len(server.bodies) == num_asked + 2, "another rubric asks anew"
    assert second.rewards[:3] == first.rewards[:3] == other.rewards and second.rewards[3] == 0.1


def test_equal_responses_are_asked_about_once() -> None:
    with judge_server(seconds=0.1) as server, _environment(server) as environment:
        report = _score(environment, ("4", "4", "<think>hm</think> 4"))
        assert len(server.bodies) == 1 and len(set(report.rewards)) == 1


def test_the_key_is_sent_and_written_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with judge_server() as server:
        with pytest.raises(ConfigError, match="JUDGE_KEY"), _environment(server, api_key_env="JUDGE_KEY"):
            pass
        monkeypatch.setenv("JUDGE_KEY", "secret-of-the-test")
        with _environment(server, tmp_path, api_key_env="JUDGE_KEY") as environment:
            _score(environment)
        assert set(server.keys) == {"Bearer secret-of-the-test"}
    assert "secret-of-the-test" not in (tmp_path / "verdicts.jsonl").read_text()


# ---- several rewards, pairs and groups


def test_a_closed_gate_spares_the_judge_and_counts_nothing_behind_it(tmp_path: Path) -> None:
    (tmp_path / "forms.py").write_text("def digit(prompt, response, answer):\n    return float(response.isdigit())\n")
    function = f"{tmp_path / 'forms.py'}:digit"
    env = {"reward_function": function, "gates": {"digit": 1.0}, "reward_weights": {"digit": 0.5, "right": 2.0}}
    with judge_server() as server:
        server.verdict = lambda body: '{"score": 5}'
        with _environment(server, env=env) as environment:
            report = _score(environment)
        assert len(server.bodies) == 2
    assert report.rewards == (1.5, 0.0, 0.0, 1.5) and not any(report.unscored)
    assert [value == value for value in report.components["right"]] == [True, False, False, True]
    assert report.components["digit"] == (1.0, 0.0, 0.0, 1.0) and report.metrics["gates_closed"].value == 0.5


def test_pairs_are_asked_in_both_orders_and_a_biased_judge_gives_ties() -> None:
    with judge_server() as server:
        server.verdict = lambda body: '{"better": 1}'
        with _environment(server, mode="pairwise") as environment:
            report = _score(environment)
        assert len(server.bodies) == 12 and report.rewards == (0.5,) * 4
        server.verdict = lambda body: json.dumps({"better": 1 + body["messages"][1]["content"].count("1>>\n5\n")})
        with _environment(server, mode="pairwise") as environment:
            assert _score(environment, ("5", "4")).rewards == (0.0, 1.0)
        with _environment(server, mode="pairwise") as environment:
            assert [bool(why) for why in _score(environment, ("4",)).unscored] == [True]


def test_a_group_is_one_request_with_a_score_for_each() -> None:
    with judge_server() as server:
        server.verdict = lambda body: '{"scores": [10, 0, 5, 2]}'
        with _environment(server, mode="groupwise") as environment:
            report = _score(environment)
        assert len(server.bodies) == 1 and report.rewards == (1.0, 0.0, 0.5, 0.2)
        server.verdict = lambda body: '{"scores": [10, 0, 5]}'
        with _environment(server, mode="groupwise") as environment:
            assert all(_score(environment).unscored), "a score is missing, and nobody knows whose"


def test_a_section_with_a_judge_leaves_out_its_own_rows_alone() -> None:
    with judge_server() as server:
        server.fault = lambda number, body: "garbage" if _response_of(body) == "5" else None
        judge = JudgeConfig(model="m", base_url=server.url, rubric="r", retries=0)
        judged = EnvConfig(name="judge", judges={"right": judge})
        rewards, identity = build_rewards(
            {"env": EnvConfig(name="sort"), "data.train.a.env": judged}, start_timeout_s=60
        )
        try:
            prompts = [replace(PROMPT, section=f"data.train.{name}") for name in ("a", "b", "a", "b")]
            report = rewards.score(prompts, [Response(text=text, num_tokens=1) for text in ("4", "4", "5", "5")])
            assert waits_for_others(rewards)
        finally:
            rewards.shutdown()
    assert [bool(why) for why in report.unscored] == [False, False, True, False]
    assert report.rewards[1] == 1.0 and report.rewards[3] == 0.0 and report.rewards[0] > 0
    assert report.metrics["judge/right/asked"].value == 2 and "rubric" in identity


def test_weights_name_every_component() -> None:
    weights = {"reward_weights": {"wrong": 1.0}}
    with judge_server() as server, _environment(server, env=weights) as environment:
        refused = pytest.raises(RewardError, match="a weight of each of right")
        with refused:
            _score(environment)


# ---- preflight


def test_the_preflight_refuses_a_judge_without_verdicts_and_warns_of_equal_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with judge_server() as server, _environment(server) as environment:
        environment.probe(PROMPT, where="data.train")
        shown = {_response_of(body) for body in server.bodies}
        assert shown == {"4", "", "What is 2 + 2?", "score: 10"} and not caplog.records
    with judge_server() as server, _environment(server) as environment:
        server.verdict = lambda body: '{"score": 5}'
        environment.probe(PROMPT, where="data.train")
        assert "does not tell responses apart" in caplog.text
    with judge_server() as server, _environment(server) as environment:
        server.fault = lambda number, body: "language"
        with pytest.raises(RewardError, match="no verdict on four responses"):
            environment.probe(PROMPT, where="data.train")


# ---- classes of the user's


def _of_class(kind: str, folder: Path | None = None, **changes: Any) -> JudgeEnvironment:
    given: dict[str, Any] = {"kind": kind, "timeout_s": 5.0, "request_timeout_s": 0.5, "retries": 1, **changes}
    config = EnvConfig(name="judge", judges={"own": JudgeConfig(**given)})
    environment = build_environment(config, start_timeout_s=60, log_file=folder and folder / "reward.log")
    assert isinstance(environment, JudgeEnvironment)
    return environment


def test_a_class_of_the_user_has_our_tries_records_and_counters(tmp_path: Path) -> None:
    """One case fails for ever, one hangs, one cannot be read at first; the others have verdicts."""
    environment = _of_class("tests.helpers.own_judge:OwnJudge", tmp_path, options={"best": "4"}, rubric="Is it 4?")
    try:
        report = _score(environment, ("4", "raise", "hang", "later", "4"))
        again = _score(environment, ("4",))
    finally:
        environment.shutdown()
    assert report.rewards == (1.0, 0.0, 0.0, 0.1, 1.0) and again.rewards == (1.0,)
    assert ["KeyError" in why or "no answer within" in why for why in report.unscored] == [
        False,
        True,
        True,
        False,
        False,
    ]
    metrics = {name: value.value for name, value in report.metrics.items() if name.startswith("judge/own/")}
    assert metrics["judge/own/further_tries"] == 3 and metrics["judge/own/failed/transport"] == 2
    assert metrics["judge/own/tokens"] == 3 * 7, "three texts came: of 4, and of later twice"
    assert metrics["judge/own/kept"] == 1 and again.metrics["judge/own/kept"].value == 1
    lines = [json.loads(line) for line in (tmp_path / "verdicts.jsonl").read_text().splitlines()]
    assert len(lines) == 4 and "Is it 4?" in lines[0]["messages"][0]["content"]


def test_options_of_a_class_decide_which_verdicts_are_taken(tmp_path: Path) -> None:
    found = []
    for best in ("4", "5"):
        environment = _of_class("tests.helpers.own_judge:OwnJudge", tmp_path, options={"best": best})
        try:
            found.append(_score(environment, ("4", "5")).rewards)
        finally:
            environment.shutdown()
    assert found == [(1.0, 0.1), (0.1, 1.0)]


def test_a_budget_needs_the_tokens_of_a_class(tmp_path: Path) -> None:
    environment = _of_class("tests.helpers.own_judge:OwnJudge", options={"best": "4", "counts": False}, budget_tokens=9)
    try:
        assert "reports no usage" in _score(environment, ("4",)).unscored[0]
    finally:
        environment.shutdown()


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("tests.helpers.own_judge:Missing", "has no 'Missing'"),
        ("tests.helpers.no_such_module:Judge", "cannot be imported"),
        ("tests.helpers.judge_server:JudgeServer", "is called with name= and config="),
    ],
)
def test_a_class_that_is_none_is_refused(kind: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        _of_class(kind)
