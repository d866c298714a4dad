"""How many examples a property draws: all in `make test-full`, a third of them elsewhere."""

from __future__ import annotations

import os

FULL = "NEMO_RL_TEST_FULL"
"""Variable that `make test-full` sets."""


def num_examples(count: int = 100) -> int:
    """Of this run, given those of `make test-full`."""
    return count if os.environ.get(FULL) else -(-count // 3)
