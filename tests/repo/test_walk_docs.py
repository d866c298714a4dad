"""Fenced blocks of README and docs say what they are, and those that cost nothing run in a copy where nothing ran."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo import walk_docs
from tests.repo.walk_docs import LANGUAGES, PAGES, TARGETS, TARGETS_LEFT_OUT, WORDS, Walk, blocks_of

ROOT = Path(__file__).parents[2]


def test_every_page_is_walked() -> None:
    assert sorted(PAGES) == sorted(["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page: str) -> None:
    unclear = [block.where for block in blocks_of(page) if block.language not in LANGUAGES or block.words - WORDS]
    assert unclear == [], f"expected one of {sorted(LANGUAGES)}, then some of {sorted(WORDS)}"
    for block in blocks_of(page):
        if block.language == "bash":
            done = subprocess.run(["bash", "-n", "-c", block.body], capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, f"{block.where}: {done.stderr}"


def test_every_make_target_is_run_by_a_page_or_by_the_walk() -> None:
    by_pages = {name for page in PAGES for block in blocks_of(page) for name in walk_docs.targets_named(block)}
    targets = set(walk_docs.make_targets())
    assert targets - by_pages - set(TARGETS) - set(TARGETS_LEFT_OUT) == set(), "give it ARGS in walk_docs.TARGETS"
    assert (set(TARGETS) | set(TARGETS_LEFT_OUT)) - targets == set()


@pytest.mark.slow
def test_cheap_commands_run_in_a_copy_where_nothing_ran(tmp_path: Path) -> None:
    walk_docs.copy_tracked(tmp_path)
    own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path)}
    walk = Walk(tmp_path, {**os.environ, **own, "OMP_NUM_THREADS": "1"})
    walked = [block for page in PAGES for block in blocks_of(page) if "cheap" in block.words or block.file_name]
    assert sum("cheap" in block.words for block in walked) >= 2
    for block in walked:
        walk.visit(block)
    assert walk.failures == []


def test_a_walk_keeps_the_environment_and_tells_failures(tmp_path: Path) -> None:
    walk = Walk(tmp_path, dict(os.environ))
    walk.run("export FOUND=here", where="a")
    walk.run('test "$FOUND" = here', where="b")
    assert walk.failures == []
    walk.run("false", where="c", may_miss_bounds=True)
    assert walk.failures == []
    walk.run("echo 'Traceback (most recent call last):'", where="d", may_miss_bounds=True)
    walk.run("echo a word; exit 3", where="e")
    assert [failure.split(":")[0] for failure in walk.failures] == ["d", "e"]
    assert "exit code 3" in walk.failures[1] and "a word" in walk.failures[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "start", "end"), [(0, "('a_g0', 'a_g1') (3, 1)", "2\n0\n"), (1, "tensor([3, 1])", "tensor([3, 1])\n")]
)
def test_the_examples_of_the_data_plane_run_and_print_what_they_hold(
    tmp_path: Path, number: int, start: str, end: str
) -> None:
    example = [block for block in blocks_of("docs/data_plane.md") if block.language == "python"][number]
    done = subprocess.run(
        [sys.executable, "-c", example.body],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(start) and done.stdout.endswith(end)
