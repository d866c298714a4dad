"""Which stage the current thread works for: set by `working_for`, sent with every ledger request.

A context variable, so threads and nested stages keep apart; "" means outside every stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["CLEAR", "NO_STAGE", "current_stage", "working_for"]

NO_STAGE = ""
CLEAR = "clear"
"""The stage of what `factory.open_step` does."""

current_stage: ContextVar[str] = ContextVar("data_plane_stage", default=NO_STAGE)


@contextmanager
def working_for(stage: str) -> Iterator[None]:
    """Calls made inside, in this thread, belong to `stage`."""
    token = current_stage.set(stage)
    try:
        yield
    finally:
        current_stage.reset(token)
