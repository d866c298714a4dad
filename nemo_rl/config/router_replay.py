"""Settings of router replay (`policy.router_replay`).

Router replay uses the experts that the rollout chose again in training. What depends on the experts of the model is
checked with the model folder.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from nemo_rl.config.base import Section

__all__ = ["RouterReplayConfig"]


class RouterReplayConfig(Section):
    """Routes of a mixture of experts, recorded once and replayed in log-probability and training passes."""

    enabled: bool = False
    """The model must have routed experts of a kind that both the engine and the policy worker know."""
    source: Literal["rollout", "prev_logprobs"] = "rollout"
    """The recorder of the routes: the engine that samples, or the policy worker in its log-probability pass."""
    bit_packed: bool = False
    """Send ids in as many bits as they need; false: one byte each up to 256 experts, two above."""
    with_digests: bool = False
    """Digests of the rollout's routes travel with them, so that forward passes can be checked against the rollout.
    NRL_R3_TRACE together with NRL_R3_TRACE_VERIFY_FORWARD sets it."""
    max_missing_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Largest share of trainable tokens without a route, which then take the model's own; a step above it fails."""
    compare_microbatches: NonNegativeInt = 0
    """Microbatches per rank and step whose log-probabilities are also computed with the model's own routes, for the
    metrics that show what replay changes."""

    @property
    def records_at_rollout(self) -> bool:
        """Return whether the engines record routes."""
        return self.enabled and self.source == "rollout"
