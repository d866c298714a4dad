"""The benchmark of checkpoints: figures from given seconds, and one writer that misses the bound."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.checkpoint import HOLDS, Samples, figures_of, main
from benchmarks.common import check_figures

GOOD = Samples(
    copy=[1.0, 2.0, 3.0],
    blocks=[1.2, 2.2, 9.0],
    written=[2.0, 1.0, 4.0],
    plain=[1.8, 0.9, 3.0],
    bytes_written=2_000_000,
)


def test_figures_are_medians_of_pairs() -> None:
    figures = figures_of({"dtensor": GOOD, "megatron": GOOD})
    assert figures["dtensor: blocks / one copy"] == pytest.approx(1.2)
    assert figures["megatron: bandwidth / plain writers"] == pytest.approx(0.9)
    assert figures["dtensor: MB/s"] == pytest.approx(1.0)
    assert check_figures(figures, HOLDS) == []
    slow = replace(GOOD, written=[9.0, 9.0, 9.0])
    assert len(check_figures(figures_of({"dtensor": slow, "megatron": GOOD}), HOLDS)) == 1


@pytest.mark.full
@pytest.mark.slow
def test_a_quick_run_writes_its_raw_samples(tmp_path: Path) -> None:
    assert main(["--quick", "--json", str(tmp_path / "found.json")]) == 0
    report = json.loads((tmp_path / "found.json").read_text())
    assert len(report["megatron"]["blocks"]) == report["setting"]["repeats"] and report["commit"]
