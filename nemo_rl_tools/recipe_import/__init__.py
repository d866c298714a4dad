"""`nemo-rl config import`: a NeMo-RL recipe as one of ours that loads, with a report of what became of every key.

import_recipe
  |- read_recipe            defaults, overrides of sections, interpolations           (keys)
  |- _by_table              each key by its row; unknown ones with a suggestion       (table)
  |- convert_sections       keys that belong together                                 (sections, prompts, dialects)
  |- _typed                 what the schema does not take is left out, and named
  |- _without_effect        what the rules call ignored is left out, and named
  `- _to_decide             what would train something else, or is not there
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nemo_rl.config.load import parse_tree
from nemo_rl.config.rules import RULES
from nemo_rl.config.rules.rule import Ignored
from nemo_rl.config.schema_walk import lookup, place_of, put, section_class, suggest
from nemo_rl.config.yaml_text import YamlProblem, parse_yaml, yaml_line
from nemo_rl.errors import ConfigError
from nemo_rl_tools.recipe_import.dialects import ADAPTERS, SOURCES, TURNS
from nemo_rl_tools.recipe_import.keys import MANDATORY, MANY, Fate, Given, KeyOutcome, KeyRule, Table, read_recipe
from nemo_rl_tools.recipe_import.sections import convert_sections
from nemo_rl_tools.recipe_import.table import NEMO_RL

__all__ = ["TABLE", "Imported", "as_record", "import_recipe", "report_lines", "rule_of", "to_recipe"]

TABLE: Table = {**NEMO_RL, **TURNS, **ADAPTERS, **SOURCES}
"""Every key of a NeMo-RL GRPO recipe, and those of turns, tools, adapters and sources of prompts of verl, TRL and
prime-rl."""
MAX_ROUNDS = 20
DECIDING = ("loss_fn.", "grpo.", "algorithm.", "actor_rollout_ref.actor.", "reward_model.")
"""Sections of NeMo-RL and verl that say which loss is trained on which advantages."""
TRL_DECIDING = ("beta", "delta", "epsilon", "epsilon_high", "importance_sampling_level", "loss_type", "reward_weights")
"""The same in TRL, whose recipes have no sections."""
"""Most rounds of leaving keys out: one that is left out may reveal another."""
DECIDE = "model_name"
WORKERS = ("dtensor_cfg", "megatron_cfg")
SHARES = "policy.generation.colocated.enabled"
"""Engines share the GPUs of the workers, which they do here without being asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """A recipe of ours, and where it comes from."""

    given: Given
    tree: dict[str, Any]
    outcomes: tuple[KeyOutcome, ...]
    problems: tuple[str, ...]
    """Decisions that are left to the user: rules that the recipe breaks as it is, parents and values that are not
    there, and keys without which something else is trained."""

    def of(self, fate: Fate) -> list[KeyOutcome]:
        return [outcome for outcome in self.outcomes if outcome.fate is fate]


def import_recipe(path: Path) -> Imported:
    """
    Raises:
        ConfigError: the file is missing or is no recipe.
    """
    given = read_recipe(path)
    converted = convert_sections(given)
    said = {outcome.key for outcome in converted}
    outcomes = [outcome for outcome in _by_table(given) if outcome.to or outcome.key not in said] + converted
    tree: dict[str, Any] = {}
    for outcome in outcomes:
        if outcome.to:
            put(tree, outcome.to.split("."), copy.deepcopy(outcome.value))
    outcomes = _typed(tree, outcomes)
    outcomes, problems = _without_effect(tree, outcomes)
    problems = list(dict.fromkeys([*_to_decide(given, tree, outcomes), *problems]))
    _drop_empty(tree)
    return Imported(given=given, tree=tree, outcomes=tuple(outcomes), problems=tuple(problems))


def rule_of(key: str) -> KeyRule | None:
    """Return the row of a key; of several that stand for many, the longest."""
    if key in TABLE:
        return TABLE[key]
    wide = [name for name in TABLE if name.endswith(MANY) and key.startswith(name.removesuffix(MANY))]
    return TABLE[max(wide, key=len)] if wide else None


