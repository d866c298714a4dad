"""Seconds per stage."""

from __future__ import annotations

import pytest

from nemo_rl.utils.metrics import Timer


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
