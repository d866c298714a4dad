"""Commands of programs are found from the folder of the run; `run_program` itself is tested in test_endpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nemo_rl.environments.programs import ProgramHost, ProgramSpec, absolute_command


def test_a_command_is_run_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agent.py").write_text("pass\n")
    monkeypatch.chdir(tmp_path)
    command = absolute_command(["python", "agent.py", "other.py", "--seed", "3"])
    assert command == (sys.executable, str(tmp_path / "agent.py"), "other.py", "--seed", "3")
    assert absolute_command(["node", "agent.py"])[0] == "node"


def test_the_identity_of_a_program_is_that_of_its_files(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text("pass\n")
    host = ProgramHost(ProgramSpec(command=["python", str(file)]), timeout_s=1, hear=lambda line: None)
    first = host.source
    assert host.source == first
    file.write_text("pass  # changed\n")
    assert host.source != first
