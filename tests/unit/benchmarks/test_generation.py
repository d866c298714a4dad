"""The benchmark of generation: lengths as they are asked for, figures from samples, and a run that sends no deltas."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from benchmarks.common import check_figures
from benchmarks.generation import HOLDS, figures_of, main
from benchmarks.generation_receipt import ReceiptSample, receipt_figures
from benchmarks.generation_refit import RefitSample
from benchmarks.generation_speed import MODES, TAIL, WORKLOADS, SpeedCase, SpeedSample, request_of


def test_lengths_and_prompts_are_those_of_the_workload() -> None:
    case = SpeedCase()
    for workload in WORKLOADS:
        request = request_of(workload, case, seed=1)
        assert request == request_of(workload, case, seed=1) != request_of(workload, case, seed=2)
        lengths = [len(response) for response in request.forced or ()]
        assert len(lengths) == case.rows == len(request.seeds)
        assert request.group_size == (8 if workload.is_shared else 1)
        if workload.is_unequal:
            assert max(lengths) == TAIL * case.median_tokens
            assert 0.7 < statistics.median(lengths) / case.median_tokens < 1.4
        else:
            assert set(lengths) == {case.equal_tokens}


def speed(engine: str, *, cpu_s: float) -> SpeedSample:
    return SpeedSample(engine=engine, workload="unequal", tokens=100, wall_s=2 * cpu_s, cpu_s=cpu_s)


def refit(what: str, *, rate: str = "1e-6", sent: int, is_delta: bool = True) -> RefitSample:
    return RefitSample(
        what=what,
        parameters=500_000,
        transport="payload",
        is_delta=is_delta,
        rate=rate,
        ms=5.0,
        bytes_dense=1_000_000,
        bytes_sent=sent,
    )


def test_figures_are_medians_and_every_bound_can_be_missed() -> None:
    speeds = [speed("hf_generate", cpu_s=1.0), speed("vllm", cpu_s=0.5), speed("embedded", cpu_s=0.8)]
    # Modes are compared pair by pair: a pair that was measured on a busy machine does not count alone.
    for request_s, continuous_s in ((0.8, 0.8), (4.0, 2.0), (0.8, 1.0)):
        speeds += [speed("request_mode", cpu_s=request_s), speed("continuous", cpu_s=continuous_s)]
    sizes = [refit("size", sent=50_000), refit("size", sent=1_000_000, is_delta=False)]
    figures = figures_of(speeds, [*(refit("rate", sent=sent) for sent in (40_000, 60_000, 900_000)), *sizes])
    assert figures["vllm_vs_hf_unequal"] == 2.0 and figures["embedded_vs_hf_unequal"] == 1.25
    assert figures["continuous_vs_request_mode_unequal"] == 1.0
    assert figures["hf_generate_unequal_tokens_per_s"] == 50.0
    assert figures["delta_bytes_ratio_1e6"] == 0.06
    assert figures["refit_0.5M_payload_delta_mb"] == 0.05 and figures["refit_0.5M_payload_dense_mb"] == 1.0
    steps = [
        ReceiptSample(
            has_receipt=on, step_s=0.9, refit_s=0.1 + on * ms / 1e3, receipt_ms=ms, is_scored=bool(on) and ms > 5
        )
        for on in (0, 1)
        for ms in (5, *[10] * 8, 90)
    ]
    figures |= receipt_figures(steps) | {"faults_caught": 12.0, "false_alarms": 0.0}
    assert figures["receipt_pct_of_step"] == pytest.approx(1.0) and figures["receipt_ms"] == 10
    assert figures["receipt_scored_ms"] == 10 and figures["receipt_scored_share"] == 0.9
    assert check_figures(figures, HOLDS) == []
    slow = [speed("hf_generate", cpu_s=1.0), speed("vllm", cpu_s=1.5), speed("embedded", cpu_s=1.5)]
    slow += [speed("request_mode", cpu_s=1.0), speed("continuous", cpu_s=1.2)]
    found = {"receipt_pct_of_step": 2.1, "faults_caught": 11.0, "false_alarms": 1.0}
    missed = check_figures(figures_of(slow, [refit("rate", sent=200_000)]) | found, HOLDS)
    assert [line.split(":")[0] for line in missed] == list(HOLDS)


@pytest.mark.slow
@pytest.mark.parametrize("is_on", [pytest.param(True, marks=pytest.mark.full), False])
def test_a_small_run_reports_its_samples_and_misses_deltas_that_are_off(tmp_path: Path, is_on: bool) -> None:
    path = tmp_path / "report.json"
    engines = ["--engines", "embedded", "hf_generate"]
    main(["--quick", *engines, "--json", str(path), *([] if is_on else ["--without-delta"])])
    report = json.loads(path.read_text())
    assert {"versions", "commit", "load_before", "load_after"} < report.keys()
    assert {sample.get("engine") for sample in report["samples"]} == {*engines[1:], *MODES, None}
    assert {"refit_0.1M_broadcast_delta_ms", "embedded_unequal_shared_tokens_per_cpu_s"} < report["figures"].keys()
    missed = {line.split(":")[0] for line in report["problems"]}
    assert {"vllm_vs_hf_unequal", "faults_caught"} <= missed, "what was not measured does not hold"
    assert "receipt_pct_of_step" in report["figures"]
    assert ("delta_bytes_ratio_1e6" in missed) is not is_on
