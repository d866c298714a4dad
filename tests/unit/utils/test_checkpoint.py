"""Step folders are complete or absent; damaged ones are told, passed over and left alone."""

from __future__ import annotations

import json
import logging
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_rl.errors import CheckpointError
from nemo_rl.utils import interrupt
from nemo_rl.utils.checkpoint import CheckpointManager, checkpoint_paths


def manager(folder: Path, *, keep: int | None = None) -> CheckpointManager:
    return CheckpointManager(folder, keep_top_k=keep, metric_name="val/accuracy")


def write_weights(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"x" * 4096)


def write_policy(folder: Path) -> None:
    for part in ("weights", "optimizer"):
        (folder / "policy" / part).mkdir(parents=True)
        (folder / "policy" / part / "shard.bin").write_bytes(b"y" * 70_000)


def state(accuracy: float = 0.5) -> dict[str, object]:
    return {"sampler": {"position": 3}, "metrics": {"val/accuracy": accuracy}}


def three_checkpoints(folder: Path) -> CheckpointManager:
    store = manager(folder)
    for step in (1, 2, 3):
        store.save(step, write=write_policy, state=state())
    return store


def test_a_saved_checkpoint_is_the_latest_and_carries_its_state(tmp_path):
    saved = manager(tmp_path).save(3, write=write_weights, state=state(0.5))
    latest = manager(tmp_path).latest()
    assert latest is not None and latest.path == saved == tmp_path / "step_3"
    assert latest.step == 3 and latest.state["metrics"] == {"val/accuracy": 0.5}


