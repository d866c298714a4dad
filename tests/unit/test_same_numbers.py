"""The comparison behind `make same-numbers` finds one bit, and only what a change does not announce."""

from __future__ import annotations

import math

import pytest

from tests.helpers.same_numbers import Changes, first_difference

NOTHING = Changes(renamed={}, added=frozenset())
STEPS = [{"step": 1, "train/loss": 0.1, "train/kl": math.nan}, {"step": 2, "train/loss": 0.2, "train/kl": 0.5}]


def changed(step: int, **values: object) -> list[dict[str, object]]:
    return [{**row, **values} if i == step else dict(row) for i, row in enumerate(STEPS)]


def test_equal_runs_are_equal_not_a_number_included() -> None:
    assert first_difference(STEPS, changed(0), NOTHING) is None


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        (changed(1, **{"train/loss": math.nextafter(0.2, 1)}), "line 2, train/loss: 0.2 at the base, 0.2000000"),
        (changed(0, **{"train/kl": 0.0}), "line 1, train/kl: NaN at the base, 0.0 here"),
        (STEPS[:1], "2 steps at the base, 1 here"),
        ([{"step": 1, "train/kl": math.nan}, STEPS[1]], 'line 1, train/loss: 0.1 at the base, "missing" here'),
        (changed(1, new=3), 'line 2, new: "missing" at the base, 3 here'),
    ],
)
def test_the_first_difference_is_named(here: list[dict[str, object]], expected: str) -> None:
    assert (first_difference(STEPS, here, NOTHING) or "").startswith(expected)


def test_announced_changes_are_none_and_others_still_count() -> None:
    here = [{"new": 1, **{name.replace("kl", "policy_kl"): value for name, value in row.items()}} for row in STEPS]
    announced = Changes(renamed={"train/kl": "train/policy_kl"}, added=frozenset({"new"}))
    assert first_difference(STEPS, here, announced) is None
    here[1]["train/policy_kl"] = 0.25
    assert "train/policy_kl: 0.5 at the base, 0.25 here" in (first_difference(STEPS, here, announced) or "")
