"""Deadlines: the last step before a save, a start that says what it waits for, a time limit for Python code."""

from __future__ import annotations

import ast
import signal
import threading
import time
from pathlib import Path

import pytest

from nemo_rl.config.base import seconds_of
from nemo_rl.config.run import CheckpointingConfig, ClusterConfig
from nemo_rl.errors import UserError
from nemo_rl.utils.deadlines import END_S, AwakeClock, SaveDeadline, StartUp, seconds_left, time_limit


@pytest.mark.parametrize(
    ("text", "seconds"), [("00:00:01", 1), ("1:02:03", 3723), ("100:00:00", 360_000), ("2:00:00:01", 172_801)]
)
def test_durations_are_those_of_slurm(text, seconds):
    assert seconds_of(text) == seconds
    assert CheckpointingConfig(must_save_by=text).must_save_by == text


@pytest.mark.parametrize("text", ["", "90", "1:30", "00:00:00", "0:60:00", "1:2:3:4:5", "-1:00:00", "1:00:00\n", 3600])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="expected HH:MM:SS|valid string|HH:MM:SS or DD:HH:MM:SS above 0"):
        CheckpointingConfig(must_save_by=text)


def test_a_step_starts_only_while_the_longest_step_and_save_fit():
    now = [0.0]
    deadline = SaveDeadline(100.0 + END_S, clock=lambda: now[0])
    assert not deadline.is_reached()
    deadline.step_took(20.0)
    deadline.step_took(5.0)
    assert deadline.reserve_s == pytest.approx(1.1 * 40.0 + END_S)  # no save was seen: as long as a step
    deadline.save_took(30.0)
    deadline.save_took(10.0)
    assert deadline.reserve_s == pytest.approx(1.1 * 50.0 + END_S)
    now[0] = 44.9
    assert not deadline.is_reached()
    now[0] = 45.1
    assert deadline.is_reached() and deadline.left_s() == pytest.approx(54.9 + END_S)
    assert not SaveDeadline().is_reached()


def test_a_duration_counts_from_the_start_of_the_run_and_auto_to_the_end_of_the_job():
    deadline = SaveDeadline.starting_at(time.monotonic() - 600, "1:00:00")
    assert 2990 < deadline.left_s() <= 3000
    ends = str(int(time.time()) + 500)
    assert 498 < seconds_left("auto", variables={"SLURM_JOB_END_TIME": ends}) <= 500
    with pytest.raises(UserError, match="auto needs SLURM_JOB_END_TIME, which is '' here; run it as a Slurm job"):
        seconds_left("auto", variables={})


def test_seconds_in_which_this_process_was_stopped_do_not_count():
    now = [100.0]
    clock = AwakeClock(lambda: now[0])
    deadline = clock() + 30
    now[0] += 4.0
    assert clock() == deadline - 26
    now[0] += 600.0  # stopped
    assert clock() == deadline - 26
    now[0] += 1.0
    assert clock() == deadline - 25


ROOT = Path(__file__).parents[3] / "nemo_rl"
HOME = ROOT / "config" / "base.py"
OTHERS = {ROOT / "environments" / "scorer_pool.py", ROOT / "utils" / "trackers.py"}
"""Not of the cluster: a reward is a user's own code, a tracker goes on without the run."""


def test_a_slow_start_says_what_it_waits_for_and_a_fast_one_is_silent() -> None:
    told: list[str] = []
    second = threading.Event()

    def tell(text: str) -> None:
        told.append(text)
        if len(told) == 2:
            second.set()

    with StartUp(report=tell, every_s=0.02).waiting_for("TransferQueue"):
        assert second.wait(30)
    assert told[0].startswith("waiting for TransferQueue, ") and told[0].endswith(" s")
    told.clear()
    with StartUp(report=tell, every_s=60).waiting_for("TransferQueue"):
        pass
    assert told == []


def test_the_error_past_the_deadline_names_the_key() -> None:
    text = StartUp(timeout_s=90).too_late("TransferQueue did not start")
    assert "within 90 s" in text and "cluster.worker_start_timeout_s" in text
    assert "worker_start_timeout_s" in ClusterConfig.model_fields and StartUp().timeout_s >= 300


def test_no_other_start_has_a_constant_of_its_own() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {target.id}"
        for path in ROOT.rglob("*.py")
        if path != HOME and path not in OTHERS
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
        and ("START" in target.id or "PLACEMENT" in target.id)
        and target.id.endswith("_S")
    ]
    assert found == []


def spin() -> None:
    while True:
        pass


def test_what_has_no_end_is_ended_and_what_ends_is_left_alone():
    handler = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeoutError, match=r"not finished within 0\.1 s"), time_limit(0.1):
        spin()
    with time_limit(60):
        pass
    assert signal.getsignal(signal.SIGALRM) is handler


def test_a_timer_of_somebody_else_goes_on():
    before = signal.setitimer(signal.ITIMER_REAL, 500)
    try:
        with time_limit(60):
            assert signal.getitimer(signal.ITIMER_REAL)[0] <= 60
        assert 60 < signal.getitimer(signal.ITIMER_REAL)[0] <= 500
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)


def test_another_thread_runs_without_a_limit():
    done = []

    def work() -> None:
        with time_limit(0.01):
            done.append(signal.getitimer(signal.ITIMER_REAL)[0])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=60)
    assert len(done) == 1
