"""Rewards in killable processes: results, limits, errors with their cause, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from nemo_rl.config.data import DataConfig, DatasetConfig
from nemo_rl.config.env import EnvConfig
from nemo_rl.data.datasets import Prompt, build_prompt_sets
from nemo_rl.data.tokenizer import build_tokenizer
from nemo_rl.environments.interfaces import ChecksAnswers, Environment, EnvReport, Response
from nemo_rl.environments.process_environment import build_environment
from nemo_rl.errors import RewardError

REWARDS = "tests.helpers.rewards"


@contextmanager
def environment(**keys: object) -> Iterator[Environment]:
    """Built, and checked to leave neither processes nor threads."""
    threads, children = set(threading.enumerate()), set(psutil.Process().children())
    log_file = keys.pop("log_file", None)
    built = build_environment(EnvConfig(**keys), start_timeout_s=120.0, log_file=log_file)
    try:
        yield built
    finally:
        built.shutdown()
        built.shutdown()
    assert set(psutil.Process().children()) <= children
    assert set(threading.enumerate()) <= threads


def custom(function: str, **keys: object) -> dict[str, object]:
    return {"name": "custom", "reward_function": f"{REWARDS}:{function}", **keys}


def score(env: Environment, responses: Sequence[str], *, answer: object = None) -> EnvReport:
    prompts = [Prompt(index=0, text="p", answer=answer, ids=(1,))] * len(responses)
    return env.score(prompts, answered(responses))


def answered(texts: Sequence[str]) -> list[Response]:
    return [Response(text=text, num_tokens=len(text) + 1) for text in texts]


def test_rewards_come_from_a_process_with_more_descriptors_than_select_knows() -> None:
    """Sockets of Ray and of a data plane take the first 1,024."""
    taken = [os.dup(0) for _ in range(1100)]
    try:
        with environment(**custom("length", num_workers=1)) as env:
            assert score(env, ["xx"]).rewards == (2.0,)
    finally:
        for descriptor in taken:
            os.close(descriptor)


def test_custom_reward_gets_prompt_response_and_answer_and_keeps_their_order() -> None:
    with environment(**custom("length", num_workers=2)) as env:
        responses = ["x" * n for n in range(40)]
        report = score(env, responses, answer={"gold": "p"})
        assert report.rewards == tuple(n + 0.5 for n in range(40))
        assert report.num_timeouts == 0


def test_a_reward_takes_columns_of_the_row_by_name_and_rows_without_them_are_found_first() -> None:
    rows: list[dict[str, object]] = [{"level": 1}, {"level": 2, "bonus": 4.0}, {"bonus": 1.0}]
    prompts = [Prompt(index=n, text="p", answer="", ids=(1,), metadata=row) for n, row in enumerate(rows)]
    with environment(**custom("of_columns", num_workers=1)) as env:
        assert env.score(prompts[:2], answered(["a", "b"])).rewards == (1.5, 6.0)
        assert isinstance(env, ChecksAnswers)
        assert env.answer_problems(prompts) == [
            None,
            None,
            f"reward function '{REWARDS}:of_columns' takes level by name, and the row has bonus",
        ]


def test_a_file_in_the_working_directory_can_hold_the_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_reward_of_this_test.py").write_text("def f(prompt, response, answer):\n    return 0.75\n")
    monkeypatch.chdir(tmp_path)
    with environment(name="custom", reward_function="my_reward_of_this_test:f") as env:
        assert score(env, ["a"]).rewards == (0.75,)


@pytest.mark.parametrize("hang", ["hang", "hang in C"])
def test_a_hanging_reward_is_zero_after_its_limit_and_the_others_are_scored(hang: str) -> None:
    with environment(**custom("hang_on_request", timeout_s=0.5)) as env:
        start = time.monotonic()
        report = score(env, ["a", hang, "b", hang, "c"])
        assert time.monotonic() - start < 15
        assert report.rewards == (1.0, 0.0, 1.0, 0.0, 1.0)
        assert report.num_timeouts == 2


def test_a_hanging_reward_stops_the_run_when_asked_to() -> None:
    with (
        environment(**custom("hang_on_request", timeout_s=0.5, on_timeout="error")) as env,
        pytest.raises(
            RewardError, match=r"hang_on_request' took longer than env.timeout_s 0.5 s(.|\n)*response: 'hang'"
        ),
    ):
        score(env, ["a", "hang"])


@pytest.mark.parametrize(
    ("response", "cause"),
    [
        ("raise", r"misbehave' raised KeyError: 'gold'"),
        ("exit", "ended its process: exit code 3"),
        ("nan", "returned nan, expected a finite number"),
        ("inf", "returned inf, expected a finite number"),
        ("text", "returned '1.0', expected a finite number"),
        ("none", "returned None, expected a finite number"),
    ],
)
def test_a_reward_that_misbehaves_is_reported_with_prompt_and_response(response: str, cause: str) -> None:
    with environment(**custom("misbehave")) as env:
        place = r"( of at most 1e\+15)?(\n  at: .*rewards.py:\d+ misbehave)?"
        with pytest.raises(RewardError, match=rf"{cause}{place}\n  prompt: 'p'\n  response: '{response}'"):
            score(env, ["fine", response])
        assert score(env, ["fine", "true"]).rewards == (0.25, 1.0)


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (f"{REWARDS}:nothing", "cannot be loaded: AttributeError"),
        ("no_such_module:f", "cannot be loaded: ModuleNotFoundError"),
        (f"{REWARDS}:math", "expected a function, got module"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_reported_before_any_rollout(function: str, cause: str) -> None:
    children = set(psutil.Process().children())
    with pytest.raises(RewardError, match=cause), environment(name="custom", reward_function=function):
        pass
    assert set(psutil.Process().children()) <= children


@pytest.mark.slow
def test_math_compares_values_not_texts() -> None:
    with environment(name="math") as env:
        responses = ["so $0.5$", r"\boxed{\frac{2}{4}}", "the answer is 1/2.", "2", "", "no number"]
        assert score(env, responses, answer=r"\frac{1}{2}").rewards == (1.0, 1.0, 1.0, 0.0, 0.0, 0.0)
        assert score(env, ["42"], answer="42").rewards == (1.0,)
        with pytest.raises(RewardError, match="cannot read the gold answer ''"):
            score(env, ["1"], answer="")


@pytest.mark.slow
def test_a_response_that_sympy_cannot_finish_is_ended() -> None:
    # The second response is scored by a new process, on a busy machine.
    with environment(name="math", timeout_s=5.0) as env:
        report = score(env, [r"\boxed{9^{9^{9^{9^{9}}}}}", "3"], answer="3")
        assert (report.rewards, report.num_timeouts) == ((0.0, 1.0), 1)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["chain_sum", "prime_factorization", "propositional_logic"])
def test_reasoning_gym_scores_its_items_and_survives_odd_texts(task: str) -> None:
    cfg = DatasetConfig(dataset_name="reasoning_gym", task=task, size=4, seed=1)
    train = build_prompt_sets(DataConfig(train=cfg, max_input_seq_length=5000), build_tokenizer(["a"]))["data.train"]
    prompts = [*train.prompts, *train.prompts]
    gold = [str(p.answer) for p in train.prompts]
    with environment(name="reasoning_gym", score_threshold=1.0, timeout_s=60) as env:
        report = env.score(prompts, answered([*gold, "zzz", "", "-", "(" * 500]))
    assert set(report.rewards) <= {0.0, 1.0}
    assert report.rewards[4:] == (0.0,) * 4
    if train.prompts[0].answer is not None:
        assert report.rewards[:4] == (1.0,) * 4


@pytest.mark.slow
def test_reasoning_gym_gives_partial_credit_without_a_threshold() -> None:
    cfg = DatasetConfig(dataset_name="reasoning_gym", task="chain_sum", size=1, seed=1)
    train = build_prompt_sets(DataConfig(train=cfg), build_tokenizer(["a"]))["data.train"]
    gold = str(train.prompts[0].answer)
    with environment(name="reasoning_gym") as env:
        (reward,) = env.score(train.prompts, answered([f"the answer is {gold}"])).rewards
    assert 0.0 < reward < 1.0


@pytest.mark.slow
def test_no_scoring_process_outlives_a_killed_owner() -> None:
    script = textwrap.dedent(
        """
        import threading, time
        import psutil
        from nemo_rl.config.env import EnvConfig
        from nemo_rl.data.datasets import Prompt
        from nemo_rl.environments.process_environment import build_environment
        from nemo_rl.environments.interfaces import Response

        cfg = EnvConfig(
            name="custom", reward_function="tests.helpers.rewards:hang_on_request", timeout_s=600, num_workers=2
        )
        env = build_environment(cfg, start_timeout_s=120.0)
        prompt = Prompt(index=0, text="p", answer=None, ids=(1,))
        hangs = [Response(text=text, num_tokens=1) for text in ("hang in C", "hang")]
        threading.Thread(target=env.score, args=([prompt] * 2, hangs), daemon=True).start()
        while len(psutil.Process().children(recursive=True)) < 6:
            time.sleep(0.05)
        time.sleep(0.5)
        print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
        time.sleep(600)
        """
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout as output:
        children = [psutil.Process(int(pid)) for pid in output.readline().split()]
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait(10)
    assert len(children) == 6  # two scorers, their guards, and what removes their folders
    _, alive = psutil.wait_procs(children, timeout=10)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
