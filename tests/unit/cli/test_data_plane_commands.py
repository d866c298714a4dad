"""`nemo-rl data-plane`: a running job, a finished one, a killed one, and what a user can get wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.address import ATTACH_FILE
from nemo_rl.data_plane.factory import build_data_plane_client
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.data_plane.ledger.events import EVENTS_FILE
from tests.helpers.data_planes import ids_column, keys_of


@pytest.fixture
def job(tmp_path: Path) -> Iterator[DataPlaneClient]:
    """A job with 4 rows put, 3 of them read for training."""
    client = build_data_plane_client(DataPlaneConfig(impl="noop"), run_id="job", log_dir=tmp_path)
    client.register_partition("train", ["input_ids", "sample_mask"], 99, ["train"])
    with client.stage("rollout"):
        columns = {"input_ids": ids_column([2] * 4), "sample_mask": torch.ones(4)}
        client.kv_batch_put(keys_of(1), "train", columns, [{"std": 0.5}] * 4)
    with client.stage("train"):
        client.kv_batch_get(keys_of(1)[:3], "train", ["input_ids"])
    yield client
    client.close()


def test_a_running_job_shows_its_rows_and_bytes(job, tmp_path: Path, output_of) -> None:
    shown = output_of("data-plane", "stat", "--run", tmp_path)
    assert "run job, running" in shown and "partition train: 4 rows" in shown and "input_ids" in shown
    stats = json.loads(output_of("data-plane", "stat", "--run", tmp_path, "--json"))
    assert stats == {**job.stats(), "oldest_row_age_s": stats["oldest_row_age_s"], "partitions": stats["partitions"]}
    assert stats["partitions"]["train"]["fields"] == {"input_ids": 32, "sample_mask": 16}
    listed = output_of("data-plane", "ls", "--run", tmp_path)
    assert listed.count("\n") == 4 and "u0_g3" in listed and "std=0.5" in listed


def test_a_sample_is_explained_while_it_lives_and_after(job, tmp_path: Path, output_of) -> None:
    live = output_of("inspect", tmp_path, "row", "u0_g0")
    assert "made" in live and "stage rollout" in live and "now: live in partition train" in live
    assert "outcome: trained by" in live and "not cleared yet" in live
    job.kv_clear(["u0_g3"], "train", reason="equal rewards in its group")
    job.kv_clear(None, "train", reason="step end")
    dropped = output_of("inspect", tmp_path, "row", "u0_g3")
    assert "outcome: dropped: equal rewards in its group" in dropped and "now: live" not in dropped
    assert "cleared: step end" in output_of("inspect", tmp_path, "row", "u0_g0")
    job.close()
    told = json.loads(output_of("inspect", tmp_path, "row", "u0_g0", "--json"))
    assert [event["event"] for event in told["events"]] == ["commit", "read", "clear"] and told["live"] == []


def test_a_finished_run_is_told_from_its_log(job, tmp_path: Path, output_of) -> None:
    job.kv_batch_put(["u0_g2"], "train", {"sample_mask": torch.zeros(1)})  # a row that is rewritten is not made again
    job.kv_clear(["u0_g0", "u0_g1"], "train", reason="step end")
    job.close()
    told = json.loads(output_of("data-plane", "stat", "--run", tmp_path, "--json"))
    assert (told["run_id"], told["rows_made"], told["cleared"]) == ("job", 4, {"step end": 2})
    assert told["left"] == {"train": ["u0_g2", "u0_g3"]}
    assert output_of("data-plane", "ls", "--run", tmp_path).split() == ["train", "u0_g2", "train", "u0_g3"]
    assert "rows never cleared 2" in output_of("data-plane", "stat", "--run", tmp_path)


def test_of_several_runs_in_a_folder_the_last_is_told(job, tmp_path: Path, output_of) -> None:
    job.close()
    build_data_plane_client(DataPlaneConfig(impl="noop"), run_id="later", log_dir=tmp_path).close()
    told = json.loads(output_of("data-plane", "stat", "--run", tmp_path, "--json"))
    assert (told["run_id"], told["rows_made"], told["events"]) == ("later", 0, {"open": 1})


def test_a_killed_job_is_told_from_its_log(job, tmp_path: Path, output_of) -> None:
    left_behind = (tmp_path / ATTACH_FILE).read_text()
    job.close()
    (tmp_path / ATTACH_FILE).write_text(left_behind)
    assert "run job, ended" in output_of("data-plane", "stat", "--run", tmp_path)


@pytest.mark.parametrize("line", ["{", "[1]", '{"event": 1}', '{"event": "read", "rows": 1}'])
def test_a_damaged_log_is_named_with_its_line(job, tmp_path: Path, line: str, ended) -> None:
    job.close()
    with tmp_path.joinpath(EVENTS_FILE).open("a") as events:
        events.write(f"{line}\n")
    number = tmp_path.joinpath(EVENTS_FILE).read_text().count("\n")
    for args in (("data-plane", "stat", "--run", tmp_path), ("inspect", tmp_path, "row", "u0_g0")):
        code, _, said = ended(*args)
        assert code == 2 and f"{EVENTS_FILE}: line {number}: expected an event" in " ".join(said.split())


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("data-plane", "stat", "--run", "nowhere"), "nowhere is not a directory"),
        (("data-plane", "stat", "--run", "{empty}"), f"holds neither {ATTACH_FILE}"),
        (("inspect", "{run}", "row", "u9_g9"), "unknown key 'u9_g9'"),
        (("data-plane", "ls", "--run", "{run}", "--partition", "nope"), "unknown 'nope'; registered: train"),
        (("data-plane", "stat"), "Missing option '--run'"),
        (("data-plane", "statt"), "No such command 'statt'"),
    ],
)
def test_user_errors_are_one_line_and_exit_with_2(job, tmp_path: Path, args, text: str, ended) -> None:
    (tmp_path / "empty").mkdir()
    filled = [arg.format(empty=tmp_path / "empty", run=tmp_path) for arg in args]
    code, _, shown = ended(*filled)
    assert code == 2 and text in shown and "Traceback" not in shown
    assert len([line for line in shown.splitlines() if "rror" in line]) == 1


def test_a_job_on_another_machine_is_named(job, tmp_path: Path, ended) -> None:
    path = tmp_path / ATTACH_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"host_name": "elsewhere"}))
    code, _, shown = ended("data-plane", "stat", "--run", tmp_path)
    assert code == 2 and "the job runs on elsewhere; look into it there" in shown


def test_a_run_without_events_says_how_to_get_them(job, tmp_path: Path, output_of, ended) -> None:
    (tmp_path / EVENTS_FILE).unlink()
    assert "u0_g0" in output_of("data-plane", "ls", "--run", tmp_path)
    assert "ago: commit by" in output_of("inspect", tmp_path, "row", "u0_g0")
    job.close()
    code, _, shown = ended("data-plane", "stat", "--run", tmp_path)
    assert code == 2 and "observability.event_log=true" in shown
