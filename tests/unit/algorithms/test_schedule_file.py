"""`schedule.jsonl`: what is written comes back, start by start, and what cannot be followed is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl.algorithms.scheduled_batches import SCHEDULE_FILE, ScheduleFile, read_schedule
from nemo_rl.errors import CheckpointError
from nemo_rl.models.generation.schedule import ScheduleEntry

JOIN = ScheduleEntry(engine=0, number=0, turn=0, kind="join", groups=("0.0", "1.0"))
SWAP = ScheduleEntry(engine=0, number=1, turn=4, kind="swap", version=1)
OTHER = ScheduleEntry(engine=1, number=0, turn=0, kind="join", groups=("2.0",))


def test_the_events_of_a_start_come_back_by_engine_step_and_version(tmp_path: Path) -> None:
    file = ScheduleFile(tmp_path, step=0)
    # Threads hand over what they have: entries of an engine come out of turn.
    file.engines([SWAP, OTHER])
    file.engines([JOIN])
    file.step(1, ["1.0", "0.0"])
    file.weights(1, "abc")
    found = read_schedule(tmp_path, start=0)
    assert found.start == 0 and found.scripts == {0: [JOIN, SWAP], 1: [OTHER]}
    assert found.steps == {1: ("1.0", "0.0")} and found.weights == {1: "abc"}


def test_the_last_start_after_the_step_is_read_and_nothing_of_the_others(tmp_path: Path) -> None:
    ScheduleFile(tmp_path, step=0).step(1, ["0.0"])
    ScheduleFile(tmp_path, step=1).step(2, ["1.0"])
    ScheduleFile(tmp_path, step=0).step(1, ["2.0"])
    ScheduleFile(tmp_path, step=1).step(2, ["3.0"])
    assert read_schedule(tmp_path, start=0).steps == {1: ("2.0",)}
    assert read_schedule(tmp_path, start=1).steps == {2: ("3.0",)}
    with pytest.raises(CheckpointError, match=r"no start after step 5; expected one of \[0, 1, 0, 1\]: give --from"):
        read_schedule(tmp_path, start=5)


def test_a_schedule_that_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="only asynchronous runs"):
        read_schedule(tmp_path, start=0)
    ScheduleFile(tmp_path, step=0).engines([SWAP])
    with pytest.raises(CheckpointError, match="engine 0 was replaced in this run, or events of it are missing"):
        read_schedule(tmp_path, start=0)
    with (tmp_path / SCHEDULE_FILE).open("a") as file:
        file.write('{"event": "tea"}\n')
    with pytest.raises(CheckpointError, match="line 3: expected an event of a schedule"):
        read_schedule(tmp_path, start=0)
