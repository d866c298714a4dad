"""Sockets of a rank do not grow with the number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sockets import socket_counts

pytestmark = pytest.mark.slow


def test_a_rank_connects_to_those_that_it_talks_to_alone(tmp_path: Path) -> None:
    few, many = (socket_counts(tmp_path, ranks) for ranks in (4, 8))
    # All pairs would be four more of each of two groups.
    assert many.step <= few.step + 1 and many.save <= few.save + 4, (few, many)
