"""`make wheels`: the two distributions of this repository as wheels.

    python -m tests.repo.wheels build/wheels

`nemo-rl` has the package `nemo_rl` and `nemo-rl-tools` the package `nemo_rl_tools`. pyproject.toml describes both
together, as an editable install has them. Each wheel is built in a temporary folder from the files of its package and a
pyproject.toml that is written for them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from tests.helpers.roots import ROOT, ROOTS

__all__ = ["CORE", "TOOLS", "build_wheels", "files_of", "project_of"]

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CORE, TOOLS = "nemo-rl", "nemo-rl-tools"
PACKAGES = dict(zip((CORE, TOOLS), ROOTS, strict=True))
SHARED = ("version", "requires-python", "license", "license-files")
BUILD_TIMEOUT_S = 300


def files_of(distribution: str) -> list[Path]:
    """Files of the library in a distribution, relative to the repository."""
    files = sorted((ROOT / PACKAGES[distribution]).rglob("*"))
    return [path.relative_to(ROOT) for path in files if path.is_file() and "__pycache__" not in path.parts]


def project_of(distribution: str) -> dict[str, Any]:
    """The section `project` of a distribution's pyproject.toml."""
    whole, divided = PYPROJECT["project"], PYPROJECT["tool"]["wheels"]
    if distribution == CORE:
        left_out = divided[CORE]["without"]
        needed = [line for line in whole["dependencies"] if Requirement(line).name not in left_out]
        return {**whole, "dependencies": needed}
    names = divided[TOOLS]["dependencies"]
    needed = [line for line in whole["dependencies"] if Requirement(line).name in names]
    return {
        **{key: whole[key] for key in SHARED},
        "name": TOOLS,
        "description": divided[TOOLS]["description"],
        "dependencies": [f"{CORE}=={whole['version']}", *needed],
    }


def build_wheels(out: Path) -> list[Path]:
    """Build both wheels into a folder; needs no network."""
    with tempfile.TemporaryDirectory(prefix="wheels_") as folder:
        sources = [Path(folder) / name for name in (CORE, TOOLS)]
        for source in sources:
            _write_source(source)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-index"]
        options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(out), *map(str, sources)]
        subprocess.run([*command, *options], check=True, timeout=BUILD_TIMEOUT_S)
    return sorted(out.glob("*.whl"))


def _write_source(folder: Path) -> None:
    """Write what the wheel of a distribution, the folder's name, is built from."""
    project = project_of(folder.name)
    for path in [*files_of(folder.name), *map(Path, project["license-files"])]:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / path)
    setuptools = PYPROJECT["tool"]["setuptools"]
    tables = {
        "build-system": PYPROJECT["build-system"],
        "project": {key: value for key, value in project.items() if not isinstance(value, dict)},
        **{f"project.{key}": value for key, value in project.items() if isinstance(value, dict)},
        "tool.setuptools.packages.find": setuptools["packages"]["find"],
        "tool.setuptools.package-data": {
            name: files for name, files in setuptools["package-data"].items() if _root_of(name) == PACKAGES[folder.name]
        },
    }
    (folder / "pyproject.toml").write_text(_toml(tables), encoding="utf-8")


def _root_of(module: str) -> str:
    return module.partition(".")[0]


def _toml(tables: Mapping[str, Mapping[str, str | Sequence[str]]]) -> str:
    """Tables of texts and of lists of texts, which TOML writes as JSON does."""
    lines: list[str] = []
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in table.items()), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    for wheel in build_wheels(Path(sys.argv[1])):
        print(f"{wheel}  {wheel.stat().st_size / 1024:.0f} KiB")
