"""The benchmark of adapters: figures from given measurements, and full training that misses the bounds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.common import check_figures
from benchmarks.lora_refit import HOLDS, KindResult, figures_of, main

FULL = KindResult(
    refit_ms=[900.0, 1000.0, 5000.0],
    bytes_sent=[2000, 2000],
    train_peak_bytes=4000,
    tensor_bytes=4000,
    adapter_bytes=0,
    reference_bytes=0,
)
LORA = KindResult(
    refit_ms=[40.0, 50.0, 900.0],
    bytes_sent=[100, 105],
    train_peak_bytes=2000,
    tensor_bytes=1200,
    adapter_bytes=100,
    reference_bytes=0,
)


def missed(lora: KindResult) -> list[str]:
    """Names of the figures that are out of bounds."""
    return [line.split(":")[0] for line in check_figures(figures_of(FULL, lora), HOLDS)]


def test_figures_are_medians_of_times_and_the_most_bytes() -> None:
    assert figures_of(FULL, LORA) == {
        "lora_refit_vs_full": 0.05,
        "lora_refit_bytes_vs_adapter": 1.05,
        "lora_refit_bytes_vs_full": 0.0525,
        "lora_train_bytes_vs_full": 0.5,
        "lora_tensor_bytes_vs_full": 0.3,
        "reference_copy_bytes": 0.0,
    }
    assert missed(LORA) == []


@pytest.mark.parametrize(
    ("worse", "name"),
    [
        (replace(LORA, refit_ms=[90.0, 110.0, 120.0]), "lora_refit_vs_full"),
        (replace(LORA, bytes_sent=[100, 111]), "lora_refit_bytes_vs_adapter"),
        (replace(LORA, train_peak_bytes=2201), "lora_train_bytes_vs_full"),
        (replace(LORA, reference_bytes=1), "reference_copy_bytes"),
    ],
)
def test_every_bound_can_be_missed(worse: KindResult, name: str) -> None:
    assert missed(worse) == [name]


def test_full_training_in_place_of_the_adapter_misses_time_bytes_and_memory() -> None:
    assert missed(FULL) == ["lora_refit_vs_full", "lora_refit_bytes_vs_adapter", "lora_train_bytes_vs_full"]


@pytest.mark.slow
@pytest.mark.parametrize("is_off", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_small_run_sends_the_adapter_alone_unless_it_is_switched_off(tmp_path: Path, is_off: bool) -> None:
    path = tmp_path / "report.json"
    ended = main(["--quick", "--json", str(path), *(["--switched-off"] if is_off else [])])
    report = json.loads(path.read_text())
    assert ended == bool(report["problems"]) == is_off
    assert {"versions", "commit", "load_before", "load_after"} < report.keys()
    figures = report["figures"]
    assert (figures["lora_refit_bytes_vs_adapter"] <= 1.1) is not is_off
    assert (figures["lora_refit_bytes_vs_full"] < 1.0) is not is_off
    assert (figures["lora_tensor_bytes_vs_full"] < 1.0) is not is_off
    assert figures["reference_copy_bytes"] == 0