def _by_table(given: Given) -> Iterator[KeyOutcome]:
    for key, value in _leaves(given.tree):
        rule = rule_of(key)
        if rule is None:
            yield _unknown(key, value)
        elif rule.is_with_others:
            # What it becomes is said by its section; that it was seen, here.
            yield KeyOutcome(key=key, fate=rule.fate, why=rule.why)
        elif rule.fate in (Fate.SAME, Fate.MAPPED):
            yield _kept(key, value, rule)
        elif rule.fate is Fate.NOT_SUPPORTED and any(value == off and type(value) is type(off) for off in rule.off):
            yield KeyOutcome(key=key, fate=Fate.SAME, why="switched off there, and not here")
        else:
            yield KeyOutcome(key=key, fate=rule.fate, why=rule.why, must_decide=rule.must_decide)


def _kept(key: str, value: object, rule: KeyRule) -> KeyOutcome:
    to = rule.to or key
    if not place_of(to.split(".")).is_known:
        if value in (None, key == SHARES, {}):
            return KeyOutcome(key=key, fate=Fate.SAME, why="it asks for nothing that differs here")
        return KeyOutcome(key=key, fate=Fate.NOT_SUPPORTED, why="there is no such key here yet")
    now = value if rule.convert is None else rule.convert(value)
    if now == value and to == key:
        return KeyOutcome(key=key, fate=Fate.SAME, to=to, value=now)
    why = rule.why or ("" if now == value else f"{value!r} there")
    return KeyOutcome(key=key, fate=Fate.MAPPED, to=to, value=now, why=why)


