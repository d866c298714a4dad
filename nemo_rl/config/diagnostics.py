"""Settings of what a run keeps of itself for later (`diagnostics` section)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from nemo_rl.config.base import FilePath, Section, Text

__all__ = ["DiagnosticsConfig", "KeepStepsConfig", "RecordConfig", "TracerConfig", "TracerSwitches"]


class TracerConfig(Section):
    """Shows the model at work on a page beside the run; see docs/tracer.md."""

    enabled: bool = False
    """Start a hub that serves the page; false costs nothing."""
    host: Text = "127.0.0.1"
    """Address that the hub listens at. Others than this machine's own let everybody on the network reach it, who still
    needs a token; put a proxy with TLS in front of it."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """Port of the page; 0 takes a free one."""
    origins: list[Text] = Field(default_factory=list)
    """Origins of pages besides the hub's own that may connect, such as `https://watch.example.org` of a proxy."""
    selectors: list[Text] = Field(
        default_factory=lambda: [
            "layer.out, attn.out, mlp.out, moe.logits, logprob, loss | stats",
            "layer.out | tiles(1, rms); histogram",
            "moe.topk_ids | counts",
        ]
    )
    """The watched tensors: `SITES | REDUCERS | WHEN` each; the page can change it at any time."""
    rows: NonNegativeInt = 4
    """Rows of a step whose tokens are shown one by one, of those that are trained; while decoding, of each engine."""
    max_hz: PositiveFloat = 10.0
    """Most steps per second that are looked at."""
    memory_bytes: PositiveInt = 64 << 20
    """Most bytes of frames that wait in each rank; beyond it the newest are dropped and counted."""
    artifacts: FilePath | None = None
    """Folder of vectors for `project(NAME)`; null has none."""
    record: bool = True
    """Write what the page shows to `tracer/` of the log folder; `nemo-rl trace serve` shows it again."""
    record_bytes: PositiveInt = 1 << 30
    """Most bytes of that; the oldest fall out first."""
    compatibility: bool = False
    """Serve `/legacy` too, the text protocol of an older public tracer."""


class TracerSwitches(Section):
    """Six classical places of a model, each looked at as 96 means per token; `diagnostics.tracer.selectors` can say
    more."""

    qkv_mat_mul: bool = False
    """Queries, keys and values as projected."""
    context_layer_mat_mul: bool = False
    """The gathered values of attention, before the output projection."""
    mlp1_mat_mul: bool = False
    """First product of the MLP."""
    mlp2_mat_mul: bool = False
    """Second product of the MLP, its output."""
    attention_output_mat_mul: bool = False
    """Output of attention."""
    hidden_states: bool = False
    """Residual stream out of each layer."""


Phase = Literal["prev_logprobs", "reference_logprobs", "train", "generation"]


class KeepStepsConfig(Section):
    """Steps kept whole in `steps/` of the log folder, so that `nemo-rl compare RUN replay` can run them again."""

    enabled: bool = False
    """Keep the columns, plans, seeds and outcome of every step."""
    max_bytes: PositiveInt = 1 << 30
    """Most bytes of kept steps. The oldest fall out first; those since the last checkpoint only if they alone are too
    many."""
    on_failure: bool = True
    """Keep the step in flight when it fails, as far as its columns were written; false keeps finished steps alone."""


class RecordConfig(Section):
    """Tensors that the policy workers write to `steps/step_N/records` of the log folder; `nemo-rl compare` reads them.

    A disk that refuses ends the recording of a step, never the step.
    """

    steps: list[PositiveInt] = Field(default_factory=list)
    """Steps that are recorded; empty records nothing, and costs nothing."""
    sites: Text = "layer.out, moe.topk_ids, logprob, loss"
    """The recorded tensors; a selector such as `attn.* & layer in 0..3; logits`, see docs/debugging.md."""
    phases: Annotated[list[Phase], Field(min_length=1)] = ["prev_logprobs", "reference_logprobs", "train"]
    """Passes of the workers that are recorded; `generation` records the engines while they decode, into
    `steps/step_N/records/generation`."""

    @property
    def has_generation(self) -> bool:
        """Return whether the engines are recorded."""
        return bool(self.steps) and "generation" in self.phases


class DiagnosticsConfig(Section):
    """The records that a run keeps of itself for later."""

    record: RecordConfig = Field(default_factory=RecordConfig)

    keep_steps: KeepStepsConfig = Field(default_factory=KeepStepsConfig)

    tracer: TracerConfig = Field(default_factory=TracerConfig)
