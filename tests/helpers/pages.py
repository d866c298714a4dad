"""Memory that shows in a process's size: pages of its own, not a free piece of the heap that is already resident."""

from __future__ import annotations

import mmap


def touched_pages(num_bytes: int) -> mmap.mmap:
    """Anonymous pages, each written once; `close` gives them back."""
    pages = mmap.mmap(-1, num_bytes)
    for offset in range(0, num_bytes, mmap.PAGESIZE):
        pages[offset] = 1
    return pages
