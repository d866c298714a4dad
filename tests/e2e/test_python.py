"""`nemo_rl.train`: the numbers of the equal recipe, a process that is as before, and what it refuses."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
import yaml
from rich.console import Console

import nemo_rl
from nemo_rl.algorithms.run import run as run_config
from nemo_rl.config.load import load_config
from nemo_rl.errors import ConfigError, DatasetError, UserError
from tests.helpers.runs import ROOT, logged_steps

ROWS = [{"prompt": f"sort {number}", "answer": "".join(sorted(str(number)))} for number in range(1201, 1233)]
SHORT = {"num_generations_per_prompt": 4, "num_prompts_per_step": 4, "max_num_steps": 2, "learning_rate": 1e-3}
SETTINGS = {
    "cluster": {"launcher": "local"},
    "policy.max_total_sequence_length": 32,
    "policy.generation.max_new_tokens": 6,
    "data.max_input_seq_length": 24,
    "logger.tensorboard_enabled": False,
    "logger.reward_curve": False,
}
REWARD = """
def odd_share(prompt, response, answer):
    return sum(character in "13579" for character in response) / max(1, len(response))
"""
RECIPE = {
    "grpo": {"num_generations_per_prompt": 4, "num_prompts_per_step": 4, "max_num_steps": 2},
    "policy": {
        "precision": "float32",
        "train_global_batch_size": 16,
        "max_total_sequence_length": 32,
        "optimizer": {"kwargs": {"lr": 1e-3, "weight_decay": 0.01}},
        "generation": {"max_new_tokens": 6},
    },
    "data": {
        "train": {"dataset_name": "jsonl", "input_key": "prompt", "output_key": "answer"},
        "validation": None,
        "max_input_seq_length": 24,
    },
    "cluster": {"launcher": "local"},
    "logger": {"tensorboard_enabled": False, "reward_curve": False},
}


@pytest.fixture(autouse=True)
def in_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def of_a_cell() -> object:
    """A function as a notebook's cell makes it: no module and no file has it."""
    names: dict[str, object] = {"__name__": "__main__"}
    exec(REWARD, names)
    return names["odd_share"]


