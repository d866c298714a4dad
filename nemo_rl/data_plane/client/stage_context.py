"""Which stage the current thread works for: set by `MetricsDataPlaneClient.stage`, sent with every ledger request.

A context variable, so threads and nested stages keep apart; "" means outside every stage.
"""

from __future__ import annotations

from contextvars import ContextVar

__all__ = ["NO_STAGE", "current_stage"]

NO_STAGE = ""

current_stage: ContextVar[str] = ContextVar("data_plane_stage", default=NO_STAGE)
