"""Runs the test suite in parts, several at a time: `make test`, `make test-fast`, `make test-full`.

    python tests/suite.py [--fast | --full] [--jobs N] [--only PART ...]

Much of a test that starts processes is waiting, so parts share the cores well; and what engines leave behind in a
process (threads of theirs) meets no test of another part. Each part prints its whole output when it ends, and the
processor time that it and what it waited for took. Tests marked `alone` measure time and run at the end with nothing
besides them. The exit code is 0 when every part passed.
"""

from __future__ import annotations

import argparse
import compileall
import os
import resource
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Timer

ROOT = Path(__file__).parents[1]
PYTEST = (sys.executable, "-m", "pytest", "-q", "--durations=0", "--durations-min=3600")
NO_TESTS = 5
"""pytest's exit code when none was chosen."""
FULL = "NEMO_RL_TEST_FULL"
"""Variable that says the same to code that sees no mark; see `tests.helpers.case_selection`."""
PART_TIMEOUT_S = 4800.0
SLOWEST = 20
OWN_PARTS = {
    "runs": ("tests/e2e/test_run_*.py",),
    "models": ("tests/unit/models",),
    "processes": ("tests/unit/distributed", "tests/unit/environments", "tests/unit/experience"),
    **{name: (f"tests/{name}",) for name in ("contract", "parity", "distributed")},
    "clusters": tuple(f"tests/e2e/test_{name}.py" for name in ("two_hosts", "spare_nodes", "slurm", "cluster_page")),
}
"""Name -> paths of a part that lies in another. The rest of `tests/e2e` takes as long as its runs of recipes; clusters
and processes wait more than they compute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One process."""

    name: str
    command: tuple[str, ...]


def pytest_parts(marks: str, *, is_fast: bool) -> list[Part]:
    """By directory; first those that use one core for long, so that the last one is not left alone with it. `rest` is
    what no other names, so that nothing is left out.

    Of the fast ones few tests are left, and what a part imports takes as long as they do: they are other parts, without
    jobs of several ranks.
    """
    own = {
        name: [str(found.relative_to(ROOT)) for path in paths for found in sorted(ROOT.glob(path))]
        for name, paths in OWN_PARTS.items()
    }
    ignored = [f"--ignore={path}" for paths in own.values() for path in paths]
    parts = {"e2e": ["tests/e2e", *ignored], "runs": own["runs"], "unit": ["tests/unit", *ignored], **own}
    parts["rest"] = ["tests", "--ignore=tests/e2e", "--ignore=tests/unit", *ignored]
    if is_fast:
        unit = ["tests/unit", "--ignore=tests/unit/models"]
        parts = {"unit": unit, "models": own["models"], "rest": parts["rest"], "runs": [*own["contract"], "tests/e2e"]}
    return [Part(name=name, command=(*PYTEST, *paths, "-m", f"not alone{marks}")) for name, paths in parts.items()]


def alone_part(marks: str) -> Part | None:
    """Tests that measure time, from their files only: importing all others takes longer than they do."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.alone" in path.read_text(encoding="utf-8")]
    paths = [str(path.relative_to(ROOT)) for path in sorted(files)]
    return Part(name="alone", command=(*PYTEST, *paths, "-m", f"alone{marks}")) if paths else None


def static_parts() -> list[Part]:
    """What looks at the code without running it."""
    return [Part(name="types", command=(str(Path(sys.executable).with_name("mypy")),))]


@dataclass(slots=True)
class Suite:
    """What has run so far."""

    folder: Path
    failed: list[str]
    lock: Lock

    def run(self, part: Part) -> None:
        """Runs a part to its end and prints what it printed."""
        started = time.monotonic()
        is_pytest = "pytest" in part.command
        report = [f"--junitxml={self.folder / part.name}.xml"] if is_pytest else []
        with (self.folder / f"{part.name}.log").open("w+b") as log:
            process = subprocess.Popen(
                [*part.command, *report],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            deadline = Timer(PART_TIMEOUT_S, process.kill)
            deadline.start()
            _, status, used = os.wait4(process.pid, 0)
            deadline.cancel()
            code = process.returncode = os.waitstatus_to_exitcode(status)
            log.seek(0)
            output = log.read().decode("utf-8", "backslashreplace")
        is_ok = code == 0 or (is_pytest and code == NO_TESTS)
        with self.lock:
            seconds = time.monotonic() - started
            word = "ok" if is_ok else "FAILED"
            print(f"\n===== {part.name}: {word}, {seconds:.0f} s, {processor_seconds(used):.0f} s of processors =====")
            print(output, flush=True)
            if not is_ok:
                self.failed.append(f"{part.name} (exit code {code})")

    def slowest(self) -> list[tuple[float, str]]:
        """Seconds and name of every test of every part, the slowest first."""
        cases = [case for file in self.folder.glob("*.xml") for case in ET.parse(file).getroot().iter("testcase")]
        times = [(float(case.get("time", 0)), f"{case.get('classname')}::{case.get('name')}") for case in cases]
        return sorted(times, reverse=True)


def processor_seconds(used: resource.struct_rusage) -> float:
    """Of a process and what it has waited for."""
    return used.ru_utime + used.ru_stime


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--fast", action="store_true", help="static checks, unit tests and a few runs in one process")
    size.add_argument("--full", action="store_true", help="every test over every store and layout")
    parser.add_argument("--jobs", type=int, default=min(4, 2 + (os.cpu_count() or 1)), help="parts at a time")
    parser.add_argument("--only", nargs="+", default=[], help="only these parts")
    given = parser.parse_args(arguments)
    marks = "" if given.full else " and not full and not slow" if given.fast else " and not full"
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="test_suite_") as folder:
        if given.full:
            os.environ[FULL] = "1"
        # Tests start some hundred processes, and where bytecode is not written each of them would compile the library.
        for name in ("nemo_rl", "nemo_rl_tools"):
            compileall.compile_dir(ROOT / name, quiet=1)
        suite = Suite(folder=Path(folder), failed=[], lock=Lock())
        parts = [*pytest_parts(marks, is_fast=given.fast), *static_parts()]
        parts = [part for part in parts if not given.only or part.name in given.only]
        with ThreadPoolExecutor(given.jobs) as pool:
            list(pool.map(suite.run, parts))
        alone = alone_part(marks)
        if alone is not None and (not given.only or "alone" in given.only):
            suite.run(alone)
        times = suite.slowest()
        print(f"===== the {SLOWEST} slowest of {len(times)} tests, seconds =====")
        for seconds, name in times[:SLOWEST]:
            print(f"{seconds:8.1f}  {name}")
    used = processor_seconds(resource.getrusage(resource.RUSAGE_CHILDREN))
    end = f"failed: {', '.join(suite.failed)}" if suite.failed else "all ok"
    print(f"{time.monotonic() - started:.0f} s, {used:.0f} s of processors; {end}")
    return 1 if suite.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
