"""Kept steps on disk: what is written comes back, old ones fall out, and whatever is damaged says so."""

from __future__ import annotations

import ast
import io
import logging
import resource
import signal
from pathlib import Path

import pytest
import torch
from rich.console import Console

from nemo_rl.algorithms.grpo_sync import GRPOTrainer
from nemo_rl.algorithms.kept_steps.folder import (
    ROLLOUT_FILE,
    STEP_FILE,
    RunFacts,
    SnapshotOutcome,
    SnapshotRows,
    StepError,
    StepsFolder,
    StepSnapshot,
    StepStatus,
    read_record,
    record_text,
)
from nemo_rl.algorithms.run_folder import open_run_folders
from nemo_rl.algorithms.setup import open_trainer
from nemo_rl.config.load import load_config
from nemo_rl.data_plane.column_io import read_column_file, write_column_file
from nemo_rl.data_plane.factory import open_step
from nemo_rl.errors import CheckpointError, ConfigError, ResourceError, SchemaMismatch, UnsupportedFormat
from nemo_rl.jagged import lengths_of, nest, values_of
from nemo_rl.models.weight_sync.weights_digest import digest_weights
from tests.helpers.runs import LOCAL, ROOT, load_recipe, write_recipe
from tests.helpers.tiny_model import write_tiny_folder


def a_step(number: int = 3, **changes: object) -> StepSnapshot:
    values: dict[str, object] = {
        "number": number,
        "partition": "train",
        "prompts": (7,),
        "uids": ("a",),
        "keys": ("a_g0", "a_g1"),
        "policy_version": 2,
        "run": RunFacts(config={"grpo": {"seed": 1}}, world_size=1, stages=("rollout",), train_fields=("input_ids",)),
    }
    return StepSnapshot(**{**values, **changes})


def write_step(steps: StepsFolder, number: int, *, size: int = 1000, whole: bool = True) -> None:
    path = steps.begin(number)
    (path / STEP_FILE).write_text(record_text(a_step(number)))
    write_column_file(path / ROLLOUT_FILE, {"input_ids": torch.zeros(size, dtype=torch.uint8)})
    if whole:
        steps.end(number)


def numbers(steps: StepsFolder) -> list[int]:
    return [kept.number for kept in steps.all()]


# ---- the config


def test_keys_of_kept_steps_without_their_switch_are_refused(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tmp_path / "model")
    with pytest.raises(ConfigError, match=r"diagnostics.keep_steps.max_bytes: 5 would be ignored"):
        load_config(recipe, ["diagnostics.keep_steps.max_bytes=5"])
    config = load_config(recipe, ["diagnostics.keep_steps.enabled=true", "diagnostics.keep_steps.max_bytes=5"])
    assert config.diagnostics.keep_steps.max_bytes == 5
    assert not load_config(recipe).diagnostics.keep_steps.enabled


# ---- the record


