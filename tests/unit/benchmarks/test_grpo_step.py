"""The step benchmark: its summary, its report, and every reason for which it refuses its own numbers."""

from __future__ import annotations

import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import grpo_step
from benchmarks.common import Spread, commit, environment, write_json
from benchmarks.grpo_step import PAIRS, RUNS, Options, check, main, measure, measure_group_statistics
from benchmarks.step_report import (
    GroupStatistics,
    RunResult,
    StepSample,
    group_statistics_problems,
    pair_problems,
    run_problems,
    stage_table,
    step_sample,
)
from benchmarks.tiny_model import write_random_model

METRICS = {
    "step": 3,
    "timing/step_s": 1.0,
    "timing/rollout_s": 0.25,
    "timing/train_s": 0.5,
    "timing/refit_s": 0.5,
    "timing/tokens": 7.0,
    "data_plane/seconds": 0.125,
    "data_plane/process_seconds": 0.25,
    "data_plane/payload_bytes": 4000.0,
    "data_plane/driver_bytes": 40.0,
    "data_plane/live_rows": 0.0,
    "rollout/mean_response_tokens": 520.0,
    "train/loss": -0.5,
    "train/grad_norm": 2.0,
}
SAMPLE = step_sample(METRICS)


def result(*samples: StepSample, **changes: object) -> RunResult:
    values = {"name": "noop", "impl": "noop", "samples": samples or (SAMPLE,)}
    return RunResult(**{**values, **changes})


def statistics(ms: float) -> GroupStatistics:
    return GroupStatistics(num_groups=2, group_size=4, statistics_ms=(ms / 2,), total_ms=(ms, ms, 100.0))


# ---- samples, summaries, files


def test_a_sample_has_the_stages_and_shares_of_its_step():
    assert SAMPLE.stage_seconds == {"rollout": 0.25, "train": 0.5, "refit": 0.5}
    assert SAMPLE.data_plane_share == 0.125 and SAMPLE.driver_share == 0.01
    assert SAMPLE.step == 3 and SAMPLE.loss == -0.5


def test_medians_leave_the_first_step_out_and_keep_the_range():
    steps = [replace(SAMPLE, step=i, seconds=seconds) for i, seconds in enumerate((9.0, 2.0, 1.0, 4.0))]
    spreads = result(*steps).spreads()
    assert spreads["step"] == Spread(median=2.0, minimum=1.0, maximum=4.0)
    assert "stage/prev_logprobs" not in spreads and spreads["stage/train"].median == 0.5
    assert result(steps[0]).spreads()["step"].median == 9.0
    with pytest.raises(ValueError, match="at least one sample"):
        Spread.of([])


def test_the_report_keeps_raw_samples_and_is_valid_json(tmp_path):
    made = result(SAMPLE, replace(SAMPLE, loss=None, payload_bytes=0.0))
    path = write_json(tmp_path / "deep" / "report.json", {**environment(), "runs": {"noop": made.to_json()}})
    read = json.loads(path.read_text())
    assert [sample["loss"] for sample in read["runs"]["noop"]["samples"]] == [-0.5, None]
    assert read["runs"]["noop"]["samples"][0]["stage_seconds"]["rollout"] == 0.25
    assert "driver_share" not in read["runs"]["noop"]["summary"], "a share of nothing is no number"
    assert {"python", "torch", "ray", "tensordict", "TransferQueue", "transformers"} == set(read["versions"])
    assert read["cpu_count"] >= 1 and isinstance(read["dirty"], bool)
    with pytest.raises(ValueError):
        write_json(path, {"bad": math.nan})
    assert json.loads(path.read_text()) == read and [p.name for p in path.parent.iterdir()] == ["report.json"]


def test_the_commit_says_whether_tracked_files_differ(tmp_path):
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@x", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert commit(tmp_path).revision is None
    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    (tmp_path / "untracked").write_text("2")
    assert commit(tmp_path).revision == git("rev-parse", "HEAD") and not commit(tmp_path).dirty
    (tmp_path / "file").write_text("3")
    assert commit(tmp_path).dirty


def test_the_table_shows_each_run_beside_the_other_and_only_stages_that_ran():
    console = Console(width=160)
    with console.capture() as shown:
        console.print(stage_table([result(), result(name="transfer_queue")], title="two"))
    text = shown.get()
    assert "noop" in text and "transfer_queue" in text and "0.250 (0.250..0.250)" in text and "12.50%" in text
    assert "prev_logprobs" not in text


# ---- reasons to fail


