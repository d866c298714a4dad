"""The benchmark of the live tracer: what it reports, and that it finds a tracer that shows nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import tracer
from benchmarks.common import check_figures
from benchmarks.tracer import HOLDS, Samples, figures_of, main


@pytest.fixture
def one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer, "ENGINES", ("dtensor",))


@pytest.mark.slow
@pytest.mark.usefixtures("one_engine")
@pytest.mark.parametrize("is_on", [pytest.param(True, marks=pytest.mark.full), False])
def test_a_small_run_reports_what_a_tracer_shows_and_misses_one_that_shows_nothing(tmp_path: Path, is_on: bool) -> None:
    path = tmp_path / "report.json"
    main(["--quick", "--json", str(path), *([] if is_on else ["--without-tracing"])])
    report = json.loads(path.read_text())
    assert {sample["what"] for sample in report["samples"]} == {"off", "stats", "tiles", "all_sites"}
    assert all(len(sample["with_s"]) == len(sample["without_s"]) == 2 for sample in report["samples"])
    assert {"versions", "commit", "load_before"} < report.keys()
    missed = {line.split(":")[0] for line in report["problems"]}
    assert ("frames_per_s" not in missed and "bytes_per_s" not in missed) is is_on


def test_figures_are_those_of_the_engine_that_pays_more() -> None:
    found = [
        Samples(engine=engine, what=what, without_s=[1.0, 2.0], with_s=[ratio, 2 * ratio], frames_per_s=9.0)
        for engine, ratio in (("dtensor", 1.02), ("megatron", 1.07))
        for what in ("off", "stats", "tiles", "all_sites")
    ]
    figures = figures_of(found)
    assert figures["stats_pct"] == pytest.approx(7.0)
    assert [line.split(":")[0] for line in check_figures(figures, HOLDS)] == ["stats_pct", "off_pct", "bytes_per_s"]
