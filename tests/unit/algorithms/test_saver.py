"""Saving beside the training: complete or without a name, waited for, and never silent about an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from nemo_rl.algorithms.saver import Saver
from nemo_rl.config.run import CheckpointingConfig
from nemo_rl.distributed.worker_groups import LocalWorkerGroup
from nemo_rl.errors import CheckpointError, UserError, WorkerError
from nemo_rl.models.policy.tq_policy import Policy
from nemo_rl.utils.checkpoint import CheckpointManager, Upload
from nemo_rl.utils.deadlines import SaveDeadline

STATE = {"sampler": {}}
FAR_S = 60.0


@dataclass
class Writer:
    """A worker that writes when it is told to."""

    may_write: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    waits: list[Callable[[], None]] = field(default_factory=list)

    def save_checkpoint(
        self, *, weights: Path, optimizer: Path | None, tokenizer: Path | None, upload: Upload | None = None
    ) -> None:
        weights.mkdir(parents=True)
        (weights / "model.safetensors").write_text(weights.parts[-3])

    def begin_save(
        self,
        *,
        weights: Path,
        optimizer: Path | None,
        tokenizer: Path | None,
        most_share: float | None,
        upload: Upload | None,
    ) -> None:
        self.waits.append(lambda: self.save_checkpoint(weights=weights, optimizer=optimizer, tokenizer=tokenizer))

    def is_saving(self) -> bool:
        return not self.may_write.is_set()

    def finish_save(self, *, timeout_s: float) -> float:
        assert self.may_write.wait(FAR_S)
        if self.error is not None:
            raise self.error
        self.waits.pop()()
        return 0.5

    def shutdown(self) -> None:
        pass


@dataclass
class Run:
    folder: Path
    writer: Writer = field(default_factory=Writer)

    def __post_init__(self) -> None:
        self.manager = CheckpointManager(self.folder, keep_top_k=1, metric_name="reward")
        policy = Policy(LocalWorkerGroup(lambda: self.writer), timeout_s=FAR_S)
        self.saver = Saver(self.manager, policy, CheckpointingConfig(async_save=True), timeout_s=FAR_S)

    def names(self) -> list[str]:
        return sorted(path.name.split(".")[0] for path in self.folder.iterdir())

    def write(self) -> None:
        self.writer.may_write.set()

    def look_until(self, is_reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + FAR_S
        while not is_reached():
            assert time.monotonic() < deadline
            self.saver.look()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_step_has_no_name_before_all_of_it_is_written(run: Run) -> None:
    run.saver.save(1, state=STATE, waits=False)
    run.saver.look()
    assert run.names() == ["tmp_step_1"] and run.saver.last_step == 0 and run.manager.latest() is None
    run.write()
    run.look_until(lambda: run.saver.last_step == 1)
    assert run.names() == ["latest", "step_1"] and run.saver.last_path == run.folder / "step_1"
    assert run.manager.choose(with_optimizer=False).checkpoint.step == 1


def test_the_next_save_waits_for_the_one_before_it_and_only_then_are_old_ones_removed(run: Run) -> None:
    run.saver.save(1, state=STATE, waits=True)
    run.saver.save(2, state=STATE, waits=False)
    assert run.names() == ["latest", "step_1", "tmp_step_2"]
    threading.Timer(0.05, run.write).start()
    run.saver.save(3, state=STATE, waits=True)
    assert run.saver.last_step == 3 and (run.folder / "latest").read_text() == "step_3"
    # The best and the latest: without the metric the newest is both.
    assert run.names() == ["latest", "step_3"]


def test_the_end_of_a_run_waits(run: Run) -> None:
    with run.saver.waited_for():
        run.saver.save(4, state=STATE, waits=False)
        threading.Timer(0.05, run.write).start()
    assert run.names() == ["latest", "step_4"]


def test_an_error_in_the_background_is_raised_at_the_next_step_with_its_cause(run: Run) -> None:
    run.saver.save(1, state=STATE, waits=True)
    run.writer.error = CheckpointError("rank 0 could not write it: OSError: no space")
    run.saver.save(2, state=STATE, waits=False)
    run.write()
    with (
        pytest.raises(CheckpointError, match=r"checkpoint of step 2 in .*no space; the latest valid checkpoint is .*1"),
        run.saver.waited_for(),
    ):
        run.saver.look()
    assert run.names() == ["latest", "step_1"] and run.saver.last_step == 1


def test_files_that_cannot_be_completed_are_told_too(run: Run) -> None:
    run.saver.save(1, state=STATE, waits=False)
    [unfinished] = run.folder.iterdir()
    (unfinished / "manifest.json").mkdir()
    run.write()
    with pytest.raises(CheckpointError, match="checkpoint of step 1 .*there is no earlier checkpoint"):
        run.look_until(lambda: False)
    assert run.names() == []
    run.saver.finish()


def test_a_run_that_fails_completes_its_checkpoint_and_tells_its_own_error(run: Run) -> None:
    with pytest.raises(UserError, match="of the run"), run.saver.waited_for():
        run.saver.save(1, state=STATE, waits=False)
        threading.Timer(0.05, run.write).start()
        raise UserError("of the run")
    assert run.names() == ["latest", "step_1"]


def test_a_save_that_fails_with_the_run_is_a_warning(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.writer.error = WorkerError("has been shut down", rank=0, stage="checkpoint")
    run.write()
    with pytest.raises(UserError, match="of the run"), run.saver.waited_for():
        run.saver.save(1, state=STATE, waits=False)
        raise UserError("of the run")
    assert run.names() == []
    assert "checkpoint of step 1 was being written, and is removed" in caplog.text


def test_time_for_a_save_that_runs_is_kept_until_it_is_complete(run: Run) -> None:
    deadline = run.saver.deadline = SaveDeadline(1000.0, clock=lambda: 0.0)
    deadline.step_took(10.0)
    deadline.save_took(20.0)
    before = deadline.reserve_s
    run.saver.save(1, state=STATE, waits=False)
    assert deadline.reserve_s == pytest.approx(before + 1.1 * 20.0)
    run.write()
    run.saver.finish()
    assert deadline.reserve_s == pytest.approx(before)
