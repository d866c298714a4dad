"""A folder holds one run; nothing that a run did not write is ever touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl.algorithms.run_folder import open_run_folders, truncate_rollouts, used_folder_problems
from nemo_rl.config.run import CheckpointingConfig, LoggerConfig
from nemo_rl.errors import RunFolderError
from nemo_rl.utils.run_lock import OUTCOME_FILE

Sections = tuple[LoggerConfig, CheckpointingConfig]


def config(log_dir: Path, *, checkpointing: dict[str, object] | None = None, **logger: object) -> Sections:
    return LoggerConfig(log_dir=log_dir, **logger), CheckpointingConfig(**checkpointing or {})


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")


RUN = (
    OUTCOME_FILE,
    "metrics.jsonl",
    "config.yaml",
    "rollouts/step_1.jsonl",
    "rollouts/val_step_0.jsonl",
    "reward.log",
    "tensorboard/events.out.tfevents.1",
    "reward_curve.png",
)
SAVED = (
    "checkpoints/step_20/training_info.json",
    "checkpoints/step_40/policy/x",
    "checkpoints/latest",
    "checkpoints/tmp_step_60.ab/x",
)
MINE = (
    "notes.txt",
    "tensorboard/notes.txt",
    "checkpoints/best/model",
    "checkpoints/step_20_copy/model",
    "sub/metrics.jsonl",
)


def test_a_used_folder_is_refused_with_the_ways_out(tmp_path):
    write(tmp_path, *RUN)
    [problem] = used_folder_problems(*config(tmp_path))
    assert f"{tmp_path} already holds a run (metrics.jsonl, rollouts of 1 steps)" in problem
    assert "logger.overwrite=true" in problem and "another logger.log_dir" in problem and "resume" not in problem
    write(tmp_path, *SAVED)
    [problem] = used_folder_problems(*config(tmp_path))
    assert "2 checkpoints, the newest step_40" in problem and "checkpointing.resume=true to continue it" in problem
    before = files(tmp_path)
    with pytest.raises(RunFolderError, match="already holds a run"), open_run_folders(*config(tmp_path)):
        pass
    assert files(tmp_path) == before


def test_checkpoints_elsewhere_are_a_run_too(tmp_path):
    write(tmp_path / "ck", "step_3/training_info.json")
    elsewhere = {"checkpoint_dir": tmp_path / "ck"}
    [problem] = used_folder_problems(*config(tmp_path / "logs", checkpointing=elsewhere))
    assert f"1 checkpoints in {tmp_path / 'ck'}, the newest step_3" in problem
    assert "another logger.log_dir and checkpointing.checkpoint_dir" in problem
    assert used_folder_problems(*config(tmp_path / "logs", checkpointing={**elsewhere, "enabled": False})) == []
    with open_run_folders(*config(tmp_path / "logs", checkpointing=elsewhere, overwrite=True)):
        assert files(tmp_path / "ck") == {".run.lock"}


def test_what_a_start_that_came_to_nothing_left_is_no_run(tmp_path):
    write(tmp_path, "config.yaml", "tensorboard/events.out.tfevents.1", "data_plane.json", ".run.lock", "notes.txt")
    (tmp_path / "metrics.jsonl").touch()
    assert used_folder_problems(*config(tmp_path)) == []


@pytest.mark.parametrize("enabled", [True, False])
def test_overwriting_removes_what_a_run_wrote_and_nothing_else(tmp_path, enabled):
    write(tmp_path, *RUN, *SAVED, *MINE)
    with open_run_folders(*config(tmp_path, checkpointing={"enabled": enabled}, overwrite=True)):
        pass
    assert files(tmp_path) == {*MINE, OUTCOME_FILE}
    assert not (tmp_path / "rollouts").exists()


@pytest.mark.parametrize("name", ["step_1/thesis.txt", "step_22/model/weights.bin"])
def test_a_folder_that_is_only_named_like_a_checkpoint_is_not_removed(tmp_path, name):
    write(tmp_path, *RUN, *SAVED, name)
    before = files(tmp_path)
    refused = pytest.raises(RunFolderError, match="is named like a checkpoint and holds none")
    with refused, open_run_folders(*config(tmp_path, checkpointing={"checkpoint_dir": tmp_path}, overwrite=True)):
        pass
    assert files(tmp_path) == before


def test_a_resumed_run_may_use_the_folder_and_loses_nothing(tmp_path):
    write(tmp_path, *RUN, *SAVED)
    with open_run_folders(*config(tmp_path, checkpointing={"resume": True})):
        assert files(tmp_path) >= {*RUN, *SAVED}


def test_two_runs_that_share_only_their_checkpoints_are_refused(tmp_path):
    shared = {"checkpoint_dir": tmp_path / "ck"}
    first, second = (config(tmp_path / name, checkpointing=shared, overwrite=True) for name in "ab")
    refused = pytest.raises(RunFolderError, match="ck is in use by another run")
    with open_run_folders(*first), refused, open_run_folders(*second):
        pass


def test_rollouts_after_the_resumed_step_are_removed(tmp_path):
    kept = {f"rollouts/{name}.jsonl" for name in ("step_2", "step_9", "val_step_9", "step_\u00b2")} | {"step_12.jsonl"}
    write(tmp_path, *kept, *(f"rollouts/{name}.jsonl" for name in ("step_10", "step_11", "val_step_10")))
    truncate_rollouts(tmp_path, resume_step=9)
    assert files(tmp_path) == kept
