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
from benchmarks.driver_step import PARTS, DriverSample


def samples(way: str, batch: str, seconds: float, *, session: str = "tuned") -> Samples:
    part = {"ledger": 0.001}
    return Samples(session=session, batch=batch, way=way, put=[seconds] * 3, get=[seconds] * 3, parts=[part] * 3)


def good() -> data_plane.Results:
    results = data_plane.Results(
        samples=[
            samples("memcpy", "large", 0.005),
            samples("raw_transfer_queue", "large", 0.08),
            samples("raw_transfer_queue_ragged", "large", 0.05),
            samples("ray", "large", 0.01),
            samples("transfer_queue", "large", 0.05),
            samples("transfer_queue_unchecked", "large", 0.049),
            samples("raw_transfer_queue", "small", 0.05),
            samples("transfer_queue", "small", 0.01),
            samples("transfer_queue_unchecked", "small", 0.0095),
            samples("raw_transfer_queue_mooncake", "large", 0.2, session="mooncake"),
            samples("mooncake", "large", 0.05, session="mooncake"),
            samples("mooncake_unchecked", "large", 0.047, session="mooncake"),
            samples("mooncake", "small", 0.02, session="mooncake"),
            samples("mooncake_unchecked", "small", 0.02, session="mooncake"),
        ],
        driver=[DriverSample(rows=16384, ms=dict.fromkeys(PARTS, ms)) for ms in (20.0, 20.0, 21.0)],
        raw={
            "fields_ray_1": [0.010],
            "fields_ray_32": [0.012],
            "fields_transfer_queue_1": [0.010],
            "fields_transfer_queue_32": [0.014],
            "scalar_tags_16k": [0.015],
            "over_read_transfer_queue_large": [1.1],
            "over_read_transfer_queue_small": [1.8],
            "worker_shm_s": [0.025, 0.026, 0.3],
            "worker_ray_node_s": [0.027, 0.028, 0.3],
            "block_12288_8_shards_s": [0.04],
            "block_131072_8_shards_s": [0.05],
        },
    )
    return results


def test_figures_are_ratios_of_medians_and_all_bounds_can_hold() -> None:
    figures = data_plane.figures_of(good())
    assert figures["ray_vs_tuned_tq"] == pytest.approx(8.0)
    assert figures["ray_vs_tuned_tq_ragged"] == pytest.approx(5.0)
    assert figures["tq_vs_tuned_tq_small"] == pytest.approx(5.0)
    assert figures["worker_shm_vs_memcpy"] == pytest.approx(2.6)
    assert figures["blocks_8_shards_time"] == pytest.approx(0.8)
    assert figures["checksums_mooncake_large_pct"] == pytest.approx(100 * 3 / 47)
    assert figures["driver_ms_16384"] == pytest.approx(20.0 * len(PARTS))
    assert figures["mooncake_vs_tq_mooncake"] == pytest.approx(4.0)
    assert figures["ledger_overhead_pct"] == pytest.approx(5.0)
    assert figures["fields_32_vs_1"] == pytest.approx(1.2)
    assert figures["scalar_tags_16k_ms"] == pytest.approx(15.0)
    assert check_figures(figures, HOLDS) == []


