"""The packing benchmark: its bounds hold for `balanced`, and fail for an algorithm that does not balance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import packing
from benchmarks.packing_lengths import MAX_LENGTH, SHAPES, draw_lengths
from benchmarks.packing_report import Case, Samples, missed_bounds, plan_problems
from nemo_rl.distributed.packing import PackPlan, plan_packs

HELD = Case(shape="pile-up", num_rows=448, num_ranks=32)
TIMED = Case(shape="pile-up", num_rows=4096, num_ranks=64)


def good(case: Case) -> Samples:
    return Samples(
        case=case,
        algorithm="balanced",
        imbalance=[1.0, 1.01],
        synchronised=[1.3] * 2,
        pad_share=[0.0] * 2,
        num_bins=[64, 64],
        bins_bound=[64, 64],
        milliseconds=[10.0, 90.0, 20.0],
    )


def test_lengths_are_reproducible_and_have_their_shape() -> None:
    for shape in SHAPES:
        lengths = draw_lengths(shape, 500, seed=3)
        assert lengths == draw_lengths(shape, 500, seed=3) != draw_lengths(shape, 500, seed=4)
        assert 1 <= min(lengths) <= max(lengths) <= MAX_LENGTH
    assert 100 < draw_lengths("pile-up", 500, seed=3).count(MAX_LENGTH) < 170


@pytest.mark.parametrize(
    ("field", "values", "line"),
    [
        ("imbalance", [1.01, 1.04], "mean: expected <= 1.02, got 1.0250"),
        ("imbalance", [1.0] * 18 + [1.09] * 2, "p95: expected <= 1.05, got 1.0900"),
        ("num_bins", [64, 66], "minimum, worst: expected <= 1.02, got 1.0312"),
        ("milliseconds", [31.0, 29.0, 40.0], "CPU milliseconds, median: expected <= 30, got 31.0000"),
        ("problems", ["a microbatch has 9 tokens"], "a microbatch has 9 tokens"),
    ],
)
def test_every_bound_can_be_missed(field: str, values: list[float], line: str) -> None:
    samples = good(TIMED)
    assert missed_bounds([samples], algorithm="balanced") == []
    setattr(samples, field, values)
    missed = missed_bounds([samples], algorithm="balanced")
    assert any(line in one for one in missed), missed


def test_bounds_are_held_where_the_ranks_have_rows_to_choose_from() -> None:
    few = Case(shape="pile-up", num_rows=447, num_ranks=32)
    for case, is_held in ((HELD, True), (few, False)):
        samples = good(case)
        samples.imbalance = [1.5, 1.5]
        assert bool(missed_bounds([samples], algorithm="balanced")) is is_held
        assert not missed_bounds([samples], algorithm="karmarkar_karp")


def test_a_wrong_plan_is_seen() -> None:
    plan = plan_packs([5, 6, 7, 8], capacity=16, dp_world=2)
    assert plan_problems(plan, [5, 6, 7, 8], capacity=16) == []
    assert "not every row" in plan_problems(plan, [5, 6, 7, 8, 9], capacity=16)[0]
    assert plan_problems(plan, [5, 6, 7, 8], capacity=12) == ["a microbatch has 13 tokens, the cap is 12"]
    uneven = PackPlan(microbatches=(((0,), (1,)), ((2,),)), steps=(2,), pad_to=8)
    assert plan_problems(uneven, [5, 6, 7], capacity=16) == ["ranks have different numbers of microbatches"]


def test_a_small_run_holds_for_balanced_and_fails_without_balance(tmp_path: Path) -> None:
    file = tmp_path / "packing.json"
    assert packing.main(["--seed", "7", "--quick", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["missed"] == [] and report["seed"] == 7 and report["commit"] and report["load_average"]["before"]
    assert {one["algorithm"] for one in report["samples"]} >= {"balanced", "karmarkar_karp", "concatenative"}
    assert all(len(one["imbalance"]) == report["draws"] for one in report["samples"])
    assert packing.main(["--seed", "7", "--quick", "--json", str(file), "--algorithm", "first_fit_shuffle"]) == 1
    assert "first_fit_shuffle" in json.loads(file.read_text())["missed"][0]
