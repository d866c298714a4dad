"""What a run keeps of itself, to be looked into later (`diagnostics`)."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from nemo_rl.config.base import Section

__all__ = ["DiagnosticsConfig", "KeepStepsConfig"]


class KeepStepsConfig(Section):
    """Steps kept whole in `steps/` of the log folder, so that `nemo-rl replay` can run them again."""

    enabled: bool = False
    """Keep the columns, plans, seeds and outcome of every step."""
    max_bytes: PositiveInt = 1 << 30
    """Most bytes of kept steps. The oldest fall out first; those since the last checkpoint only if they alone are too
    many."""
    on_failure: bool = True
    """Keep the step in flight when it fails, as far as its columns were written; false keeps finished steps alone."""


class DiagnosticsConfig(Section):
    """What a run keeps of itself, to be looked into later."""

    keep_steps: KeepStepsConfig = Field(default_factory=KeepStepsConfig)
