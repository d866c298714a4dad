"""Words and rooms: docstrings are sentences, a class name exists once, private dialect stays out, files have a noun."""

from __future__ import annotations

import ast
import collections
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARY = sorted((ROOT / "nemo_rl").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

FRAGMENT_STARTS = {
    *("Of", "As", "By", "What", "Whether", "To", "For", "From", "In", "On", "At", "With", "Without", "That", "Those"),
    *("Between", "Behind", "Until", "Where", "When", "How", "Why", "Which", "Who", "Whose", "None", "Nobody"),
    *("Nothing", "There", "Here", "So", "Only", "Not", "Inside", "Outside", "Also", "Below"),
}
"""First words of a docstring that needs the line above it to be understood."""

BANNED = {
    "onlooker": "observer",
    "lifeline": "watchdog",
    "births": "incarnations",
    "mint_uids": "new_group_ids",
    "_redrawn": "requeued",
    "weight_lag": "staleness",
    "weight lag": "staleness",
    "trivial group": "zero-variance group",
    "is_trivial": "is_zero_variance",
    "planted fault": "mutant",
    "has ended without a word": "exited without output",
    "no line to the": "cannot reach the",
    "not foreseen": "internal error",
    "passed over": "skipped",
    "first cause": "root cause",
    "kept set": "sampling mask",
    "whole weights": "full weights",
    "sweeper": "reaper",
    "keeper": "recorder, renewer or storage actor",
    "stand_in": "placeholder",
    "traits": "capabilities or properties",
    "whoever": "the caller, the reader, the user",
}
"""Private words and the field's, in code, messages and docs; names in checkpoints and logs of earlier runs apart."""
ALLOWED = {"redrawn_ordinals", "redrawn_prompts"}
"""Names in the files of earlier runs."""

MOST_FILES = 507
SMALL_LINES, MOST_SMALL = 80, 15
"""Modules under so many lines that one other module imports; a private helper lives with its caller."""


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every string that stands alone: of modules, classes, functions and fields."""
    for node in ast.walk(tree_of(path)):
        body = vars(node).get("body")
        for item in body if isinstance(body, list) else []:
            if (
                isinstance(item, ast.Expr)
                and isinstance(item.value, ast.Constant)
                and isinstance(item.value.value, str)
            ):
                yield item.lineno, item.value.value.strip()


def test_docstrings_are_no_fragments() -> None:
    fragments = [
        f"{path.relative_to(ROOT)}:{line}: {text[:60]}"
        for path in LIBRARY
        for line, text in docstrings(path)
        if text and re.split(r"[\s.,;:]", text)[0] in FRAGMENT_STARTS
    ]
    assert fragments == [], "name the subject, or leave the docstring out"


def test_a_class_name_exists_once() -> None:
    places = collections.defaultdict(list)
    for path in LIBRARY:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_the_fields_words_are_used() -> None:
    found = []
    for path in [*LIBRARY, *PAGES]:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            text = line.lower()
            for name in ALLOWED:
                text = text.replace(name, "")
            found += [
                f"{path.relative_to(ROOT)}:{number}: {old!r}, write {new!r}"
                for old, new in BANNED.items()
                if old in text
            ]
    assert found == []


def test_the_glossary_is_short() -> None:
    rows = re.findall(r"^\| (?!word|---)", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert 10 <= len(rows) <= 40


def test_the_library_has_few_rooms() -> None:
    assert len(LIBRARY) <= MOST_FILES
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in LIBRARY}
    importers = collections.defaultdict(set)
    for name, path in modules.items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    importers[whole if whole in modules else node.module].add(name)
    small = [
        name
        for name, path in modules.items()
        if len(importers[name]) == 1 and len(path.read_text(encoding="utf-8").splitlines()) < SMALL_LINES
    ]
    assert len(small) <= MOST_SMALL, small
