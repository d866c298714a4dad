"""What a run keeps of itself, to be looked into later (`diagnostics`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from nemo_rl.config.base import Section, Text
from nemo_rl.config.tracer import TracerConfig

__all__ = ["DiagnosticsConfig", "KeepStepsConfig", "RecordConfig"]

Phase = Literal["prev_logprobs", "reference_logprobs", "train"]


class KeepStepsConfig(Section):
    """Steps kept whole in `steps/` of the log folder, so that `nemo-rl replay` can run them again."""

    enabled: bool = False
    """Keep the columns, plans, seeds and outcome of every step."""
    max_bytes: PositiveInt = 1 << 30
    """Most bytes of kept steps. The oldest fall out first; those since the last checkpoint only if they alone are too
    many."""
    on_failure: bool = True
    """Keep the step in flight when it fails, as far as its columns were written; false keeps finished steps alone."""


class RecordConfig(Section):
    """Tensors that the policy workers write to `records/step_N` of the log folder; `nemo-rl probe compare` reads them.

    A disk that refuses ends the recording of a step, never the step.
    """

    steps: list[PositiveInt] = Field(default_factory=list)
    """Steps that are recorded; empty records nothing, and costs nothing."""
    sites: Text = "layer.out, moe.topk_ids, logprob, loss"
    """Which tensors; a selector such as `attn.* & layer in 0..3; logits`, see docs/debugging.md."""
    phases: Annotated[list[Phase], Field(min_length=1)] = ["prev_logprobs", "reference_logprobs", "train"]
    """Passes of the workers that are recorded."""


class DiagnosticsConfig(Section):
    """What a run keeps of itself, to be looked into later."""

    record: RecordConfig = Field(default_factory=RecordConfig)

    keep_steps: KeepStepsConfig = Field(default_factory=KeepStepsConfig)

    tracer: TracerConfig = Field(default_factory=TracerConfig)
