"""Settings of router replay (`policy.router_replay`), and the rules over them.

Router replay uses the experts that the rollout chose again in training. What depends on the experts of the model is
checked with the model folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeInt

from nemo_rl.config.base import Section
from nemo_rl.config.rule import would_be_ignored

if TYPE_CHECKING:
    from nemo_rl.config.schema import MasterConfig

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


_SECTION = "policy.router_replay"


def _why_no_logprobs(config: MasterConfig) -> str:
    """Return the key that leaves the pass out."""
    is_sampled = config.grpo.use_generation_logprobs_as_prev
    return "grpo.use_generation_logprobs_as_prev" if is_sampled else "loss_fn.force_on_policy_ratio"


def rule_route_recording_needs_its_pass(config: MasterConfig) -> Iterator[str]:
    replay = config.policy.router_replay
    if replay.enabled and replay.source == "prev_logprobs" and not config.has_prev_logprobs_pass:
        switch = _why_no_logprobs(config)
        yield (
            f"{_SECTION}.source: 'prev_logprobs' never records, because {switch} is true; set it to rollout, or "
            f"{switch}=false"
        )


def rule_missing_route_share_needs_rollout_routes(config: MasterConfig) -> Iterator[str]:
    replay, switch = config.policy.router_replay, f"{_SECTION}.source"
    if not replay.enabled or replay.records_at_rollout:
        return
    because = "a log-probability pass records the route of every token"
    yield from would_be_ignored(replay, _SECTION, ["max_missing_share"], switch=switch, because=because)


def rule_route_comparison_needs_logprob_pass(config: MasterConfig) -> Iterator[str]:
    replay = config.policy.router_replay
    if not replay.enabled:
        return
    if not config.has_prev_logprobs_pass:
        switch = _why_no_logprobs(config)
        because = f"{switch} is true: no pass computes log-probabilities before training"
        yield from would_be_ignored(replay, _SECTION, ["compare_microbatches"], switch=switch, because=because)
    elif not replay.records_at_rollout:
        because = "the pass that records uses the model's own routes anyway"
        switch = f"{_SECTION}.source"
        yield from would_be_ignored(replay, _SECTION, ["compare_microbatches"], switch=switch, because=because)
