"""The form of a cross-field rule, and the lines it gives about keys that have no effect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from nemo_rl.config.base import Section

__all__ = ["SET_FOR_A_PASS", "Ignored", "Rule", "keys_besides_the_switch", "rules_in", "would_be_ignored"]

SET_FOR_A_PASS = "set grpo.use_generation_logprobs_as_prev=false and loss_fn.force_on_policy_ratio=false"
"""The advice that gives a run the pass `prev_logprobs`, for messages."""

Rule = Callable[..., Iterable[str]]
"""Returns the problems of a recipe, each line starting with the dotted path of the key to change."""


def rules_in(namespace: Mapping[str, object]) -> dict[str, Rule]:
    """Return every `rule_*` function of a module's globals, by name."""
    return {name: value for name, value in namespace.items() if name.startswith("rule_") and callable(value)}


class Ignored(str):
    """One line; it knows the two keys, so that the loader knows who set which."""

    key: str
    """Dotted path of the key without effect."""
    switch: str
    """Dotted path of the key that decides."""

    def __new__(cls, key: str, what: str, *, switch: str, because: str) -> Ignored:
        line = super().__new__(
            cls, f"{key}: {what}would be ignored, because {because}; leave it out, or change {switch}"
        )
        line.key, line.switch = key, switch
        return line


def would_be_ignored(
    section: Section, prefix: str, names: Iterable[str], *, switch: str, because: str = ""
) -> list[str]:
    """Return one line for each of the attributes `names` that differs from its default; of a section below, one for
    each of its keys.

    Args:
        because: empty: the switch is false.
    """
    because = because or f"{switch} is false"
    lines: list[str] = []
    for name in names:
        value, field = getattr(section, name), type(section).model_fields[name]
        key = f"{prefix}.{field.alias or name}"
        default = field.get_default(call_default_factory=True)
        if isinstance(value, Section) and default is not None:
            inside = type(value).model_fields
            lines += would_be_ignored(value, key, inside, switch=switch, because=because)
            continue
        if value != default:
            shown = f"{value!r} " if isinstance(value, (str, int, float, bool)) else ""
            lines.append(Ignored(key, shown, switch=switch, because=because))
    return lines


def keys_besides_the_switch(section: Section) -> tuple[str, ...]:
    return tuple(name for name in type(section).model_fields if name != "enabled")
