"""Every metric is reduced as whoever made it says, whatever the parts are."""

from __future__ import annotations

import pytest

from nemo_rl.utils.metrics import Max, Mean, Min, Reduction, Sum, merge_metrics, values


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
