"""The benchmark of the training pass, and the report on one GPU as far as a CPU can make it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu_report
from benchmarks.common import check_figures
from benchmarks.train_pass import HOLDS, attention_ops_by_lengths, losses, main, switched_off
from nemo_rl.config.parts import LOSSES


def test_every_bound_can_be_missed() -> None:
    assert check_figures(dict.fromkeys(HOLDS, 0.0), HOLDS) == []
    assert [line.split(":")[0] for line in check_figures(dict.fromkeys(HOLDS, 13.0), HOLDS)] == list(HOLDS)
    assert set(LOSSES.builtin) < losses().keys()


def test_attention_of_many_lengths_costs_more_when_it_is_switched_off() -> None:
    with switched_off():
        without = attention_ops_by_lengths()
    assert attention_ops_by_lengths() <= HOLDS["attention_ops_by_lengths"].most < without


@pytest.mark.slow
def test_a_small_pass_holds_what_does_not_depend_on_its_size(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert main(["--quick", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert {"versions", "commit", "load_before", "load_after", "setting"} < report.keys()
    assert len(report["syncs"]) == 2 * len(losses())
    assert all(sum(found.values()) <= 2 for found in report["syncs"].values()), report["syncs"]


@pytest.mark.slow
def test_the_gpu_report_measures_on_a_cpu_all_that_has_a_form_there(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path), "--models", str(tmp_path / "models"), "--device", "cpu", "--tiny"]
    assert gpu_report.main(words) == 0, (tmp_path / "table.md").read_text()
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    found = {record["part"]: record for record in records}
    assert found.keys() == gpu_report.PARTS.keys()
    missing = [name for name, record in found.items() if "found" not in record]
    assert missing == [name for name, part in gpu_report.PARTS.items() if part.needs_cuda]
    assert found["train 1.5B"]["found"]["train"]["tokens_per_s"] > 0
    table = (tmp_path / "table.md").read_text()
    assert all(f"| {name} |" in table for name in gpu_report.PARTS)
    # Nothing is left to do.
    assert gpu_report.main([*words, "--resume", "--part", "ceilings"]) == 0
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == len(records)
