"""The imported recipe as YAML with a comment where a value is not NeMo-RL's, and the report about all keys."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_rl.cluster.recipe_import.convert import Imported
from nemo_rl.cluster.recipe_import.key_rule import Fate, Outcome
from nemo_rl.config.yaml_text import YamlProblem, parse_yaml, yaml_line
from nemo_rl.errors import ConfigError

__all__ = ["as_record", "report_lines", "to_recipe"]

LOST = "what it sets is not in the result; import again where it lies beside the recipe"


def to_recipe(imported: Imported) -> str:
    """YAML that loads; what is not supported is listed at its head.

    Raises:
        ConfigError: what was written does not read as what was meant.
    """
    lines = [_comment(f"Imported from {imported.given.file} by `nemo-rl config import`.")]
    lines += [_comment(f"to decide: {problem}") for problem in imported.problems]
    named = [*imported.of(Fate.NOT_SUPPORTED), *imported.of(Fate.UNKNOWN)]
    lines += [_comment(f"{one.fate}: {one.key}: {one.why}") for one in named if not one.must_decide]
    comments: dict[str, str] = {}
    for outcome in imported.outcomes:
        if outcome.to:
            comments[outcome.to] = _note(outcome)
    text = "\n".join([*dict.fromkeys(lines), *_section(imported.tree, comments, path="", indent=0)]) + "\n"
    _check_reads_back(text, imported)
    return text


def _check_reads_back(text: str, imported: Imported) -> None:
    try:
        found = parse_yaml(text)
    except YamlProblem as error:
        raise ConfigError(f"{imported.given.file}: cannot be written as YAML: {error}; change that value") from error
    # As text: 1, 1.0 and true are equal in Python.
    if json.dumps(found or {}, sort_keys=True) != json.dumps(imported.tree, sort_keys=True):
        raise ConfigError(f"{imported.given.file}: what was written would read as something else; nothing was imported")


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
            yield f"{pad}{yaml_line(name)}:"
            yield from _section(value, comments, path=f"{key}.", indent=indent + 1)
            continue
        if comments.get(key):
            yield f"{pad}{_comment(comments[key])}"
        yield f"{pad}{yaml_line(name)}: {yaml_line(value)}"


def _comment(text: str) -> str:
    """On one line, with characters that YAML does not take written out."""
    shown = (each if each.isprintable() else ascii(each)[1:-1] for each in " ".join(text.split()))
    return "# " + "".join(shown)


def report_lines(imported: Imported) -> Iterator[str]:
    """For people."""
    given = imported.given
    yield f"import of {given.file}"
    for parent in given.missing:
        is_lost = parent in given.lost_parents
        what = LOST if is_lost else f"its values of August 2026 stand in for it in {len(given.assumed)} keys"
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
        arrow = f"{outcome.key or 'added'} -> {outcome.to} {yaml_line(outcome.value)}"
    else:
        arrow = f"{outcome.key} {yaml_line(outcome.value)}" if outcome.to else outcome.key
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
