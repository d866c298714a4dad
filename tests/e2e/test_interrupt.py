"""However a run ends, none of its processes is left, and a killed run resumes as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from nemo_rl.utils.run_lock import outcome_of
from tests.helpers.processes import MARK, end_all, listening_off_loopback, marked, wait_for_none
from tests.helpers.resume_kills import ResumeKills
from tests.helpers.runs import LOCAL, logged_steps, start_cli, write_recipe

pytestmark = pytest.mark.slow

GONE_S = 60.0
RAY_PROCESSES = 6
"""Fewest processes that make a started run: Ray's own, workers, engines, rollout, storage."""


SETTINGS = {
    "ctrl_c": ("data_plane.impl=transfer_queue",),
    "sigterm": ("policy.generation.refit_transport=broadcast", "data_plane.ray.owner=holder"),
    "sigkill": ("data_plane.impl=ray", "data_plane.ray.owner=node"),
}
"""Each end with another store: what it has started must go too."""


@pytest.fixture
def mark(monkeypatch) -> Iterator[str]:
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    yield value
    monkeypatch.delenv(MARK)
    end_all(value)


def wait_for_step(log_dir: Path, step: int, process: subprocess.Popen[str], *, timeout_s: float = 600.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        metrics = log_dir / "metrics.jsonl"
        if metrics.is_file() and any(row["step"] >= step for row in logged_steps(log_dir)):
            return
        if process.poll() is not None:
            raise AssertionError(f"the run ended early with {process.returncode}:\n{process.communicate()[0][-3000:]}")
        time.sleep(0.1)
    raise AssertionError(f"step {step} was not reached in {timeout_s:.0f} s")


@pytest.mark.parametrize(
    "how", ["ctrl_c", *(pytest.param(name, marks=pytest.mark.full) for name in ("sigkill", "sigterm"))]
)
def test_no_process_is_left_after_the_end(tmp_path, model, mark, how):
    recipe = write_recipe(tmp_path, model)
    process = start_cli(recipe, "grpo.max_num_steps=100000", *SETTINGS[how])
    wait_for_step(tmp_path / "logs", 1, process)
    assert len(marked(mark)) - 1 >= RAY_PROCESSES
    count, reachable = listening_off_loopback(mark)
    assert count >= RAY_PROCESSES and reachable == [], "only this machine may reach what a run has started"
    if how == "ctrl_c":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGTERM if how == "sigterm" else signal.SIGKILL)
    assert wait_for_none(mark, timeout_s=GONE_S) == []
    output, _ = process.communicate(timeout=GONE_S)
    if how != "sigkill":
        assert process.returncode == 130 and "interrupted" in output and "Traceback" not in output, output[-3000:]
    ended = outcome_of(tmp_path / "logs", step=1, num_steps=100000)
    said = {"ctrl_c": "interrupted", "sigterm": "by a signal, after step", "sigkill": "its process was killed"}
    assert ended.state == "stopped" and ended.cause.startswith(said[how]) and ended.seconds > 0


def test_a_worker_that_is_killed_ends_the_run_with_its_cause(
    tmp_path: Path, model: Path, mark: str, command_line: Callable[..., tuple[int, str]]
) -> None:
    logs = tmp_path / "logs"

    def kill_one() -> int:
        give_up = time.monotonic() + 600.0
        while not ((logs / "metrics.jsonl").is_file() and logged_steps(logs)):
            assert time.monotonic() < give_up
            time.sleep(0.1)
        names = {other: " ".join(other.cmdline()) for other in marked(mark)}
        workers = [other for other, name in names.items() if name.startswith("ray::") and "Worker" in name]
        workers[0].kill()
        return len(workers)

    with ThreadPoolExecutor(1) as pool:
        count = pool.submit(kill_one)
        code, output = command_line(write_recipe(tmp_path, model), "grpo.max_num_steps=100000")
        assert count.result() == 4, "two policy workers, one engine, one rollout worker"
    assert code == 1, output[-3000:]
    # Its peer notices, or the driver, whichever is faster.
    said = ("process died", "exited without output", "keeps the job's store, has ended")
    assert any(text in output for text in said) and "stage" in output, output[-3000:]
    ended = outcome_of(logs, step=1, num_steps=100000)
    assert ended.state == "failed" and any(text in ended.cause for text in said) and "\n" not in ended.cause
    assert "Ray's logs of this run are in" in output and list((logs / "ray_logs").glob("raylet*"))
    assert wait_for_none(mark, timeout_s=GONE_S) == []


ASYNC = {"grpo.async.enabled": True, "loss_fn.use_importance_sampling_correction": True, "data_plane.impl": "ray"}


@pytest.mark.parametrize(
    ("settings", "number"),
    [pytest.param(LOCAL, signal.SIGTERM, marks=pytest.mark.full), (ASYNC, signal.SIGUSR1)],
    ids=["sync-SIGTERM", "async-SIGUSR1"],
)
def test_what_a_cluster_sends_before_it_takes_the_machine_ends_the_run_with_a_checkpoint(
    tmp_path, model, mark, settings, number
):
    """Every process gets SIGUSR1 and SIGUSR2 here, as on a cluster; SIGUSR2 means nothing, and workers heed neither."""
    recipe = write_recipe(tmp_path, model, checkpointing={"enabled": True, "save_period": 1000})
    process = start_cli(recipe, "grpo.max_num_steps=100000", *(f"{name}={value}" for name, value in settings.items()))
    wait_for_step(tmp_path / "logs", 1, process)
    for each in marked(mark):
        with suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGUSR2)
    wait_for_step(tmp_path / "logs", int(logged_steps(tmp_path / "logs")[-1]["step"]) + 2, process)
    for each in [process] if number == signal.SIGTERM else marked(mark):
        with suppress(psutil.NoSuchProcess):
            each.send_signal(number)
    output, _ = process.communicate(timeout=GONE_S)
    last = int(logged_steps(tmp_path / "logs")[-1]["step"])
    saved = tmp_path / "logs" / "checkpoints" / f"step_{last}"
    assert process.returncode == 130 and saved.is_dir(), output[-3000:]
    ended = outcome_of(tmp_path / "logs", step=last, num_steps=100000)
    assert (ended.state, ended.cause) == ("stopped", f"by a signal, after step {last}")
    for said in (
        f"{number.name}: ending after this step, which may take 25 s (cluster.grace_s)",
        f"saved step {last} and ending",
        f"the last checkpoint is {saved}; to continue:",
    ):
        assert said in " ".join(output.split()), output[-3000:]
    assert wait_for_none(mark, timeout_s=GONE_S) == []


@pytest.mark.full
@pytest.mark.parametrize("more", [{}, {"async_save": True}, {"durable": True}], ids=["plain", "async_save", "durable"])
def test_a_killed_run_resumes_with_the_prompts_and_losses_of_an_uninterrupted_one(tmp_path, model, more):
    """A twenty-fifth of `make resume-kills`, in one process."""
    result = ResumeKills(tmp_path, model, launcher="local", kills=2, saves=1, seed=0, **more).run()
    assert result.problems == [] and result.processes_left == 0
    assert (result.kills_during_a_save, result.kills_at_random) == (1, 1)
    assert result.resumed_from