def test_a_record_comes_back_to_the_last_bit() -> None:
    rows = SnapshotRows(
        keys=("a_g0", "a_g1"),
        lengths=(3, 4),
        tags={"reward": (0.1, 1.0), "weight_version": (2, 2), "why": (None, "x")},
        versions={"tokens": 1, "sample_mask": (1, 2)},
        rewards=(0.1, 1 / 3),
        truncated=(True, False),
        response_lengths=(1, 2),
        components={"odd": (0.5, float("nan"))},
    )
    outcome = SnapshotOutcome(
        losses=(float("nan"), 1e-300), weights=digest_weights([("w", torch.arange(5.0))]), metrics={"kl": float("inf")}
    )
    step = a_step(rows=rows, trained=(1, 0)).ended(outcome=outcome)
    text = record_text(step)
    again = read_record(text)
    assert record_text(again) == text and again.status is StepStatus.COMPLETE
    assert again.rows is not None and again.rows.tags == rows.tags and again.rows.versions == rows.versions
    assert again.rows.scalars.rewards.tolist() == torch.tensor([0.1, 1 / 3]).tolist()
    failed = a_step().ended(error=StepError(kind="NonFiniteError", text="NaN", stage="train"))
    assert read_record(record_text(failed)) == failed and failed.status is StepStatus.FAILED


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format":1}', "[" * 100_000])
def test_a_damaged_record_is_refused(text: str) -> None:
    with pytest.raises(SchemaMismatch, match="where it is"):
        read_record(text, where="where it is")


def test_a_record_of_another_format_is_refused() -> None:
    with pytest.raises(UnsupportedFormat, match="expected version 1 of the format of kept steps, got 2; read"):
        read_record(record_text(a_step()).replace('"format":1', '"format":2'))


# ---- columns


def test_columns_come_back_with_dtypes_and_lengths(tmp_path: Path) -> None:
    lengths = torch.tensor([2, 0, 3])
    chunk = torch.arange(10, dtype=torch.int32)
    columns = {
        "input_ids": nest(chunk[:5], lengths),
        "token_mask": nest(torch.tensor([True, False, True, True, False]), lengths),
        "routed_experts": nest(torch.arange(20, dtype=torch.int16).view(5, 2, 2), lengths),
        "input_lengths": chunk[5:8],
        "advantages": torch.tensor([0.5, float("nan"), -1.0]),
    }
    num_bytes = write_column_file(tmp_path / "columns.safetensors", columns)
    assert num_bytes == (tmp_path / "columns.safetensors").stat().st_size
    found = read_column_file(tmp_path / "columns.safetensors")
    assert found.keys() == columns.keys()
    for name, column in columns.items():
        assert found[name].dtype == column.dtype and found[name].is_nested == column.is_nested
        if column.is_nested:
            assert torch.equal(values_of(found[name]), values_of(column))
            assert lengths_of(found[name]).tolist() == lengths_of(column).tolist()
        else:
            assert found[name].view(torch.int32).equal(column.view(torch.int32))


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_a_torn_file_of_columns_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "columns.safetensors"
    write_column_file(path, {"input_ids": nest(torch.arange(5), torch.tensor([2, 3]))})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(SchemaMismatch, match="expected columns in the safetensors format"):
        read_column_file(path)


# ---- folders


def test_a_step_in_flight_is_one_without_outcome_until_it_has_its_name(tmp_path: Path) -> None:
    steps = StepsFolder(tmp_path)
    write_step(steps, 2)
    write_step(steps, 10, whole=False)
    assert [(kept.number, kept.is_partial) for kept in steps.all()] == [(2, False), (10, True)]
    assert steps.all()[1].read().status is StepStatus.PARTIAL and steps.all()[1].columns()[1] == {}
    write_step(steps, 10)
    assert [(kept.number, kept.is_partial) for kept in steps.all()] == [(2, False), (10, False)]
    write_step(steps, 10, size=7)
    assert len(steps.all()[1].columns()[0]["input_ids"]) == 7, "a run that comes to the step again"
    steps.begin(11)
    assert numbers(steps) == [2, 10], "killed before anything was written"
    steps.cut(resume_step=2)
    assert numbers(steps) == [2] and [path.name for path in steps.path.iterdir()] == ["step_2"]


def test_records_of_a_step_lie_in_its_folder_and_stay_when_the_kept_step_goes(tmp_path: Path) -> None:
    steps = StepsFolder(tmp_path)
    for number in (1, 2, 3):
        folder = steps.path / f"step_{number}" / "records"
        folder.mkdir(parents=True)
        (folder / "rank_00000.bin").write_bytes(b"x" * 5000)
        if number > 1:
            write_step(steps, number)
    (tmp_path / "records" / "step_7").mkdir(parents=True)
    assert numbers(steps) == [2, 3] and list(steps.records()) == [1, 2, 3, 7]
    (steps.records()[3] / "rank_00000.bin").unlink()
    assert steps.all()[1].read().number == 3, "records may be removed"
    assert steps.all()[0].num_bytes < 5000
    assert steps.prune(max_bytes=1, since=9) == [] and numbers(steps) == [3] and list(steps.records()) == [1, 2, 3, 7]
    steps.begin(3)
    assert numbers(steps) == [] and (steps.path / "step_3" / "records").is_dir()
    steps.cut(resume_step=1)
    assert list(steps.records()) == [1] and not (tmp_path / "records" / "step_7").exists()


def test_the_step_in_flight_of_an_earlier_release_is_found(tmp_path: Path) -> None:
    steps = StepsFolder(tmp_path)
    write_step(steps, 7, whole=False)
    (steps.path / "step_7").rename(steps.path / "step_7.partial")
    assert [(kept.number, kept.is_partial, kept.read().status) for kept in steps.all()] == [
        (7, True, StepStatus.PARTIAL)
    ]
    write_step(steps, 7)
    assert [(kept.number, kept.is_partial) for kept in steps.all()] == [(7, False)]


def test_a_manifest_is_what_makes_a_step_whole(tmp_path: Path) -> None:
    steps = StepsFolder(tmp_path)
    write_step(steps, 1)
    path = steps.all()[0].path
    (path / STEP_FILE).write_text(record_text(a_step(1).ended(outcome=SnapshotOutcome())))
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest.json is missing: its run was killed while it wrote it"):
        steps.all()[0].read()


@pytest.mark.parametrize("what", ["missing", "changed"])
def test_a_whole_folder_with_another_content_is_refused(tmp_path: Path, what: str) -> None:
    steps = StepsFolder(tmp_path)
    write_step(steps, 1)
    path = steps.all()[0].path
    if what == "missing":
        (path / ROLLOUT_FILE).unlink()
    else:
        content = bytearray((path / ROLLOUT_FILE).read_bytes())
        content[-1] ^= 1
        (path / ROLLOUT_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match="step_1"):
        steps.all()[0].read()


def test_the_oldest_steps_fall_out_and_those_since_the_checkpoint_stay(tmp_path: Path) -> None:
    steps = StepsFolder(tmp_path)
    for number in range(1, 6):
        write_step(steps, number)
    size = steps.all()[0].num_bytes
    assert steps.prune(max_bytes=6 * size, since=3) == [] and numbers(steps) == [1, 2, 3, 4, 5]
    assert steps.prune(max_bytes=3 * size, since=3) == [] and numbers(steps) == [3, 4, 5]
    assert steps.prune(max_bytes=2 * size, since=3) == [] and numbers(steps) == [4, 5]
    assert steps.prune(max_bytes=size, since=3) == [4] and numbers(steps) == [5], "they alone are too many"
    assert steps.prune(max_bytes=1, since=3) == [] and numbers(steps) == [5], "the newest one stays"


def test_an_overwritten_run_loses_its_kept_steps_and_nothing_else(tmp_path: Path) -> None:
    config = load_recipe(write_recipe(tmp_path, tmp_path / "model"), {**LOCAL, "logger.overwrite": "true"})
    steps = StepsFolder(config.logger.log_dir)
    write_step(steps, 1)
    write_step(steps, 2, whole=False)
    (steps.path / "step_notes.txt").write_text("mine")
    with open_run_folders(config.logger, config.checkpointing):
        assert [path.name for path in steps.path.iterdir()] == ["step_notes.txt"]


# ---- whole runs


def test_a_folder_that_takes_no_steps_ends_the_run_with_the_cause(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ResourceError, match=r"step 1 cannot be kept in .*steps: .*keep_steps.enabled=false"):
        train(tmp_path, model, before=lambda logs: (logs / "steps").write_text("a file where the folder goes"))


def test_a_full_disk_ends_the_run_with_the_cause(tmp_path: Path, model: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(ResourceError, match=r"cannot be kept in .*the limit on the size of a file"):
            train(
                tmp_path, model, before=lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1])), steps=1
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)