def test_sound_numbers_have_no_problems():
    assert run_problems(result(), num_steps=1) == []
    assert run_problems(result(is_long=True), num_steps=1) == []
    assert pair_problems(result(), result(name="transfer_queue")) == []
    assert group_statistics_problems(statistics(1.0)) == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"payload_bytes": 0.0}, "counted nothing"),
        ({"driver_bytes": 0.0}, "counted nothing"),
        ({"data_plane_seconds": 0.0}, "is data_plane.observability.enabled off?"),
        ({"live_rows": 2.0}, "expected 0 live rows after the step, got 2.0"),
        ({"live_rows": None}, "expected 0 live rows after the step, got None"),
        ({"data_plane_seconds": 1.5}, "the step took 1.000 s, its data plane 1.500 s"),
        ({"seconds": 0.7}, "do not fit into a step of 0.700 s"),
        ({"stage_seconds": {"rollout": 0.1}}, "do not fit into a step"),
        ({"loss": None}, "loss is None"),
        ({"loss": math.nan}, "loss is nan"),
        ({"grad_norm": math.inf}, "gradient norm is inf"),
        ({"loss": 0.0}, "nothing was trained"),
    ],
)
def test_numbers_that_make_no_sense_are_a_problem(changes, text):
    problems = run_problems(result(replace(SAMPLE, **changes)), num_steps=1)
    assert any(text in problem and problem.startswith("noop") for problem in problems), problems


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"driver_bytes": 44.0}, "driver share of at most 0.01, got 44 B of 4000 B = 0.0110"),
        ({"mean_response_tokens": 511.0}, "at least 512 tokens, got 511"),
    ],
)
def test_the_drivers_share_is_limited_for_long_responses_only(changes, text):
    sample = replace(SAMPLE, **changes)
    assert run_problems(result(sample), num_steps=1) == []
    problems = run_problems(result(sample, is_long=True), num_steps=1)
    assert len(problems) == 1 and text in problems[0]


def test_missing_steps_are_a_problem():
    assert run_problems(result(), num_steps=2) == ["noop: expected 2 steps, got 1"]


def test_another_store_than_the_one_that_was_asked_for_is_a_problem():
    for section, used in (
        ({"enabled": False, "impl": "transfer_queue"}, "noop"),
        ({"enabled": True, "impl": "x"}, "x"),
    ):
        made = result(name="transfer_queue", impl="transfer_queue", config={"data_plane": section})
        problems = run_problems(made, num_steps=1)
        assert problems == [f"transfer_queue: expected data plane 'transfer_queue', the run used {used!r}"]


def test_losses_and_gradient_norms_of_two_stores_must_be_equal_in_every_bit():
    last_bit = math.nextafter(-0.5, 0.0)
    other = result(replace(SAMPLE, loss=last_bit), name="transfer_queue")
    assert pair_problems(result(), other) == [
        f"step 3: loss must be bit-identical, noop has -0.5, transfer_queue {last_bit!r}"
    ]
    assert "gradient norm" in pair_problems(result(), result(replace(SAMPLE, grad_norm=2.5), name="t"))[0]
    assert "cannot be compared" in pair_problems(result(), result(SAMPLE, SAMPLE, name="t"))[0]


def test_slow_group_statistics_are_a_problem():
    assert "got 1.001 ms" in group_statistics_problems(statistics(1.001))[0]


def test_check_looks_at_every_run_every_pair_and_the_statistics():
    options = Options(model=Path("model"), is_random=True, steps=1, rows=16)
    reference, other = PAIRS[0]
    runs = [result(name=reference), result(replace(SAMPLE, live_rows=1.0, loss=2.0), name=other, impl=RUNS[other].impl)]
    problems = check(runs, statistics(2.0), options)
    assert len(problems) == 3, problems
    assert check([result(name=reference)], statistics(0.5), options) == []


def test_pairs_differ_in_the_store_alone():
    for reference, other in PAIRS:
        assert (RUNS[reference].impl, RUNS[other].impl) == ("noop", "transfer_queue")
        noop, queue = set(RUNS[reference].overrides), set(RUNS[other].overrides)
        assert queue < noop and noop - queue == {"cluster.launcher=local", "data_plane.impl=noop"}


def test_group_statistics_are_measured_as_often_as_asked():
    measured = measure_group_statistics(num_groups=4, group_size=2, repeats=3)
    assert len(measured.statistics_ms) == len(measured.total_ms) == 3
    assert all(ms > 0 for ms in measured.total_ms)


# ---- the real thing, small


@pytest.fixture
def few_prompts(monkeypatch):
    monkeypatch.setattr(grpo_step, "COMMON", (*grpo_step.COMMON, "data.train.size=64"))


@pytest.mark.slow
def test_a_short_run_in_one_process_writes_a_sound_report(tmp_path, capsys, few_prompts):
    model = write_random_model(tmp_path / "model")
    json_file = tmp_path / "report.json"
    arguments = ["--json", str(json_file), "--steps", "2", "--rows", "16", "--only", "noop", "noop_all_stages"]
    status = main([*arguments, "--model", str(model)])
    shown = capsys.readouterr().out
    report = json.loads(json_file.read_text())
    assert status == 1, "rewards of the sort task are all zero for a random model: nothing is trained"
    assert "nothing was trained" in shown and any("loss is None" in text for text in report["problems"])
    assert len(report["runs"]["noop"]["samples"]) == 2
    assert report["runs"]["noop"]["config"]["data_plane"]["impl"] == "noop"
    assert {"prev_logprobs", "reference_logprobs"}.isdisjoint(report["runs"]["noop"]["samples"][0]["stage_seconds"])


@pytest.mark.slow
def test_a_random_model_trains_in_every_stage_and_counting_can_be_missed(tmp_path, few_prompts):
    model = write_random_model(tmp_path / "model")
    options = Options(model=model, is_random=True, steps=2, rows=16)
    measured = measure("noop_all_stages", options, tmp_path / "on")
    assert check([measured], statistics(0.5), options) == []
    assert {"rollout", "prev_logprobs", "reference_logprobs", "advantages", "train", "log", "refit"} == set(
        measured.samples[0].stage_seconds
    )
    off = replace(options, steps=1, overrides=("data_plane.observability.enabled=false",))
    [problem] = check([measure("noop_all_stages", off, tmp_path / "off")], statistics(0.5), off)
    assert "is data_plane.observability.enabled off?" in problem