def _unknown(key: str, value: object) -> KeyOutcome:
    if place_of(key.split(".")).is_known:
        return KeyOutcome(key=key, fate=Fate.SAME, to=key, value=value, why="a key of ours")
    section, _, name = key.rpartition(".")
    near = {known.rsplit(".", 1)[-1] for known in TABLE if known.rsplit(".", 1)[0] == section}
    hint = suggest(name, near) or suggest(key, TABLE)
    # Without a key of the loss or of the algorithm something else would be trained.
    decides = (key.startswith(DECIDING) or key in TRL_DECIDING) and value not in (None, False, {}, [])
    why = f"no key of NeMo-RL's that is known here{hint}"
    return KeyOutcome(key=key, fate=Fate.UNKNOWN, why=why, must_decide=decides)


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the values by dotted key; lists, empty sections and dictionaries of ours are values."""
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and not _is_dictionary(key):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _is_dictionary(key: str) -> bool:
    """Return whether the key holds one dictionary here, whose names are free."""
    field = place_of((TABLE[key].to or key).split(".")).field if key in TABLE else None
    return field is not None and section_class(field.annotation) is None


def _to_decide(given: Given, tree: Mapping[str, Any], outcomes: list[KeyOutcome]) -> Iterator[str]:
    for parent in given.lost_parents:
        yield f"defaults: {parent} is not here, and what it sets is missing: import the recipe where its parents are"
    for key, text in given.unresolved.items():
        rule = rule_of(key)
        if rule is None or rule.fate is not Fate.IGNORED:
            yield f"{key}: {text}"
    if lookup(tree, ["policy", DECIDE])[1] == MANDATORY and f"policy.{DECIDE}" not in given.unresolved:
        yield f"policy.{DECIDE}: must be set"
    for outcome in outcomes:
        is_of_other_worker = any(
            outcome.key.startswith(f"policy.{worker}.") and given.get(f"policy.{worker}.enabled") is False
            for worker in WORKERS
        )
        if outcome.must_decide and not is_of_other_worker:
            yield f"{outcome.key}: {outcome.fate}: {outcome.why}; change it, or leave it out, in {given.file.name}"


def _typed(tree: dict[str, Any], outcomes: list[KeyOutcome]) -> list[KeyOutcome]:
    """Leave out what the schema does not take; the key that is named is that of the recipe."""
    for _ in range(MAX_ROUNDS):
        try:
            parse_tree(tree)
        except ValidationError as error:
            details = [detail for detail in error.errors() if detail["type"] != "missing"]
            if not details:
                put(tree, ["policy", DECIDE], MANDATORY)
                return outcomes
            for detail in details:
                key, value = _cut(tree, [str(part) for part in detail["loc"]])
                if key:
                    outcomes = _not_taken(outcomes, key, value, detail["msg"])
        else:
            return outcomes
    return outcomes


def _not_taken(outcomes: list[KeyOutcome], cut: str, value: object, message: str) -> list[KeyOutcome]:
    """Return the outcomes after a key of ours was cut: null asks for the default, anything else is not supported."""
    found = [one for one in outcomes if one.to == cut or one.to.startswith(f"{cut}.")]
    others = [one for one in outcomes if one not in found]
    names = dict.fromkeys(one.key for one in found if one.key) or {cut: None}
    if value is None:
        return others + [KeyOutcome(key=name, fate=Fate.SAME, why="null there: the default here") for name in names]
    why = f"{value!r} is not taken here: {message}"
    return others + [KeyOutcome(key=name, fate=Fate.NOT_SUPPORTED, why=why) for name in names]


def _cut(tree: dict[str, Any], path: list[str]) -> tuple[str, object]:
    node, taken = tree, list[str]()
    for name in path:
        if name not in node:
            continue
        taken.append(name)
        if not isinstance(node[name], dict) or name == path[-1]:
            return ".".join(taken), node.pop(name)
        node = node[name]
    return "", None


def _without_effect(tree: dict[str, Any], outcomes: list[KeyOutcome]) -> tuple[list[KeyOutcome], list[str]]:
    """Leave out what the rules call ignored; what else they say is left to somebody."""
    problems: list[str] = []
    for _ in range(MAX_ROUNDS):
        whole = copy.deepcopy(tree)
        if lookup(whole, ["policy", DECIDE]) == (False, None):
            put(whole, ["policy", DECIDE], MANDATORY)
        config = parse_tree(whole)
        lines = [line for rule in RULES for line in rule(config)]
        ignored = [line for line in lines if isinstance(line, Ignored)]
        problems = [str(line) for line in lines if not isinstance(line, Ignored)]
        removed = {key: line for line in ignored if (key := _cut(tree, line.key.split("."))[0])}
        if not removed:
            break
        outcomes = [_ignored(outcome, removed) for outcome in outcomes]
    return outcomes, problems


def _ignored(outcome: KeyOutcome, removed: Mapping[str, Ignored]) -> KeyOutcome:
    line = removed.get(outcome.to)
    if line is None:
        return outcome
    because = str(line).partition("because ")[2].partition(";")[0]
    return KeyOutcome(key=outcome.key, fate=Fate.IGNORED, why=because)


def _drop_empty(tree: dict[str, Any]) -> None:
    for name, value in list(tree.items()):
        if isinstance(value, dict):
            _drop_empty(value)
            if not value:
                del tree[name]


LOST = "what it sets is not in the result; import again where it lies beside the recipe"


def to_recipe(imported: Imported) -> str:
    """Return the recipe as YAML that loads; what is not supported is listed at its head.

    Raises:
        ConfigError: what was written does not read as what was meant.
    """
    lines = [_comment(f"Imported from {imported.given.file} by `nemo-rl config import`.")]
    lines += [_comment(f"to decide: {problem}") for problem in imported.problems]
    named = [*imported.of(Fate.NOT_SUPPORTED), *imported.of(Fate.UNKNOWN)]
    lines += [_comment(f"{one.fate}: {one.key}: {one.why}") for one in named if not one.must_decide]
    comments = {outcome.to: _note(outcome) for outcome in imported.outcomes if outcome.to}
    text = "\n".join([*dict.fromkeys(lines), *_section(imported.tree, comments, path="", indent=0)]) + "\n"
    try:
        found = parse_yaml(text)
    except YamlProblem as error:
        raise ConfigError(f"{imported.given.file}: cannot be written as YAML: {error}; change that value") from error
    # As text: 1, 1.0 and true are equal in Python.
    if json.dumps(found or {}, sort_keys=True) != json.dumps(imported.tree, sort_keys=True):
        raise ConfigError(f"{imported.given.file}: what was written would read as something else; nothing was imported")
    return text


def _note(outcome: KeyOutcome) -> str:
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
    """Return a comment on one line, with characters that YAML does not take written out."""
    shown = (each if each.isprintable() else ascii(each)[1:-1] for each in " ".join(text.split()))
    return "# " + "".join(shown)


def report_lines(imported: Imported) -> Iterator[str]:
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


def _unique(outcomes: list[KeyOutcome]) -> list[KeyOutcome]:
    """Return one outcome for each pair of keys: a section says more of a key than that it was seen."""
    last = {(outcome.key, outcome.to): outcome for outcome in outcomes}
    told = {key for key, to in last if to}
    return [outcome for (key, to), outcome in last.items() if to or key not in told]


def _line(outcome: KeyOutcome) -> str:
    if outcome.to and outcome.to != outcome.key:
        arrow = f"{outcome.key or 'added'} -> {outcome.to} {yaml_line(outcome.value)}"
    else:
        arrow = f"{outcome.key} {yaml_line(outcome.value)}" if outcome.to else outcome.key
    return f"{arrow}: {outcome.why}" if outcome.why else arrow


def as_record(imported: Imported) -> dict[str, object]:
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