def test_a_failed_write_leaves_the_previous_checkpoint_valid(tmp_path):
    store = manager(tmp_path)
    store.save(1, write=write_weights, state=state())

    def fail(folder: Path) -> None:
        write_weights(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step 2.*No space left.*latest valid checkpoint is .*step_1"):
        store.save(2, write=fail, state=state())
    latest = store.latest()
    assert latest is not None and latest.step == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_1"]


def test_a_file_size_limit_while_writing_is_a_checkpoint_error(tmp_path):
    store = manager(tmp_path)
    store.save(1, write=write_weights, state=state())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(CheckpointError, match="step_1"):
            store.save(2, write=write_weights, state=state())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [checkpoint.step for checkpoint in store.all()] == [1]


def test_the_best_and_the_latest_are_kept(tmp_path):
    store = manager(tmp_path, keep=2)
    for step, accuracy in ((1, 0.9), (2, 0.1), (3, 0.8), (4, 0.2)):
        store.save(step, write=write_weights, state=state(accuracy))
    assert [checkpoint.step for checkpoint in store.all()] == [1, 3, 4]


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_nan_ranks_last_and_the_best_can_be_asked_for(tmp_path, higher_is_better):
    store = CheckpointManager(tmp_path, keep_top_k=2, metric_name="val/accuracy", higher_is_better=higher_is_better)
    assert store.best() is None
    sign = 1 if higher_is_better else -1
    store.save(1, write=write_weights, state=state(float("nan")))
    store.save(2, write=write_weights, state={**state(), "metrics": {}})
    assert store.best() is None
    for step, accuracy in ((3, 0.5), (4, float("nan")), (5, 0.9), (6, float("nan")), (7, 0.5), (8, 0.1)):
        store.save(step, write=write_weights, state=state(sign * accuracy))
    assert [checkpoint.step for checkpoint in store.all()] == [5, 7, 8]
    best = store.best()
    assert best is not None and best.step == 5
    (best.path / "weights.bin").unlink()
    assert [left.step for left in [store.best()] if left] == [7]


def test_numbers_and_arrays_of_numpy_and_torch_are_saved_as_plain_ones(tmp_path):
    told = {"a": np.float32(0.5), "b": torch.tensor(2), "c": np.arange(3), "d": (torch.ones(1, 2), np.bool_(True))}
    given = {"sampler": {np.int64(3): told}, "metrics": {"val/accuracy": np.float32(0.25)}}
    store = manager(tmp_path)
    store.save(1, write=write_weights, state=given)
    latest = store.latest()
    assert latest is not None
    assert latest.state["sampler"] == {"3": {"a": 0.5, "b": 2, "c": [0, 1, 2], "d": [[[1.0, 1.0]], True]}}
    assert latest.state["metrics"] == {"val/accuracy": 0.25}


@pytest.mark.parametrize("value", [object(), {1: 1, "a": 1}, {1, 2}], ids=str)
def test_a_state_that_cannot_be_saved_says_so_and_leaves_nothing(tmp_path, value):
    store = three_checkpoints(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=r"step 4 in .*training_info\.json: expected text, numbers"):
        store.save(4, write=write_weights, state={**state(), "other": value})
    assert sorted(tmp_path.rglob("*")) == before


def test_a_stale_pointer_falls_back_to_the_newest_complete_folder(tmp_path):
    store = manager(tmp_path)
    store.save(1, write=write_weights, state=state())
    (tmp_path / "latest").write_text("step_9")
    (tmp_path / "step_9").mkdir()
    latest = store.latest()
    assert latest is not None and latest.step == 1
    assert manager(tmp_path / "nothing").latest() is None


def test_saving_a_step_again_replaces_it(tmp_path):
    store = manager(tmp_path)
    store.save(1, write=write_weights, state=state(0.1))
    store.save(1, write=write_weights, state=state(0.2))
    assert [dict(c.state["metrics"]) for c in store.all()] == [{"val/accuracy": 0.2}]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_1"]


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "state is no JSON": (lambda step: (step / "training_info.json").write_text('{"step"'), "Expecting"),
    "state is no text": (lambda step: (step / "training_info.json").write_bytes(b"\xff\xfe"), "decode"),
    "state is a list": (lambda step: (step / "training_info.json").write_text("[1]"), "expected an object"),
    "state is a deep list": (lambda step: (step / "training_info.json").write_text("[" * 10**5), "recursion"),
    "state without sampler": (lambda step: change_json(step / "training_info.json", sampler=None), "'sampler'"),
    "state of another step": (lambda step: change_json(step / "training_info.json", step=7), "expected step 3, got 7"),
    "state is a folder": (lambda step: replace_by_folder(step / "training_info.json"), "Is a directory"),
    "state is missing": (lambda step: (step / "training_info.json").unlink(), "No such file"),
    "no manifest": (lambda step: (step / "manifest.json").unlink(), "manifest.json"),
    "manifest is no manifest": (lambda step: (step / "manifest.json").write_text('{"files": [1]}'), "damaged"),
    "a byte of the weights": (
        lambda step: flip_a_byte(step / "policy/weights/shard.bin"),
        "weights/shard.bin is corrupt",
    ),
    "a byte of the optimizer": (
        lambda step: flip_a_byte(step / "policy/optimizer/shard.bin"),
        "optimizer/shard.bin is",
    ),
    "a byte of the state": (
        lambda step: change_json(step / "training_info.json", metrics={}),
        "training_info.json has",
    ),
    "the optimizer is gone": (lambda step: shutil.rmtree(step / "policy/optimizer"), "optimizer/shard.bin is missing"),
    "weights are cut off": (
        lambda step: (step / "policy/weights/shard.bin").write_bytes(b"y"),
        "has 1 bytes, expected",
    ),
}


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_named_passed_over_and_left_alone(tmp_path, caplog, name):
    damage, told = DAMAGE[name]
    store = three_checkpoints(tmp_path)
    damage(tmp_path / "step_3")
    before = sorted(tmp_path.rglob("*"))
    choice = store.choose()
    assert choice.checkpoint.step == 2 and "the newest intact one" in choice.reason and "'step_3'" in choice.reason
    [warning] = [record.getMessage() for record in caplog.records]
    assert str(tmp_path / "step_3") in warning and told in warning, warning
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["step_\u00b2", "step_007", "step_x", "step_-1", "step_" + "9" * 200])
def test_folders_with_strange_names_block_neither_resume_nor_pruning(tmp_path, caplog, name):
    store = manager(tmp_path, keep=1)
    store.save(1, write=write_policy, state=state(0.9))
    (tmp_path / name).mkdir()
    store.save(2, write=write_policy, state=state(0.1))
    assert store.choose().checkpoint.step == 2 and f"{name} is corrupt" in caplog.text
    assert {path.name for path in tmp_path.iterdir()} == {"step_1", "step_2", "latest", name}


def test_when_nothing_is_intact_all_reasons_are_told(tmp_path):
    store = three_checkpoints(tmp_path)
    for step in (1, 2, 3):
        flip_a_byte(tmp_path / f"step_{step}" / "policy" / "weights" / "shard.bin")
    with pytest.raises(CheckpointError, match=r"(?s)holds no complete checkpoint.*step_3: .*step_2: .*step_1: "):
        store.choose()
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        manager(tmp_path / "nothing").choose()


