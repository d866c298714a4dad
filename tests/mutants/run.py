"""Plants the faults of this folder one by one in a copy of the tracked files, and sees that their tests notice.

    python -m tests.mutants.run [--only WORD ...] [--jobs 1]

First all tests that are named must pass on the copy as it is. A fault is caught when its tests fail: exit code 1 of
pytest. An error of collection or a test that does not exist is no catch, and neither is a run past its deadline, unless
the fault says that it makes its tests hang. Prints a line per fault; exit code 1 unless all are caught.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.faults import Fault, load_faults
from tests.repo.walk_docs import copy_tracked

CLEAN_S = 1800.0
"""All named tests in one run, on a machine that does much else."""
FAULT_S = 240.0
"""The tests of one fault, which take seconds."""
HANG = re.compile(r"\bhangs?\b")
"""In a fault's `why`: its tests may be past their deadline."""
TESTS_FAILED = 1
"""Exit code of pytest."""


class Verdict(StrEnum):
    """What became of a fault."""

    CAUGHT = "caught"
    SURVIVED = "SURVIVED"
    BROKEN = "broken"
    """Its tests could not say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One run of pytest."""

    exit_code: int | None
    """None: past its deadline."""
    output: str
    """The end of it."""
    seconds: float


def judge(exit_code: int | None, *, why: str) -> Verdict:
    """What the end of a fault's tests says."""
    if exit_code == TESTS_FAILED or (exit_code is None and HANG.search(why) is not None):
        return Verdict.CAUGHT
    return Verdict.SURVIVED if exit_code == 0 else Verdict.BROKEN


class Copy:
    """A copy of the tracked files with a process that runs its tests: see `tests.mutants.warm`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.warm"],
            cwd=folder,
            env={**environment, "TOKENIZERS_PARALLELISM": "false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # An interrupt is for whoever started it; it ends with its requests.
            start_new_session=True,
        )

    def run(self, tests: Sequence[str], *, timeout_s: float, keeps_bytecode: bool = False) -> Outcome:
        """Tests in their own process, with the code of the copy as it is now."""
        request = {"tests": list(tests), "timeout_s": timeout_s, "keeps_bytecode": keeps_bytecode}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        reply = self._process.stdout.readline()
        assert reply, f"the process of {self.folder} ended with {self._process.wait()}"
        return Outcome(**json.loads(reply))

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate()


def check_copy(copy: Copy, faults: Sequence[Fault]) -> str | None:
    """Why nothing can be learned from a copy: a test fails without a fault. None if all is well.

    The bytecode of this run is kept, which makes every later one faster.
    """
    tests = list(dict.fromkeys(test for fault in faults for test in fault.tests))
    done = copy.run(tests, timeout_s=CLEAN_S, keeps_bytecode=True)
    if done.exit_code != 0:
        return f"without a fault the tests end with {done.exit_code}:\n{done.output}"
    print(f"{len(tests)} tests or files pass without a fault, {done.seconds:.0f} s", flush=True)
    return None


@contextmanager
def planted(folder: Path, fault: Fault) -> Iterator[None]:
    """The fault is in the copy; afterwards the file is as it was, its time included."""
    path = folder / fault.file
    source, status = path.read_text(encoding="utf-8"), path.stat()
    path.write_text(fault.apply(source), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(source, encoding="utf-8")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def run_faults(faults: Sequence[Fault], copies: Sequence[Copy]) -> Iterator[tuple[Fault, Outcome]]:
    """The outcome of every fault, in order; as many at a time as there are copies."""
    free: SimpleQueue[Copy] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def run(fault: Fault) -> Outcome:
        copy = free.get()
        try:
            with planted(copy.folder, fault):
                return copy.run(fault.tests, timeout_s=FAULT_S)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        yield from zip(faults, pool.map(run, faults), strict=True)


def run_all(faults: Sequence[Fault], *, num_jobs: int) -> int:
    """Prints what became of each fault; returns how many were caught."""
    with tempfile.TemporaryDirectory(prefix="mutants_") as root, ExitStack() as stack:
        first = Path(root).resolve() / "0"
        copy_tracked(first)
        copies = [Copy(first)]
        stack.callback(copies[0].close)
        problem = check_copy(copies[0], faults)
        if problem is not None:
            print(problem)
            return 0
        for number in range(1, num_jobs):
            shutil.copytree(first, first.with_name(str(number)))
            copies.append(Copy(first.with_name(str(number))))
            stack.callback(copies[-1].close)
        num_caught = 0
        for fault, outcome in run_faults(faults, copies):
            verdict = judge(outcome.exit_code, why=fault.why)
            num_caught += verdict is Verdict.CAUGHT
            print(f"{verdict:8} {outcome.seconds:5.1f} s  {fault.file}: {fault.why}", flush=True)
            if verdict is not Verdict.CAUGHT:
                print(f"  exit code {outcome.exit_code} with {fault.new!r} in place of {fault.old!r}")
                print(f"  {' '.join(fault.tests)}\n{outcome.output}", flush=True)
        return num_caught


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="faults with one of these words in file, text or why")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time, each in its own copy")
    given = parser.parse_args(arguments)
    faults = [f for f in load_faults() if any(word in f"{f.file} {f.old} {f.why}" for word in given.only)]
    started = time.monotonic()
    num_caught = run_all(faults, num_jobs=max(1, given.jobs)) if faults else 0
    print(f"{num_caught} of {len(faults)} faults caught, {time.monotonic() - started:.0f} s")
    return 0 if faults and num_caught == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
