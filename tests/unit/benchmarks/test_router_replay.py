"""The router replay benchmark: its figures, every bound it holds, and a fault that it must find."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import router_replay
from benchmarks.common import check_figures
from benchmarks.router_replay_bytes import measure_bytes
from benchmarks.router_replay_numerics import dense_routes
from benchmarks.router_replay_report import (
    HOLDS,
    Bytes,
    Comparison,
    Mismatch,
    Overhead,
    figures_of,
    median_interval,
)
from nemo_rl.models.generation.interfaces import RecordedRoutes
from nemo_rl.routes.shape import RouteShape

NUM_TOKENS = 20_000


def mismatch(*, beyond: int, extreme: float = 0.3, noise: float = 1e-3) -> Mismatch:
    """So many tokens at +-extreme, the others at noise."""
    differences = torch.full((NUM_TOKENS,), noise)
    differences[:beyond] = extreme
    differences[:beyond:2] *= -1
    return Mismatch(differences=differences, loss=0.1)


def comparison(**changes: object) -> Comparison:
    values = {"worker": "one", "seeds": (0,), "free": mismatch(beyond=40), "replayed": mismatch(beyond=10)}
    return Comparison(**{**values, "flips": 0.01, **changes})


def overhead(*percent: float) -> Overhead:
    free = (1.0,) * len(percent)
    return Overhead(worker="one", tokens=4096, hidden=512, free_s=free, replayed_s=tuple(1 + p / 100 for p in percent))


def stored(whole: float, bit_packed: float) -> Bytes:
    per_token = {"whole": 168 * whole, "bit_packed": 168 * bit_packed}
    return Bytes(num_experts=128, top_k=8, num_layers=24, bound_per_token=168.0, per_token=per_token)


GOOD = {
    "comparisons": (comparison(),),
    "overheads": (overhead(*[2.0] * 15, *[4.0] * 15),),
    "bytes_found": (stored(1.145, 1.005),),
}


def test_all_bounds_can_hold() -> None:
    figures = figures_of(**GOOD)
    assert check_figures(figures, HOLDS) == []
    assert figures["f128_free"] == 40 / NUM_TOKENS and figures["f128_r3"] == 10 / NUM_TOKENS
    assert figures["f128_reduction"] == 4.0 and figures["overhead_forward_pct"] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({"comparisons": (comparison(free=mismatch(beyond=16), replayed=mismatch(beyond=4)),)}, "tokens_free"),
        ({"comparisons": (comparison(replayed=mismatch(beyond=11)),)}, "f128_reduction"),
        ({"comparisons": (comparison(), comparison(worker="two", replayed=mismatch(beyond=11)))}, "f128_reduction"),
        ({"comparisons": (comparison(replayed=mismatch(beyond=1, extreme=-0.7)),)}, "f2_r3"),
        ({"comparisons": (comparison(replayed=mismatch(beyond=0, noise=0.02)),)}, "k3_r3"),
        ({"overheads": (overhead(*[3.1] * 30),)}, "overhead_forward_low_pct"),
        ({"overheads": (overhead(*[1.0] * 30), overhead(*[3.1] * 30))}, "overhead_forward_low_pct"),
        ({"overheads": ()}, "overhead_forward_low_pct"),
        ({"bytes_found": (stored(1.16, 1.0),)}, "bytes_per_token_vs_bound"),
        ({"bytes_found": (stored(1.1, 1.03),)}, "bytes_per_token_vs_bound_bit_packed"),
    ],
)
def test_a_figure_that_is_missed_or_missing_is_named(change: dict[str, object], missed: str) -> None:
    (line,) = check_figures(figures_of(**{**GOOD, **change}), HOLDS)
    assert line.startswith(missed)


def test_ratios_count_on_both_sides_of_one_and_k3_is_the_mean_of_r_minus_one_minus_log_r() -> None:
    ratios = torch.tensor([1.0, 1.27, 1 / 1.29, 2.1, 1 / 2.1], dtype=torch.float64)
    found = Mismatch(differences=ratios.log().float(), loss=0.0)
    assert [found.count_beyond(at) for at in (1.1, 1.28, 2.0)] == [4, 3, 2]
    assert found.k3 == pytest.approx(float((ratios - 1 - ratios.log()).mean()), rel=1e-6)


def test_pooling_weighs_tokens_not_seeds() -> None:
    many = comparison(seeds=(1,), free=Mismatch(differences=torch.full((3 * NUM_TOKENS,), 0.5), loss=0.3))
    pooled = Comparison.pooled([comparison(free=mismatch(beyond=0)), many])
    assert pooled.seeds == (0, 1)
    assert pooled.free.share_beyond(1.28) == 0.75 and pooled.free.loss == pytest.approx(0.2)


@pytest.mark.parametrize("count", [6, 11, 30, 31])
def test_the_interval_of_the_median_is_the_narrowest_one_that_covers_it_often_enough(count: int) -> None:
    low, high = median_interval([float(i) for i in range(count, 0, -1)])

    def covers(low: int, high: int) -> float:
        """Probability that the median lies between these order statistics."""
        return sum(math.comb(count, heads) for heads in range(low, high)) / 2**count

    assert low + high == count + 1
    assert covers(int(low), int(high)) >= 0.95 > covers(int(low) + 1, int(high) - 1)


def test_few_samples_have_their_range_as_interval() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)


def test_bytes_are_those_of_the_ids_and_a_little_for_rows() -> None:
    (found,) = measure_bytes([128])
    assert found.bound_per_token == 168.0
    assert 192.0 + 1 / 8 < found.per_token["whole"] < 193.0
    assert 168.0 + 1 / 8 < found.per_token["bit_packed"] < 169.0


def test_dense_routes_have_each_token_in_its_place_and_a_valid_route_elsewhere() -> None:
    shape = RouteShape(layers=(0, 2), top_k=2, num_experts=8)
    ids = torch.arange(3 * 2 * 2, dtype=torch.uint8).view(3, 2, 2) % 8
    recorded = RecordedRoutes(ids=ids, starts=torch.zeros(2).long(), lengths=torch.tensor([2, 1]), shape=shape)
    dense = dense_routes(recorded, torch.tensor([3, 2]), width=4)
    assert dense.dtype == torch.int16 and dense.shape == (2, 4, 2, 2)
    assert torch.equal(dense[0, :2], ids[:2].short()) and torch.equal(dense[1, :1], ids[2:].short())
    assert (dense[0, 2:] == torch.tensor([0, 1])).all() and (dense[1, 1:] == torch.tensor([0, 1])).all()


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, object]:
    # A model that has learned nothing changes its mind about one token-layer in a hundred: some rows have such tokens.
    monkeypatch.setattr(router_replay, "QUICK", replace(router_replay.QUICK, num_prompts=8))
    target = tmp_path / "report.json"
    assert router_replay.main(["--json", str(target), "--quick", *arguments]) == 1
    report: dict[str, object] = json.loads(target.read_text())
    return report


@pytest.mark.slow
def test_a_small_run_reports_what_both_workers_do_and_misses_its_bounds(tmp_path: Path, monkeypatch) -> None:
    report = run(tmp_path, monkeypatch)
    assert {"versions", "commit", "load_average", "missed"} <= report.keys()
    keys = ("k3_free", "k3_r3", "f128_free", "f128_r3", "f2_r3", "overhead_forward_pct", "bytes_per_token_vs_bound")
    assert all(isinstance(report[key], float) for key in keys)
    assert [one["worker"] for one in report["overhead"]] == ["dtensor", "megatron"]
    assert all(len(one["free_s"]) == len(one["replayed_s"]) == 2 for one in report["overhead"])
    assert [one["num_experts"] for one in report["bytes"]] == [8, 64, 128, 256, 512]
    dtensor, megatron = report["numerics"]
    for one in (dtensor, megatron):
        assert one["flips_per_token_layer"] > 0
        assert one["replayed"]["k3"] < 0.7 * one["free"]["k3"]
    assert dtensor["replayed"]["k3"] == pytest.approx(megatron["replayed"]["k3"], rel=0.02)


@pytest.mark.full
@pytest.mark.slow
def test_replay_that_is_off_behind_its_back_is_seen(tmp_path: Path, monkeypatch) -> None:
    report = run(tmp_path, monkeypatch, "--without-replay", "--only", "numerics")
    assert report["f128_reduction"] < 4 and report["k3_r3"] == pytest.approx(report["k3_free"], rel=1e-3)
    assert any(line.startswith("f128_reduction") for line in report["missed"])