def test_columns_that_cannot_be_written_end_the_run_with_the_cause(tmp_path: Path, model: Path) -> None:
    (tmp_path / "file").write_text("a file where the folder goes")

    def keep(trainer: GRPOTrainer) -> None:
        parts = trainer._parts
        step = parts.source.next(1)
        with open_step(parts.client, step.partition, step.keys):
            path = tmp_path / "file" / "columns.safetensors"
            parts.rollout.submit_keep_columns(step.rows.meta, fields=["input_ids"], path=path).result()

    with pytest.raises(ResourceError, match="columns cannot be kept in .*columns.safetensors"):
        train(tmp_path, model, instead=keep)


def test_an_error_while_a_failed_step_is_kept_does_not_hide_the_first_one(tmp_path, model, caplog):
    explode = {"env.reward_function": "tests.helpers.rewards:explode", "env.preflight_reward": "false"}

    def block(logs: Path) -> None:
        (logs / "steps").write_text("a file where the folder goes")

    with caplog.at_level(logging.WARNING), pytest.raises(Exception, match="this reward always fails"):
        train(tmp_path / "a", model, before=block, overrides=explode)
    assert "step 1 has failed and could not be kept whole" in caplog.text
    with pytest.raises(Exception, match="this reward always fails"):
        train(tmp_path / "b", model, overrides=explode)
    step = StepsFolder(tmp_path / "b" / "logs").all()[0].read()
    assert step.status is StepStatus.FAILED and step.error is not None and step.error.stage == "rollout"
    assert step.rows is None and "this reward always fails" in step.error.text
    off = {**explode, "diagnostics.keep_steps.on_failure": "false"}
    with pytest.raises(Exception, match="this reward always fails"):
        train(tmp_path / "c", model, overrides=off)
    assert StepsFolder(tmp_path / "c" / "logs").all() == []


def test_steps_since_the_checkpoint_that_are_too_many_are_named_once(tmp_path, model, caplog):
    with caplog.at_level(logging.WARNING):
        train(tmp_path, model, overrides={"diagnostics.keep_steps.max_bytes": "1000"}, steps=3)
    assert numbers(StepsFolder(tmp_path / "logs")) == [3]
    assert caplog.text.count("falls out") == 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def train(folder: Path, model: Path, *, before=None, overrides=None, steps: int = 2, instead=None) -> None:
    """Steps of a run in this process; `before` is given the log folder when everything has started."""
    keep = {"diagnostics.keep_steps.enabled": "true"}
    config = load_recipe(write_recipe(folder, model), {**LOCAL, **keep, **(overrides or {})})
    with open_trainer(config, console=Console(file=io.StringIO())) as trainer:
        trainer.open_run()
        if before is not None:
            before(config.logger.log_dir)
        if instead is not None:
            return instead(trainer)
        for _ in range(steps):
            trainer.step()
        return None


# ---- the code


def test_nothing_of_kept_steps_and_replay_pickles() -> None:
    sources = [
        *(ROOT / "nemo_rl" / "algorithms" / "kept_steps").glob("*.py"),
        *(ROOT / "nemo_rl_tools" / "step_replay").glob("*.py"),
        ROOT / "nemo_rl" / "data_plane" / "column_io.py",
    ]
    found = [
        f"{path.name}: {name}"
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        for name in [ast.unparse(node) if isinstance(node, ast.Attribute | ast.Import | ast.ImportFrom) else ""]
        if "pickle" in name or name in ("torch.load", "torch.save")
    ]
    assert len(sources) > 8 and found == []
