"""Lines about keys that have no effect because another key switches them off. Made by the rules, read by the loader."""

from __future__ import annotations

from collections.abc import Iterable

from nemo_rl.config.base import Section

__all__ = ["Ignored", "would_be_ignored"]


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


def would_be_ignored(section: Section, prefix: str, names: Iterable[str], *, switch: str, because: str) -> list[str]:
    """One line for each of `names` that differs from its default; of a section below, one for each of its keys."""
    lines: list[str] = []
    for name in names:
        value = getattr(section, name)
        if isinstance(value, Section):
            below, inside = f"{prefix}.{name}", type(value).model_fields
            lines += would_be_ignored(value, below, inside, switch=switch, because=because)
            continue
        default = type(section).model_fields[name].get_default(call_default_factory=True)
        if value != default:
            shown = f"{value!r} " if isinstance(value, (str, int, float, bool)) else ""
            lines.append(Ignored(f"{prefix}.{name}", shown, switch=switch, because=because))
    return lines
