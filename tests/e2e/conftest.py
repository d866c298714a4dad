"""What the runs of all files here share."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.helpers.runs import ROOT
from tests.helpers.tiny_model import write_tiny_folder
from tests.helpers.warm_runs import WarmRuns

CommandLine: TypeAlias = Callable[..., tuple[int, str]]
"""Takes a recipe and overrides; returns the exit code and everything that was printed."""


@pytest.fixture(autouse=True, scope="session")
def from_the_root() -> Iterator[None]:
    """Recipes name files of the repository."""
    with contextlib.chdir(ROOT):
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, for tests that leave it as it is."""
    return write_tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def warm_runs() -> Iterator[WarmRuns]:
    with WarmRuns() as runs:
        yield runs


@pytest.fixture
def command_line(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """The command line's `main` in this process."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    spec = importlib.util.spec_from_file_location("run_grpo", ROOT / "examples" / "run_grpo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def call(recipe: Path, *overrides: str) -> tuple[int, str]:
        code = module.main(["--config", str(recipe), *overrides])
        out, err = capfd.readouterr()
        text = out + err
        assert "Traceback" not in text, text
        return code, text

    return call
