"""The distributions `nemo-rl` and `nemo-rl-tools`: which has what, and the first without the second."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nemo_rl.cli import main
from tests.helpers.roots import ROOT, ROOTS
from tests.repo.wheels import CORE, PACKAGES, PYPROJECT, TOOLS, build_wheels, files_of, project_of

TIMEOUT_S = 60
INDIRECT = {"tensorboard"}
"""Imported through torch alone."""
RECIPE = ROOT / "configs" / "grpo_sort_cpu.yaml"
TOOL_COMMANDS = (
    *("plan", "trace", "inspect", "compare", "view", "probe run", "doctor", "shrink", "config import", "plan --help"),
    "inspect RUN step 3 rollouts --limit 2",
)
CORE_COMMANDS = (
    f"train {RECIPE} --validate-only",
    *("launch --help", "data-plane --help", "eval --help", "export --help", "--version"),
)


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in requirements}


def imported_packages(distribution: str) -> set[str]:
    """Packages that a file of the distribution imports, also inside functions."""
    modules: set[str] = set()
    for path in files_of(distribution):
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))) if path.suffix == ".py" else ():
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules.add(node.module)
    known = packages_distributions()
    return {canonicalize_name(name) for module in modules for name in known.get(module.split(".")[0], ())}


def test_every_check_of_the_source_names_both_roots() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"benchmarks", "tests"}
    assert packages == set(ROOTS)
    tools = PYPROJECT["tool"]
    assert set(tools["importlinter"]["root_packages"]) == packages <= set(tools["mypy"]["files"])
    assert {name for name in tools["setuptools"]["packages"]["find"]["include"] if "." not in name} == packages
    (sources,) = re.findall(r"^SOURCES := (.*)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert packages <= set(sources.split())
    for contract in tools["importlinter"]["contracts"]:
        if contract["name"].startswith("one door"):
            assert set(contract["source_modules"]) == packages, contract["name"]


def test_every_room_has_a_place_in_the_layers() -> None:
    layers = [contract for contract in PYPROJECT["tool"]["importlinter"]["contracts"] if contract["type"] == "layers"]
    named = {name for contract in layers for layer in contract["layers"] for name in layer.split(" | ")}
    rooms = {
        f"{path.parent.parent.name}.{path.parent.name}" for root in ROOTS for path in ROOT.glob(f"{root}/*/__init__.py")
    }
    assert rooms <= named


def test_subcommands_that_may_be_absent_are_those_of_the_tools() -> None:
    modules = {place.partition(":")[0] for place in main.TOOLS.values()}
    assert {module.partition(".")[0] for module in modules} == {PACKAGES[TOOLS]}
    assert main.TOOLS_PACKAGE == TOOLS


@pytest.mark.parametrize("distribution", [CORE, TOOLS])
def test_dependencies_are_what_is_imported(distribution: str) -> None:
    needed = names(project_of(distribution)["dependencies"]) - {CORE}
    all_of_both = names(PYPROJECT["project"]["dependencies"])
    assert needed - INDIRECT == imported_packages(distribution) & all_of_both


def test_both_lists_of_dependencies_are_those_of_an_editable_install() -> None:
    of_core, of_tools = (set(project_of(name)["dependencies"]) for name in (CORE, TOOLS))
    version = PYPROJECT["project"]["version"]
    assert of_core | of_tools == {*PYPROJECT["project"]["dependencies"], f"{CORE}=={version}"}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel of the core and that of the tools."""
    core, tools = build_wheels(tmp_path_factory.mktemp("wheels"))
    assert core.name.startswith("nemo_rl-") and tools.name.startswith("nemo_rl_tools-")
    return core, tools


def files_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheels_divide_the_files_of_the_library(wheels: tuple[Path, Path]) -> None:
    core, tools = map(files_in, wheels)
    tree = (path for root in ROOTS for path in (ROOT / root).rglob("*"))
    files = (path for path in tree if path.is_file() and "__pycache__" not in path.parts)
    assert not core & tools
    assert core | tools == {str(path.relative_to(ROOT)) for path in files}
    assert {"nemo_rl/__init__.py", "nemo_rl/py.typed", "nemo_rl/cli/main.py"} <= core
    assert {
        "nemo_rl_tools/py.typed",
        "nemo_rl_tools/tracer/page/index.html",
        "nemo_rl_tools/doctor.py",
        "nemo_rl_tools/cli/view.py",
        "nemo_rl_tools/view/page/index.html",
    } <= tools
    assert not [name for name in core if name.startswith("nemo_rl_tools/")]


