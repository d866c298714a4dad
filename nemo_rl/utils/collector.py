"""`paused_collector`: makes many small containers at once without the garbage collector in between.

Every few hundred new dicts it would look at all young ones again, and now and then at everything; that doubles the time
of a call that makes one dict per row.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["paused_collector"]

_lock = threading.Lock()
_depth = 0


@contextmanager
def paused_collector() -> Iterator[None]:
    """Inside it nothing is collected, in any thread; a collector that somebody has switched off stays off."""
    global _depth  # noqa: PLW0603 - the collector is one per process, too
    with _lock:
        is_ours = _depth > 0 or gc.isenabled()
        if is_ours:
            _depth += 1
            gc.disable()
    try:
        yield
    finally:
        if is_ours:
            with _lock:
                _depth -= 1
                if not _depth:
                    gc.enable()
