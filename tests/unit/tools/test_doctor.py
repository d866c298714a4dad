"""The doctor finds what is wrong, says what to do, and tries two ranks and a data plane for real."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl.config.data_plane import DataPlaneConfig, SharedMemoryConfig
from nemo_rl_tools.doctor import (
    DoctorFinding,
    State,
    examine,
    green,
    installed_packages,
    look_at_machine,
    look_at_network,
    look_at_packages,
    look_at_self_test,
    red,
    worst,
    yellow,
)

DEADLINE_S = 180.0


def named(findings: object, name: str) -> DoctorFinding:
    (found,) = [finding for finding in findings if finding.name.startswith(name)]  # type: ignore[attr-defined]
    return found


def test_a_package_that_is_missing_or_old_is_red_with_the_command_that_mends_it() -> None:
    have = installed_packages()
    found = list(look_at_packages({**{name: given for name, given in have.items() if name != "rich"}, "ray": "2.1"}))
    assert (named(found, "rich").state, named(found, "rich").found) == (State.RED, "not installed")
    assert named(found, "ray").found == "2.1, needed is >=2.50" and "pip install 'ray" in named(found, "ray").advice
    both = {**have, "mooncake-transfer-engine": "1", "mooncake-transfer-engine-non-cuda": "1"}
    assert any(each.state is State.RED and "Mooncake" in each.found for each in look_at_packages(both))
    assert all(each.state is State.GREEN for each in look_at_packages())


def test_shared_memory_that_is_not_there_is_red(tmp_path: Path) -> None:
    found = named(look_at_machine(shared=tmp_path / "none"), "shared memory")
    assert (found.state, found.found) == (State.RED, "not there") and found.advice


def test_a_port_that_is_taken_and_an_interface_that_is_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nothing7")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = list(look_at_network(ray_port=taken.getsockname()[1]))
    assert named(found, "port ").state is State.YELLOW
    assert named(found, "NCCL_SOCKET_IFNAME").found.startswith("names nothing7")


def test_the_worst_finding_decides_and_a_look_that_fails_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worst([]) is State.GREEN
    assert worst([green("a", ""), yellow("b", "", "do")]) is State.YELLOW
    assert worst([red("a", "", "do"), yellow("b", "", "do")]) is State.RED

    def broken() -> list[DoctorFinding]:
        raise ValueError("the disk is on fire")

    monkeypatch.setattr("nemo_rl_tools.doctor.LOOKS", (("packages", broken), ("machine", look_at_machine)))
    found = list(examine(with_self_test=False))
    assert (found[0].state, found[0].found) == (State.RED, "ValueError: the disk is on fire") and len(found) > 3


@pytest.mark.slow
def test_two_ranks_read_what_the_other_has_written(tmp_path: Path) -> None:
    assert named(look_at_self_test(), "self-test").state is State.GREEN
    nowhere = DataPlaneConfig(impl="shm", shm=SharedMemoryConfig(folder=str(tmp_path / "none")))
    assert named(look_at_self_test(nowhere), "self-test").state is State.RED


@pytest.mark.slow
def test_the_command_says_it_as_json_and_with_its_exit_code() -> None:
    command = [sys.executable, "-m", "nemo_rl.cli.main", "doctor", "--json", "--no-self-test"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    document = json.loads(done.stdout)
    assert (document["format"], done.returncode) == (1, 2 if document["state"] == "red" else 0)
    assert {"Python", "memory", "host name"} <= {finding["name"] for finding in document["findings"]}
