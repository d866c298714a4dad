"""The benchmark of `nemo-rl plan --time`: figures from given seconds, and a prediction that misses its bound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.common import check_figures
from benchmarks.plan_time import FILE, FITTED, HOLDS, RECIPES, figures_of, main
from nemo_rl_tools.plan.time_constants import TimeConstants

PREDICTED = {"sort": 2.0, "wide": 3.0, "chain_sum": 4.0, "medium": 5.0, "async": 1.5}
MEASURED = {name: [seconds * 0.9, seconds, seconds * 9] for name, seconds in PREDICTED.items()}


def test_figures_compare_medians_and_runs_of_the_same_turn() -> None:
    figures = figures_of(PREDICTED, MEASURED, load=1.0)
    assert figures["medium: measured"] == pytest.approx(5.0)
    # Slow turns slow both.
    assert figures["async / sync: measured"] == pytest.approx(0.75)
    assert check_figures(figures, HOLDS) == []
    [problem] = check_figures(figures_of(PREDICTED | {"wide": 3.6}, MEASURED, load=1.0), HOLDS)
    assert problem.startswith("wide: |predicted / measured - 1|: expected <= 0.15, got 0.2")


def test_the_constants_come_from_the_fitted_recipes_alone() -> None:
    assert set(RECIPES) - set(FITTED) == {"medium", "async"}
    known = json.loads(FILE.read_text())
    assert tuple(known["raw_step_s"]) == tuple(known["workloads"]) == FITTED and known["environment"]["commit"]
    assert TimeConstants.read(FILE).is_measured and len(known["load_before"]) == 3


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_quick_run_writes_its_raw_samples(tmp_path: Path) -> None:
    assert main(["--quick", "--json", str(tmp_path / "found.json")]) == 0
    report = json.loads((tmp_path / "found.json").read_text())
    assert set(report["raw_step_s"]) == set(RECIPES) and report["environment"]["versions"]
