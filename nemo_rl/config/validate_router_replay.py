"""Rules about `policy.router_replay`: who records routes, who replays them, and what would be ignored.

The form of a rule is explained in `nemo_rl.config.validate`, which runs them all. What depends on the model's experts
is checked with the model folder.
"""

from __future__ import annotations

from nemo_rl.config.ignored import would_be_ignored
from nemo_rl.config.rule import rules_in
from nemo_rl.config.schema import MasterConfig

__all__ = ["RULES"]

_SECTION = "policy.router_replay"


def _why_no_logprobs(config: MasterConfig) -> str:
    """The key that leaves the pass out."""
    is_sampled = config.grpo.use_generation_logprobs_as_prev
    return "grpo.use_generation_logprobs_as_prev" if is_sampled else "loss_fn.force_on_policy_ratio"


def rule_router_replay_keys_need_their_switch(config: MasterConfig) -> list[str]:
    replay, switch = config.policy.router_replay, f"{_SECTION}.enabled"
    if replay.enabled:
        return []
    names = tuple(name for name in type(replay).model_fields if name != "enabled")
    return would_be_ignored(replay, _SECTION, names, switch=switch, because=f"{switch} is false")


def rule_routes_are_recorded_by_a_stage_that_runs(config: MasterConfig) -> list[str]:
    replay = config.policy.router_replay
    if replay.enabled and replay.source == "prev_logprobs" and not config.has_prev_logprobs_pass:
        switch = _why_no_logprobs(config)
        return [
            f"{_SECTION}.source: 'prev_logprobs' never records, because {switch} is true; set it to rollout, or "
            f"{switch}=false"
        ]
    return []


def rule_missing_routes_come_from_rollouts(config: MasterConfig) -> list[str]:
    replay, switch = config.policy.router_replay, f"{_SECTION}.source"
    if not replay.enabled or replay.records_at_rollout:
        return []
    because = "a log-probability pass records the route of every token"
    return would_be_ignored(replay, _SECTION, ["max_missing_share"], switch=switch, because=because)


def rule_routes_are_compared_in_logprob_passes(config: MasterConfig) -> list[str]:
    replay = config.policy.router_replay
    if not replay.enabled:
        return []
    if not config.has_prev_logprobs_pass:
        switch = _why_no_logprobs(config)
        because = f"{switch} is true: no pass computes log-probabilities before training"
        return would_be_ignored(replay, _SECTION, ["compare_microbatches"], switch=switch, because=because)
    if not replay.records_at_rollout:
        because = "the pass that records uses the model's own routes anyway"
        switch = f"{_SECTION}.source"
        return would_be_ignored(replay, _SECTION, ["compare_microbatches"], switch=switch, because=because)
    return []


RULES = rules_in(globals())
"""The rules of this module, by name."""
