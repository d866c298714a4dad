"""Metrics are reduced as their producer says, whatever the parts are, and timers add up the seconds of each stage."""

from __future__ import annotations

import pytest

from nemo_rl.utils.metrics import Max, Mean, Min, Reduction, Sum, Timer, merge_metrics, values


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([Mean(6.0, 2.0), Mean(0.0, 1.0), Mean(3.0, 3.0)], 1.5),
        ([Mean(0.0, 0.0)], 0.0),
        ([Sum(1.0), Sum(-3.0), Sum(2.5)], 0.5),
        ([Max(1.0), Max(3.0), Max(-2.0)], 3.0),
        ([Min(1.0), Min(-3.0), Min(2.0)], -3.0),
    ],
)
def test_parts_are_merged_by_their_kind_in_any_order(parts: list[Reduction], expected: float) -> None:
    for ordered in (parts, parts[::-1]):
        assert values(merge_metrics({"a": part} for part in ordered)) == {"a": expected}


def test_names_are_merged_apart_and_kinds_do_not_mix() -> None:
    merged = merge_metrics([{"a": Sum(1.0), "b": Max(2.0)}, {"b": Max(1.0)}, {"a": Sum(4.0), "c": Min(0.5)}])
    assert values(merged) == {"a": 5.0, "b": 2.0, "c": 0.5}
    with pytest.raises(TypeError, match="metric 'a': Sum and Max do not merge"):
        merge_metrics([{"a": Sum(1.0)}, {"a": Max(1.0)}])


def test_repeated_and_failing_blocks_add_up_until_reset() -> None:
    ticks = iter([0.0, 1.0, 10.0, 13.0, 20.0, 20.5])
    timer = Timer(clock=lambda: next(ticks))
    with timer.time("train"):
        pass
    with pytest.raises(ValueError, match="boom"), timer.time("train"):
        raise ValueError("boom")
    with timer.time("refit"):
        pass
    timer.add("refit", 1.0)
    assert timer.seconds() == {"train": 4.0, "refit": 1.5}
    timer.reset()
    assert timer.seconds() == {}
