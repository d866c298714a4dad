"""The data plane benchmark: what it holds fails when it is not so, and a small run moves every byte."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import data_plane
from benchmarks.common import check_figures
from benchmarks.data_plane_batches import make_batch, pad_raw, sums
from benchmarks.data_plane_peers import BatchSpec
from benchmarks.data_plane_report import HOLDS, Samples, holds_of


def samples(way: str, batch: str, seconds: float, *, session: str = "tuned") -> Samples:
    part = {"ledger": 0.001}
    return Samples(session=session, batch=batch, way=way, put=[seconds] * 3, get=[seconds] * 3, parts=[part] * 3)


def good() -> data_plane.Results:
    results = data_plane.Results(
        samples=[
            samples("raw_transfer_queue", "large", 0.08),
            samples("raw_transfer_queue_ragged", "large", 0.05),
            samples("ray", "large", 0.01),
            samples("transfer_queue", "large", 0.07),
            samples("raw_transfer_queue", "small", 0.03),
            samples("transfer_queue", "small", 0.01),
            samples("raw_transfer_queue_mooncake", "large", 0.2, session="mooncake"),
            samples("mooncake", "large", 0.05, session="mooncake"),
        ],
        raw={
            "fields_ray_1": [0.010],
            "fields_ray_32": [0.012],
            "fields_transfer_queue_1": [0.010],
            "fields_transfer_queue_32": [0.014],
            "scalar_tags_16k": [0.025],
            "over_read_transfer_queue_large": [1.1],
        },
    )
    return results


def test_figures_are_ratios_of_medians_and_all_bounds_can_hold() -> None:
    figures = data_plane.figures_of(good())
    assert figures["ray_vs_tuned_tq"] == pytest.approx(8.0)
    assert figures["ray_vs_tuned_tq_ragged"] == pytest.approx(5.0)
    assert figures["tq_vs_tuned_tq_small"] == pytest.approx(3.0)
    assert figures["mooncake_vs_tq_mooncake"] == pytest.approx(4.0)
    assert figures["ledger_overhead_pct"] == pytest.approx(5.0)
    assert figures["fields_32_vs_1"] == pytest.approx(1.2)
    assert figures["scalar_tags_16k_ms"] == pytest.approx(25.0)
    assert check_figures(figures, HOLDS) == []


@pytest.mark.parametrize(
    ("spoil", "missed"),
    [
        (
            lambda r: r.of("large", "ray").put.__setitem__(slice(None), [0.08] * 3),
            "ray_vs_tuned_tq ray_vs_tuned_tq_ragged",
        ),
        (
            lambda r: r.of("large", "raw_transfer_queue").put.__setitem__(slice(None), [0.05] * 3),
            "ray_vs_tuned_tq tq_vs_tuned_tq_large",
        ),
        (lambda r: r.of("small", "transfer_queue").get.__setitem__(slice(None), [0.05] * 3), "tq_vs_tuned_tq_small"),
        (lambda r: r.of("large", "transfer_queue").get.__setitem__(slice(None), [0.2] * 3), "tq_vs_tuned_tq_large"),
        (lambda r: r.of("large", "mooncake").get.__setitem__(slice(None), [0.4] * 3), "mooncake_vs_tq_mooncake"),
        (lambda r: r.of("large", "ray").parts.__setitem__(slice(None), [{"ledger": 0.01}] * 3), "ledger_overhead_pct"),
        (lambda r: r.raw.update(fields_ray_32=[0.02]), "fields_32_vs_1"),
        (lambda r: r.raw.update(over_read_transfer_queue_large=[7.5]), "over_read"),
        (lambda r: r.samples.remove(r.of("large", "mooncake")), "mooncake_vs_tq_mooncake"),
    ],
)
def test_a_figure_that_is_missed_or_missing_is_named(spoil: object, missed: str) -> None:
    results = good()
    spoil(results)
    lines = check_figures(data_plane.figures_of(results), HOLDS)
    assert {line.partition(": ")[0] for line in lines} == set(missed.split())


def test_sums_see_every_byte_of_every_column() -> None:
    batch = make_batch(routes=True, num_rows=8, longest=64)
    expected = sums(pad_raw(batch.tensordict(), with_routes=True))
    for name, column in batch.columns.items():
        values = column.values().view(-1)
        changed = values.clone()
        changed[-1] = not changed[-1] if changed.dtype is torch.bool else changed[-1] + 1
        values.copy_(changed)
        assert sums(pad_raw(batch.tensordict(), with_routes=True))[name] != expected[name]


@pytest.mark.full
@pytest.mark.slow
def test_a_small_run_reports_samples_figures_and_where_they_come_from(tmp_path: Path, monkeypatch) -> None:
    # A batch is a cluster, and a way of ours an actor; the contract suite has all of them.
    small = {"small": BatchSpec(routes=True, num_rows=16, longest=64)}
    left_out = ("ray_holder", "ray_node", "shm")
    ways = {name: config for name, config in data_plane.SESSIONS["tuned"].items() if name not in left_out}
    monkeypatch.setattr(data_plane, "BATCHES", small)
    monkeypatch.setattr(data_plane, "Options", partial(data_plane.Options, batches=tuple(small)))
    monkeypatch.setattr(data_plane, "SESSIONS", {"tuned": ways})
    monkeypatch.setattr(data_plane, "TAG_COUNTS", (64, 128, 256))
    target = tmp_path / "report.json"
    assert data_plane.main(["--json", str(target), "--turns", "1", "--only", "tuned"]) == 1
    report = json.loads(target.read_text())
    assert {one["way"] for one in report["samples"]} == set(ways)
    assert all(len(one["put"]) == len(one["get"]) == 1 for one in report["samples"])
    assert {"versions", "commit", "load_average", "figures", "raw"} <= report.keys()
    assert not any("mooncake" in line for line in report["missed"]), "a session that was not asked for holds nothing"
    assert not [line for line in report["missed"] if "brought" in line]


def test_sessions_that_were_not_asked_for_or_cannot_run_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(holds_of(("mooncake",))) == {"mooncake_vs_tq_mooncake"}
    assert set(holds_of(("tuned", "default"))) == set(HOLDS) - {"mooncake_vs_tq_mooncake"}
    assert data_plane.not_here(("tuned", "default")) == {}
    monkeypatch.setitem(sys.modules, "mooncake", None)
    assert "extras" in data_plane.not_here(("tuned", "mooncake"))["mooncake"]
