"""Step folders are complete or absent."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from nemo_rl.errors import CheckpointError
from nemo_rl.utils.checkpoint import CheckpointManager


def manager(folder: Path, *, keep: int | None = None) -> CheckpointManager:
    return CheckpointManager(folder, keep_top_k=keep, metric_name="val/accuracy")


def write_weights(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"x" * 4096)


def test_a_saved_checkpoint_is_the_latest_and_carries_its_state(tmp_path):
    saved = manager(tmp_path).save(3, write=write_weights, state={"metrics": {"val/accuracy": 0.5}})
    latest = manager(tmp_path).latest()
    assert latest is not None and latest.path == saved == tmp_path / "step_3"
    assert latest.step == 3 and latest.state["metrics"] == {"val/accuracy": 0.5}


def test_a_failed_write_leaves_the_previous_checkpoint_valid(tmp_path):
    store = manager(tmp_path)
    store.save(1, write=write_weights, state={})

    def fail(folder: Path) -> None:
        write_weights(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step 2.*No space left.*latest valid checkpoint is .*step_1"):
        store.save(2, write=fail, state={})
    latest = store.latest()
    assert latest is not None and latest.step == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_1"]


def test_a_file_size_limit_while_writing_is_a_checkpoint_error(tmp_path):
    store = manager(tmp_path)
    store.save(1, write=write_weights, state={})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(CheckpointError, match="step_1"):
            store.save(2, write=write_weights, state={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [checkpoint.step for checkpoint in store.all()] == [1]


def test_the_best_and_the_latest_are_kept(tmp_path):
    store = manager(tmp_path, keep=2)
    for step, accuracy in ((1, 0.9), (2, 0.1), (3, 0.8), (4, 0.2)):
        store.save(step, write=write_weights, state={"metrics": {"val/accuracy": accuracy}})
    assert [checkpoint.step for checkpoint in store.all()] == [1, 3, 4]


def test_a_stale_pointer_falls_back_to_the_newest_complete_folder(tmp_path):
    store = manager(tmp_path)
    store.save(1, write=write_weights, state={})
    (tmp_path / "latest").write_text("step_9")
    (tmp_path / "step_9").mkdir()
    latest = store.latest()
    assert latest is not None and latest.step == 1
    assert manager(tmp_path / "nothing").latest() is None


def test_saving_a_step_again_replaces_it(tmp_path):
    store = manager(tmp_path)
    store.save(1, write=write_weights, state={"metrics": {"val/accuracy": 0.1}})
    store.save(1, write=write_weights, state={"metrics": {"val/accuracy": 0.2}})
    assert [dict(c.state["metrics"]) for c in store.all()] == [{"val/accuracy": 0.2}]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_1"]