def state() -> list[object]:
    """What a program may have set up before it trains."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)]
    loggers = [(list(found.handlers), found.level) for found in map(logging.getLogger, (None, "nemo_rl"))]
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    return [handlers, loggers, children, sys.excepthook, set(threading.enumerate()), dict(os.environ)]


def test_the_numbers_are_those_of_the_equal_recipe(model: Path, tmp_path: Path) -> None:
    before = state()
    run = nemo_rl.train(model, iter(ROWS), of_a_cell(), folder="python", **SHORT, settings=SETTINGS)
    assert state() == before
    assert repr(run) == "Run('python')"

    (tmp_path / "rewards.py").write_text(REWARD)
    reward = {"name": "custom", "reward_function": "rewards.py:odd_share"}
    tree = {**RECIPE, "env": reward, "logger": {**RECIPE["logger"], "log_dir": "recipe"}}
    tree["policy"] = {"model_name": str(model), **tree["policy"]}
    tree["data"]["train"]["data_path"] = "python/prompts/train.jsonl"
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    run_config(load_config("recipe.yaml"), console=Console(quiet=True))
    assert logged_steps(Path("python")) == logged_steps(Path("recipe"))

    rewards = [row["train/reward"] for row in run.metrics]
    assert len(rewards) == 2 and 0 < max(rewards) < 1
    assert yaml.safe_load(Path("python/config.yaml").read_text())["env"]["reward_function"] == "python:odd_share"
    with pytest.raises(ConfigError, match="function of a Python session, which no file holds"):
        load_config("python/config.yaml")

    before = state()
    samples = run.sample("sort 1310", num_samples=2)
    assert len(samples) == 2 and isinstance(run.sample("sort 1310"), str)
    found = run.evaluate(ROWS[:3], settings={"evaluation.num_samples": 2})
    assert found["num_prompts"] == 3 and 0 <= found["reward"] <= 1
    assert (run.export("exported") / "model.safetensors").is_file()
    assert state() == before
    with pytest.raises(UserError, match="exists already"):
        run.export("exported")
    with pytest.raises(UserError, match="logger.log_dir: python already holds a run"):
        nemo_rl.train(model, ROWS, of_a_cell(), folder="python", **SHORT, settings=SETTINGS)
    assert state() == before


def test_functions_of_both_forms_are_parts_of_a_reward(model: Path) -> None:
    seen = Path("seen").absolute()

    def in_lists(prompts, completions, answer, **columns):
        assert [each[0]["role"] for each in completions] == ["assistant"] * len(answer)
        seen.write_text(f"{prompts[0][-1]['content']} {answer[0]} {sorted(columns)}")
        return [None if number % 2 else 1.0 for number in range(len(completions))]

    def by_row(prompt, response, answer, level):
        return 1.0 + level

    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": "1", "level": 2} for row in ROWS]
    sources, settings = {"few": rows[:2], "more": rows[2:]}, {**SETTINGS, "data.train.more.weight": 3}
    run = nemo_rl.train(model, sources, {in_lists: 0.5, by_row: 2.0}, **SHORT, settings=settings, name="parts")
    row = run.metrics[0]
    assert (row["train/source/few/rows"], row["train/source/more/rows"]) == (4, 12)
    assert (row["train/reward/in_lists"], row["train/reward/by_row"]) == (0.5, 3.0)
    assert row["train/reward"] == pytest.approx(0.5 * 0.5 + 2.0 * 3.0)
    assert seen.read_text().endswith(" 1 ['level']")
    assert run.folder.parent == Path("results") and run.folder.name.startswith("parts-")


def own_form(prompt: str, response: str, answer: str) -> float:
    return 0.0


def test_what_cannot_be_trained_is_refused_before_anything_starts(model: Path) -> None:
    lock = threading.Lock()

    def trains(reward=own_form, prompts=ROWS, settings=None, **given):
        return nemo_rl.train(model, prompts, reward, settings={**SETTINGS, **(settings or {})}, **{**SHORT, **given})

    with pytest.raises(UserError, match=r"(?s)expected one of two forms.*completions, \*\*columns.*got lambda\(text\)"):
        trains(lambda text: 0.0)
    with pytest.raises(UserError, match="trainer_state is given by TRL's trainer alone"):
        trains(lambda completions, trainer_state: [0.0])
    with pytest.raises(UserError, match="cannot be sent to the processes that score: TypeError: cannot pickle"):
        trains(lambda prompt, response, answer: float(lock.locked()))
    with pytest.raises(ConfigError, match=r"train\(\): grpo.max_num_steps: is given twice"):
        trains(settings={"grpo.max_num_steps": 3})
    with pytest.raises(ConfigError, match=r"train\(\): env.reward_function: is given twice"):
        trains(settings={"env": {"reward_function": "a.py:b"}})
    with pytest.raises(ConfigError, match=r"train\(\): grpo.sed: .*did you mean 'grpo.seed'|did you mean 'seed'"):
        trains(settings={"grpo.sed": 3})
    with pytest.raises(ConfigError, match="grpo.max_num_steps: expected an integer, got 'two'"):
        trains(max_num_steps="two")
    with pytest.raises(DatasetError, match="expected rows that are dictionaries, got none"):
        trains(prompts=[])
    with pytest.raises(DatasetError, match="expected sources by name, got splits test, train; give one split"):
        trains(prompts={"train": ROWS, "test": ROWS})
    with pytest.raises(DatasetError, match="expected one column of answers"):
        trains(lambda completions, **_: [0.0], prompts={"a": ROWS, "b": [{"prompt": "a", "output": "b"}]})
    with pytest.raises(UserError, match="nothing.jsonl"):
        trains(prompts="nothing.jsonl")
    assert list(Path().rglob("metrics.jsonl")) == []


SCRIPT = """
import sys
import nemo_rl
assert not {{"torch", "ray", "transformers"}} & set(sys.modules)

def reward(prompt, response, answer):
    return float(len(response))

try:
    nemo_rl.train({model!r}, {rows!r}, reward, folder="run", max_num_steps=1000, num_generations_per_prompt=2,
                  num_prompts_per_step=2, settings={settings!r})
except KeyboardInterrupt:
    import psutil
    print("interrupted", psutil.Process().children(recursive=True))
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_script_cleanly(model: Path, tmp_path: Path) -> None:
    script = SCRIPT.format(model=str(model), rows=ROWS, settings=SETTINGS)
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen([sys.executable, "-u", "script.py"], stdout=log, stderr=log, env=environment)
        give_up = time.monotonic() + 300
        while "step    2/1000" not in (text := (tmp_path / "log").read_text()):
            assert process.poll() is None and time.monotonic() < give_up, text
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0, (tmp_path / "log").read_text()
    assert (tmp_path / "log").read_text().endswith("interrupted []\n")


def test_two_steps_of_the_first_recipe(model: Path) -> None:
    changed = {"policy.model_name": model, "grpo.max_num_steps": 2, "cluster.launcher": "local"}
    config = load_config(
        ROOT / "examples" / "first" / "recipe.yaml", [f"{key}={value}" for key, value in changed.items()]
    )
    run_config(config, console=Console(quiet=True))
    steps = logged_steps(Path("results/first"))
    assert [row["step"] for row in steps] == [1, 2] and all(0 <= row["train/reward"] < 0.5 for row in steps)
