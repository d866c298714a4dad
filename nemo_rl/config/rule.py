"""What a cross-field rule is, and how the rules of a module are found."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nemo_rl.config.schema import MasterConfig

__all__ = ["SET_FOR_A_PASS", "Rule", "rules_in"]

SET_FOR_A_PASS = "set grpo.use_generation_logprobs_as_prev=false and loss_fn.force_on_policy_ratio=false"
"""What gives a run the pass `prev_logprobs`, for messages."""

Rule = Callable[[MasterConfig], list[str]]
"""The problems of a config, each line starting with the dotted path of the key to change."""


def rules_in(namespace: Mapping[str, object]) -> dict[str, Rule]:
    """Every `rule_*` function of a module's globals, by name."""
    return {name: value for name, value in namespace.items() if name.startswith("rule_") and callable(value)}