def test_a_pointer_to_an_older_checkpoint_is_followed_and_said(tmp_path):
    store = three_checkpoints(tmp_path)
    assert store.choose().reason == "named by `latest`"
    (tmp_path / "latest").write_text("step_1\n")
    choice = store.choose()
    assert choice.checkpoint.step == 1 and choice.reason == "named by `latest`, though step_3 is there"
    (tmp_path / "latest").write_text("step_9")
    choice = store.choose()
    assert choice.checkpoint.step == 3 and "`latest` names 'step_9', which is damaged or missing" in choice.reason
    (tmp_path / "latest").unlink()
    assert store.choose().reason == "the newest intact one"


def test_a_pointer_that_is_no_text_is_passed_over(tmp_path, caplog):
    store = three_checkpoints(tmp_path)
    (tmp_path / "latest").write_bytes(b"\xff\xfe\x00")
    assert store.choose().checkpoint.step == 3
    assert "latest cannot be read" in caplog.text


def test_without_its_optimizer_a_checkpoint_resumes_only_when_asked_for(tmp_path):
    store = three_checkpoints(tmp_path)
    shutil.rmtree(tmp_path / "step_3" / "policy" / "optimizer")
    assert store.choose().checkpoint.step == 2
    assert store.choose(with_optimizer=False).checkpoint.step == 3
    weights_only = manager(tmp_path / "other")
    weights_only.save(4, write=write_weights, state=state())
    with pytest.raises(CheckpointError, match=r"no optimizer state.*checkpointing\.load_optimizer=false"):
        weights_only.choose()
    assert weights_only.choose(with_optimizer=False).checkpoint.step == 4


def test_damaged_checkpoints_are_neither_counted_nor_removed_by_pruning(tmp_path):
    store = manager(tmp_path, keep=2)
    for step, accuracy in ((1, 0.9), (2, 0.8)):
        store.save(step, write=write_policy, state=state(accuracy))
    (tmp_path / "step_1" / "training_info.json").write_text("[]")
    shutil.rmtree(tmp_path / "step_2" / "policy")
    for step, accuracy in ((3, 0.3), (4, 0.4), (5, 0.1)):
        store.save(step, write=write_policy, state=state(accuracy))
    assert {path.name for path in tmp_path.glob("step_*")} == {f"step_{step}" for step in (1, 2, 3, 4, 5)}


def test_what_a_kill_leaves_is_cleaned_and_what_was_being_exchanged_comes_back(tmp_path):
    store = three_checkpoints(tmp_path)
    for name in ("tmp_step_4.0a1b2c3d", "tmp_step_4", "removed_step_1.0a1b2c3d", "old_step_3.0a1b2c3d"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_2").rename(tmp_path / "old_step_2.0a1b2c3d")
    (tmp_path / "tmp_step_of_mine").mkdir()
    assert len(checkpoint_paths(tmp_path)) == 8
    store.clean()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "step_1",
        "step_2",
        "step_3",
        "tmp_step_of_mine",
    ]
    assert store.choose().checkpoint.step == 3


def test_two_managers_use_different_temporary_names(tmp_path):
    other, seen = manager(tmp_path), []

    def write(folder: Path) -> None:
        seen.append(folder.name)
        write_policy(folder)
        if len(seen) == 1:
            other.save(1, write=write, state=state())

    manager(tmp_path).save(1, write=write, state=state())
    assert len(set(seen)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_1"]


def test_an_interrupt_during_a_save_is_one_whatever_a_library_makes_of_it(tmp_path, monkeypatch):
    """torch turns the KeyboardInterrupt of a save into its own error, which the worker reports as a full disk."""

    def write(folder: Path) -> None:
        monkeypatch.setattr(interrupt, "_received", [15])
        raise CheckpointError("CheckpointException: KeyboardInterrupt; Free disk space")

    with pytest.raises(KeyboardInterrupt):
        manager(tmp_path).save(1, write=write, state=state())
    assert list(tmp_path.iterdir()) == []


def test_a_warning_says_that_a_step_is_replaced(tmp_path, caplog):
    store = three_checkpoints(tmp_path)
    with caplog.at_level(logging.WARNING):
        store.save(3, write=write_policy, state=state())
    assert "step_3 is replaced" in caplog.text
