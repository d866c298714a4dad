"""GPU tests run on a machine that has no Ray, TransferQueue or vLLM, and not much else."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from tests.helpers.roots import ROOT, ROOTS

GPU_TESTS = ROOT / "tests" / "gpu"
GIVEN = ("torch", "transformers")
"""What a GPU machine has, with its dependencies."""
OWN = {*ROOTS, "tests"}
"""Ours, whatever else ships modules of these names."""

COLLECT = """
import sys
class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {blocked!r} else self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
import pytest
# The report runs there as well.
import benchmarks.gpu_report
sys.exit(pytest.main(["tests/gpu", "--collect-only", "-q", "-p", "no:cacheprovider", "-p", "pytest_timeout"]))
"""


def names_of_wheels() -> set[str]:
    """Distributions that `make gpu-wheels` asks for."""
    files = sorted(GPU_TESTS.glob("requirements*.txt"))
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return {Requirement(line).name for line in lines if line and not line.startswith("#")}


def with_dependencies(names: set[str]) -> set[str]:
    """Normalised names of distributions and of all that they require."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        for requirement in map(Requirement, requirements):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


def collect(without: set[str]) -> subprocess.CompletedProcess[str]:
    """Collects the GPU tests in a process that lacks these distributions."""
    blocked = {
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if module not in OWN and all(re.sub(r"[-_.]+", "-", owner).lower() in without for owner in owners)
    }
    script = COLLECT.format(blocked=sorted(blocked))
    # Plugins of what happens to be installed here would fail before our own modules are looked at.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


def dependencies() -> set[str]:
    """What this package names in its pyproject, extras included: all that our modules may import themselves."""
    named = importlib.metadata.requires("nemo-rl") or []
    return {re.sub(r"[-_.]+", "-", Requirement(line).name).lower() for line in named}


@pytest.mark.slow
def test_collecting_the_gpu_tests_needs_only_what_is_brought_along() -> None:
    there = with_dependencies({*GIVEN, *names_of_wheels()})
    done = collect(dependencies() - there)
    assert done.returncode == 0, done.stdout + done.stderr
    for module in GPU_TESTS.glob("test_*.py"):
        assert module.name in done.stdout


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(("name", "module"), [("psutil", "psutil"), ("megatron-core", "megatron")])
def test_a_wheel_that_is_not_brought_along_is_missed(name: str, module: str) -> None:
    there = with_dependencies({*GIVEN, *(names_of_wheels() - {name})})
    done = collect(dependencies() - there)
    assert done.returncode != 0 and f"No module named '{module}" in done.stdout + done.stderr
