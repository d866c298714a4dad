"""The faults of `make mutants` can be planted, are spread over all packages, and its verdicts are right."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.roots import ROOT, ROOTS
from tests.mutants.faults import Fault, load_faults, problem_of
from tests.mutants.run import Verdict, judge, planted

FEWEST = 150
"""The list may change, and only grows."""
FAULTS = load_faults()
EXAMPLE = Fault(file="nemo_rl/a/b.py", old="x + 1", new="x", tests=("tests/test_b.py::test_b[one]",), why="off by one")


def test_every_fault_can_be_planted() -> None:
    assert [problem for fault in FAULTS if (problem := problem_of(fault)) is not None] == []


def test_faults_are_told_apart_and_say_what_a_user_would_see() -> None:
    assert len({(fault.file, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS) >= FEWEST
    assert [fault.why for fault in FAULTS if not 10 <= len(fault.why) <= 110] == []


def test_every_package_that_has_code_has_faults() -> None:
    found = Counter(fault.package for fault in FAULTS)
    packages = {
        "/".join(path.relative_to(ROOT).parts[:2]) for name in ROOTS for path in (ROOT / name).glob("*/**/*.py")
    }
    assert {package for package in packages if not found[package]} == set()


def write_example(root: Path, source: str) -> Path:
    path = root / EXAMPLE.file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    (root / "tests").mkdir()
    (root / "tests/test_b.py").write_text("def test_b(number):\n    pass\n")
    return path


@pytest.mark.parametrize(
    ("source", "changed", "expected"),
    [
        ("y = x + 1\n", {}, None),
        (
            "y = x + 1\nz = x + 1\n",
            {},
            "nemo_rl/a/b.py: expected 'x + 1' once, got it 2 times; it is in nemo_rl/a/b.py",
        ),
        ("y = 2\n", {}, "got it 0 times; write the fault anew"),
        ("y = x + 1\n", {"new": "x +"}, "'x +' does not compile"),
        ("y = x + 1\n", {"new": "x + 1"}, "expected another text of one line"),
        ("y = x + 1\n", {"tests": ("tests/test_b.py::test_c",)}, "no such tests: ['tests/test_b.py::test_c']"),
        ("y = x + 1\n", {"tests": ()}, "no such tests: []"),
        (
            "y = x + 1\n",
            {"file": "nemo_rl/b.py"},
            "nemo_rl/b.py: expected 'x + 1' once, got it 0 times; it is in nemo_",
        ),
    ],
)
def test_what_is_wrong_with_a_fault_is_said(
    source: str, changed: dict[str, object], expected: str | None, tmp_path: Path
) -> None:
    write_example(tmp_path, source)
    fields = {name: getattr(EXAMPLE, name) for name in ("file", "old", "new", "tests", "why")}
    problem = problem_of(Fault(**{**fields, **changed}), tmp_path)
    assert problem is None if expected is None else expected in (problem or "")


def test_a_fault_is_in_the_file_for_as_long_as_it_is_planted(tmp_path: Path) -> None:
    path = write_example(tmp_path, "y = x + 1\n")
    written = path.stat().st_mtime_ns
    with pytest.raises(RuntimeError), planted(tmp_path, EXAMPLE):
        assert path.read_text() == "y = x\n"
        raise RuntimeError
    assert (path.read_text(), path.stat().st_mtime_ns) == ("y = x + 1\n", written)


@pytest.mark.parametrize(
    ("exit_code", "why", "expected"),
    [
        (1, "a wrong number", Verdict.CAUGHT),
        (0, "a wrong number", Verdict.SURVIVED),
        *((code, "a wrong number", Verdict.BROKEN) for code in (2, 3, 4, 5, -9)),
        (None, "a number that changes", Verdict.BROKEN),
        (None, "the last writer hangs", Verdict.CAUGHT),
        (0, "the last writer hangs", Verdict.SURVIVED),
    ],
)
def test_only_tests_that_fail_catch_a_fault(exit_code: int | None, why: str, expected: Verdict) -> None:
    assert judge(exit_code, why=why) is expected
