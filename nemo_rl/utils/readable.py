"""Waits for file descriptors without select's limit of 1,024."""

from __future__ import annotations

import math
import select


def wait_readable(*descriptors: int, timeout_s: float) -> set[int]:
    """Those of `descriptors` that can be read without waiting, at their end included; empty after `timeout_s`."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(math.ceil(max(timeout_s, 0.0) * 1000))}
