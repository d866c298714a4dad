"""Every command of docs/debugging.md, in order, on a tiny random model in place of the starter checkpoint."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nemo_rl.cli.main import app
from nemo_rl_tools.verdict import Verdict
from tests.helpers.tiny_model import write_tiny_folder
from tests.repo.walk_docs import ROOT, blocks_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NOT_OURS = ("rm ",)


def test_every_command_of_the_page_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    write_tiny_folder(tmp_path / "checkpoints" / "starter_sort")
    monkeypatch.chdir(tmp_path)
    blocks = [block for block in blocks_of("docs/debugging.md") if block.language == "bash"]
    commands = [line for block in blocks for line in block.body.splitlines()]
    ours = [command for command in commands if not command.startswith(NOT_OURS)]
    for command in ours:
        program, *arguments = shlex.split(command)
        assert program == "nemo-rl", command
        result = CliRunner().invoke(app, arguments)
        # A random model sorts nothing, so no group has unequal rewards.
        expected = Verdict.VACUOUS if "mismatch" in arguments else Verdict.PASS
        assert result.exit_code == expected.value, f"{command}\n{result.output}\n{result.exception!r}"
    assert (tmp_path / "results" / "ab.html").is_file()
    assert (tmp_path / "results" / "debug" / "steps" / "step_2" / "records" / "manifest.json").is_file()
    assert len(ours) == sum(line.startswith("nemo-rl") for line in commands) >= 11
