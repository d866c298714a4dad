"""The benchmark of the driver's part of a step: every part is timed, and a run without plans has no figure."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

from benchmarks.common import check_figures
from benchmarks.driver_step import HOLDS, PARTS, DriverSample, figures_of, main
from nemo_rl.utils.memory import frozen_startup_objects


def sample(rows: int, ms: float) -> DriverSample:
    return DriverSample(rows=rows, ms=dict.fromkeys(PARTS, ms))


def test_figures_are_medians_of_the_sums_and_every_bound_can_be_missed() -> None:
    quick = [sample(2048, 1.0), sample(2048, 2.0), sample(2048, 90.0), sample(16384, 20.0)]
    figures = figures_of(quick)
    assert figures["driver_ms_2048"] == 2.0 * len(PARTS) and figures["driver_ms_16384"] == 20.0 * len(PARTS)
    assert figures["driver_p95_vs_median_2048"] > 30 and figures["driver_p95_vs_median_16384"] == 1.0
    assert check_figures(figures, HOLDS) == []
    uneven = [sample(2048, 26.0), sample(16384, 40.0), sample(16384, 40.0), sample(16384, 90.0)]
    slow = check_figures(figures_of(uneven), HOLDS)
    assert [line.split(":")[0] for line in slow] == list(HOLDS)


def test_the_objects_of_the_start_are_frozen_in_the_block_alone() -> None:
    start, threshold = [[] for _ in range(1000)], gc.get_threshold()
    with frozen_startup_objects():
        assert gc.get_freeze_count() > len(start)
        assert not any(each is start for each in gc.get_objects())
        assert gc.get_threshold()[0] > threshold[0], "a step makes many objects and no circles"
    assert gc.get_threshold() == threshold
    assert any(each is start for each in gc.get_objects())


@pytest.mark.parametrize("is_planned", [True, False])
def test_a_small_run_times_every_part_and_misses_plans_that_are_off(tmp_path: Path, is_planned: bool) -> None:
    path = tmp_path / "report.json"
    main(["--quick", "--json", str(path), *([] if is_planned else ["--without-plan"])])
    report = json.loads(path.read_text())
    assert {"versions", "commit", "load_before", "load_after"} < report.keys()
    assert ("driver_ms_128" in report["figures"]) is is_planned
    for each in report["samples"]:
        assert each["rows"] == 128 and (set(each["ms"]) == set(PARTS)) is is_planned
        assert all(ms > 0 for ms in each["ms"].values())
