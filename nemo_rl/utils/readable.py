"""Waits for file descriptors, without select's limit of 1,024, and reads a line from one by a deadline."""

from __future__ import annotations

import math
import os
import select
import time


def wait_readable(*descriptors: int, timeout_s: float) -> set[int]:
    """Those of `descriptors` that can be read without waiting, at their end included; empty after `timeout_s`."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(math.ceil(max(timeout_s, 0.0) * 1000))}


def read_line(descriptor: int, *, timeout_s: float, limit_bytes: int = 1 << 16) -> bytes:
    """The first line that comes, with its line feed. Without one: what came until the end, the limit or the deadline.

    What follows the line in the same piece is dropped, so this is for who says one line.
    """
    deadline, line = time.monotonic() + timeout_s, b""
    while b"\n" not in line and len(line) < limit_bytes:
        left = deadline - time.monotonic()
        if left <= 0 or not wait_readable(descriptor, timeout_s=left):
            break
        part = os.read(descriptor, limit_bytes - len(line))
        if not part:
            break
        line += part
    first, feed, _ = line.partition(b"\n")
    return first + feed
