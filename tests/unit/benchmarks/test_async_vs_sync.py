"""The benchmark of asynchronous runs: figures from two runs, and a run without overlap that misses them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.async_vs_sync import HOLDS, Setting, TimedRun, TimedStep, figures_of, ks_statistic, main
from benchmarks.common import check_figures


def run_of(setting: Setting, *, seconds: float, staleness: int = 1, factor: int = 1) -> TimedRun:
    """A run that trains every group in the order of the prompts."""
    steps = []
    for number in range(setting.num_steps):
        first = number * setting.num_groups
        lengths = [
            factor * length
            for ordinal in range(first, first + setting.num_groups)
            for length in setting.lengths(ordinal)
        ]
        ages = (staleness,) * len(lengths)
        steps.append(TimedStep(number=number + 1, waited_s=0.1, refit_s=0.0, lengths=tuple(lengths), staleness=ages))
    return TimedRun(seconds=seconds, steps=tuple(steps))


def test_the_ks_statistic_is_that_of_the_distribution_functions() -> None:
    assert ks_statistic([1, 2, 3], [3, 2, 1]) == 0.0
    assert ks_statistic([1, 1, 1, 5], [1, 5, 5, 5]) == 0.5


def test_every_bound_can_be_missed() -> None:
    setting = Setting()
    bound = setting.ideal(is_async=True).seconds
    sync = run_of(setting, seconds=setting.ideal(is_async=False).seconds)
    figures = figures_of(setting, sync, run_of(setting, seconds=bound))
    assert figures["async_vs_sync"] > 2.2 and figures["vs_bound"] == 1.0 and figures["ks_lengths"] == 0.0
    assert check_figures(figures, HOLDS) == []
    slow = run_of(setting, seconds=1.3 * bound, staleness=3, factor=2)
    assert [line.split(":")[0] for line in check_figures(figures_of(setting, sync, slow), HOLDS)] == list(HOLDS)


@pytest.mark.slow
@pytest.mark.parametrize("overlaps", [pytest.param(True, marks=pytest.mark.full), False])
def test_a_small_run_overlaps_unless_it_is_off(tmp_path: Path, overlaps: bool) -> None:
    path = tmp_path / "report.json"
    main(["--quick", "--json", str(path), *([] if overlaps else ["--without-overlap"])])
    report = json.loads(path.read_text())
    assert {"versions", "commit", "load_before", "load_after"} < report.keys()
    figures = report["figures"]
    assert figures["over_age"] == 0.0 and figures["ks_lengths"] == 0.0
    assert (figures["async_vs_sync"] > 1.5) is overlaps
    assert len(report["async"]["steps"]) == len(report["sync"]["steps"]) == 4
