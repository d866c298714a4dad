"""Sockets of a rank do not grow with the number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sockets import socket_counts

pytestmark = pytest.mark.slow


def test_a_rank_connects_to_those_that_it_talks_to_alone(tmp_path: Path) -> None:
    found = socket_counts(tmp_path, 8)
    # Two neighbours of a ring, the job's store, a listener of each of two groups; 17 with all of both groups.
    assert found.step <= 6 and found.save <= 12, found
