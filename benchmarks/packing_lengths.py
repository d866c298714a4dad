"""Row lengths as GRPO rollouts make them: three shapes, every one reproducible from its seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

__all__ = ["MAX_LENGTH", "SHAPES", "draw_lengths"]

MAX_LENGTH = 8192
"""Where a rollout is cut off, in tokens, prompt included."""
MIN_LENGTH = 32
CUT_OFF_SHARE = 0.25


def _log_normal(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.lognormal(np.log(1500.0), 0.8, count)


def _bimodal(rng: np.random.Generator, count: int) -> np.ndarray:
    """Answers at once, and answers after long thought."""
    return np.where(rng.random(count) < 0.7, rng.normal(600.0, 150.0, count), rng.normal(5000.0, 800.0, count))


def _pile_up(rng: np.random.Generator, count: int) -> np.ndarray:
    """A quarter of the rows is cut off at the cap."""
    return np.where(rng.random(count) < CUT_OFF_SHARE, MAX_LENGTH, rng.lognormal(np.log(2000.0), 0.7, count))


SHAPES: Mapping[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "log-normal": _log_normal,
    "bimodal": _bimodal,
    "pile-up": _pile_up,
}


def draw_lengths(shape: str, count: int, *, seed: int) -> list[int]:
    """`count` row lengths of this shape, in tokens."""
    lengths = SHAPES[shape](np.random.default_rng(seed), count)
    return [int(length) for length in np.clip(lengths, MIN_LENGTH, MAX_LENGTH)]
