"""The faults that tests must find: what `make mutants` plants, read from the YAML files in this folder.

A fault is found by its text, so it stays valid while code moves inside its file; when code moves to another file,
`problem_of` says to which.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.helpers.roots import ROOT, ROOTS

__all__ = ["ROOT", "Fault", "load_faults", "problem_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One line that is wrong, and the tests that must notice.

    Example:
        `Fault(file="nemo_rl/utils/metrics.py", old="max(self", new="min(self", tests=("tests/x.py",), why="...")`
    """

    file: str
    """Path from the root of the repository."""
    old: str
    """Text of the source, part of one line, that occurs once in its file."""
    new: str
    tests: tuple[str, ...]
    """Node ids or files of pytest, the cheapest that find it."""
    why: str
    """What a user would see. A fault that makes its tests wait for ever says `hang`."""

    @property
    def package(self) -> str:
        """Folder below a root, such as `nemo_rl/data`; the root for a module besides them."""
        return "/".join(self.file.split("/")[:-1][:2])

    def apply(self, source: str) -> str:
        """The source with this fault.

        Raises:
            ValueError: the text does not occur exactly once.
        """
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.file}: expected {self.old!r} once, got it {count} times")
        return source.replace(self.old, self.new)


def load_faults(folder: Path = Path(__file__).parent) -> list[Fault]:
    """All faults, file by file."""
    entries = [
        entry for path in sorted(folder.glob("*.yaml")) for entry in yaml.safe_load(path.read_text(encoding="utf-8"))
    ]
    return [Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def problem_of(fault: Fault, root: Path = ROOT) -> str | None:
    """Why a fault cannot be planted, in words; None when it can be."""
    path = root / fault.file
    try:
        mutated = fault.apply(path.read_text(encoding="utf-8") if path.is_file() else "")
        compile(mutated, fault.file, "exec", dont_inherit=True)
    except ValueError as error:
        return f"{error}{_found_elsewhere(fault, root)}"
    except SyntaxError as error:
        return f"{fault.file}: {fault.new!r} does not compile: {error}"
    if fault.new == fault.old or "\n" in fault.old + fault.new:
        return f"{fault.file}: expected another text of one line, got {fault.new!r}"
    absent = [test for test in fault.tests if not _is_there(test, root)]
    return f"{fault.file}: {fault.old!r}: no such tests: {absent}" if absent or not fault.tests else None


def _found_elsewhere(fault: Fault, root: Path) -> str:
    texts = (
        (path, path.read_text(encoding="utf-8"))
        for path in sorted(path for name in ROOTS for path in (root / name).rglob("*.py"))
    )
    places = [str(path.relative_to(root)) for path, text in texts if fault.old in text]
    return f"; it is in {', '.join(places)}" if places else "; write the fault anew for the code as it is"


def _is_there(test: str, root: Path) -> bool:
    """Whether the file of a node id has a function, or a name, of the test."""
    file, _, name = test.partition("[")[0].partition("::")
    path = root / file
    if not path.is_file():
        return False
    text = path.read_text(encoding="utf-8")
    return not name or f"def {name}(" in text or f"\n{name} = " in text