def installed(folder: Path, *wheels: Path) -> Path:
    """The folder, with the wheels installed into it; an editable install of this repository is not found there."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    options = ["--no-deps", "--no-compile", "--target", str(folder), *map(str, wheels)]
    subprocess.run([*command, *options], check=True, timeout=TIMEOUT_S)
    (folder / "sitecustomize.py").write_text(
        f"import sys\n"
        f"sys.path[:] = [path for path in sys.path if path != {str(ROOT)!r}]\n"
        f"sys.meta_path[:] = [one for one in sys.meta_path if not one.__module__.startswith('__editable__')]\n"
    )
    return folder


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with what is installed there; dependencies are those of this environment."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def nemo_rl(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run the command that is installed there."""
    return run(folder, str(folder / "bin" / "nemo-rl"), *command.split())


IN_ONE_PROCESS = """
import json, sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from nemo_rl.cli.main import main

ended = []
for command in sys.argv[1:]:
    sys.argv[1:], shown, code = command.split(), StringIO(), None
    with redirect_stdout(shown), redirect_stderr(shown):
        try:
            main()
        except SystemExit as error:
            code = error.code or 0
    ended.append((code, " ".join(shown.getvalue().split())))
print(json.dumps(ended))
"""


def ends(folder: Path, *commands: str) -> list[tuple[int, str]]:
    """Exit code and output of each command, all run by one process, which is quicker."""
    done = run(folder, "-c", IN_ONE_PROCESS, *commands)
    assert done.returncode == 0, done.stderr
    return [(code, shown) for code, shown in json.loads(done.stdout)]


def listed(shown: str) -> set[str]:
    """Names of the subcommands in a help text."""
    return set(re.findall(r"^  (\w\S+)  ", shown.partition("\nRun:\n")[2], re.MULTILINE))


def test_the_core_alone_says_what_to_install(wheels: tuple[Path, Path], tmp_path: Path) -> None:
    folder = installed(tmp_path / "core", wheels[0])
    shown = nemo_rl(folder, "--help")
    assert shown.returncode == 0, shown.stderr
    assert listed(shown.stdout) == {"train", "sft", "init", "launch", "data-plane", "eval", "export"}
    from_python = run(folder, "-c", "from nemo_rl import Run, train; print(train.__module__, Run.__name__)")
    assert from_python.stdout == "nemo_rl.training Run\n", from_python.stderr
    refused = nemo_rl(folder, "plan recipe.yaml")
    assert (refused.returncode, refused.stdout) == (2, "") and "pip install nemo-rl-tools==" in refused.stderr
    for command, (code, said) in zip(TOOL_COMMANDS, ends(folder, *TOOL_COMMANDS), strict=True):
        assert (code, said) == (
            2,
            f"error: `nemo-rl {command.split()[0]}` is part of the package nemo-rl-tools, which is not installed; "
            f"install it: pip install nemo-rl-tools=={PYPROJECT['project']['version']}",
        )
    for command, (code, said) in zip(CORE_COMMANDS, ends(folder, *CORE_COMMANDS), strict=True):
        assert code == 0, f"{command}: {said}"


def test_both_wheels_together_have_every_subcommand(wheels: tuple[Path, Path], tmp_path: Path) -> None:
    folder = installed(tmp_path / "both", *wheels)
    shown = nemo_rl(folder, "--help")
    assert shown.returncode == 0, shown.stderr
    assert {"train", *main.TOOLS} <= listed(shown.stdout)
    planned = nemo_rl(folder, "plan --help")
    assert planned.returncode == 0 and "RECIPE" in planned.stdout, planned.stderr
    # Not those of the checkout, which this environment has as well.
    assert str(folder) in run(folder, "-c", "import nemo_rl_tools.cli.view as view; print(view.__file__)").stdout
