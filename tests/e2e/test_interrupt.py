"""However a run ends, none of its processes is left, and a killed run resumes as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.processes import MARK, end_all, marked, wait_for_none
from tests.helpers.runs import LOCAL, logged_steps, rollouts_of, run_cli, start_cli, write_recipe
from tests.helpers.tiny_model import write_tiny_folder

pytestmark = pytest.mark.slow

GONE_S = 10.0
RAY_PROCESSES = 6
"""Fewest processes that make a started run: Ray's own, workers, engines, rollout, storage."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def mark(monkeypatch) -> Iterator[str]:
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    yield value
    monkeypatch.delenv(MARK)
    end_all(value)


def wait_for_step(log_dir: Path, step: int, process: subprocess.Popen[str], *, timeout_s: float = 150.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        metrics = log_dir / "metrics.jsonl"
        if metrics.is_file() and any(row["step"] >= step for row in logged_steps(log_dir)):
            return
        if process.poll() is not None:
            raise AssertionError(f"the run ended early with {process.returncode}:\n{process.communicate()[0][-3000:]}")
        time.sleep(0.1)
    raise AssertionError(f"step {step} was not reached in {timeout_s:.0f} s")


@pytest.mark.parametrize("how", ["ctrl_c", "sigterm", "sigkill"])
def test_no_process_is_left_after_the_end(tmp_path, model, mark, how):
    recipe = write_recipe(tmp_path, model)
    process = start_cli(recipe, "grpo.max_num_steps=100000")
    wait_for_step(tmp_path / "logs", 1, process)
    assert len(marked(mark)) - 1 >= RAY_PROCESSES
    if how == "ctrl_c":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGTERM if how == "sigterm" else signal.SIGKILL)
    assert wait_for_none(mark, timeout_s=GONE_S) == []
    output, _ = process.communicate(timeout=GONE_S)
    if how != "sigkill":
        assert process.returncode == 130 and "interrupted" in output and "Traceback" not in output, output[-3000:]


def test_a_worker_that_is_killed_ends_the_run_with_its_cause(tmp_path, model, mark):
    process = start_cli(write_recipe(tmp_path, model), "grpo.max_num_steps=100000")
    wait_for_step(tmp_path / "logs", 1, process)
    workers = [other for other in marked(mark) if "_Host" in " ".join(other.cmdline())]
    assert len(workers) == 4, "two policy workers, one engine, one rollout worker"
    workers[0].kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output[-3000:]
    # Its peer notices, or the driver, whichever is faster.
    told = "process died" in output or "has ended without a word" in output
    assert told and "stage" in output and "Traceback" not in output, output[-3000:]
    assert wait_for_none(mark, timeout_s=GONE_S) == []


def test_a_killed_run_resumes_with_the_prompts_and_losses_of_an_uninterrupted_one(tmp_path, model, mark):
    saving = {"enabled": True, "save_period": 1, "keep_top_k": None}
    whole = write_recipe(tmp_path / "whole", model, checkpointing={**saving, "checkpoint_dir": str(tmp_path / "ck0")})
    killed = write_recipe(tmp_path / "killed", model, checkpointing={**saving, "checkpoint_dir": str(tmp_path / "ck1")})
    settings = [f"{name}={value}" for name, value in {**LOCAL, "grpo.max_num_steps": "10"}.items()]
    code, output = run_cli(whole, *settings)
    assert code == 0, output
    process = start_cli(killed, *settings)
    wait_for_step(tmp_path / "killed" / "logs", 7, process)
    process.kill()
    process.communicate()
    code, output = run_cli(killed, *settings, "checkpointing.resume=true")
    assert code == 0, output
    expected = {row["step"]: row for row in logged_steps(tmp_path / "whole" / "logs")}
    got = {row["step"]: row for row in logged_steps(tmp_path / "killed" / "logs")}
    assert set(got) == set(range(1, 11))
    for step in (8, 9, 10):
        assert got[step]["train/loss"] == pytest.approx(expected[step]["train/loss"], abs=1e-6)
        ours, theirs = rollouts_of(tmp_path / "killed" / "logs", step), rollouts_of(tmp_path / "whole" / "logs", step)
        assert [row["prompt"] for row in ours] == [row["prompt"] for row in theirs]
