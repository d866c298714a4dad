"""Every rule over several keys: what would be ignored, or cannot work, is refused when the recipe is loaded.

Each rule is one function `rule_*(config)` that yields its problems; a line starts with the dotted path of the key to
change. All rules run, so that all problems are reported at once. The loader calls them. Rules are given the whole
recipe and stand here, so that a section imports neither the root nor the sections beside it. A new rule is a new
function in the module of its section.
"""

from __future__ import annotations

from nemo_rl.config.rules import data, generation, grpo, judges, loss, megatron, policy, run, sft
from nemo_rl.config.rules.rule import Rule, rules_in

__all__ = ["RULES"]

_ALL = {
    name: rule
    for module in (data, generation, grpo, judges, loss, megatron, policy, run, sft)
    for name, rule in rules_in(vars(module)).items()
}

RULES: tuple[Rule, ...] = tuple(_ALL[name] for name in sorted(_ALL))
"""Every rule, sorted by name."""
