"""Files that a forge and its tools read: forms of issues, hooks of pre-commit, the changelog."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
FIELDS = {"markdown": "value", "textarea": "label", "input": "label", "dropdown": "label", "checkboxes": "label"}
"""Kinds of a form's fields, and the attribute that each must have."""


def read(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_pre_commit_runs_what_make_lint_runs() -> None:
    repositories = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    assert [(hook["entry"], hook["language"]) for hook in repositories[0]["hooks"]] == [("make lint", "system")]


@pytest.mark.parametrize("path", [path for path in FORMS if path.name != "config.yml"], ids=lambda path: path.name)
def test_a_form_has_the_fields_that_a_forge_asks_for(path: Path) -> None:
    form = read(path)
    assert form["name"] and form["description"]
    assert all(field["attributes"][FIELDS[field["type"]]] for field in form["body"])
    named = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert len(named) == len(set(named)) >= 4
    options = [field["attributes"]["options"] for field in form["body"] if field["type"] == "dropdown"]
    assert all(isinstance(option, str) for each in options for option in each)
    # Pages and files that it tells the reader to look at.
    for name in re.findall(r"docs/[\w./]+\.md", path.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), name


def test_the_changelog_has_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_no_link_of_a_machine_is_tracked() -> None:
    """A link to a folder that another machine does not have keeps `make` from making it."""
    listed = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
    assert [line for line in listed.stdout.splitlines() if line.startswith("120000")] == []