@pytest.mark.parametrize(
    ("spoil", "missed"),
    [
        (
            lambda r: r.of("large", "ray").put.__setitem__(slice(None), [0.08] * 3),
            "ray_vs_tuned_tq ray_vs_tuned_tq_ragged",
        ),
        (
            lambda r: r.of("large", "raw_transfer_queue").put.__setitem__(slice(None), [0.03] * 3),
            "ray_vs_tuned_tq tq_vs_tuned_tq_large",
        ),
        (
            lambda r: r.of("small", "raw_transfer_queue").get.__setitem__(slice(None), [0.02] * 3),
            "tq_vs_tuned_tq_small",
        ),
        (
            lambda r: r.of("small", "transfer_queue").get.__setitem__(slice(None), [0.05] * 3),
            "tq_vs_tuned_tq_small checksums_transfer_queue_small_pct",
        ),
        (
            lambda r: r.of("large", "transfer_queue").get.__setitem__(slice(None), [0.2] * 3),
            "tq_vs_tuned_tq_large checksums_transfer_queue_large_pct",
        ),
        (
            lambda r: r.of("large", "mooncake").get.__setitem__(slice(None), [0.4] * 3),
            "mooncake_vs_tq_mooncake checksums_mooncake_large_pct",
        ),
        (
            lambda r: r.of("small", "mooncake_unchecked").get.__setitem__(slice(None), [0.01] * 3),
            "checksums_mooncake_small_pct",
        ),
        (lambda r: r.raw.update(worker_shm_s=[0.04] * 3), "worker_shm_vs_memcpy"),
        (lambda r: r.raw.update(worker_ray_node_s=[0.04] * 3), "worker_ray_node_vs_memcpy"),
        (lambda r: r.raw.update(block_12288_8_shards_s=[0.06]), "blocks_8_shards_time"),
        (lambda r: r.raw.update(scalar_tags_16k=[0.025]), "scalar_tags_16k_ms"),
        (lambda r: r.raw.update(over_read_transfer_queue_small=[7.8]), "over_read_transfer_queue_small"),
        (
            lambda r: r.driver.append(DriverSample(rows=16384, ms=dict.fromkeys(PARTS, 90.0))),
            "driver_p95_vs_median_16384",
        ),
        (lambda r: r.driver.clear(), "driver_ms_16384 driver_p95_vs_median_16384"),
        (lambda r: r.of("large", "ray").parts.__setitem__(slice(None), [{"ledger": 0.01}] * 3), "ledger_overhead_pct"),
        (lambda r: r.raw.update(fields_ray_32=[0.02]), "fields_32_vs_1"),
        (lambda r: r.raw.update(over_read_transfer_queue_large=[7.5]), "over_read_transfer_queue_large"),
        (lambda r: r.samples.remove(r.of("large", "mooncake")), "mooncake_vs_tq_mooncake checksums_mooncake_large_pct"),
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
    left_out = ("ray_holder", "ray_node", "shm", "transfer_queue_native")
    ways = {name: config for name, config in data_plane.SESSIONS["tuned"].items() if name not in left_out}
    monkeypatch.setattr(data_plane, "BATCHES", small)
    monkeypatch.setattr(data_plane, "Options", partial(data_plane.Options, batches=tuple(small)))
    monkeypatch.setattr(data_plane, "SESSIONS", {"tuned": ways})
    monkeypatch.setattr(data_plane, "TAG_COUNTS", (64, 128, 256))
    monkeypatch.setattr(data_plane, "DRIVER_ROWS", 128)
    target = tmp_path / "report.json"
    assert data_plane.main(["--json", str(target), "--turns", "1", "--only", "tuned"]) == 1
    report = json.loads(target.read_text())
    assert {one["way"] for one in report["samples"]} == {*ways, "transfer_queue_unchecked"}
    turns = {"large": 1, "small": data_plane.SMALL_TURNS}
    assert all(len(one["put"]) == len(one["get"]) == turns[one["batch"]] for one in report["samples"])
    assert {"versions", "commit", "load_average", "figures", "raw"} <= report.keys()
    assert not any("mooncake" in line for line in report["missed"]), "a session that was not asked for holds nothing"
    assert not [line for line in report["missed"] if "brought" in line]


def test_sessions_that_were_not_asked_for_or_cannot_run_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    over_mooncake = {name for name in HOLDS if "mooncake" in name}
    assert set(holds_of(("mooncake",))) == over_mooncake and len(over_mooncake) == 3
    assert set(holds_of(("tuned", "default"))) == set(HOLDS) - over_mooncake
    assert data_plane.not_here(("tuned", "default")) == {}
    monkeypatch.setitem(sys.modules, "mooncake", None)
    assert "extras" in data_plane.not_here(("tuned", "mooncake"))["mooncake"]
