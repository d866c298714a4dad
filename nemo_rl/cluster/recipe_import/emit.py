"""The imported recipe as YAML with a comment where a value is not NeMo-RL's, and the report about all keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from nemo_rl.cluster.recipe_import.convert import Imported
from nemo_rl.cluster.recipe_import.key_rule import Fate, Outcome
from nemo_rl.cluster.recipe_import.read import EXEMPLAR_NAME

__all__ = ["as_record", "report_lines", "to_recipe"]

LOST = "what it sets is not in the result; import again where it lies beside the recipe"


def to_recipe(imported: Imported) -> str:
    """YAML that loads; what is not supported is listed at its head."""
    lines = [f"# Imported from {imported.given.file} by `nemo-rl config import`."]
    for outcome in [*imported.of(Fate.NOT_SUPPORTED), *imported.of(Fate.UNKNOWN)]:
        lines.append(_comment(f"{outcome.fate}: {outcome.key}: {outcome.why}"))
    lines += [_comment(f"to decide: {problem}") for problem in imported.problems]
    comments: dict[str, str] = {}
    for outcome in imported.outcomes:
        if outcome.to:
            comments[outcome.to] = _note(outcome)
    return "\n".join([*lines, *_section(imported.tree, comments, path="", indent=0)]) + "\n"


def _note(outcome: Outcome) -> str:
    if outcome.fate is Fate.SAME:
        return ""
    if not outcome.key:
        return f"added: {outcome.why}"
    if outcome.key != outcome.to:
        return f"{outcome.key}: {outcome.why}" if outcome.why else outcome.key
    return outcome.why


def _section(tree: Mapping[str, Any], comments: Mapping[str, str], *, path: str, indent: int) -> Iterator[str]:
    pad = "  " * indent
    for name, value in tree.items():
        key = f"{path}{name}"
        if indent == 0:
            yield ""
        if isinstance(value, Mapping) and value:
            yield f"{pad}{name}:"
            yield from _section(value, comments, path=f"{key}.", indent=indent + 1)
            continue
        if comments.get(key):
            yield f"{pad}{_comment(comments[key])}"
        yield f"{pad}{name}: {_flow(value)}"


def _flow(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return str(text).removesuffix("...\n").strip()


def _comment(text: str) -> str:
    return "# " + " ".join(text.split())


def report_lines(imported: Imported) -> Iterator[str]:
    """For people."""
    given = imported.given
    yield f"import of {given.file}"
    for parent in given.missing:
        is_exemplar = bool(given.assumed) and parent.endswith(EXEMPLAR_NAME)
        what = f"its values of August 2026 stand in for it in {len(given.assumed)} keys" if is_exemplar else LOST
        yield f"  missing parent: {parent}: {what}"
    for key, text in given.unresolved.items():
        yield f"  left out: {key}: {text}"
    for fate in Fate:
        found = _unique(imported.of(fate))
        if fate is Fate.SAME:
            yield f"same: {len(found)} keys"
            continue
        yield f"{fate}: {len(found)} keys"
        for outcome in found:
            yield f"  {_line(outcome)}"
    for problem in imported.problems:
        yield f"to decide: {problem}"


def _unique(outcomes: list[Outcome]) -> list[Outcome]:
    """One for each pair of keys: a section says more of a key than that it was seen."""
    last = {(outcome.key, outcome.to): outcome for outcome in outcomes}
    told = {key for key, to in last if to}
    return [outcome for (key, to), outcome in last.items() if to or key not in told]


def _line(outcome: Outcome) -> str:
    if outcome.to and outcome.to != outcome.key:
        arrow = f"{outcome.key or 'added'} -> {outcome.to} {_flow(outcome.value)}"
    else:
        arrow = f"{outcome.key} {_flow(outcome.value)}" if outcome.to else outcome.key
    return f"{arrow}: {outcome.why}" if outcome.why else arrow


def as_record(imported: Imported) -> dict[str, object]:
    """For JSON."""
    given = imported.given
    return {
        "file": str(given.file),
        "missing_parents": list(given.missing),
        "assumed": list(given.assumed),
        "left_out": dict(given.unresolved),
        "keys": [
            {"key": one.key, "fate": str(one.fate), "to": one.to, "value": one.value, "why": one.why}
            for one in imported.outcomes
        ],
        "to_decide": list(imported.problems),
    }
