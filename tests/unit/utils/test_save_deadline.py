"""Whether one more step fits before a run must have saved."""

from __future__ import annotations

import time

import pytest

from nemo_rl.config.base import seconds_of
from nemo_rl.config.schema import CheckpointingConfig
from nemo_rl.errors import UserError
from nemo_rl.utils.deadlines import END_S, SaveDeadline, seconds_left


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
